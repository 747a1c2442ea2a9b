"""One thing that an app did, as a span: made when it starts, complete when it ends, turned into OpenTelemetry's form only to leave.

A span here is a plain record, twenty times cheaper than one of the OpenTelemetry SDK and out of reach of its samplers, limits,
environment variables and of ``random.seed``: ids come from the system's generator, nothing is ever sampled or cut. ``_otel`` makes
the SDK's ``ReadableSpan`` of it on the exporting thread.
"""

from __future__ import annotations

import collections
import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Generator
from typing import Any, Final, Literal

import msgspec

from rllm_trace._calldata import CallData
from rllm_trace.types import ErrorInfo

__all__ = ["Sources", "Span", "SpanKind", "begin_making", "error_info", "made", "sources", "use_sources"]

SpanKind = Literal["workflow", "agent", "tool", "reward", "chat", "other"]

_MAX_MESSAGE: Final = 2_000
_SECRET: Final = re.compile(r"\b[spr]k-[\w*-]{8,}|(?i:bearer)\s+[\w.~+/=-]{8,}")
"""What an error message may quote of the request that it is about: a key of a provider, an authorization header."""


class _Ids:
    """Random ids, drawn from the system many at once: each draw lets go of the interpreter lock, which costs more than the id."""

    _BATCH: Final = 256

    def __init__(self) -> None:
        self._ready: collections.deque[str] = collections.deque()
        self._watching = False

    def span_id(self) -> str:
        """16 hex digits."""
        try:
            return self._ready.popleft()
        except IndexError:
            return self._draw()

    def trace_id(self) -> str:
        """32 hex digits."""
        return self.span_id() + self.span_id()

    def _draw(self) -> str:
        if not self._watching and hasattr(os, "register_at_fork"):
            self._watching = True
            os.register_at_fork(after_in_child=self._ready.clear)
        drawn = os.urandom(8 * (self._BATCH + 1)).hex()
        self._ready.extend(drawn[start : start + 16] for start in range(16, len(drawn), 16))
        return drawn[:16]


_ids: Final = _Ids()


class Sources:
    """Where times and ids come from; ``use_sources`` replaces them for a test."""

    __slots__ = ("now", "span_id", "trace_id")

    def __init__(self) -> None:
        self.now: Callable[[], int] = time.time_ns
        """Unix time, nanoseconds."""
        self.span_id: Callable[[], str] = _ids.span_id
        """16 hex digits."""
        self.trace_id: Callable[[], str] = _ids.trace_id
        """32 hex digits."""


sources: Final = Sources()


@contextlib.contextmanager
def use_sources(
    *, now: Callable[[], int] | None = None, span_id: Callable[[], str] | None = None, trace_id: Callable[[], str] | None = None
) -> Generator[None]:
    """A fixed clock or fixed ids while it is open, process-wide."""
    before = (sources.now, sources.span_id, sources.trace_id)
    sources.now, sources.span_id, sources.trace_id = now or sources.now, span_id or sources.span_id, trace_id or sources.trace_id
    try:
        yield
    finally:
        sources.now, sources.span_id, sources.trace_id = before


class Span(msgspec.Struct, kw_only=True):
    """A started or ended span. Mutable until it has ended, then left alone."""

    kind: SpanKind
    name: str
    """Name of the workflow, agent, tool or reward; the requested model of a call; the whole span name of another span."""
    trace_id: str
    span_id: str
    parent_id: str | None
    episode_id: str
    trajectory_id: str
    """The trajectory that it belongs to; for an agent its own span id."""
    trajectory_name: str
    started: int
    """Unix time, nanoseconds."""
    ended: int = 0
    """Unix time, nanoseconds; 0 while it is open."""
    no_train: bool = False
    in_reward: bool = False
    late: bool = False
    error: ErrorInfo | None = None
    call: CallData | None = None
    """What the client knows of a call; None for other kinds, and for a call that has not ended."""
    pending: Callable[[], CallData] | None = None
    """Makes ``call`` of what was received; ``made`` sees to it, beside the app. None: there is nothing to make."""
    whole: Callable[[], None] | None = None
    """Of an open call whose stream the app reads: ends it if the reply has been received whole, though the stream is kept open."""
    number: int = 0
    """Of a call: its number in its trajectory, from 0."""
    facts: dict[str, Any] = {}
    """What its kind has to say beyond that, as Python values under attribute keys."""
    links: tuple[tuple[str, str], ...] = ()
    """(trace id, span id) of the user's own span that was current at the start."""

    def copy(self) -> Span:
        """A copy that later changes of an open span do not reach."""
        return msgspec.structs.replace(self, facts=dict(self.facts))


class _Making:
    """Who makes a call's record; anew in a forked child, where the thread that held it is not."""

    lock = threading.RLock()

    @classmethod
    def begin(cls) -> None:
        cls.lock = threading.RLock()


begin_making: Final = _Making.begin


def made(span: Span) -> Span:
    """The span, its ``call`` made if it was still to be made; by any thread, as often as wanted."""
    if span.pending is not None:
        with _Making.lock:
            make = span.pending
            if make is not None:
                span.call = make()
                span.pending = None
    return span


def error_info(error: BaseException) -> ErrorInfo:
    """The exception as a record: qualified name, message cut to 2,000 characters, HTTP status where it has one."""
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    try:
        message = str(error)
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001 - a user's __str__, which only we call, may raise anything
        message = "<its message cannot be read>"
    status = getattr(error, "status_code", None)
    return ErrorInfo(
        type=name, message=_SECRET.sub("[withheld]", message[:_MAX_MESSAGE]), status_code=status if isinstance(status, int) else None
    )
