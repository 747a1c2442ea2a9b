"""The writer thread: ended spans and episodes in, in order; out come calls' records, what exporters are given, and ``deliver(episode)``.

The app's thread appends a reference. The thread is not woken for each: it takes what there is, then waits for a moment (``_PAUSE``) for
more, unless somebody waits for what it has. Waking it costs the app more than what it does, and what is done in one go costs less. It
watches the settle times meanwhile. The queue has a size: ``put`` says when it is full, a span is then handled by the thread that ended it.
The thread starts with the first item, in an empty context, so that it carries nothing of the app along; where no thread can be started any
more (the interpreter is ending) the caller does the work itself.
"""

from __future__ import annotations

import collections
import contextvars
import heapq
import itertools
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from rllm_trace._guard import guard
from rllm_trace._open import OpenEpisode
from rllm_trace._spans import Span

__all__ = ["Writer"]

Sinks = tuple[Any, ...]
_Settling = tuple[float, int, OpenEpisode]
_STOP: Final = None
_SETTLED: Final = "calls were still open after the settle time"
_PAUSE: Final = 0.05
"""Seconds that what has ended may wait for more."""
_MAX_SPANS: Final = 8_192


class _Line:
    """What one thread takes its work from."""

    def __init__(self) -> None:
        self.items: collections.deque[Any] = collections.deque()
        self.called = threading.Event()
        """There is something."""
        self.hurry = threading.Event()
        """Somebody waits for it."""
        self.busy = False
        """Something that was taken is not done yet."""


class Writer:
    """One queue, one thread."""

    def __init__(self, take: Callable[[Span, Sinks], None], deliver: Callable[[OpenEpisode], None], size: int) -> None:
        self._take = take
        self._deliver = deliver
        self._size = size
        self._lock = threading.RLock()
        self._line = _Line()
        self._thread: threading.Thread | None = None
        self._pending = 0
        self._waiting = 0
        self._idle = threading.Condition()
        self._serial = itertools.count()

    def take(self, span: Span, sinks: Sinks) -> None:
        """Takes an ended span, whose record is to be made and given to ``sinks``."""
        if len(self._line.items) >= _MAX_SPANS or not self._send((span, sinks)):
            self._take(span, sinks)

    def put(self, episode: OpenEpisode, *, now: bool) -> bool:
        """Takes an ended episode; ``now``: somebody waits for it. False: the queue is full, and it was not taken."""
        with self._idle:
            if self._pending >= self._size:
                return False
            self._pending += 1
        if not self._send(episode):
            self._finish(episode)
        elif now:
            self.hurry()
        return True

    def settle(self, episode: OpenEpisode, seconds: float) -> None:
        """Expires the episode after ``seconds``, unless it has ended by then."""
        self._send((time.monotonic() + seconds, next(self._serial), episode))

    def hurry(self) -> None:
        """What was taken so far is wanted at once."""
        self._line.hurry.set()

    def wait_idle(self, timeout: float) -> bool:
        """Blocks until everything taken so far has been delivered. False: the deadline came first."""
        with self._idle:
            self._waiting += 1
            self.hurry()
            try:
                return self._idle.wait_for(self._is_idle, max(0.0, timeout))
            finally:
                self._waiting -= 1

    def _is_idle(self) -> bool:
        return not (self._pending or self._line.busy or self._line.items)

    def stop(self) -> None:
        """Ends the thread once its queue is empty; it comes back when it is needed."""
        with self._lock:
            if self._thread is not None:
                self._send(_STOP)
                self.hurry()
                self._thread, self._line = None, _Line()

    def _send(self, item: Any) -> bool:
        with self._lock:
            line = self._line
            if self._thread is None:
                thread = threading.Thread(target=self._run, args=(line,), name="rllm-trace-writer", daemon=True)
                try:
                    contextvars.Context().run(thread.start)
                except RuntimeError:
                    return False
                self._thread = thread
            line.items.append(item)
            if not line.called.is_set():
                line.called.set()
        return True

    def _run(self, line: _Line) -> None:
        settling: list[_Settling] = []
        had: bool | None = False
        while had is not None:
            if not had:
                line.called.wait(max(0.0, settling[0][0] - time.monotonic()) if settling else None)
            if (had or line.called.is_set()) and not self._waiting:
                line.hurry.wait(_PAUSE)
            had = self._round(line, settling)

    def _round(self, line: _Line, settling: list[_Settling]) -> bool | None:
        """Does what there is to do; gives whether there was anything, None: the thread is to end."""
        line.hurry.clear()
        line.called.clear()
        count = len(line.items)
        line.busy = True
        try:
            for _ in range(count):
                item = line.items.popleft()
                if item is _STOP:
                    return None
                if isinstance(item, OpenEpisode):
                    self._finish(item)
                elif isinstance(item[0], Span):
                    self._take(*item)
                else:
                    heapq.heappush(settling, item)
                item = None  # a waiting writer keeps no episode alive
            while settling and settling[0][0] <= time.monotonic():
                with guard("settle"):
                    heapq.heappop(settling)[-1].expire(_SETTLED, "")
        finally:
            line.busy = False
            with self._idle:
                self._idle.notify_all()
        return count > 0

    def _finish(self, episode: OpenEpisode) -> None:
        with guard("episode"):
            self._deliver(episode)
        with self._idle:
            self._pending -= 1
            self._idle.notify_all()
