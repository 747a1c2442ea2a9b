"""Looks on at an answer that the app reads itself: events as they come, or one body in pieces, compressed or not.

A body that something is to be taken out of is held back until it is whole; events are passed on as ``EventReader`` gives them. A
compressed stream is passed on as it came and read at its end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from rllm_trace._guard import guard
from rllm_trace.clients._decode import Reply

if TYPE_CHECKING:
    from rllm_trace.clients._call import ClientCall

__all__ = ["Onlooker"]


class Onlooker:
    """Looks on at an answer that is read by the app: events, or one body that comes in pieces."""

    def __init__(self, call: ClientCall, response: Any, events: bool, encoding: str | None) -> None:
        self._call = call
        self._events = call.events() if events and encoding is None else None
        self._is_events = events
        self._encoding = encoding
        self._response_class: type[Any] = type(response)
        self._pieces: list[bytes] = []
        self.quickly: Callable[[bytes], bytes | None] | None = None
        """Shows an event that is like others before; None until there are such."""
        self.holds = False
        """The reply is whole and its stream's last events are still to come: the app gets the last chunk together with those, so that a
        call to the policy has ended, usage included, also where the app leaves its stream at the finish reason."""
        self._holds_back = not events and encoding is None and not call.keep.everything
        self._feeding = threading.Lock()
        if call.defers:
            call.open.span.whole = self.end_if_whole

    @guard("stream")
    def end_if_whole(self) -> None:
        """Its workflow has returned, on whichever thread: a reply that is there whole is recorded, also where the app keeps its stream."""
        if not self._feeding.acquire(blocking=False):
            return  # it is being read, and ends by itself
        try:
            call, events = self._call, self._events
            if events is None or getattr(events, "is_learned", False) or not events.is_whole(call.expected):
                return
            reply = events.reply()
            if reply.finished and len(reply.choices) >= call.expected:
                call.stream_over(lambda: reply, True, None, exhausted=False)
        finally:
            self._feeding.release()

    def feed(self, chunk: bytes) -> bytes:
        with self._feeding:
            return self._feed(chunk)

    def _feed(self, chunk: bytes) -> bytes:
        call = self._call
        call.first_chunk()
        if not (self._is_events or self._pieces or self._encoding) and call.looks_streamed(chunk):
            self._events, self._is_events, self._holds_back = call.events(), True, False
        events = self._events
        if events is None:
            self._pieces.append(chunk)
            return b"" if self._holds_back else chunk
        seen = events.feed(chunk)
        self.quickly = getattr(events, "quickly", None)
        if events.done:
            call.stream_over(events.reply, True, None, exhausted=False)
            self.holds = False
        elif call.endpoint is not None:
            self.holds = events.is_whole(call.expected)
        if events.done or self.holds:
            self.quickly = None
        return seen

    def flush(self) -> bytes:
        if self._events is not None:
            return self._events.flush()
        seen = b"" if self._is_events else self._call.whole(self._body())
        return seen if self._holds_back else b""

    def end(self, error: BaseException | None, exhausted: bool) -> None:
        events = self._events
        try:
            if events is None and self._is_events:
                events = self._call.events()
                events.feed(self._body())
                events.flush()
            if events is not None:
                self._call.stream_over(events.reply, events.done, error, exhausted=exhausted)
            else:
                self._call.stream_over(Reply, False, error, exhausted=exhausted)
        finally:
            self._call.finish(Reply())

    def _body(self) -> bytes:
        raw = b"".join(self._pieces)
        if self._encoding is None or not raw:
            return raw
        try:
            return cast(bytes, self._response_class(200, headers={"content-encoding": self._encoding}, content=raw).content)
        except Exception:  # noqa: BLE001 - cut off in the middle of a compressed block, or an unknown encoding
            return b""
