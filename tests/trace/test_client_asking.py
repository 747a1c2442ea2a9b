"""Ids and logprobs are asked for where the rule says so, a refusal costs one replay once, and what does not add up is named."""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from rllm_trace._recorder import recorder
from rllm_trace.clients._ask import ask, is_strict, refusals
from rllm_trace.testing import Reply, ReplyChoice, ScriptedServer

MESSAGES: Any = [{"role": "user", "content": "hi"}]
CREATE: Any = {"model": "m", "messages": MESSAGES}
STREAM: Any = {**CREATE, "stream": True}
UNKNOWN = (400, "Unrecognized request argument supplied: return_token_ids")
FORBIDDEN = (403, "You are not allowed to request logprobs from this model")


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    refusals.clear()
    yield
    refusals.clear()


def client_of(server: ScriptedServer, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.base_url, api_key=server.api_key, http_client=openai.DefaultHttpxClient(verify=False), **options)


def test_a_field_that_is_refused_is_replayed_untouched_once_and_remembered(recording: Any) -> None:
    """The first call is sent again as the app gave it; the second does not send the field any more."""
    with ScriptedServer(refuses={"return_token_ids": UNKNOWN}) as server:

        def app() -> list[str | None]:
            with client_of(server) as client:
                return [client.chat.completions.create(**CREATE).choices[0].message.content for _ in range(2)]

        first, second = recording.calls(app)
        sent = [{field for field in exchange.body if field not in CREATE} for exchange in server.log]
    assert recording.value == ["ok", "ok"]
    assert sent == [{"logprobs", "return_token_ids"}, set(), {"logprobs"}]
    assert (first.attempts, first.error, first.exact, first.inexact_reason) == (2, None, False, "tokens not asked for")
    assert (second.attempts, second.error, second.exact) == (1, None, False)


def test_every_refused_field_is_learned(recording: Any) -> None:
    """A server that refuses both fields costs two replays in all, then none."""
    with ScriptedServer(refuses={"return_token_ids": UNKNOWN, "logprobs": FORBIDDEN}) as server:

        def app() -> None:
            with client_of(server) as client:
                for _ in range(3):
                    client.chat.completions.create(**CREATE)

        calls = recording.calls(app)
    assert [call.attempts for call in calls] == [2, 2, 1]
    assert recording.error is None


@pytest.mark.parametrize("kwargs", [CREATE, STREAM], ids=["create", "stream"])
def test_a_refused_asynchronous_call_is_replayed_too(kwargs: Any, recording: Any) -> None:
    """The replay is the same for an asynchronous client, and for a stream."""
    with ScriptedServer(refuses={"return_token_ids": UNKNOWN}) as server:

        async def go() -> list[str]:
            http = openai.DefaultAsyncHttpxClient(verify=False)
            async with openai.AsyncOpenAI(base_url=server.base_url, api_key=server.api_key, http_client=http) as client:
                answer = await client.chat.completions.create(**kwargs)
                if kwargs is CREATE:
                    return [answer.choices[0].message.content]
                return [chunk.choices[0].delta.content async for chunk in answer]

        call = recording.call(lambda: asyncio.run(go()))
    assert "".join(recording.value) == "ok"
    assert (call.attempts, call.choices[0].text, call.complete) == (2, "ok", True)


@pytest.mark.parametrize(
    "order, sent",
    [
        ((STREAM, CREATE, STREAM), [True, False, True, False]),
        ((CREATE, STREAM, CREATE), [True, False, False, False]),
    ],
    ids=["stream first", "whole first"],
)
def test_what_a_stream_is_refused_is_asked_of_whole_answers(order: Any, sent: list[bool], recording: Any) -> None:
    """A refusal of a stream is remembered for streams, one of a whole answer for both."""
    with ScriptedServer(refuses={"return_token_ids": UNKNOWN}) as server:

        def app() -> None:
            with client_of(server) as client:
                for kwargs in order:
                    answer: Any = client.chat.completions.create(**kwargs)
                    list(answer)

        recording.calls(app)
    assert ["return_token_ids" in exchange.body for exchange in server.log][: len(sent)] == sent


