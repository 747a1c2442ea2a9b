"""The public fakes: what the scripted server is sent and sends is real, logged, and gone afterwards."""

from __future__ import annotations

import json
import socket
import threading
import urllib.error
import urllib.request
from typing import Any

import pytest

from rllm_trace._spans import sources
from rllm_trace.testing import Reply, ReplyChoice, ScriptedServer, fixed_sources


def post(server: ScriptedServer, body: dict[str, Any], *, key: str | None = None, path: str = "/chat/completions") -> tuple[int, bytes]:
    headers = {"authorization": f"Bearer {key or server.api_key}", "content-type": "application/json"}
    request = urllib.request.Request(server.base_url + path, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=5) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


ASKS = {"model": "m", "messages": [], "logprobs": True, "return_token_ids": True}


def test_ids_and_logprobs_are_sent_only_where_they_are_asked_for() -> None:
    """vLLM's fields: ids at the top and in the choice, one logprob for each id."""
    with ScriptedServer() as server:
        asked = json.loads(post(server, ASKS)[1])
        bare = json.loads(post(server, {"model": "m", "messages": []})[1])
    assert asked["prompt_token_ids"] == [1, 72, 105]
    assert asked["choices"][0]["token_ids"] == [104, 105, 2]
    assert [entry["logprob"] for entry in asked["choices"][0]["logprobs"]["content"]] == [-0.5, -0.25, -0.125]
    assert bare["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "ok", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert "prompt_token_ids" not in bare
    assert bare["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}


def test_a_stream_spreads_ids_over_its_chunks() -> None:
    """The prompt's ids come with the first chunk; the ids of all chunks are those of the reply; usage and end come last."""
    choice = ReplyChoice(text="abcd", token_ids=[1, 2, 3, 4, 5], logprobs=[-1.0, -2.0, -3.0, -4.0, -5.0])
    with ScriptedServer([Reply(choices=[choice], tokens_per_chunk=2)]) as server:
        _, raw = post(server, {**ASKS, "stream": True, "stream_options": {"include_usage": True}})
    *events, last = raw.decode().strip().split("\n\n")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert last == "data: [DONE]"
    assert chunks[0]["prompt_token_ids"] == [1, 72, 105]
    assert [chunk["choices"][0].get("token_ids") for chunk in chunks[:-1]] == [None, [1], [2, 3], [4, 5]]
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks[:-1]) == "abcd"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None, None, None, "stop"]
    assert (chunks[-1]["choices"], chunks[-1]["usage"]["completion_tokens"]) == ([], 5)


def test_the_log_holds_what_came_and_what_was_sent() -> None:
    """Method, path, headers, body, reply and the very bytes of the answer."""
    with ScriptedServer() as server:
        status, raw = post(server, {"model": "m", "messages": [1]}, path="/chat/completions?x=1")
    (exchange,) = server.log
    assert (exchange.method, exchange.path, exchange.body) == ("POST", "/v1/chat/completions?x=1", {"model": "m", "messages": [1]})
    assert exchange.headers["content-type"] == "application/json"
    assert exchange.raw == b'{"model": "m", "messages": [1]}'
    assert (exchange.sent, exchange.status, exchange.finished, status) == (raw, 200, True, 200)
    assert server.calls() == [exchange]


def test_replies_come_in_their_order_and_the_last_repeats() -> None:
    """A list is a script, and so is a function of the request."""
    with ScriptedServer([Reply(status=500, error={"message": "busy"}), Reply()]) as server:
        assert [post(server, ASKS)[0] for _ in range(3)] == [500, 200, 200]
    with ScriptedServer(lambda exchange: Reply(status=exchange.body["status"], error={"message": "x"})) as server:
        assert [post(server, {"status": status})[0] for status in (418, 503)] == [418, 503]


def test_a_strict_server_refuses_fields_and_keys() -> None:
    """A named field gets its status and message, a wrong key a 401, an unknown path a 404."""
    with ScriptedServer(refuses={"return_token_ids": (400, "Unrecognized request argument supplied: return_token_ids")}) as server:
        status, raw = post(server, ASKS)
        assert (status, json.loads(raw)["error"]["message"]) == (400, "Unrecognized request argument supplied: return_token_ids")
        assert post(server, {"model": "m"})[0] == 200
        assert post(server, {"model": "m"}, key="wrong")[0] == 401
        assert post(server, {}, path="/nowhere")[0] == 404


def test_a_connection_can_be_dropped() -> None:
    """``disconnect_after`` ends the connection without an end of the body."""
    with ScriptedServer([Reply(disconnect_after=0), Reply(disconnect_after=2)]) as server:
        with pytest.raises(OSError, match=r"reset|closed|Remote end"):
            post(server, {**ASKS, "stream": True})
        with pytest.raises(Exception, match=r"IncompleteRead|reset"):
            post(server, {**ASKS, "stream": True})
    assert server.log[1].sent.count(b"data: ") == 2
    assert not server.log[1].finished


def test_versions_are_told_as_our_own_server_tells_them() -> None:
    """Under ``metadata``, and in the header of every response."""
    with ScriptedServer([Reply(weight_versions=[(3, 0, 2), (4, 2, 3)])]) as server:
        body = json.loads(post(server, ASKS)[1])
    assert body["metadata"] == {
        "weight_version": "4",
        "weight_versions": [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 3}],
    }


def test_nothing_is_left_when_the_block_is_left() -> None:
    """The port is closed and the thread is gone, also while a request is being held."""
    with ScriptedServer([Reply(hold_after=0)]) as server:
        port = int(server.base_url.split(":")[2].split("/")[0])
        with socket.create_connection(("127.0.0.1", port), 5) as waiting:
            waiting.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nauthorization: Bearer scripted\r\ncontent-length: 2\r\n\r\n{}")
    assert all(thread.name != "rllm-scripted-server" for thread in threading.enumerate())
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 5)


def test_fixed_sources_make_times_and_ids_repeat() -> None:
    """The same numbers each time, and the real ones afterwards."""
    for _ in range(2):
        with fixed_sources():
            assert [sources.now(), sources.now()] == [1_700_000_000_000_000_000, 1_700_000_000_001_000_000]
            assert (sources.span_id(), sources.trace_id()) == ("0" * 15 + "1", "0" * 31 + "1")
    assert sources.now() > 1_700_000_000_002_000_000
