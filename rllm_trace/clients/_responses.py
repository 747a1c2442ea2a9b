"""The body or the event stream of the Responses API in; a ``Reply`` out, and the bytes that the app is to see.

A server of a policy tells ids, logprobs and versions of the weights beside OpenAI's fields; the app, which knows of no such server, sees
none of them. Elsewhere nothing was asked for and nothing is taken out; what a server tells on its own account is recorded, else the call is
inexact and says so.
"""

from __future__ import annotations

import re
from typing import Any, Final, cast

import msgspec

from rllm_trace import _exact
from rllm_trace.clients._cut import CutError, Member, cut
from rllm_trace.clients._decode import UNREADABLE, Keep, Reply, error_of, ints, make_choice
from rllm_trace.types import Usage

__all__ = ["ResponsesReader", "read_response"]

_ENDS: Final = ("response.completed", "response.incomplete", "response.failed", "response.cancelled")
_MARKS: Final = tuple(b'"' + end.encode() + b'"' for end in _ENDS)
_TYPE: Final = re.compile(rb'"type": ?"response\.([a-z_.]+)"').search
_CLOSING: Final = frozenset({b"output_text.done", b"content_part.done", b"output_item.done"})
_TOLD: Final = ("prompt_token_ids", "token_ids", "token_logprobs", "weight_version", "weight_versions")
"""What is told beside OpenAI's fields."""
_CUT_SHORT: Final = {"max_output_tokens": "length", "content_filter": "content_filter"}
"""Reasons of an incomplete response, as chat completions name them."""
_ABSENT: Final = msgspec.Raw()


class _Span(msgspec.Struct, gc=False):
    version: Any = None
    start: int = 0
    end: int = 0


class _Response(msgspec.Struct, gc=False):
    id: str | None = None
    model: str | None = None
    status: str | None = None
    output: list[dict[str, Any]] | None = None
    usage: dict[str, Any] | None = None
    error: Any = None
    incomplete_details: dict[str, Any] | None = None
    prompt_token_ids: msgspec.Raw = _ABSENT
    token_ids: msgspec.Raw = _ABSENT
    token_logprobs: msgspec.Raw = _ABSENT
    weight_version: msgspec.Raw = _ABSENT
    weight_versions: msgspec.Raw = _ABSENT


class _Event(msgspec.Struct, gc=False):
    type: str | None = None
    response: _Response | None = None
    error: Any = None
    message: str | None = None


_response = msgspec.json.Decoder(_Response).decode
_event = msgspec.json.Decoder(_Event).decode
_values = msgspec.json.Decoder(list[float | None]).decode
_spans = msgspec.json.Decoder(list[_Span]).decode


def read_response(raw: bytes, keep: Keep) -> tuple[Reply, bytes]:
    """The reply in an unstreamed body, and the body as the app is to see it. Raises one of ``UNREADABLE``."""
    body = _response(raw)
    return _reply(body), raw if keep.everything else _shown(raw, body)


def _shown(raw: bytes, body: _Response) -> bytes:
    """``raw``, a response or an event that holds one, without what is told beside OpenAI's fields."""
    members: list[Member] = [(f'"{name}":'.encode(), bytes(value), None) for name in _TOLD if (value := getattr(body, name))]
    if not members:
        return raw
    try:
        return cut(raw, members)
    except (CutError, IndexError):
        whole = cast("dict[str, Any]", msgspec.json.decode(raw))
        inner = cast("dict[str, Any]", whole.get("response") or whole)
        for name in _TOLD:
            inner.pop(name, None)
        return msgspec.json.encode(whole)


def _reply(body: _Response) -> Reply:
    texts: list[str] = []
    refusals: list[str] = []
    reasoning: list[str] = []
    tools: list[dict[str, Any]] = []
    beside: list[float | None] = []
    for item in body.output or ():
        kind = item.get("type")
        if kind == "message":
            for part in _dicts(item.get("content")):
                texts.append(str(part.get("text") or ""))
                refusals.append(str(part.get("refusal") or ""))
                beside += [entry.get("logprob") for entry in _dicts(part.get("logprobs"))]
        elif kind == "reasoning":
            reasoning += [str(part.get("text") or "") for part in _dicts(item.get("content")) or _dicts(item.get("summary"))]
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            tools.append({"type": "function", "id": item.get("call_id"), "function": function})
    token_ids, wrong = _exact.as_ids(ints(body.token_ids))
    aligned, fault = _exact.aligned(token_ids, _told_logprobs(body) or beside or None)
    choice = make_choice(
        index=0,
        token_ids=token_ids,
        logprobs=aligned,
        text="".join(texts),
        tool_calls=tools,
        reasoning="".join(reasoning),
        refusal="".join(refusals),
        finish_reason=_finish_reason(body, called=bool(tools)),
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
        version_spans=_versions(body),
        fault=prompt_wrong or wrong or fault or _exact.contradiction([choice], prompt_ids, usage),
        finished=body.status in ("completed", "incomplete"),
        error=error_of(body.error),
    )