def test_a_refusal_is_remembered_for_its_model_and_base_url_only(recording: Any) -> None:
    """Another model at the same place is asked."""
    with ScriptedServer(refuses={"return_token_ids": UNKNOWN}) as server:

        def app() -> None:
            with client_of(server) as client:
                client.chat.completions.create(**CREATE)
                client.chat.completions.create(model="other", messages=MESSAGES)

        calls = recording.calls(app)
    assert [call.attempts for call in calls] == [2, 2]


def test_an_error_that_names_no_added_field_is_the_apps(recording: Any) -> None:
    """The app's own bad field raises for the app, without a replay."""
    with ScriptedServer(refuses={"logit_bias": (400, "logit_bias is not supported")}) as server:

        def app() -> None:
            with client_of(server) as client, pytest.raises(openai.BadRequestError, match="logit_bias"):
                client.chat.completions.create(**CREATE, logit_bias={"5": 1})

        call = recording.call(app)
        assert len(server.log) == 1
    assert call.error is not None
    assert call.error.status_code == 400


def test_a_field_that_the_app_asks_for_itself_is_not_replayed(recording: Any) -> None:
    """An app that asks for ids at a strict server gets the server's error."""
    with ScriptedServer(refuses={"return_token_ids": UNKNOWN}) as server:

        def app() -> None:
            with client_of(server) as client, pytest.raises(openai.BadRequestError):
                client.chat.completions.create(**CREATE, extra_body={"return_token_ids": True})

        recording.call(app)
        assert len(server.log) == 1


@pytest.mark.parametrize(
    "host,strict",
    [
        ("api.openai.com", True),
        ("eu.api.openai.com", True),
        ("my-resource.openai.azure.com", True),
        ("openrouter.ai", True),
        ("generativelanguage.googleapis.com", True),
        ("127.0.0.1", False),
        ("vllm.internal", False),
        ("notopenai.com", False),
        ("api.fireworks.ai", False),
    ],
)
def test_known_strict_hosts(host: str, strict: bool) -> None:
    """Providers that refuse unknown fields are never asked; a name that only looks alike is."""
    assert is_strict(host) is strict


class Offline:
    """A client of api.openai.com whose requests are kept and answered nowhere."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        http = importlib.import_module(openai.DefaultHttpxClient.__mro__[1].__module__.partition(".")[0])  # httpx or httpx2
        transport = http.MockTransport(self._refuse)
        self.client = openai.OpenAI(
            api_key="k", base_url="https://api.openai.com/v1", max_retries=0, http_client=openai.DefaultHttpxClient(transport=transport)
        )

    def _refuse(self, request: Any) -> Any:
        self.bodies.append(json.loads(request.content))
        raise ConnectionError("offline")

    def create(self) -> None:
        with pytest.raises(openai.APIConnectionError):
            self.client.chat.completions.create(**CREATE)


def test_a_strict_host_is_not_asked(recording: Any) -> None:
    """A call to a known strict host goes out as the app gave it."""
    offline = Offline()
    call = recording.call(offline.create)
    assert call.server == "api.openai.com:443"
    assert offline.bodies == [CREATE]


@pytest.mark.parametrize("stream", [False, True])
def test_an_azure_client_at_its_own_endpoint_is_recorded_and_not_asked(stream: bool, recording: Any) -> None:
    """Its deployment's path, key and version go out as without us, at any host; the reply is a record without ids, and without the key."""
    http = importlib.import_module(openai.DefaultHttpxClient.__mro__[1].__module__.partition(".")[0])
    sent: list[Any] = []
    choice: Any = {"index": 0, "finish_reason": "stop", "delta" if stream else "message": {"role": "assistant", "content": "hello"}}
    body = json.dumps({"id": "c", "object": "chat.completion", "created": 1, "model": "gpt", "choices": [choice]}).encode()

    def answer(request: Any) -> Any:
        sent.append(request)
        if stream:
            headers = {"content-type": "text/event-stream"}
            return http.Response(200, headers=headers, content=b"data: " + body + b"\n\ndata: [DONE]\n\n")
        return http.Response(200, headers={"content-type": "application/json"}, content=body)

    def app() -> None:
        own: Any = {
            "azure_endpoint": "http://azure.internal",
            "azure_deployment": "mine",
            "api_key": "sk-azure",
            "api_version": "2024-10-21",
        }
        with openai.AzureOpenAI(**own, http_client=openai.DefaultHttpxClient(transport=http.MockTransport(answer))) as client:
            told = client.chat.completions.create(**CREATE, stream=stream)
            list(told) if stream else None

    call = recording.call(app)
    (request,) = sent
    assert str(request.url) == "http://azure.internal/openai/deployments/mine/chat/completions?api-version=2024-10-21"
    assert json.loads(request.content) == {**CREATE, "stream": stream}
    assert request.headers["api-key"] == "sk-azure"
    assert (call.server, call.choices[0].text, call.complete, call.exact) == ("azure.internal:80", "hello", True, False)
    assert call.inexact_reason == "tokens not asked for"
    assert "sk-azure" not in repr(call)


