"""An answer of Anthropic's Messages API in, whole or as events; a ``Reply`` out. Nothing is taken out of it: nothing was asked for.

The API gives no token ids, so such a call is recorded as inexact.
"""

from __future__ import annotations

from typing import Any, Final, cast

import msgspec

from rllm_trace import _exact
from rllm_trace.clients._decode import UNREADABLE, Reply, error_of, make_choice
from rllm_trace.types import Usage

__all__ = ["MessagesReader", "read_message"]

_INPUT_TOKENS: Final = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
_encode = msgspec.json.encode


class _Message(msgspec.Struct, gc=False):
    id: str | None = None
    model: str | None = None
    content: list[dict[str, Any]] = []
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: dict[str, Any] | None = None
    error: Any = None


class _Event(msgspec.Struct, gc=False):
    type: str = ""
    index: int = 0
    message: _Message | None = None
    content_block: dict[str, Any] | None = None
    delta: dict[str, Any] | None = None
    usage: dict[str, Any] | None = None
    error: Any = None


_message = msgspec.json.Decoder(_Message).decode
_event = msgspec.json.Decoder(_Event).decode


def read_message(raw: bytes) -> Reply:
    """The reply in an answer in one piece. Raises ``msgspec.DecodeError``."""
    message = _message(raw)
    return _reply(message) if message.error is None else Reply(error=error_of(message.error))


def _reply(message: _Message) -> Reply:
    texts: list[str] = []
    thoughts: list[str] = []
    tools: list[dict[str, Any]] = []
    for block in message.content:
        kind = block.get("type")
        if kind == "text":
            texts.append(str(block.get("text") or ""))
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking") or ""))
        elif kind == "tool_use":
            given = block.get("input")
            function = {"name": block.get("name"), "arguments": given if isinstance(given, str) else _encode(given).decode()}
            tools.append({"type": "function", "id": block.get("id"), "function": function})
    choice = make_choice(
        index=0,
        token_ids=None,
        logprobs=None,
        text="".join(texts),
        tool_calls=tools,
        reasoning="".join(thoughts),
        refusal=None,
        finish_reason=message.stop_reason,
        stop_reason=message.stop_sequence,
    )
    return Reply(
        choices=[choice],
        usage=_usage(message.usage),
        response_id=message.id,
        response_model=message.model,
        fault=_exact.NO_PROMPT_IDS,
        finished=message.stop_reason is not None,
    )


def _usage(usage: dict[str, Any] | None) -> Usage | None:
    if usage is None:
        return None
    read = [usage.get(name) for name in _INPUT_TOKENS]
    written = usage.get("output_tokens")
    if not isinstance(written, int) or not isinstance(read[0], int):
        return None
    return Usage(prompt_tokens=sum(count for count in read if isinstance(count, int)), completion_tokens=written)


class MessagesReader:
    """Reads one stream."""

    def __init__(self) -> None:
        self._pending = b""
        self._message = _Message()
        self._parts: dict[int, list[str]] = {}
        self._error: dict[str, Any] | None = None
        self._unreadable = False
        self.done = False
        """The stream has said that it is over."""

    @property
    def finished(self) -> bool:
        """The stop reason is known."""
        return self._message.stop_reason is not None

    def feed(self, chunk: bytes) -> bytes:
        """Takes in bytes and gives them back."""
        pending = (self._pending + chunk).replace(b"\r\n", b"\n")
        *events, self._pending = pending.split(b"\n\n")
        for event in events:
            self._read(event)
        return chunk

    def flush(self) -> bytes:
        """The stream has ended."""
        self._read(self._pending)
        self._pending = b""
        return b""

    def reply(self) -> Reply:
        """What has been received so far."""
        message = msgspec.structs.replace(self._message, content=[dict(block) for block in self._message.content])
        for index, parts in self._parts.items():
            if index < len(message.content):
                block = message.content[index]
                key = _GROWS.get(str(block.get("type")))
                if key is not None:
                    block[key] = "".join(parts)
        reply = _reply(message)
        reply.error = self._error
        if self._unreadable:
            reply.fault = _exact.UNREADABLE
        return reply

    def _read(self, event: bytes) -> None:
        data = b"\n".join([line[5:].lstrip() for line in event.split(b"\n") if line.startswith(b"data:")])
        if not data.startswith(b"{"):
            return
        try:
            told = _event(data)
        except UNREADABLE:
            self._unreadable = True
            return
        if told.type == "message_start" and told.message is not None:
            self._message = told.message
        elif told.type == "content_block_start" and told.content_block is not None:
            block = dict(told.content_block)
            key = _GROWS.get(str(block.get("type")))
            first = block.get(key) if key is not None else None
            self._parts[told.index] = [first] if isinstance(first, str) else []
            self._message.content.append(block)
        elif told.type == "content_block_delta" and told.delta is not None:
            for key in ("text", "thinking", "partial_json"):
                part = told.delta.get(key)
                if isinstance(part, str):
                    self._parts.setdefault(told.index, []).append(part)
        elif told.type == "message_delta":
            self._end(told)
        elif told.type == "message_stop":
            self.done = True
        elif told.type == "error":
            self._error = error_of(told.error or {"message": "error"})

    def _end(self, told: _Event) -> None:
        delta = told.delta or {}
        self._message.stop_reason = cast("str | None", delta.get("stop_reason")) or self._message.stop_reason
        self._message.stop_sequence = cast("str | None", delta.get("stop_sequence"))
        if told.usage is not None:
            given = {key: value for key, value in told.usage.items() if value is not None}
            self._message.usage = {**(self._message.usage or {}), **given}


_GROWS: Final = {"text": "text", "thinking": "thinking", "tool_use": "input"}
"""The field of each kind of block that a stream sends in parts."""
