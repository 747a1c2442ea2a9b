"""What passes through is what would have passed without the gateway, and however a call ends its record says so."""

from __future__ import annotations

import time
from typing import Any

import httpx
import openai
import pytest

from rllm_trace.gateway._gateway import Limits
from rllm_trace.rollouts import rollout
from rllm_trace.routing import Route
from rllm_trace.testing import Reply, ReplyChoice, ScriptedServer

BODY: Any = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
LONG = ReplyChoice(text="abcdefgh", token_ids=[1, 2, 3, 4, 5, 6, 7, 8], logprobs=[-1.0, -2.0, -3.0, -4.0, -5.0, -6.0, -7.0, -8.0])


def ask(http: httpx.Client, gateway: Any, path: str = "chat/completions", headers: Any = None, **body: Any) -> httpx.Response:
    url = f"{gateway.url_for()}/{path}"
    return http.post(url, json={**BODY, **body}, headers={"authorization": f"Bearer {gateway.token}", **(headers or {})})


def test_a_streamed_call_gives_the_record_of_the_unstreamed_one(behind: Any, http: httpx.Client, recording: Any) -> None:
    """Events arrive with what was added taken out, and the numbers are the same."""
    _, gateway = behind([Reply(choices=[LONG])])
    seen: list[str] = []
    whole, streamed = recording.calls(lambda: [ask(http, gateway), seen.append(ask(http, gateway, stream=True).text)])
    assert streamed.streamed
    assert streamed.exact
    assert streamed.choices == whole.choices
    assert streamed.prompt_token_ids == whole.prompt_token_ids == [1, 72, 105]
    assert "token_ids" not in seen[0]
    assert '"logprob"' not in seen[0]
    assert seen[0].endswith("data: [DONE]\n\n")


def test_events_are_passed_on_as_they_come(behind: Any, http: httpx.Client, recording: Any) -> None:
    """The first events are read while the server has not sent the rest, and leaving then abandons the call."""
    _, gateway = behind([Reply(choices=[LONG], hold_after=4)])

    def app() -> None:
        headers = {"authorization": f"Bearer {gateway.token}"}
        with http.stream("POST", f"{gateway.url_for()}/chat/completions", json={**BODY, "stream": True}, headers=headers) as answer:
            text = ""
            for piece in answer.iter_text():
                text += piece
                if text.count("data:") == 4:
                    break

    call = recording.call(app)
    assert (call.complete, call.exact, call.trainable) == (False, False, False)
    assert call.choices[0].token_ids == [1, 2, 3]


def test_a_client_that_gives_up_leaves_a_failed_call_and_no_ghost(behind: Any, recording: Any) -> None:
    """The server's work for it is broken off, and no sample comes of it later."""
    server, gateway = behind([Reply(delay=30)])

    def app() -> None:
        with httpx.Client(trust_env=False, timeout=0.3) as impatient, pytest.raises(httpx.ReadTimeout):
            ask(impatient, gateway)

    call = recording.call(app)
    assert (call.complete, call.exact, call.trainable) == (False, False, False)
    assert call.error.type == "rllm_trace.gateway._client.ClientGoneError" or "Cancelled" in call.error.type
    assert not server.log[0].finished


def test_an_error_of_the_server_passes_unchanged(behind: Any, http: httpx.Client, recording: Any) -> None:
    """Status, body and headers are the server's; the record is a failed call."""
    reply = Reply(status=429, error={"message": "slow down", "code": "rate"}, headers={"retry-after": "7", "x-request-id": "r9"})
    _, gateway = behind([reply])
    answers: list[httpx.Response] = []
    call = recording.call(lambda: answers.append(ask(http, gateway)))
    assert answers[0].status_code == 429
    assert answers[0].content == b'{"error":{"message":"slow down","code":"rate"}}'
    assert (answers[0].headers["retry-after"], answers[0].headers["x-request-id"]) == ("7", "r9")
    assert call.error.status_code == 429
    assert "slow down" in call.error.message
    assert not call.trainable


