"""A chat completion in, whole or as events; the answer of Anthropic's Messages API out, whole or as events.

Text, reasoning and tool calls become blocks in the order in which they come. What the arguments of each tool call were, byte for byte, is
told to ``remember``, so that the next request can be put together as the model wrote it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, cast

import msgspec

__all__ = ["MessageStream", "Remember", "error_of", "message"]

Remember = Callable[[str, str], None]
"""(id of a tool call, its arguments as text)."""

_STOP_REASONS: Final = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "function_call": "tool_use",
    "content_filter": "refusal",
}
_UNPARSED: Final = "_arguments"
"""Key under which arguments stand that are no JSON object."""
_ERROR_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}
_encode = msgspec.json.encode
_decode = msgspec.json.decode


def _dict(value: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [_dict(item) for item in cast("list[Any]", value)] if isinstance(value, list) else []


def _id(id: Any) -> str:
    return f"msg_{id or ''}"


def _usage(usage: Any) -> dict[str, Any]:
    told = _dict(usage)
    cached = _dict(told.get("prompt_tokens_details")).get("cached_tokens") or 0
    return {
        "input_tokens": (told.get("prompt_tokens") or 0) - cached,
        "cache_read_input_tokens": cached,
        "output_tokens": told.get("completion_tokens") or 0,
    }


def _stop(finish: Any, stop_reason: Any) -> dict[str, Any]:
    """``stop_reason`` and ``stop_sequence``; servers with vLLM's fields name the stop string that ended the text."""
    if finish == "stop" and isinstance(stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop_reason}
    return {"stop_reason": _STOP_REASONS.get(str(finish), "end_turn"), "stop_sequence": None}


def _input(arguments: str) -> dict[str, Any]:
    try:
        parsed: Any = _decode(arguments) if arguments else {}
    except msgspec.DecodeError:
        parsed = None
    return cast("dict[str, Any]", parsed) if isinstance(parsed, dict) else {_UNPARSED: arguments}


def message(body: bytes, remember: Remember) -> bytes:
    """An answer in one piece. Raises ``msgspec.DecodeError`` for what is no chat completion."""
    chat = _dict(_decode(body))
    choice = next(iter(_dicts(chat.get("choices"))), None)
    if choice is None:
        raise msgspec.DecodeError("the chat completion has no choices")
    said = _dict(choice.get("message"))
    blocks: list[dict[str, Any]] = []
    reasoning = said.get("reasoning_content") or said.get("reasoning")
    if isinstance(reasoning, str) and reasoning:
        blocks.append({"type": "thinking", "thinking": reasoning, "signature": ""})
    text = said.get("content") or said.get("refusal")
    if text:
        blocks.append({"type": "text", "text": text if isinstance(text, str) else str(text)})
    for call in _dicts(said.get("tool_calls")):
        function, id = _dict(call.get("function")), str(call.get("id") or "")
        arguments = str(function.get("arguments") or "")
        remember(id, arguments)
        blocks.append({"type": "tool_use", "id": id, "name": function.get("name"), "input": _input(arguments)})
    stop = _stop("content_filter" if said.get("refusal") else choice.get("finish_reason"), choice.get("stop_reason"))
    return _encode(
        {
            "id": _id(chat.get("id")),
            "type": "message",
            "role": "assistant",
            "model": chat.get("model"),
            "content": blocks,
            **stop,
            "usage": _usage(chat.get("usage")),
        }
    )


def error_of(status: int, body: bytes) -> bytes:
    """An error of an OpenAI-compatible server as Anthropic's clients read it: the same message under the same status."""
    try:
        parsed = _dict(_decode(body))
    except msgspec.DecodeError:
        parsed = {}
    error = parsed.get("error", parsed)
    text = _dict(error).get("message") or (error if isinstance(error, str) else body.decode("utf-8", "replace"))
    kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return _encode({"type": "error", "error": {"type": kind, "message": str(text)}})


