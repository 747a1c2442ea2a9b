"""A call and how it has ended in, its ``CallData`` out: what was asked, what was received, whether it is whole and exact.

Made when the app has what it waits for, on another thread: of bytes and of what was noted at the call's time, never of objects that the
app may have changed since.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec

from rllm_trace import _exact
from rllm_trace._calldata import CallData
from rllm_trace._guard import guard
from rllm_trace.clients._decode import UNREADABLE, Reply
from rllm_trace.types import ErrorInfo

if TYPE_CHECKING:
    from rllm_trace.clients._call import ClientCall

__all__ = ["Outcome", "expected_choices", "record_of"]

_CUT_OFF: Final = frozenset({"abort", "error", "cancelled", "failed", "in_progress", "queued"})
"""Finish reasons that a server gives to a reply that it broke off, or has not written yet (a response in the background)."""
_MEDIA: Final = frozenset(
    {"image_url", "input_image", "image", "input_audio", "audio", "audio_url", "video_url", "video", "file", "input_file"}
)
_LONG: Final = frozenset({"messages", "input", "prompt", "tools"})
"""Fields of a request that are left as they are where only the others are wanted."""
_PART_MARK: Final = b'"type"'

_decode = msgspec.json.Decoder().decode
_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a call has ended."""

    read: Callable[[], Reply]
    """Gives what was received."""
    complete: bool | None = False
    """None: if every choice that was asked for is there and has its finish reason; then ``error`` is none."""
    error: ErrorInfo | None = None
    cancelled: bool = False
    streamed: bool = False


def record_of(call: ClientCall, outcome: Outcome, request: bytes, body: Mapping[str, Any] | None) -> CallData:
    """The record of the call. ``body``: what was sent; None: it is read from ``request``, the app may have changed its own meanwhile."""
    try:
        return _data(call, outcome, request, _body_of(call, request) if body is None else body)
    except Exception as error:  # noqa: BLE001 - as in ``guard``
        guard.count("client", error)
        return _minimal(call)


def _body_of(call: ClientCall, request: bytes) -> Mapping[str, Any]:
    try:
        return {name: value if name in _LONG else _decode(value) for name, value in _members(request).items()}
    except UNREADABLE:
        return call.body


def _data(call: ClientCall, outcome: Outcome, request: bytes, body: Mapping[str, Any]) -> CallData:
    reply, error = outcome.read(), outcome.error
    complete = outcome.complete
    if complete is None:
        complete = reply.finished and len(reply.choices) >= expected_choices(body)
        error = None if complete else error
    if error is None and reply.error is not None:
        error = call.told(reply.error)
    complete = complete and error is None and not any(choice.finish_reason in _CUT_OFF for choice in reply.choices)
    reason = _inexact(call, reply, body, complete, failed=error is not None)
    first_version, last_version, spans = _versions(call, reply, outcome.streamed)
    cancelled = outcome.cancelled and error is not None
    return CallData(
        operation=call.operation,
        model=call.model,
        requested_model=call.requested_model,
        endpoint="policy" if call.endpoint is not None else "own",
        server=call.server,
        request=request,
        requested={**call.added, **call.changed} or None,
        choices=reply.choices,
        prompt_token_ids=reply.prompt_token_ids,
        usage=reply.usage,
        response_id=reply.response_id,
        response_model=reply.response_model,
        attempts=max(call.attempts, 1),
        error=error,
        status="cancelled" if cancelled else "error" if error is not None else "ok" if complete else "abandoned",
        exact=reason is None,
        inexact_reason=reason,
        complete=complete,
        streamed=call.streams,
        multimodal=_has_media(body),
        policy_version_start=first_version,
        policy_version_end=last_version,
        version_spans=spans,
        time_to_first_token=call.first,
    )


def _minimal(call: ClientCall) -> CallData:
    return CallData(
        operation=call.operation,
        model=call.model,
        requested_model=call.model,
        request=b"{}",
        inexact_reason=_exact.UNREADABLE,
        status="error",
    )


def _inexact(call: ClientCall, reply: Reply, body: Mapping[str, Any], complete: bool, *, failed: bool) -> str | None:
    if failed:
        return _exact.FAILED
    if not complete:
        return _exact.INCOMPLETE
    if reply.choices and len(reply.choices) < expected_choices(body):
        return f"{_exact.NO_CHOICES}: {len(reply.choices)} of {expected_choices(body)}"
    if reply.fault in _exact.ABSENT and not _has_asked(call, body):
        return _exact.NOT_ASKED
    return reply.fault or _exact.sampling_reason(body)


def _has_asked(call: ClientCall, body: Mapping[str, Any]) -> bool:
    """Whether the server had reason to tell ids and logprobs. The policy's tells them with every response unasked."""
    if call.operation == "responses":
        return call.endpoint is not None
    return bool(body.get("return_token_ids")) and body.get("logprobs") is not None


def _versions(call: ClientCall, reply: Reply, streamed: bool) -> tuple[int | None, int | None, list[tuple[int, int, int]] | None]:
    spans, header = reply.version_spans, call.header_version
    if not spans:
        return header, None if streamed else header, None
    told = len(spans) > 1 or (header not in (None, spans[0][0]) and spans[0][2] > 0)  # sent before a swap, sampled after it
    last = max([spans[-1][0], *(choice.version_spans[-1][0] for choice in reply.choices if choice.version_spans)])
    return spans[0][0] if told or header is None else header, last, spans if told else None


def expected_choices(body: Mapping[str, Any]) -> int:
    """How many choices a request asks for."""
    count = body.get("n")
    return count if isinstance(count, int) else 1


def _has_media(body: Mapping[str, Any]) -> bool:
    messages = body.get("messages") or body.get("input")
    if isinstance(messages, msgspec.Raw):
        messages = _decode(messages) if _PART_MARK in bytes(messages) else None
    if not isinstance(messages, list):
        return False
    for message in cast("list[Any]", messages):
        content = cast("dict[str, Any]", message).get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            for part in cast("list[Any]", content):
                if isinstance(part, dict) and cast("dict[str, Any]", part).get("type") in _MEDIA:
                    return True
    return False
