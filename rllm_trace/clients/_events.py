"""The bytes of an event stream in, as they arrive; out come the bytes that the app is to see, and, when it is asked for, what they say.

The two are apart. Showing is done at once: where nothing is taken out, bytes pass through as they came; else whole events are passed on.
Most events of a long stream are one event again and again, with another text: the bytes around its text are learned from one of them
that was taken apart, and in those that begin and end alike nothing but the text and what was added is looked at (``_Layout``). Reading is
done at the end, of all that came in one go, and where the record of the call is made: the app does not wait for it. Of events that differ
in nothing but their text, one with all their texts is read.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple, cast

import msgspec

from rllm_trace.clients._cut import VERSION_MARK
from rllm_trace.clients._decode import UNREADABLE, Keep, Reply, read_bodies, read_body, shown, shown_unread
from rllm_trace.clients._gather import Gathered

__all__ = ["EventReader"]

_DATA: Final = b"data:"
_SIMPLE: Final = b"data: "
_DONE: Final = b"[DONE]"
_LAST: Final = b"\n\ndata: [DONE]"
_UNFINISHED: Final = b'"finish_reason":null'
_NEAR_END: Final = -160
"""Where in an event ``_UNFINISHED`` is looked for."""
_TEXT: Final = rb'"[^"\\]*(?:\\.[^"\\]*)*"'
_PATTERN: Final = re.compile(
    rb'"logprobs":\{"content":\[(?:\{"token":'
    + _TEXT
    + rb',"logprob":[^,"\[\]{}]+,"bytes":(?:\[[0-9,]*\]|null),"top_logprobs":\[\]\},?)*\]'
    rb'(?:,"refusal":null)?\}(,"finish_reason":null(?:,"stop_reason":null)?),"token_ids":\[[0-9,]*\]',
    re.DOTALL,
)
_ADDED: Final = _PATTERN.search
_ADDED_HERE: Final = _PATTERN.match
_NO_LOGPROBS: Final = b'"logprobs":null'
_LOGPROBS_KEY: Final = b'"logprobs"'
_FINISH_KEY: Final = b"finish_reason"
_USAGE: Final = b'"usage":{'
_IDS_KEY: Final = b"token_ids"
_CONTENT: Final = b'"content"'
_TEXT_KEY: Final = _CONTENT + b':"'
_INSIDE: Final = re.compile(rb'[^"\\\n]*(?:\\(?:[^\nu]|u[0-9A-Fa-f]{4})[^"\\\n]*)*')
"""What stands between the quotes of a JSON text, and stays what it is beside another."""
_MAX_LATER: Final = 4 * 1024 * 1024
"""Bytes that are kept to be read later."""
_MAX_EVENTS: Final = 8_192
"""Events that are, of those that are alike."""
_MAX_PENDING: Final = 64 * 1024 * 1024
"""Bytes without an end of event that are held back at most; what is longer is no event stream and passes through unread."""


class _Layout:
    """What an event is around its text: another that is the same around another text is shown the same way."""

    __slots__ = ("_added", "_head", "_merges", "_tail")

    def __init__(self, head: bytes, added: bytes | None, tail: bytes, *, merges: bool) -> None:
        self._head = head
        self._added = added
        """What stands between the text and what was added; None where nothing was."""
        self._tail = tail
        self._merges = merges
        """One event with the texts of many says what the many say."""

    @classmethod
    def of(cls, event: bytes, start: int, end: int) -> _Layout | None:
        """Of an event from which ``event[start:end]`` is taken out (nothing: both are -1), and else shown as it is."""
        at = event.find(_TEXT_KEY, 0, start if start >= 0 else len(event))
        if at < 0:
            return None
        at += len(_TEXT_KEY)
        after = cast("re.Match[bytes]", _INSIDE.match(event, at)).end()
        if event[after : after + 1] != b'"':
            return None
        if start < 0:
            return cls(event[:at], None, event[after:], merges=_says_only_text(event, event[at:after]))
        return cls(event[:at], event[after:start], event[end:], merges=False)

    def shown(self, event: bytes) -> bytes | None:
        """The event as the app is to see it; None if it is another one."""
        if not (event.startswith(self._head) and event.endswith(self._tail)):
            return None
        begin, end = len(self._head), len(event) - len(self._tail)
        if begin > end:
            return None
        after = cast("re.Match[bytes]", _INSIDE.match(event, begin, end)).end()
        if self._added is None:
            return event if after == end else None
        if not event.startswith(self._added, after):
            return None
        start = after + len(self._added)
        found = _ADDED_HERE(event, start)
        if found is None or found.end() != end:
            return None
        return event[:start] + _NO_LOGPROBS + found[1] + self._tail

    def merged(self, events: list[bytes]) -> bytes:
        """What says the same as these events of the layout, for whoever joins their texts."""
        if not self._merges:
            return b"".join(events)
        begin, end = len(self._head), -len(self._tail)
        return b"".join([self._head, *[event[begin:end] for event in events], self._tail])


class _Run(NamedTuple):
    """Events of one layout, in a row."""

    layout: _Layout
    events: list[bytes]

    def merged(self) -> bytes:
        return self.layout.merged(self.events)


def _says_only_text(event: bytes, text: bytes) -> bool:
    """Whether nothing of the event but ``text``, the text of one choice, is added to what was there before."""
    try:
        body, told = read_body(event[len(_SIMPLE) :]), msgspec.json.decode(b'"' + text + b'"')
    except UNREADABLE:
        return False
    if body.choices is None or len(body.choices) != 1 or event.count(_CONTENT) != 1 or body.error:
        return False
    choice, delta = body.choices[0], body.choices[0].delta
    if delta is None or delta.content != told or choice.text or choice.finish_reason is not None:
        return False
    others = (delta.refusal, delta.reasoning_content, delta.reasoning, delta.tool_calls, delta.function_call)
    return not any(others) and (not choice.logprobs or bytes(choice.logprobs) == b"null")


class EventReader:
    """Reads one stream."""

    def __init__(self, keep: Keep) -> None:
        self._keep = keep
        self._strips = not (keep.everything and keep.usage_chunk)
        self._strips_all = not (keep.ids or keep.logprobs)
        self._layout: _Layout | None = None
        self._pending = b""
        """The beginning of an event that has not been shown."""
        self._later: list[bytes | _Run] = []
        self._alike: list[bytes] = []
        """Events of ``_layout`` that came after those."""
        self._size = 0
        self._rest = b""
        """The beginning of an event that has not been read."""
        self._gathered = Gathered()
        self._ends = False
        """A choice may have ended."""
        self.done = False
        """The stream has said that it is over."""

    @property
    def is_learned(self) -> bool:
        """Whether ``quickly`` takes in events: if not, only ``feed`` does."""
        return self._layout is not None

    @property
    def finished(self) -> bool:
        """Every choice that was begun has its finish reason."""
        if self._ends:
            self._catch_up()
        return self._gathered.finished

    def feed(self, chunk: bytes) -> bytes:
        """Takes in bytes; gives those that the app is to see now."""
        seen = self.quickly(chunk)
        return self._feed(chunk) if seen is None else seen

    def quickly(self, chunk: bytes) -> bytes | None:
        """The same for an event like the one before, which ends nothing. None, and nothing is taken in: it is something else."""
        layout = self._layout
        if layout is None:
            return None
        seen = layout.shown(chunk)
        if seen is not None:
            alike = self._alike
            alike.append(chunk)
            if len(alike) >= _MAX_EVENTS:
                self._catch_up()
        return seen

    def _feed(self, chunk: bytes) -> bytes:
        if not self.done:
            self._keep_for_later(chunk)
        if not self._pending and not self.done and chunk[:6] == _SIMPLE:
            seen = self._simply(chunk) if self._strips else chunk if self._is_simple(chunk) else None
            if seen is not None:
                return seen
        self._learn(None)
        pending = self._pending + chunk if self._pending else chunk
        if b"\r" in pending and not pending.endswith(b"\r"):
            pending = pending.replace(b"\r\n", b"\n")
        end = pending.rfind(b"\n\n")
        if end < 0:
            self._pending = pending
            if len(pending) > _MAX_PENDING:
                self._pending = b""
                return pending if self._strips else chunk
            return b"" if self._strips else chunk
        self._pending = pending[end + 2 :]
        seen = b"".join([self._shown(event) for event in pending[:end].split(b"\n\n") if event])
        return seen if self._strips else chunk

    def flush(self) -> bytes:
        """The stream has ended: what was held back, shown as a last event."""
        self._learn(None)
        pending, self._pending = self._pending, b""
        seen = self._shown(pending) if pending else b""
        if not self.done:
            self._keep_for_later(b"\n\n")
        return seen if self._strips else b""

    def reply(self) -> Reply:
        """What has been received so far."""
        self._catch_up()
        return self._gathered.reply()

    def is_whole(self, expected: int) -> bool:
        """``expected`` choices are there, each with its finish reason: nothing is to come but the usage and the end."""
        return self.finished and len(self.reply().choices) >= expected

    # what the app sees

    def _learn(self, layout: _Layout | None) -> None:
        self._close_run()
        self._layout = layout

    def _is_simple(self, chunk: bytes) -> bool:
        """Whole events, and none of them says that something is over."""
        return chunk[-2:] == b"\n\n" and chunk.rfind(_UNFINISHED, _NEAR_END) >= 0 and chunk.rfind(_DONE, _NEAR_END) < 0

    def _simply(self, chunk: bytes) -> bytes | None:
        """An event without its ids and logprobs; None if it is not one event of a known layout."""
        if not self._strips_all:
            return None
        found = _ADDED(chunk)
        if found is None:
            if not self._is_bare(chunk):
                return None
            self._learn(_Layout.of(chunk, -1, -1))
            return chunk
        start, end = found.span()
        tail = chunk[end:]
        if tail.find(b"\n") != len(tail) - 2 or tail[-1:] != b"\n" or _IDS_KEY in tail or VERSION_MARK in tail or _USAGE in tail:
            return None
        if chunk.find(b"\n", 0, start) >= 0 or chunk.find(_IDS_KEY, 0, start) >= 0:
            return None
        self._learn(_Layout.of(chunk, start, end))
        return chunk[:start] + _NO_LOGPROBS + found[1] + tail

    def _is_bare(self, chunk: bytes) -> bool:
        """One event that has nothing which could be taken out, and says of nothing that it is over: the server gives no ids."""
        if chunk.rfind(_UNFINISHED, _NEAR_END) < 0 or chunk.find(b"\n") != len(chunk) - 2 or chunk[-1:] != b"\n":
            return False
        if chunk.count(_FINISH_KEY) != 1 or _IDS_KEY in chunk or VERSION_MARK in chunk or _USAGE in chunk:
            return False
        return chunk.count(_LOGPROBS_KEY) == chunk.count(_NO_LOGPROBS)

    def _shown(self, event: bytes) -> bytes:
        """One event as the app is to see it, with its end; nothing if the app is not to see it."""
        data, other = _data_of(event)
        if data[:1] == b"{":
            self._ends = self._ends or data.count(_FINISH_KEY) != data.count(_UNFINISHED)
            seen = self._shown_data(data) if self._strips else data
            if seen is None:
                return b""
            if seen is not data:
                return b"\n".join([*other, b"data: " + seen.replace(b"\n", b"\ndata: ")]) + b"\n\n"
        elif data[:6] == _DONE:
            self.done = True
        return event + b"\n\n"

    def _shown_data(self, data: bytes) -> bytes | None:
        """The JSON of one event as the app is to see it (the same object if nothing was taken out); None if it is not to see it."""
        try:
            body = read_body(data)
        except UNREADABLE:
            return shown_unread(data, self._keep)
        if body.usage is not None and not body.choices and not self._keep.usage_chunk:
            return None
        return data if self._keep.everything else shown(data, body, self._keep)

    # what it says

    def _keep_for_later(self, chunk: bytes) -> None:
        self._close_run()
        self._later.append(chunk)
        self._size += len(chunk)
        if self._size > _MAX_LATER:
            self._catch_up()

    def _close_run(self) -> None:
        alike, layout = self._alike, self._layout
        if alike and layout is not None:
            self._later.append(_Run(layout, alike))
            self._alike = []

    def _catch_up(self) -> None:
        """Reads what has come of whole events."""
        self._close_run()
        later, self._later, self._size, self._ends = self._later, [], 0, False
        if not later:
            return
        before = self._rest
        received = _joined(before, [part.merged() if isinstance(part, _Run) else part for part in later])
        end = received.rfind(b"\n\n")
        if end < 0:
            self._rest = received
            if len(received) > _MAX_PENDING:
                self._gathered.unreadable, self._rest = True, b""
            return
        self._rest = received[end + 2 :]
        events = received[:end].removesuffix(_LAST)
        try:
            if events[:6] != _SIMPLE:
                raise msgspec.DecodeError
            bodies = read_bodies(b"[" + events[6:].replace(b"\n\ndata: ", b",") + b"]")
            if len(bodies) != events.count(b"\n\n") + 1:
                raise msgspec.DecodeError
            self._gathered.take(bodies)
        except UNREADABLE:  # something else stands between them, or one is no JSON
            received = _joined(before, [b"".join(part.events) if isinstance(part, _Run) else part for part in later])
            for event in received[: received.rfind(b"\n\n")].split(b"\n\n"):
                self._read(event)

    def _read(self, event: bytes) -> None:
        data, _ = _data_of(event)
        if data[:1] == b"{":
            try:
                self._gathered.take((read_body(data),))
            except UNREADABLE:
                self._gathered.unreadable = True


def _joined(before: bytes, parts: list[bytes]) -> bytes:
    received = before + b"".join(parts)
    return received.replace(b"\r\n", b"\n") if b"\r" in received else received


def _data_of(event: bytes) -> tuple[bytes, list[bytes]]:
    """The data of an event, and its other lines."""
    if event[:6] == _SIMPLE and b"\n" not in event:
        return event[6:], []
    lines = event.split(b"\n")
    data = b"\n".join([line[5:].lstrip() for line in lines if line[:5] == _DATA])
    return data, [line for line in lines if line[:5] != _DATA and line]
