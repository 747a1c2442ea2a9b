"""A call lands in the episode that its headers, else its path, else its key names, and nowhere else."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

import rllm_trace as rllm
from rllm_trace.exceptions import ConfigurationError
from rllm_trace.gateway import Gateway
from rllm_trace.testing import Reply, ReplyChoice

BODY: Any = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def ask(http: httpx.Client, url: str, key: str, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
    return http.post(f"{url}/chat/completions", json={**BODY, **body}, headers={**bearer(key), **(headers or {})})


def test_a_call_by_path_gives_the_record_that_the_patched_client_gives(behind: Any, http: httpx.Client, recording: Any) -> None:
    """Ids, logprobs, messages and exactness are the same, and the app sees nothing of what was added."""
    server, gateway = behind([Reply(choices=[ReplyChoice(text="ok", token_ids=[5, 2], logprobs=[-0.5, -0.25])])])
    seen: list[dict[str, Any]] = []
    call = recording.call(lambda: seen.append(ask(http, gateway.url_for(), gateway.token).json()))
    assert (call.exact, call.inexact_reason, call.complete, call.trainable, call.attempts) == (True, None, True, True, 1)
    assert call.prompt_token_ids == [1, 72, 105]
    assert (call.choices[0].token_ids, call.choices[0].logprobs, call.choices[0].text) == ([5, 2], [-0.5, -0.25], "ok")
    assert call.messages == [{"role": "user", "content": "hi"}]
    assert server.log[0].body == {**BODY, "logprobs": True, "return_token_ids": True}
    assert "prompt_token_ids" not in seen[0]
    assert seen[0]["choices"][0]["logprobs"] is None
    assert "token_ids" not in seen[0]["choices"][0]


def test_a_key_leads_to_its_episode(behind: Any, http: httpx.Client, recording: Any) -> None:
    """A client whose URL cannot be set for each episode shows a key that was made for it."""
    _, gateway = behind()
    assert recording.call(lambda: ask(http, gateway.base_url, gateway.key_for())).exact
    assert gateway.counts == {"key": 1}


def test_headers_come_before_the_path_and_the_path_before_the_key(behind: Any, http: httpx.Client) -> None:
    """Of three episodes that one request names, the headers' has the call; without headers the path's; the contradiction is counted."""
    _, gateway = behind()
    places: dict[str, Any] = {}

    @rllm.workflow
    def outer() -> None:
        places["key"] = gateway.key_for()

        @rllm.workflow(new_episode=True)
        def middle() -> None:
            places["url"] = gateway.url_for()

            @rllm.workflow(new_episode=True)
            def inner() -> None:
                ask(http, places["url"], places["key"], rllm.headers())

            inner()
            ask(http, places["url"], places["key"])

        middle()

    before = rllm.stats()["orphan"].get("gateway call that names two episodes", 0)
    with rllm.collect() as episodes:
        outer()
    calls = {episode.workflow.rpartition(".")[2]: len(list(episode.calls)) for episode in episodes}
    assert calls == {"inner": 1, "middle": 1, "outer": 0}
    assert gateway.counts == {"headers": 1, "path": 1}
    assert rllm.stats()["orphan"]["gateway call that names two episodes"] == before + 2


def test_baggage_alone_names_the_episode(behind: Any, http: httpx.Client, recording: Any) -> None:
    """A library that passes W3C baggage on, and not our own header, still leads the call to its trajectory."""
    _, gateway = behind()

    def app() -> None:
        with rllm.agent("solver"):
            ask(http, gateway.base_url, gateway.token, {"baggage": "user=7," + rllm.headers()["baggage"]})

    episode = recording.episode(app)
    assert [(trajectory.name, len(trajectory.calls)) for trajectory in episode.trajectories if trajectory.calls] == [("solver", 1)]


def test_a_place_keeps_its_agent_and_its_no_train(behind: Any, http: httpx.Client, recording: Any) -> None:
    """An address that was asked for inside an agent, or under ``no_train``, stands for exactly that."""
    _, gateway = behind()

    def app() -> None:
        with rllm.agent("judge"), rllm.no_train:
            judge = gateway.url_for()
        with rllm.agent("solver"):
            solver = gateway.key_for()
        ask(http, judge, gateway.token)
        ask(http, gateway.base_url, solver)

    episode = recording.episode(app)
    found = [(trajectory.name, call.no_train) for trajectory in episode.trajectories for call in trajectory.calls]
    assert sorted(found) == [("judge", True), ("solver", False)]


def test_a_call_that_names_no_episode_is_recorded_as_unassigned_and_never_trained(behind: Any, http: httpx.Client) -> None:
    """Even while one episode runs, nothing is guessed."""
    _, gateway = behind()

    @rllm.workflow
    def app() -> int:
        return ask(http, gateway.base_url, gateway.token).status_code

    with rllm.collect() as episodes:
        assert app() == 200
    calls = {episode.workflow.rpartition(".")[2]: list(episode.calls) for episode in episodes}
    assert calls["app"] == []
    (call,) = calls["unassigned"]
    assert (call.no_train, call.trainable, call.exact) == (True, False, True)
    assert gateway.counts == {"unassigned": 1}


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer wrong"}, {"x-api-key": "wrong"}, {"authorization": "Basic x"}])
def test_without_the_token_nothing_is_sent_on(behind: Any, http: httpx.Client, headers: dict[str, str]) -> None:
    """Loopback is shared with every user of the machine."""
    server, gateway = behind()
    answer = http.post(f"{gateway.base_url}/chat/completions", json=BODY, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "wrong_key")
    assert http.get(f"{gateway.root}/rllm/stats", headers=headers).status_code == 401
    assert server.log == []


def test_the_token_in_any_protocols_header_is_taken_and_goes_no_further(behind: Any, http: httpx.Client, recording: Any) -> None:
    """The server sees its own key; neither the gateway's token, cookies, nor what named the episode."""
    server, gateway = behind()

    def app() -> None:
        for name in ("x-api-key", "api-key"):
            sent = {name: gateway.token, "cookie": "a=1", "baggage": "user=7", "x-request-id": "r1", "openai-organization": "o", "te": "x"}
            http.post(f"{gateway.base_url}/chat/completions", json=BODY, headers={**rllm.headers(sent)}).raise_for_status()

    assert len(recording.calls(app)) == 2
    for exchange in server.log:
        headers = exchange.headers
        assert headers["authorization"] == "Bearer sk-upstream-secret-1234"
        assert (headers["baggage"], headers["x-request-id"], headers["openai-organization"]) == ("user=7", "r1", "o")
        assert not {"x-api-key", "api-key", "cookie", "te", "x-rllm-parent"} & set(headers)


