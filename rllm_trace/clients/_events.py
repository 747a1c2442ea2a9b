"""The bytes of an event stream in, as they arrive; out come the bytes that the app is to see and, at the end, the ``Reply``.

The reply is the one that the unstreamed response would have given: fragments of text, reasoning, refusal and tool calls are joined, ids
and logprobs appended in order, versions and usage taken from wherever they are told. Where nothing is taken out, bytes pass through as
they came; else whole events are passed on.
"""

from __future__ import annotations

from typing import Any, Final, cast

import msgspec

from rllm_trace import _exact
from rllm_trace.clients._decode import (
    ChoiceBody,
    Keep,
    Message,
    Reply,
    UsageBody,
    error_of,
    legacy_call,
    make_choice,
    prompt_of,
    read_parts,
    tool_call,
    version_spans,
)
from rllm_trace.types import Choice, TokenIds

__all__ = ["EventReader"]

_DATA: Final = b"data:"
_DONE: Final = b"[DONE]"
_MAX_PENDING: Final = 64 * 1024 * 1024
"""Bytes without an end of event that are held back at most; what is longer is no event stream and passes through unread."""


class _Growing:
    """One choice while it arrives."""

    __slots__ = ("finish_reason", "function_call", "ids", "logprobs", "no_logprobs", "reasoning", "refusal", "stop_reason", "text", "tools")

    def __init__(self) -> None:
        self.text: list[str] = []
        self.reasoning: list[str] = []
        self.refusal: list[str] = []
        self.ids: list[int] | None = None
        self.logprobs: list[float | None] = []
        self.no_logprobs = True
        self.tools: dict[int, dict[str, Any]] = {}
        self.function_call: dict[str, Any] = {}
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None

    def add(self, part: ChoiceBody) -> None:
        if part.text:
            self.text.append(part.text)
        if part.delta is not None:
            self._add_message(part.delta)
        ids = part.token_ids if part.token_ids is not None else part.response_token_ids
        if ids is not None:
            if self.ids is None:
                self.ids = ids
            else:
                self.ids += ids
        if part.logprobs is not None:
            values = part.logprobs.values()
            if values is not None:
                self.no_logprobs = False
                self.logprobs += values
        if part.finish_reason is not None:
            self.finish_reason = part.finish_reason
        stop = part.stop_reason if part.stop_reason is not None else part.matched_stop
        if stop is not None:
            self.stop_reason = stop

    def _add_message(self, delta: Message) -> None:
        if delta.content:
            self.text.append(delta.content if isinstance(delta.content, str) else str(delta.content))
        reasoning = delta.reasoning_content or delta.reasoning
        if reasoning and isinstance(reasoning, str):
            self.reasoning.append(reasoning)
        if delta.refusal:
            self.refusal.append(delta.refusal)
        for position, fragment in enumerate(delta.tool_calls or ()):
            index = fragment.get("index")
            _merge(self.tools.setdefault(index if isinstance(index, int) else position, {}), fragment)
        if delta.function_call:
            _merge(self.function_call, delta.function_call)

    def choice(self, index: int) -> tuple[Choice, str | None]:
        token_ids = None if self.ids is None else TokenIds(self.ids)
        logprobs, fault = _exact.aligned(token_ids, None if self.no_logprobs else self.logprobs)
        record = make_choice(
            index=index,
            token_ids=token_ids,
            logprobs=logprobs,
            text="".join(self.text),
            tool_calls=[tool_call(self.tools[position]) for position in sorted(self.tools)] + legacy_call(self.function_call),
            reasoning="".join(self.reasoning),
            refusal="".join(self.refusal),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )
        return record, fault


_WHOLE: Final = frozenset({"id", "type", "index"})
"""Fields of a fragment that are told whole, and again; the other texts are appended."""


def _merge(into: dict[str, Any], fragment: dict[str, Any]) -> None:
    for key, value in fragment.items():
        known = into.get(key)
        if value is None:
            continue
        if isinstance(value, dict):
            inner = cast("dict[str, Any]", into.setdefault(key, {}))
            _merge(inner, cast("dict[str, Any]", value))
        elif known is None:
            into[key] = value
        elif isinstance(known, str) and isinstance(value, str) and key not in _WHOLE:
            into[key] = known + value


