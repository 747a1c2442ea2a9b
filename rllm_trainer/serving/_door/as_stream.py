"""A whole chat completion in, the events of a stream that says the same out: for servers that tell ids only of whole answers.

Each choice is one event with its message, ids and logprobs and one that ends it; then come the usage, where the client asked for it, and
``[DONE]``. What else the answer says stands on the last event of a choice, the versions of the weights among it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple, cast

import msgspec

__all__ = ["AskedWhole", "as_stream", "whole_instead"]

_ENDINGS: Final = ("finish_reason", "stop_reason", "matched_stop")
_SHARED: Final = ("id", "created", "model")
_APART: Final = frozenset({*_SHARED, "object", "choices", "usage"})


class AskedWhole(NamedTuple):
    """A request for a stream, as one for a whole answer."""

    body: bytes
    usage: bool
    """The stream is to end with its usage."""


def whole_instead(body: bytes) -> AskedWhole | None:
    """What to send for a chat completion that asks for a stream with ids; None for any other."""
    if b"return_token_ids" not in body or b"stream" not in body:
        return None
    try:
        asked = msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.DecodeError:
        return None
    if not (asked.get("stream") and asked.get("return_token_ids")):
        return None
    options = asked.pop("stream_options", None)
    usage = isinstance(options, dict) and bool(cast("dict[str, Any]", options).get("include_usage"))
    return AskedWhole(msgspec.json.encode({**asked, "stream": False}), usage)


def as_stream(answer: bytes, *, usage: bool) -> bytes:
    """The events of ``answer``, a chat completion; ``usage``: its usage too. Raises ``msgspec.DecodeError`` where it is no such thing."""
    whole = msgspec.json.decode(answer, type=dict[str, Any])
    choices = msgspec.convert(whole.get("choices"), list[dict[str, Any]])
    shared = {name: whole[name] for name in _SHARED if name in whole} | {"object": "chat.completion.chunk"}
    rest = {name: value for name, value in whole.items() if name not in _APART}
    events = [{**shared, "choices": [_said(choice)]} for choice in choices]
    events += [{**shared, "choices": [_ended(choice)]} for choice in choices]
    if events:
        events[-1] |= rest
    if usage:
        events.append({**shared, "choices": [], "usage": whole.get("usage")})
    return b"".join(b"data: " + msgspec.json.encode(event) + b"\n\n" for event in events) + b"data: [DONE]\n\n"


def _said(choice: Mapping[str, Any]) -> dict[str, Any]:
    told = {name: value for name, value in choice.items() if name not in ("message", *_ENDINGS)}
    message = cast("Mapping[str, Any]", choice.get("message") or {})
    delta = {name: value for name, value in message.items() if value is not None}
    if "tool_calls" in delta:
        delta["tool_calls"] = [{**call, "index": number} for number, call in enumerate(delta["tool_calls"])]
    return {**told, "delta": delta, "finish_reason": None}


def _ended(choice: Mapping[str, Any]) -> dict[str, Any]:
    return {"index": choice.get("index", 0), "delta": {}, **{name: choice[name] for name in _ENDINGS if name in choice}}