class MessageStream:
    """Translates one stream. ``feed`` takes bytes and gives bytes; after the last event there are none."""

    def __init__(self, model: str, remember: Remember) -> None:
        self._model = model
        self._remember = remember
        self._pending = b""
        self._begun = False
        self._over = False
        self._index = -1
        self._kind: str | None = None
        """Type of the block that is open."""
        self._calls: dict[int, tuple[str, int, list[str]]] = {}
        """By index in the chat stream: id, block, and arguments so far."""
        self._refused = False
        self._finish: Any = None
        self._stop_reason: Any = None
        self._usage: Any = None

    def feed(self, chunk: bytes) -> bytes:
        """The events that the bytes give."""
        pending = (self._pending + chunk).replace(b"\r\n", b"\n")
        *events, self._pending = pending.split(b"\n\n")
        out: list[bytes] = []
        for event in events:
            data = b"\n".join([line[5:].lstrip() for line in event.split(b"\n") if line.startswith(b"data:")])
            if data[:6] == b"[DONE]":
                self._end(out)
            elif data[:1] == b"{":
                self._take(data, out)
        return b"".join(out)

    def flush(self) -> bytes:
        """The stream has ended; whole if it has said so, or if its reply has a finish reason."""
        out: list[bytes] = []
        if not self._over and self._finish is not None:
            self._end(out)
        return b"".join(out)

    @property
    def over(self) -> bool:
        """The last event has been given."""
        return self._over

    def _take(self, data: bytes, out: list[bytes]) -> None:
        try:
            chunk = _dict(_decode(data))
        except msgspec.DecodeError:
            return
        if self._over:
            return
        if chunk.get("error"):
            self._over = True
            out.append(b"event: error\ndata: " + error_of(500, data) + b"\n\n")
            return
        if not self._begun:
            self._begin(chunk, out)
        if chunk.get("usage"):
            self._usage = chunk["usage"]
        for choice in _dicts(chunk.get("choices")):
            if choice.get("index"):
                continue
            self._delta(_dict(choice.get("delta")), out)
            if choice.get("finish_reason") is not None:
                self._finish = choice["finish_reason"]
            if choice.get("stop_reason") is not None:
                self._stop_reason = choice["stop_reason"]

    def _begin(self, chunk: dict[str, Any], out: list[bytes]) -> None:
        self._begun = True
        start: dict[str, Any] = {
            "id": _id(chunk.get("id")),
            "type": "message",
            "role": "assistant",
            "model": chunk.get("model") or self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": 0, "output_tokens": 0},
        }
        out.append(_event("message_start", {"message": start}))

    def _delta(self, delta: dict[str, Any], out: list[bytes]) -> None:
        reasoning = delta.get("reasoning_content") or delta.get("reasoning")
        if isinstance(reasoning, str) and reasoning:
            self._block("thinking", {"type": "thinking", "thinking": "", "signature": ""}, out)
            self._add({"type": "thinking_delta", "thinking": reasoning}, out)
        text = delta.get("content") or delta.get("refusal")
        self._refused = self._refused or bool(delta.get("refusal"))
        if isinstance(text, str) and text:
            self._block("text", {"type": "text", "text": ""}, out)
            self._add({"type": "text_delta", "text": text}, out)
        for position, fragment in enumerate(_dicts(delta.get("tool_calls"))):
            index = fragment.get("index")
            self._tool(index if isinstance(index, int) else position, fragment, out)

    def _tool(self, index: int, fragment: dict[str, Any], out: list[bytes]) -> None:
        function = _dict(fragment.get("function"))
        if index not in self._calls:
            id = str(fragment.get("id") or "")
            self._close(out)
            self._block("tool_use", {"type": "tool_use", "id": id, "name": function.get("name"), "input": {}}, out)
            self._calls[index] = (id, self._index, [])
        _, block, parts = self._calls[index]
        arguments = function.get("arguments")
        if isinstance(arguments, str) and arguments:
            parts.append(arguments)
            delta = {"type": "input_json_delta", "partial_json": arguments}
            out.append(_event("content_block_delta", {"index": block, "delta": delta}))

    def _block(self, kind: str, block: dict[str, Any], out: list[bytes]) -> None:
        """A block of this kind is open from here on; an open one of another kind is closed."""
        if self._kind == kind:
            return
        self._close(out)
        self._kind = kind
        self._index += 1
        out.append(_event("content_block_start", {"index": self._index, "content_block": block}))

    def _add(self, delta: dict[str, Any], out: list[bytes]) -> None:
        out.append(_event("content_block_delta", {"index": self._index, "delta": delta}))

    def _close(self, out: list[bytes]) -> None:
        if self._kind is not None:
            out.append(_event("content_block_stop", {"index": self._index}))
        self._kind = None

    def _end(self, out: list[bytes]) -> None:
        if self._over or not self._begun:
            return
        self._over = True
        self._close(out)
        for id, _, parts in self._calls.values():
            self._remember(id, "".join(parts))
        stop = _stop("content_filter" if self._refused else self._finish, self._stop_reason)
        out.append(_event("message_delta", {"delta": stop, "usage": _usage(self._usage)}))
        out.append(_event("message_stop", {}))


def _event(kind: str, data: dict[str, Any]) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + _encode({"type": kind, **data}) + b"\n\n"