class EventReader:
    """Reads one stream. ``strips`` False: what goes in comes out at once, unchanged."""

    def __init__(self, keep: Keep) -> None:
        self._keep = keep
        self._strips = not (keep.everything and keep.usage_chunk)
        self._pending = b""
        self._choices: dict[int, _Growing] = {}
        self._prompts: list[list[int] | None] = []
        self._usage: UsageBody | None = None
        self._versions: list[tuple[int, int, int]] | None = None
        self._id: str | None = None
        self._model: str | None = None
        self._error: dict[str, Any] | None = None
        self._unreadable = False
        self.done = False
        """The stream has said that it is over."""

    @property
    def finished(self) -> bool:
        """Every choice that was begun has its finish reason."""
        return bool(self._choices) and all(choice.finish_reason is not None for choice in self._choices.values())

    def feed(self, chunk: bytes) -> bytes:
        """Takes in bytes; gives those that the app is to see now."""
        pending = self._pending + chunk if self._pending else chunk
        if b"\r" in pending and not pending.endswith(b"\r"):
            pending = pending.replace(b"\r\n", b"\n")
        end = pending.rfind(b"\n\n")
        if end < 0:
            self._pending = pending
            if len(pending) > _MAX_PENDING:
                self._unreadable = True
                self._pending = b""
                return pending if self._strips else chunk
            return b"" if self._strips else chunk
        self._pending = pending[end + 2 :]
        events = pending[: end + 2]
        if not self._strips:
            for event in events.split(b"\n\n"):
                if event:
                    self._read(event)
            return chunk
        return b"".join([self._read(event) for event in events.split(b"\n\n") if event])

    def flush(self) -> bytes:
        """The stream has ended: what was held back, read as a last event."""
        pending, self._pending = self._pending, b""
        if not pending:
            return b""
        seen = self._read(pending)
        return seen if self._strips else b""

    def _read(self, event: bytes) -> bytes:
        """Takes in one event; gives it as the app is to see it, with its end; nothing if the app is not to see it."""
        if event[:5] == _DATA and b"\n" not in event:
            data = event[5:].lstrip()
            if data[:1] == b"{":
                seen = self._read_data(data)
                return event + b"\n\n" if seen is data else b"" if seen is None else b"data: " + seen + b"\n\n"
            if data[:6] == _DONE:
                self.done = True
            return event + b"\n\n"
        lines = event.split(b"\n")
        data = b"\n".join([line[5:].lstrip() for line in lines if line[:5] == _DATA])
        if data[:6] == _DONE:
            self.done = True
        elif data[:1] == b"{":
            seen = self._read_data(data)
            if seen is None:
                return b""
            if seen is not data:
                other = [line for line in lines if line[:5] != _DATA and line]
                return b"\n".join([*other, b"data: " + seen.replace(b"\n", b"\ndata: ")]) + b"\n\n"
        return event + b"\n\n"

    def _read_data(self, data: bytes) -> bytes | None:
        """Takes in the JSON of one event; gives it (the same object if nothing was taken out), or None if the app is not to see it."""
        try:
            parts = read_parts(data, self._keep)
        except (msgspec.DecodeError, UnicodeDecodeError):
            self._unreadable = True
            return data
        body = parts.body
        choices = body.choices
        if choices:
            for part in choices:
                choice = self._choices.get(part.index)
                if choice is None:
                    choice = self._choices[part.index] = _Growing()
                choice.add(part)
                if part.prompt_token_ids:
                    self._prompts.append(part.prompt_token_ids)
        if body.prompt_token_ids:
            self._prompts.append(body.prompt_token_ids)
        if body.usage is not None:
            self._usage = body.usage
        if body.metadata is not None:
            self._versions = version_spans(body.metadata) or self._versions
        if self._id is None:
            self._id, self._model = body.id or None, body.model or None
        if body.error:
            self._error = error_of(body.error)
        if body.usage is not None and not choices and not self._keep.usage_chunk:
            return None
        return parts.rest

    def reply(self) -> Reply:
        """What has been received so far."""
        choices: list[Choice] = []
        fault: str | None = _exact.UNREADABLE if self._unreadable else None
        for index in sorted(self._choices):
            record, choice_fault = self._choices[index].choice(index)
            fault = fault or choice_fault
            choices.append(record)
        prompt_ids, prompt_fault = prompt_of(self._prompts)
        usage = self._usage.usage() if self._usage is not None else None
        return Reply(
            choices=choices,
            prompt_token_ids=prompt_ids,
            usage=usage,
            response_id=self._id,
            response_model=self._model,
            version_spans=self._versions,
            fault=prompt_fault or fault or _exact.contradiction(choices, prompt_ids, usage),
            finished=self.finished,
            error=self._error,
        )
