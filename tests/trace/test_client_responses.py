"""Calls to the Responses API that are led to the policy: every id is recorded, and the app sees a response of OpenAI's and nothing else."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from rllm_trace.exceptions import CallRefusedError
from rllm_trace.routing import CallSites, Route
from rllm_trace.testing import Exchange, Reply, ScriptedServer
from rllm_trace.types import Usage

pytestmark = pytest.mark.skipif(not hasattr(openai.OpenAI, "responses"), reason="this release of openai has no Responses API")

MESSAGE = {
    "type": "message",
    "id": "msg_1",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "hello", "annotations": [], "logprobs": []}],
}
PLAIN: dict[str, Any] = {
    "id": "resp_1",
    "object": "response",
    "created_at": 1.0,
    "model": "policy",
    "status": "completed",
    "error": None,
    "incomplete_details": None,
    "output": [MESSAGE],
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
    "usage": {
        "input_tokens": 3,
        "output_tokens": 2,
        "total_tokens": 5,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 0},
    },
}
TOLD = {
    "prompt_token_ids": [1, 72, 105],
    "token_ids": [11, 2],
    "token_logprobs": [-0.5, -0.25],
    "weight_version": "4",
    "weight_versions": [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}],
}


def events(response: dict[str, Any], end: str = "completed") -> list[dict[str, Any]]:
    where: dict[str, Any] = {"item_id": "msg_1", "output_index": 0}
    (item,) = response["output"]
    (part,) = item["content"]
    begun = {**PLAIN, "status": "in_progress", "output": [], "usage": None}
    told: list[dict[str, Any]] = [
        {"type": "response.created", "response": begun},
        {"type": "response.output_item.added", "output_index": 0, "item": {**item, "status": "in_progress", "content": []}},
        {"type": "response.content_part.added", **where, "content_index": 0, "part": {**part, "text": ""}},
        {"type": "response.output_text.delta", **where, "content_index": 0, "delta": part["text"], "logprobs": []},
        {"type": "response.output_text.done", **where, "content_index": 0, "text": part["text"], "logprobs": []},
        {"type": "response.content_part.done", **where, "content_index": 0, "part": part},
        {"type": "response.output_item.done", "output_index": 0, "item": item},
        {"type": f"response.{end}", "response": response},
    ]
    return [{**event, "sequence_number": number} for number, event in enumerate(told)]


def answer(response: dict[str, Any], **options: Any) -> Any:
    def script(exchange: Exchange) -> Reply:
        if not exchange.body.get("stream"):
            return Reply(raw=json.dumps(response).encode(), **options)
        parts = [b"event: %s\ndata: %s\n\n" % (str(e["type"]).encode(), json.dumps(e).encode()) for e in events(response)]
        return Reply(raw=b"".join(parts), **options)

    return script


def plain(seen: Any) -> Any:
    return [seen.model_dump(exclude_unset=True, warnings=False), seen.model_extra]


def create(client: openai.OpenAI, **options: Any) -> Any:
    return plain(client.responses.create(model="gpt-4o-mini", input="hi", **options))


def stream(client: openai.OpenAI, **options: Any) -> Any:
    return [plain(event) for event in client.responses.create(model="gpt-4o-mini", input="hi", stream=True, **options)]


def helper(client: openai.OpenAI) -> Any:
    with client.responses.stream(model="gpt-4o-mini", input="hi") as stream:
        kinds = [event.type for event in stream]
        return [kinds, plain(stream.get_final_response())]


def raw(client: openai.OpenAI) -> Any:
    return plain(client.responses.with_raw_response.create(model="gpt-4o-mini", input="hi").parse())


def streaming(client: openai.OpenAI) -> Any:
    with client.responses.with_streaming_response.create(model="gpt-4o-mini", input="hi") as response:
        return json.loads(response.read())


SHAPES: dict[str, Any] = {"create": create, "stream": stream, "raw": raw, "streaming response": streaming, "stream helper": helper}


def with_client(server: ScriptedServer, shape: Any, **options: Any) -> Any:
    http = openai.DefaultHttpxClient(verify=False)
    with openai.OpenAI(base_url=server.base_url, api_key=server.api_key, http_client=http, max_retries=0) as client:
        return shape(client, **options)


def route_to(server: ScriptedServer, **options: Any) -> Route:
    return Route(base_url=server.base_url, api_key=server.api_key, model="policy", **options)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_a_redirected_response_is_exact_and_shows_the_app_nothing_new(shape: Any, recording: Any) -> None:
    """Plain, streamed, raw: ids, logprobs and versions are recorded, and the app sees the response that its provider would have sent."""
    with ScriptedServer(answer(PLAIN)) as own:
        bare = with_client(own, shape)
    with ScriptedServer(answer({**PLAIN, **TOLD}), api_key="policy-key") as policy, ScriptedServer() as own:
        call = recording.call(lambda: with_client(own, shape), route=route_to(policy), seed=7)
        (sent,) = policy.log
        assert own.log == []
    assert recording.error is None
    assert recording.value == bare
    assert (sent.path, sent.body["model"], sent.body["input"]) == ("/v1/responses", "policy", "hi")
    assert isinstance(sent.body["seed"], int)
    assert not {"logprobs", "return_token_ids", "include"} & sent.body.keys()
    (choice,) = call.choices
    assert (call.prompt_token_ids, choice.token_ids, choice.logprobs) == ([1, 72, 105], [11, 2], [-0.5, -0.25])
    assert (choice.text, choice.finish_reason, call.usage) == ("hello", "stop", Usage(prompt_tokens=3, completion_tokens=2))
    assert (call.policy_version_start, call.policy_version_end, call.version_spans) == (3, 4, [(3, 0, 1), (4, 1, 2)])
    assert (call.operation, call.requested_model, call.endpoint) == ("responses", "gpt-4o-mini", "policy")
    assert (call.exact, call.inexact_reason, call.complete, call.trainable) == (True, None, True, True)


def test_an_asynchronous_stream_is_recorded_the_same(recording: Any) -> None:
    """As above, through the asynchronous client."""

    async def go(server: ScriptedServer) -> list[Any]:
        http = openai.DefaultAsyncHttpxClient(verify=False)
        async with openai.AsyncOpenAI(base_url=server.base_url, api_key=server.api_key, http_client=http) as client:
            return [plain(event) async for event in await client.responses.create(model="m", input="hi", stream=True)]

    with ScriptedServer(answer(PLAIN)) as own:
        bare = asyncio.run(go(own))
    with ScriptedServer(answer({**PLAIN, **TOLD})) as policy:
        call = recording.call(lambda: asyncio.run(go(policy)), route=route_to(policy))
    assert recording.value == bare
    assert (call.choices[0].token_ids, call.exact, call.complete) == ([11, 2], True, True)


@pytest.mark.parametrize("last", ["response.output_text.done", "response.output_item.done"])
def test_a_stream_left_at_its_last_text_is_whole(last: str, recording: Any) -> None:
    """An app that leaves its stream once it has the text loses nothing that was sampled for it."""

    def app(client: openai.OpenAI) -> str:
        with client.responses.create(model="m", input="hi", stream=True) as stream:
            return next(event.type for event in stream if event.type == last)

    with ScriptedServer(answer({**PLAIN, **TOLD})) as policy:
        call = recording.call(lambda: with_client(policy, app), route=route_to(policy))
    assert recording.value == last
    assert (call.choices[0].token_ids, call.complete, call.exact) == ([11, 2], True, True)


def test_a_stream_left_early_is_abandoned(recording: Any) -> None:
    """Nothing of a response that was not read to its text's end is credited."""

    def app(client: openai.OpenAI) -> str:
        with client.responses.create(model="m", input="hi", stream=True) as stream:
            return next(iter(stream)).type

    whole = answer({**PLAIN, **TOLD})

    def script(exchange: Exchange) -> Reply:
        reply = whole(exchange)
        reply.raw = (reply.raw or b"").partition(b"event: response.output_text.done")[0]
        return reply

    with ScriptedServer(script) as policy:
        call = recording.call(lambda: with_client(policy, app), route=route_to(policy))
    assert (call.complete, call.exact, call.trainable, call.inexact_reason) == (False, False, False, "reply incomplete")