def test_a_refused_field_is_left_out_and_the_client_notices_nothing(behind: Any, http: httpx.Client, recording: Any) -> None:
    """One more request goes out, untouched; the next call does not ask again."""
    server, gateway = behind(refuses={"return_token_ids": (400, "Unrecognized request argument supplied: return_token_ids")})
    calls = recording.calls(lambda: [ask(http, gateway, model="strict").raise_for_status() for _ in range(2)])
    assert [call.attempts for call in calls] == [2, 1]
    assert [call.exact for call in calls] == [False, False]
    assert ["return_token_ids" in exchange.body for exchange in server.log] == [True, False, False]


def test_every_choice_is_recorded(behind: Any, http: httpx.Client, recording: Any) -> None:
    """n=3 gives three choices, streamed or not."""
    _, gateway = behind()
    calls = recording.calls(lambda: [ask(http, gateway, n=3), ask(http, gateway, n=3, stream=True)])
    assert [len(call.choices) for call in calls] == [3, 3]
    assert [call.exact for call in calls] == [True, True]


def test_retries_of_the_apps_client_are_counted(behind: Any, recording: Any) -> None:
    """The failed attempts are failed calls, and the one that went well says which attempt it was."""
    _, gateway = behind([Reply(status=500, error={"message": "x"}, headers={"retry-after-ms": "1"}), Reply()])

    def app() -> None:
        from rllm_trace.clients import uninstrument

        uninstrument("openai")
        with openai.OpenAI(base_url=gateway.url_for(), api_key=gateway.token, max_retries=2) as client:
            assert client.chat.completions.create(**BODY).choices[0].message.content == "ok"

    try:
        calls = recording.calls(app)
    finally:
        from rllm_trace.clients import instrument

        instrument("openai")
    assert [(call.attempts, call.error is None, call.trainable) for call in calls] == [(1, False, False), (2, True, True)]


def test_completions_and_responses_are_recorded_too(behind: Any, http: httpx.Client, recording: Any) -> None:
    """Each under its own operation."""
    body = b'{"id":"r1","model":"m","status":"completed","output":[{"type":"message","content":[{"type":"output_text","text":"yes"}]}]}'

    def script(exchange: Any) -> Reply:
        return Reply(raw=body) if exchange.path.endswith("/responses") else Reply()

    _, gateway = behind(script)
    calls = recording.calls(
        lambda: [ask(http, gateway, "completions", prompt="hi", messages=None), ask(http, gateway, "responses", input="hi")]
    )
    assert [(call.operation, call.choices[0].text) for call in calls] == [("text_completion", "ok"), ("responses", "yes")]
    assert calls[0].exact


def test_a_rollouts_calls_go_to_the_policy(behind: Any, http: httpx.Client) -> None:
    """Of a call by path the model, the key and the seed are the policy's, and the upstream never sees it."""
    with ScriptedServer(api_key="policy-key-1") as policy:
        upstream, gateway = behind()
        route = Route(base_url=policy.base_url, api_key="policy-key-1", model="policy", sampling={"temperature": 1.0})
        from rllm_trace import headers, workflow

        def app() -> None:
            ask(http, gateway, headers={"openai-organization": "secret-org"})
            told = headers({"authorization": f"Bearer {gateway.token}"})
            http.post(f"{gateway.base_url}/chat/completions", json=BODY, headers=told).raise_for_status()

        with rollout(task_id="t", route=route, seed=3) as handle:
            workflow(app)()
        (episode,) = handle.wait(5)
    assert [(call.endpoint, call.model, call.requested_model, call.exact) for call in episode.calls] == [
        ("policy", "policy", "m", True)
    ] * 2
    assert upstream.log == []
    assert [exchange.body["temperature"] for exchange in policy.log] == [1.0, 1.0]
    assert policy.log[0].body["seed"] != policy.log[1].body["seed"]
    assert "openai-organization" not in policy.log[0].headers