def _finish_reason(body: _Response, *, called: bool) -> str | None:
    """In the words of chat completions; a status that says that there is more to come stays as it is."""
    if body.status == "completed":
        return "tool_calls" if called else "stop"
    if body.status == "incomplete":
        return _CUT_SHORT.get(str((body.incomplete_details or {}).get("reason")), "incomplete")
    return body.status


def _told_logprobs(body: _Response) -> list[float | None] | None:
    try:
        return _values(body.token_logprobs) if body.token_logprobs else None
    except msgspec.ValidationError:
        return None


def _versions(body: _Response) -> list[tuple[int, int, int]] | None:
    try:
        spans = _spans(body.weight_versions) if body.weight_versions else []
        return [(int(span.version), span.start, span.end) for span in spans] or None
    except (msgspec.ValidationError, TypeError, ValueError):
        return None


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [cast("dict[str, Any]", item) for item in cast("list[Any]", value) if isinstance(item, dict)] if isinstance(value, list) else []


def _usage(usage: dict[str, Any] | None) -> Usage | None:
    if usage is None:
        return None
    read, written = usage.get("input_tokens"), usage.get("output_tokens")
    return Usage(prompt_tokens=read, completion_tokens=written) if isinstance(read, int) and isinstance(written, int) else None


class ResponsesReader:
    """Reads one stream: the last event carries the whole response."""

    def __init__(self, keep: Keep) -> None:
        self._strips = not keep.everything
        self._pending = b""
        self._reply = Reply(fault=_exact.INCOMPLETE)
        self.done = False
        self.finished = False
        """An item of the output is whole: its last events, and another item or the end, follow at once."""

    def feed(self, chunk: bytes) -> bytes:
        """Takes in bytes; gives those that the app is to see now."""
        pending = self._pending + chunk
        if b"\r" in pending and not pending.endswith(b"\r"):
            pending = pending.replace(b"\r\n", b"\n")
        *events, self._pending = pending.split(b"\n\n")
        seen = [self._read(event) + b"\n\n" for event in events if event]
        return b"".join(seen) if self._strips else chunk

    def flush(self) -> bytes:
        """The stream has ended: what was held back, read as a last event."""
        pending, self._pending = self._pending, b""
        seen = self._read(pending)
        return seen if self._strips else b""

    def is_whole(self, expected: int) -> bool:
        """As in ``EventReader``, as far as it can be known."""
        return self.finished and expected == 1

    def _read(self, event: bytes) -> bytes:
        """Takes in one event; gives it as the app is to see it."""
        kind = _TYPE(event)
        self.finished = kind is not None and kind[1] in _CLOSING
        if not (any(mark in event for mark in _MARKS) or b'"error"' in event):
            return event
        lines = event.split(b"\n")
        data = b"\n".join([line[5:].lstrip() for line in lines if line[:5] == b"data:"])
        if not data.startswith(b"{"):
            return event
        try:
            parsed = _event(data)
        except UNREADABLE:
            self._reply.fault = _exact.UNREADABLE
            return event
        if parsed.type in _ENDS and parsed.response is not None:
            self._reply = _reply(parsed.response)
            self.done = True
            seen = _shown(data, parsed.response) if self._strips else data
            if seen is not data:
                other = [line for line in lines if line[:5] != b"data:"]
                return b"\n".join([*other, b"data: " + seen.replace(b"\n", b"\ndata: ")])
        elif parsed.type == "error" or parsed.error:
            self._reply.error = error_of(parsed.error or parsed.message)
        return event

    def reply(self) -> Reply:
        """What has been received so far."""
        return self._reply
