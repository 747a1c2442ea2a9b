"""The body or the event stream of the Responses API in; a ``Reply`` out. Nothing is taken out of either: nothing was asked for.

Token ids and logprobs are recorded where the server gives them on its own account; else the call is inexact and says so.
"""

from __future__ import annotations

from typing import Any, Final, cast

import msgspec

from rllm_trace import _exact
from rllm_trace.clients._decode import UNREADABLE, Reply, error_of, ints, make_choice
from rllm_trace.types import Usage

__all__ = ["ResponsesReader", "read_response"]

_ENDS: Final = ("response.completed", "response.incomplete", "response.failed")
_END_MARKS: Final = tuple(b'"' + end.encode() + b'"' for end in _ENDS)


class _Response(msgspec.Struct, gc=False):
    id: str | None = None
    model: str | None = None
    status: str | None = None
    output: list[dict[str, Any]] | None = None
    usage: dict[str, Any] | None = None
    error: Any = None
    prompt_token_ids: msgspec.Raw = msgspec.Raw()
    token_ids: msgspec.Raw = msgspec.Raw()


class _Event(msgspec.Struct, gc=False):
    type: str | None = None
    response: _Response | None = None
    error: Any = None
    message: str | None = None


_response = msgspec.json.Decoder(_Response).decode
_event = msgspec.json.Decoder(_Event).decode


def read_response(raw: bytes) -> Reply:
    """The reply in an unstreamed body. Raises ``msgspec.DecodeError``."""
    return _reply(_response(raw))


def _reply(body: _Response) -> Reply:
    texts: list[str] = []
    refusals: list[str] = []
    reasoning: list[str] = []
    tools: list[dict[str, Any]] = []
    logprobs: list[float | None] = []
    for item in body.output or ():
        kind = item.get("type")
        if kind == "message":
            for part in _dicts(item.get("content")):
                texts.append(str(part.get("text") or ""))
                refusals.append(str(part.get("refusal") or ""))
                logprobs += [entry.get("logprob") for entry in _dicts(part.get("logprobs"))]
        elif kind == "reasoning":
            reasoning += [str(part.get("text") or "") for part in _dicts(item.get("content")) or _dicts(item.get("summary"))]
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            tools.append({"type": "function", "id": item.get("call_id"), "function": function})
    token_ids, wrong = _exact.as_ids(ints(body.token_ids))
    aligned, fault = _exact.aligned(token_ids, logprobs or None)
    choice = make_choice(
        index=0,
        token_ids=token_ids,
        logprobs=aligned,
        text="".join(texts),
        tool_calls=tools,
        reasoning="".join(reasoning),
        refusal="".join(refusals),
        finish_reason=body.status,
        stop_reason=None,
    )
    prompt_ids, prompt_wrong = _exact.as_ids(ints(body.prompt_token_ids))
    usage = _usage(body.usage)
    return Reply(
        choices=[choice],
        prompt_token_ids=prompt_ids,
        usage=usage,
        response_id=body.id,
        response_model=body.model,
        fault=prompt_wrong or wrong or fault or _exact.contradiction([choice], prompt_ids, usage),
        finished=body.status in ("completed", "incomplete"),
        error=error_of(body.error),
    )


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [cast("dict[str, Any]", item) for item in cast("list[Any]", value) if isinstance(item, dict)] if isinstance(value, list) else []


def _usage(usage: dict[str, Any] | None) -> Usage | None:
    if usage is None:
        return None
    read, written = usage.get("input_tokens"), usage.get("output_tokens")
    return Usage(prompt_tokens=read, completion_tokens=written) if isinstance(read, int) and isinstance(written, int) else None


class ResponsesReader:
    """Reads one stream: the last event carries the whole response."""

    def __init__(self) -> None:
        self._pending = b""
        self._reply = Reply(fault=_exact.INCOMPLETE)
        self.done = False
        self.finished = False
        """As in ``EventReader``; here it is only known at the end."""

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

    def _read(self, event: bytes) -> None:
        if not (any(mark in event for mark in _END_MARKS) or b'"error"' in event):
            return
        data = b"\n".join([line[5:].lstrip() for line in event.split(b"\n") if line[:5] == b"data:"])
        if not data.startswith(b"{"):
            return
        try:
            parsed = _event(data)
        except UNREADABLE:
            self._reply.fault = _exact.UNREADABLE
            return
        if parsed.type in _ENDS and parsed.response is not None:
            self._reply = _reply(parsed.response)
            self.done = True
        elif parsed.type == "error" or parsed.error:
            self._reply.error = error_of(parsed.error or parsed.message)

    def reply(self) -> Reply:
        """What has been received so far."""
        return self._reply