def test_an_episode_that_is_over_takes_no_more_calls(behind: Any, http: httpx.Client) -> None:
    """The call of an app's leftover still works, and is counted as late."""
    _, gateway = behind()
    urls: list[str] = []
    before = rllm.stats()["late"].get("start of a call", 0)
    with rllm.collect() as episodes:
        rllm.workflow(lambda: urls.append(gateway.url_for()))()
    assert ask(http, urls[0], gateway.token).status_code == 200
    assert list(episodes[0].calls) == []
    assert rllm.stats()["late"]["start of a call"] == before + 1


def test_an_unknown_episode_is_refused_where_episodes_are_this_process_own(behind: Any, http: httpx.Client) -> None:
    """A name that this process never gave is answered with 410, or 404 for a place within it."""
    server, gateway = behind()
    assert ask(http, f"{gateway.root}/e/nobody/v1", gateway.token).status_code == 410
    assert ask(http, f"{gateway.root}/e/nobody/s/00/v1", gateway.token).status_code == 404
    assert server.log == []


def test_asking_for_a_place_outside_a_workflow_is_an_error() -> None:
    """There is no episode to lead to."""
    with Gateway() as gateway:
        with pytest.raises(ConfigurationError, match="no recorded episode here"):
            gateway.url_for()
        with pytest.raises(ConfigurationError, match="no episode 'x' is open"):
            gateway.key_for("x")


def test_open_access_is_refused_beyond_loopback() -> None:
    """Without a token the gateway listens on this machine only."""
    with pytest.raises(ConfigurationError, match="beyond loopback"):
        Gateway(host="0.0.0.0", open_access=True)