def test_a_cut_response_and_a_call_end_as_chat_names_it(recording: Any) -> None:
    """``length`` for a response cut at its limit, ``tool_calls`` for one that calls; both are whole."""
    cut = {**PLAIN, **TOLD, "status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    called = {**PLAIN, **TOLD, "output": [{"type": "function_call", "id": "f", "call_id": "c", "name": "f", "arguments": "{}"}]}
    replies = [Reply(raw=json.dumps(body).encode()) for body in (cut, called)]
    with ScriptedServer(replies) as policy:
        calls = recording.calls(lambda: [with_client(policy, create) for _ in range(2)], route=route_to(policy))
    assert [call.choices[0].finish_reason for call in calls] == ["length", "tool_calls"]
    assert [call.trainable for call in calls] == [True, True]
    assert calls[1].choices[0].tool_calls == [{"type": "function", "id": "c", "function": {"name": "f", "arguments": "{}"}}]


def test_the_runs_sampling_is_said_in_the_words_of_responses(recording: Any) -> None:
    """A limit under either of chat's names replaces the app's ``max_output_tokens``; what was the app's is recorded."""
    with ScriptedServer(answer({**PLAIN, **TOLD})) as policy:
        route = route_to(policy, sampling={"max_tokens": 5, "temperature": 0.5, "reasoning": None})
        call = recording.call(lambda: with_client(policy, create, max_output_tokens=99, reasoning={"effort": "low"}), route=route)
        (sent,) = policy.log
    assert {name: sent.body.get(name) for name in ("max_output_tokens", "max_tokens", "temperature", "reasoning")} == {
        "max_output_tokens": 5,
        "max_tokens": None,
        "temperature": 0.5,
        "reasoning": None,
    }
    assert call.requested_sampling == {"max_output_tokens": 99, "temperature": None, "reasoning": {"effort": "low"}}


@pytest.mark.parametrize(
    "fields",
    [
        {"previous_response_id": "resp_0"},
        {"background": True},
        {"extra_body": {"conversation": "conv_1"}},
        {"extra_body": {"prompt": {"id": "p"}}},
    ],
    ids=["previous_response_id", "background", "conversation", "prompt"],
)
def test_what_only_the_provider_can_answer_is_refused_before_it_is_sent(fields: Any, recording: Any) -> None:
    """A call that leans on what the app's provider keeps fails by name, reaches nobody, and is a failed record."""
    (name,) = fields.get("extra_body") or fields
    with ScriptedServer() as policy, ScriptedServer() as own:
        call = recording.call(lambda: with_client(own, create, **fields), route=route_to(policy))
        assert (policy.log, own.log) == ([], [])
    assert isinstance(recording.error, CallRefusedError)
    assert f"responses.create with {name} cannot be sent to the policy" in str(recording.error)
    assert "rllm.no_train" in str(recording.error)
    assert (call.error.type, call.trainable) == ("rllm_trace.exceptions.CallRefusedError", False)


def test_a_call_that_keeps_its_endpoint_may_lean_on_it(recording: Any) -> None:
    """Where ``replaces`` names other models, ``previous_response_id`` goes to the app's provider as ever."""
    sites = CallSites()
    with ScriptedServer() as policy, ScriptedServer(answer(PLAIN)) as own:
        route = route_to(policy, replaces=frozenset({"other"}), sites=sites)
        call = recording.call(lambda: with_client(own, create, previous_response_id="resp_0"), route=route)
        assert policy.log == []
        assert own.log[0].body == {"model": "gpt-4o-mini", "input": "hi", "previous_response_id": "resp_0"}
    assert (call.endpoint, call.exact, call.inexact_reason) == ("own", False, "tokens not asked for")
    assert [(site.model, site.endpoint) for site in sites.seen()] == [("gpt-4o-mini", "own")]


class City(BaseModel):
    city: str


def test_parse_is_constrained(recording: Any) -> None:
    """``responses.parse`` gives the parsed object; its tokens are a grammar's, which is named."""
    item = {**MESSAGE, "content": [{"type": "output_text", "text": '{"city": "Oslo"}', "annotations": []}]}

    def parse(client: openai.OpenAI) -> Any:
        return client.responses.parse(model="m", input="hi", text_format=City).output_parsed

    with ScriptedServer(answer({**PLAIN, **TOLD, "output": [item]})) as policy:
        call = recording.call(lambda: with_client(policy, parse), route=route_to(policy))
    assert recording.value == City(city="Oslo")
    assert (call.choices[0].token_ids, call.exact, call.inexact_reason) == ([11, 2], False, "constrained: text.format json_schema")


@pytest.mark.parametrize("missing", ["prompt_token_ids", "token_ids", "token_logprobs"])
def test_what_the_policys_server_does_not_tell_is_named(missing: str, recording: Any) -> None:
    """A server without ids or logprobs gives an inexact call that says what it lacks."""
    told = {name: value for name, value in TOLD.items() if name != missing}
    with ScriptedServer(answer({**PLAIN, **told})) as policy:
        call = recording.call(lambda: with_client(policy, create), route=route_to(policy))
    reasons = {"prompt_token_ids": "prompt ids missing", "token_ids": "token ids missing", "token_logprobs": "logprobs missing"}
    assert (call.exact, call.inexact_reason) == (False, reasons[missing])


def test_a_response_in_the_background_is_not_whole(recording: Any) -> None:
    """What the app's provider has only queued is no reply yet."""
    queued = {**PLAIN, "status": "queued", "output": [], "usage": None}
    with ScriptedServer(answer(queued)) as own:
        call = recording.call(lambda: with_client(own, create, background=True))
    assert (call.complete, call.exact, call.inexact_reason, call.error) == (False, False, "reply incomplete", None)