def test_a_rollout_that_is_over_reaches_nobody(behind: Any, http: httpx.Client) -> None:
    """Not the policy, and the app's own endpoint least of all."""
    with ScriptedServer(api_key="policy-key-1") as policy:
        upstream, gateway = behind()
        urls: list[str] = []
        from rllm_trace import workflow

        with rollout(route=Route(base_url=policy.base_url, api_key="policy-key-1", model="policy")) as handle:
            workflow(lambda: urls.append(gateway.url_for()))()
        handle.wait(5)
        answer = http.post(f"{urls[0]}/chat/completions", json=BODY, headers={"authorization": f"Bearer {gateway.token}"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (410, "episode_over")
    assert (policy.log, upstream.log) == ([], [])


def test_what_is_no_model_call_passes_unrecorded(behind: Any, http: httpx.Client, recording: Any) -> None:
    """Models and embeddings keep their endpoint."""
    _, gateway = behind()

    def app() -> None:
        headers = {"authorization": f"Bearer {gateway.token}"}
        assert http.get(f"{gateway.url_for()}/models?a=1", headers=headers).json()["data"][0]["id"] == "m"
        assert http.post(f"{gateway.base_url}/embeddings", json={"input": "x"}, headers=headers).status_code == 200

    assert recording.calls(app) == []
    assert gateway.counts == {"passed": 2}


def test_the_upstream_key_is_in_no_answer_and_no_record(behind: Any, http: httpx.Client, recording: Any) -> None:
    """Also where the server quotes it."""
    quoted = Reply(status=401, error={"message": "Incorrect API key provided: sk-upstream-secret-1234"})
    _, gateway = behind([quoted])
    answers: list[str] = []
    call = recording.call(lambda: answers.append(ask(http, gateway).text))
    assert "sk-upstream-secret-1234" not in answers[0]
    assert "sk-upstream-secret-1234" not in repr(call)


def test_a_body_that_is_too_large_is_refused(behind: Any, http: httpx.Client) -> None:
    """Bodies are bounded, whether they say their size or not."""
    server, gateway = behind(limits=Limits(max_body=1_000))
    headers = {"authorization": f"Bearer {gateway.token}"}
    url = f"{gateway.base_url}/chat/completions"
    assert http.post(url, content=b"x" * 1_001, headers=headers).status_code == 413
    assert http.post(url, content=iter([b"x" * 600, b"x" * 600]), headers=headers).status_code == 413
    assert http.post(url, content=b"[1]", headers=headers).status_code == 400
    assert server.log == []


def test_a_server_that_is_not_there_or_says_nothing_is_told_as_such(behind: Any, http: httpx.Client, recording: Any) -> None:
    """502 and 504, and failed calls."""
    _, gateway = behind([Reply(disconnect_after=0), Reply(hold_after=0)], limits=Limits(silence=2.0))
    answers: list[int] = []
    calls = recording.calls(lambda: answers.extend([ask(http, gateway).status_code, ask(http, gateway).status_code]))
    assert answers == [502, 504]
    assert [call.error.type.partition(".")[0] for call in calls] == ["httpx", "httpx"]
    assert calls[1].error.type == "httpx.ReadTimeout"


def test_a_stream_that_the_server_breaks_off_is_broken_off(behind: Any, http: httpx.Client, recording: Any) -> None:
    """The client sees an incomplete answer, never one that looks whole."""
    _, gateway = behind([Reply(choices=[LONG], disconnect_after=4)])

    def app() -> None:
        with pytest.raises(httpx.RemoteProtocolError):
            ask(http, gateway, stream=True)

    call = recording.call(app)
    assert (call.complete, call.trainable) == (False, False)
    assert call.choices[0].token_ids == [1, 2, 3]


def test_the_record_is_there_before_the_answer(behind: Any, http: httpx.Client) -> None:
    """When the app has its reply, the call's span is in its episode; streamed or not, a hundred times."""
    from rllm_trace import workflow
    from rllm_trace._recorder import recorder

    _, gateway = behind()
    counts: list[int] = []

    def app() -> None:
        (episode,) = recorder.open_episodes.values()
        for position in range(100):
            ask(http, gateway, stream=bool(position % 2)).raise_for_status()
            counts.append(len(episode.spans))

    started = time.monotonic()
    with rollout() as handle:
        workflow(app)()
    handle.wait(5)
    assert counts == list(range(1, 101))
    assert time.monotonic() - started < 60