def test_tokens_true_asks_strict_hosts_too(recording: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The setting overrides the rule."""
    monkeypatch.setattr(recorder, "tokens", True)
    offline = Offline()
    recording.call(offline.create)
    assert offline.bodies == [{**CREATE, "logprobs": True, "return_token_ids": True}]


def test_what_is_added_to_a_request() -> None:
    """Fields are added beside the app's own, which are kept; only a stream is asked for its usage."""
    asking = ask({"model": "m", "stream": True, "stream_options": {"x": 1}}, "chat", frozenset(), policy=False)
    assert asking.body == {
        "model": "m",
        "stream": True,
        "logprobs": True,
        "return_token_ids": True,
        "stream_options": {"x": 1, "include_usage": True},
    }
    assert asking.added == {"logprobs": None, "return_token_ids": None, "stream_options": {"x": 1}}
    assert (asking.keep.ids, asking.keep.logprobs, asking.keep.usage_chunk) == (False, False, False)


def test_what_the_app_asks_for_is_not_added() -> None:
    """An app that asks for everything is sent as it is."""
    body = {"model": "m", "logprobs": True, "top_logprobs": 2, "return_token_ids": True}
    asking = ask(body, "chat", frozenset(), policy=True)
    assert (asking.body, asking.added) == (body, {})
    assert (asking.keep.ids, asking.keep.logprobs) == (True, True)


GOOD = {"token_ids": [5, 6, 2], "logprobs": [-1.0, -0.5, -0.25]}
FAULTS: dict[str, tuple[Reply, str]] = {
    "no prompt ids": (Reply(omit=frozenset({"prompt_token_ids"})), "prompt ids missing"),
    "no ids": (Reply(omit=frozenset({"token_ids"})), "token ids missing"),
    "no logprobs": (Reply(omit=frozenset({"logprobs"})), "logprobs missing"),
    "short logprobs": (
        Reply(choices=[ReplyChoice(token_ids=[5, 6, 2], logprobs=[-1.0, -0.5])]),
        "logprobs not aligned with ids: 3 ids, 2 logprobs",
    ),
    "null logprob": (Reply(choices=[ReplyChoice(token_ids=[5, 6, 2], logprobs=[-1.0, None, -0.25])]), "logprob missing for a token"),
    "probability above 1": (Reply(choices=[ReplyChoice(token_ids=[5, 2], logprobs=[-1.0, 0.5])]), "not a logprob: 0.5"),
    "all zeros": (Reply(choices=[ReplyChoice(token_ids=[5] * 16, logprobs=[0.0] * 16)]), "logprobs all 0"),
    "usage": (
        Reply(choices=[ReplyChoice(**GOOD)], usage={"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}),  # type: ignore[arg-type]
        "usage contradicts ids: 4 reported, 3 sent",
    ),
    "usage of the prompt": (
        Reply(choices=[ReplyChoice(**GOOD)], usage={"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12}),  # type: ignore[arg-type]
        "usage contradicts prompt ids: 9 reported, 3 sent",
    ),
}


@pytest.mark.parametrize("stream", [False, True], ids=["create", "stream"])
@pytest.mark.parametrize("reply,reason", FAULTS.values(), ids=FAULTS.keys())
def test_what_does_not_add_up_is_named(reply: Reply, reason: str, stream: bool, recording: Any) -> None:
    """Missing, short, null, impossible or contradicting numbers make a call inexact with their name, streamed or not."""
    with ScriptedServer([reply]) as server:

        def app() -> None:
            with client_of(server) as client:
                answer = client.chat.completions.create(**CREATE, stream=stream)
                if stream:
                    list(answer)

        call = recording.call(app)
    assert (call.exact, call.inexact_reason, call.trainable, call.complete) == (False, reason, False, True)


def test_no_usage_is_no_contradiction(recording: Any) -> None:
    """A server that sends no usage gives exact calls."""
    with ScriptedServer([Reply(omit=frozenset({"usage"}))]) as server, client_of(server) as client:
        call = recording.call(lambda: client.chat.completions.create(**CREATE))
    assert (call.usage, call.exact) == (None, True)


def test_fewer_choices_than_asked_for_are_named(recording: Any) -> None:
    """n=3 and two choices is not exact."""
    with ScriptedServer([Reply(choices=[ReplyChoice(), ReplyChoice()])]) as server, client_of(server) as client:
        call = recording.call(lambda: client.chat.completions.create(**CREATE, n=3))
    assert call.inexact_reason == "no choices: 2 of 3"


SAMPLINGS: list[tuple[dict[str, Any], str | None]] = [
    ({"temperature": 0}, "sampling: temperature 0"),
    ({"temperature": 0.7}, None),
    ({"top_p": 0.9}, "sampling: top_p 0.9"),
    ({"top_p": 1.0}, None),
    ({"presence_penalty": 0.5}, "sampling: presence_penalty 0.5"),
    ({"frequency_penalty": 0.0}, None),
    ({"logit_bias": {"5": 1}}, "sampling: logit_bias"),
    ({"extra_body": {"top_k": 40}}, "sampling: top_k 40"),
    ({"extra_body": {"top_k": -1}}, None),
    ({"extra_body": {"min_p": 0.1}}, "sampling: min_p 0.1"),
    ({"extra_body": {"repetition_penalty": 1.1}}, "sampling: repetition_penalty 1.1"),
    ({"tool_choice": "auto"}, None),
    ({"tool_choice": "none"}, None),
    ({"tool_choice": "required"}, "constrained: tool_choice required"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "constrained: tool_choice named"),
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, "constrained: response_format json_object"),
    ({"extra_body": {"structured_outputs": {"choice": ["a"]}}}, "constrained: structured_outputs"),
    ({"seed": 3, "stop": ["x"], "max_tokens": 5, "user": "u"}, None),
]


@pytest.mark.parametrize("options,reason", SAMPLINGS, ids=[str(options) for options, _ in SAMPLINGS])
def test_sampling_that_distorts_logprobs_is_named(options: dict[str, Any], reason: str | None, recording: Any) -> None:
    """Temperature 0, truncation, penalties, biases and grammars make a call inexact; what leaves the distribution alone does not."""
    with ScriptedServer() as server, client_of(server) as client:
        call = recording.call(lambda: client.chat.completions.create(**CREATE, **options))
    assert (call.exact, call.inexact_reason) == (reason is None, reason)
