"""The bytes of an event stream in, as they arrive; out come the bytes that the app is to see, and what they say is gathered.

Where nothing is taken out, bytes pass through as they came; else whole events are passed on. Most events of a long stream have one known
layout: what was added is cut out of those by a pattern that matches whole JSON values and nothing else, and they are read later, many
at once, because a loop that only reads costs a third of reading between the steps of the app. Every other event is read as it comes.
"""

from __future__ import annotations

import re
from typing import Final

from rllm_trace.clients._cut import VERSION_MARK
from rllm_trace.clients._decode import UNREADABLE, Keep, Reply, read_bodies, read_body, shown, shown_unread
from rllm_trace.clients._gather import Gathered

__all__ = ["EventReader"]

_DATA: Final = b"data:"
_SIMPLE: Final = b"data: "
_DONE: Final = b"[DONE]"
_UNFINISHED: Final = b'"finish_reason":null'
_NEAR_END: Final = -160
"""Where in an event ``_UNFINISHED`` is looked for."""
_TEXT: Final = rb'"[^"\\]*(?:\\.[^"\\]*)*"'
_ADDED: Final = re.compile(
    rb'"logprobs":\{"content":\[(?:\{"token":'
    + _TEXT
    + rb',"logprob":[^,"\[\]{}]+,"bytes":(?:\[[0-9,]*\]|null),"top_logprobs":\[\]\},?)*\]'
    rb'(?:,"refusal":null)?\}(,"finish_reason":null(?:,"stop_reason":null)?),"token_ids":\[[0-9,]*\]',
    re.DOTALL,
).search
_NO_LOGPROBS: Final = b'"logprobs":null'
_LOGPROBS_KEY: Final = b'"logprobs"'
_FINISH_KEY: Final = b"finish_reason"
_USAGE: Final = b'"usage":{'
_IDS_KEY: Final = b"token_ids"
_MAX_LATER: Final = 128
"""Chunks that are kept to be read later."""
_MAX_PENDING: Final = 64 * 1024 * 1024
"""Bytes without an end of event that are held back at most; what is longer is no event stream and passes through unread."""


class EventReader:
    """Reads one stream."""

    def __init__(self, keep: Keep) -> None:
        self._keep = keep
        self._strips = not (keep.everything and keep.usage_chunk)
        self._strips_all = not (keep.ids or keep.logprobs)
        self._pending = b""
        self._later: list[bytes] = []
        self._tail = b""
        """What follows the added fields in an event of the known layout: the same in each."""
        self._gathered = Gathered()
        self.done = False
        """The stream has said that it is over."""

    @property
    def finished(self) -> bool:
        """Every choice that was begun has its finish reason."""
        return self._gathered.finished

    def feed(self, chunk: bytes) -> bytes:
        """Takes in bytes; gives those that the app is to see now."""
        if not self._pending and chunk[:6] == _SIMPLE:
            seen = self._simply(chunk) if self._strips else chunk if self._is_simple(chunk) else None
            if seen is not None:
                self._later.append(chunk)
                if len(self._later) >= _MAX_LATER:
                    self._catch_up()
                return seen
        self._catch_up()
        pending = self._pending + chunk if self._pending else chunk
        if b"\r" in pending and not pending.endswith(b"\r"):
            pending = pending.replace(b"\r\n", b"\n")
        end = pending.rfind(b"\n\n")
        if end < 0:
            self._pending = pending
            if len(pending) > _MAX_PENDING:
                self._gathered.unreadable = True
                self._pending = b""
                return pending if self._strips else chunk
            return b"" if self._strips else chunk
        self._pending = pending[end + 2 :]
        seen = b"".join([self._read(event) for event in pending[:end].split(b"\n\n") if event])
        return seen if self._strips else chunk

    def flush(self) -> bytes:
        """The stream has ended: what was held back, read as a last event."""
        self._catch_up()
        pending, self._pending = self._pending, b""
        seen = self._read(pending) if pending else b""
        return seen if self._strips else b""

    def reply(self) -> Reply:
        """What has been received so far."""
        self._catch_up()
        return self._gathered.reply()

    def is_whole(self, expected: int) -> bool:
        """``expected`` choices are there, each with its finish reason: nothing is to come but the usage and the end."""
        return self.finished and len(self.reply().choices) >= expected

    def _is_simple(self, chunk: bytes) -> bool:
        """Whole events, and none of them says that something is over."""
        return chunk[-2:] == b"\n\n" and chunk.rfind(_UNFINISHED, _NEAR_END) >= 0

    def _simply(self, chunk: bytes) -> bytes | None:
        """An event without its ids and logprobs; None if it is not one event of the known layout."""
        if not self._strips_all:
            return None
        found = _ADDED(chunk)
        if found is None:
            return chunk if self._is_bare(chunk) else None
        start, end = found.span()
        tail = chunk[end:]
        if tail != self._tail:
            if tail.find(b"\n\n") != len(tail) - 2 or _IDS_KEY in tail or VERSION_MARK in tail or _USAGE in tail:
                return None
            self._tail = tail
        if chunk.find(b"\n", 0, start) >= 0 or chunk.find(_IDS_KEY, 0, start) >= 0:
            return None
        return chunk[:start] + _NO_LOGPROBS + found[1] + tail

    def _is_bare(self, chunk: bytes) -> bool:
        """One event that has nothing which could be taken out, and says of nothing that it is over: the server gives no ids."""
        if chunk.rfind(_UNFINISHED, _NEAR_END) < 0 or chunk.find(b"\n") != len(chunk) - 2 or chunk[-1:] != b"\n":
            return False
        if chunk.count(_FINISH_KEY) != 1 or _IDS_KEY in chunk or VERSION_MARK in chunk or _USAGE in chunk:
            return False
        return chunk.count(_LOGPROBS_KEY) == chunk.count(_NO_LOGPROBS)

    def _catch_up(self) -> None:
        if not self._later:
            return
        later, self._later = b"".join(self._later), []
        try:
            self._gathered.take(read_bodies(b"[" + later[6:-2].replace(b"\n\ndata: ", b",") + b"]"))
        except UNREADABLE:  # something else stood between them
            for event in later.split(b"\n\n"):
                if event:
                    self._read(event, show=False)

    def _read(self, event: bytes, *, show: bool = True) -> bytes:
        """Takes in one event; gives it as the app is to see it, with its end; nothing if the app is not to see it."""
        if event[:6] == _SIMPLE and b"\n" not in event:
            data = event[6:]
            other: list[bytes] = []
        else:
            lines = event.split(b"\n")
            data = b"\n".join([line[5:].lstrip() for line in lines if line[:5] == _DATA])
            other = [line for line in lines if line[:5] != _DATA and line]
        if data[:1] == b"{":
            seen = self._read_data(data, show)
            if seen is None:
                return b""
            if seen is not data:
                return b"\n".join([*other, b"data: " + seen.replace(b"\n", b"\ndata: ")]) + b"\n\n"
        elif data[:6] == _DONE:
            self.done = True
        return event + b"\n\n"

    def _read_data(self, data: bytes, show: bool) -> bytes | None:
        """Takes in the JSON of one event; gives it (the same object if nothing was taken out), or None if the app is not to see it."""
        try:
            body = read_body(data)
            self._gathered.take((body,))
        except UNREADABLE:
            self._gathered.unreadable = True
            return shown_unread(data, self._keep) if show and self._strips else data
        if not show or not self._strips:
            return data
        if body.usage is not None and not body.choices and not self._keep.usage_chunk:
            return None
        return data if self._keep.everything else shown(data, body, self._keep)
