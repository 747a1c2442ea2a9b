"""Anthropic's Messages: translated where the server speaks chat completions, passed through where it speaks Anthropic's protocol."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
import pytest

from rllm_trace.gateway import Upstream
from rllm_trace.gateway._messages_reply import MessageStream, message
from rllm_trace.gateway._messages_request import chat_request
from rllm_trace.gateway._refusal import Refusal
from rllm_trace.testing import Reply

BODY: Any = {
    "model": "claude",
    "max_tokens": 50,
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    "messages": [{"role": "user", "content": [{"type": "text", "text": "1+2?"}]}],
    "tools": [{"name": "add", "description": "adds", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "auto"},
    "stop_sequences": ["END"],
}


def nothing_known(id: str, parsed: Any) -> str | None:
    return None


def events_of(text: str) -> list[tuple[str, dict[str, Any]]]:
    """(name, data) of each event."""
    found: list[tuple[str, dict[str, Any]]] = []
    for event in text.split("\n\n"):
        if event:
            name, data = event.split("\n")
            found.append((name.removeprefix("event: "), msgspec.json.decode(data.removeprefix("data: "))))
    return found


def ask(http: httpx.Client, gateway: Any, body: Any) -> httpx.Response:
    headers = {"x-api-key": gateway.token, "anthropic-version": "2023-06-01"}
    return http.post(f"{gateway.url_for()}/messages", json=body, headers=headers)


def test_a_request_is_the_chat_completion_that_asks_for_the_same() -> None:
    """System, tools, results of tools, images and stops have their place."""
    turn = [
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "hm"}, {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}}],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "3"}]},
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}},
            ],
        },
    ]
    chat, left_out = chat_request({**BODY, "messages": BODY["messages"] + turn, "thinking": {"type": "enabled"}}, nothing_known)
    assert left_out == ["thinking"]
    assert chat == {
        "model": "claude",
        "max_tokens": 50,
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "1+2?"},
            {
                "role": "assistant",
                "content": "hm",
                "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "3"},
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]},
        ],
        "stop": ["END"],
        "tools": [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}],
        "tool_choice": "auto",
    }


@pytest.mark.parametrize(
    "change",
    [
        {"mcp_servers": [{}]},
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        {"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]},
    ],
)
def test_what_a_chat_completion_cannot_say_is_refused_by_name(change: dict[str, Any]) -> None:
    """Nothing is left out that would change the prompt."""
    with pytest.raises(Refusal, match="cannot be said in a chat completion"):
        chat_request({**BODY, **change}, nothing_known)


def test_an_answer_in_one_piece_is_a_message() -> None:
    """Reasoning, text and tool calls become blocks; the usage and the reason of the end are told."""
    body = b"""{"id":"x","model":"m","choices":[{"index":0,"finish_reason":"tool_calls","message":{"content":"hm","reasoning_content":"so",
      "tool_calls":[{"id":"c1","type":"function","function":{"name":"add","arguments":"{\\"a\\":  1}"}}]}}],
      "usage":{"prompt_tokens":9,"completion_tokens":4}}"""
    told: list[tuple[str, str]] = []
    assert msgspec.json.decode(message(body, lambda id, text: told.append((id, text)))) == {
        "id": "msg_x",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [
            {"type": "thinking", "thinking": "so", "signature": ""},
            {"type": "text", "text": "hm"},
            {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {"input_tokens": 9, "cache_read_input_tokens": 0, "output_tokens": 4},
    }
    assert told == [("c1", '{"a":  1}')]


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_a_stream_gives_the_same_events_however_its_bytes_are_cut(size: int) -> None:
    """Blocks open and close in order, and the end carries the usage."""
    chunks = [
        '{"id":"x","model":"m","choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}',
        '{"id":"x","choices":[{"index":0,"delta":{"content":"h\\u00e9"}}]}',
        '{"id":"x","choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"id":"c1","function":{"name":"add","arguments":""}}]}}]}',
        '{"id":"x","choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"function":{"arguments":"{}"}}]}}]}',
        '{"id":"x","choices":[{"index":0,"delta":{},"finish_reason":"tool_calls"}]}',
        '{"id":"x","choices":[],"usage":{"prompt_tokens":9,"completion_tokens":4}}',
        "[DONE]",
    ]
    raw = "".join(f"data: {chunk}\n\n" for chunk in chunks).encode()
    told: list[tuple[str, str]] = []
    stream = MessageStream("claude", lambda id, text: told.append((id, text)))
    out = b"".join(stream.feed(raw[start : start + size]) for start in range(0, len(raw), size)) + stream.flush()
    events = events_of(out.decode())
    assert [name for name, _ in events] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert events[2][1]["delta"] == {"type": "text_delta", "text": "hé"}
    assert events[4][1] == {
        "type": "content_block_start",
        "index": 1,
        "content_block": {"type": "tool_use", "id": "c1", "name": "add", "input": {}},
    }
    assert events[7][1]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[7][1]["usage"] == {"input_tokens": 9, "cache_read_input_tokens": 0, "output_tokens": 4}
    assert told == [("c1", "{}")]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_translated_call_is_exact_and_hands_tool_calls_back_as_written(
    behind: Any, http: httpx.Client, recording: Any, tool_reply: Reply, streamed: bool
) -> None:
    """The record is that of the chat completion; the next turn's prompt has the model's own spelling of the arguments."""
    server, gateway = behind([tool_reply, Reply()])

    def app() -> None:
        answer = ask(http, gateway, {**BODY, "stream": streamed})
        assert answer.status_code == 200
        if streamed:
            assert answer.text.endswith('event: message_stop\ndata: {"type":"message_stop"}\n\n')
        block = {"type": "tool_use", "id": "call_1", "name": "add", "input": {"a": 1, "b": 2}}
        turn = [{"role": "assistant", "content": [block]}, {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1"}]}]
        assert ask(http, gateway, {**BODY, "messages": BODY["messages"] + turn}).json()["content"] == [{"type": "text", "text": "ok"}]

    first, second = recording.calls(app)
    assert (first.exact, first.choices[0].token_ids, first.choices[0].tool_calls[0]["id"]) == (True, [7, 8, 9, 2], "call_1")
    assert first.messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+2?"}]
    assert second.exact
    assert server.log[1].body["messages"][2]["tool_calls"][0]["function"]["arguments"] == '{"a":  1, "b": 2}'
    assert "anthropic-version" not in server.log[0].headers


def test_errors_speak_the_clients_protocol(behind: Any, http: httpx.Client, recording: Any) -> None:
    """The status and the message are the server's, the shape Anthropic's; so it is with the gateway's own errors."""
    _, gateway = behind([Reply(status=429, error={"message": "slow down"})])
    answers: list[httpx.Response] = []
    call = recording.call(lambda: answers.append(ask(http, gateway, BODY)))
    assert (answers[0].status_code, answers[0].json()) == (
        429,
        {"type": "error", "error": {"type": "rate_limit_error", "message": "slow down"}},
    )
    assert call.error.status_code == 429
    refused = http.post(f"{gateway.base_url}/messages", json=BODY)
    assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")


def anthropic(exchange: Any) -> Reply:
    start = b'{"type":"message_start","message":{"id":"msg_1","model":"claude","content":[],"usage":{"input_tokens":9,"output_tokens":1}}}'
    if not exchange.body.get("stream"):
        return Reply(
            raw=b'{"id":"msg_1","type":"message","model":"claude","content":[{"type":"text","text":"3"},{"type":"tool_use","id":"t",'
            b'"name":"add","input":{"a":1}}],"stop_reason":"tool_use","stop_sequence":null,"usage":{"input_tokens":9,"output_tokens":4}}'
        )
    events = [
        start,
        b'{"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}',
        b'{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"3"}}',
        b'{"type":"content_block_stop","index":0}',
        b'{"type":"content_block_start","index":1,"content_block":{"type":"tool_use","id":"t","name":"add","input":{}}}',
        b'{"type":"content_block_delta","index":1,"delta":{"type":"input_json_delta","partial_json":"{\\"a\\":1}"}}',
        b'{"type":"content_block_stop","index":1}',
        b'{"type":"message_delta","delta":{"stop_reason":"tool_use","stop_sequence":null},"usage":{"output_tokens":4}}',
        b'{"type":"message_stop"}',
    ]
    return Reply(raw=b"".join(b"event: x\ndata: " + event + b"\n\n" for event in events))


def test_a_call_to_a_server_of_anthropics_protocol_passes_as_it_came(http: httpx.Client, recording: Any, behind: Any) -> None:
    """Bytes both ways are untouched, whole and streamed give one record, and it is inexact because there are no ids."""
    seen: list[bytes] = []
    with _MessagesServer(anthropic) as server:
        _, gateway = behind(anthropic=Upstream(base_url=server.root, api_key="sk-ant-secret-1", protocol="anthropic"))

        def app() -> None:
            for streamed in (False, True):
                seen.append(ask(http, gateway, {**BODY, "stream": streamed, "thinking": {"type": "enabled", "budget_tokens": 9}}).content)

        whole, streamed = recording.calls(app)
    assert seen == [anthropic(exchange).raw for exchange in server.log]
    assert server.log[0].headers["x-api-key"] == "sk-ant-secret-1"
    assert server.log[0].headers["anthropic-version"] == "2023-06-01"
    assert whole.choices == streamed.choices
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == ("3", "tool_use")
    assert whole.choices[0].tool_calls == [{"type": "function", "id": "t", "function": {"name": "add", "arguments": '{"a":1}'}}]
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (9, 4)
    assert [call.inexact_reason for call in (whole, streamed)] == ["tokens not asked for", "tokens not asked for"]
    assert [call.complete for call in (whole, streamed)] == [True, True]


class _MessagesServer:
    """A server of one path, over real HTTP."""

    def __init__(self, script: Any) -> None:
        self._script = script
        self.log: list[Any] = []

    def __enter__(self) -> _MessagesServer:
        import threading
        from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
        from types import SimpleNamespace

        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: Any) -> None:
                """Nothing is logged."""

            def do_POST(self) -> None:
                raw = self.rfile.read(int(self.headers["content-length"]))
                headers = {name.lower(): value for name, value in self.headers.items()}
                exchange = SimpleNamespace(path=self.path, raw=raw, body=msgspec.json.decode(raw), headers=headers)
                outer.log.append(exchange)
                body = outer._script(exchange).raw
                self.send_response(200)
                self.send_header("content-type", "text/event-stream" if exchange.body.get("stream") else "application/json")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.root = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)
