"""The writer thread: ended episodes in, ``deliver(episode)`` called for each, in order; watches the settle times meanwhile.

The queue has a size: ``put`` says when it is full. The thread starts with the first episode, in an empty context, so that it carries
nothing of the app along; where no thread can be started any more (the interpreter is ending) the caller does the work itself.
"""

from __future__ import annotations

import contextvars
import heapq
import itertools
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from rllm_trace._guard import guard
from rllm_trace._open import OpenEpisode

__all__ = ["Writer"]

_STOP: Final = None
_SETTLED: Final = "calls were still open after the settle time"


class Writer:
    """One queue, one thread."""

    def __init__(self, deliver: Callable[[OpenEpisode], None], size: int) -> None:
        self._deliver = deliver
        self._size = size
        self._lock = threading.RLock()
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._pending = 0
        self._idle = threading.Condition()
        self._serial = itertools.count()

    def put(self, episode: OpenEpisode) -> bool:
        """Takes an ended episode. False: the queue is full, and it was not taken."""
        with self._idle:
            if self._pending >= self._size:
                return False
            self._pending += 1
        if not self._send(episode):
            self._finish(episode)
        return True

    def settle(self, episode: OpenEpisode, seconds: float) -> None:
        """Expires the episode after ``seconds``, unless it has ended by then."""
        self._send((time.monotonic() + seconds, next(self._serial), episode))

    def wait_idle(self, timeout: float) -> bool:
        """Blocks until everything taken so far has been delivered. False: the deadline came first."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._pending, max(0.0, timeout))

    def stop(self) -> None:
        """Ends the thread once its queue is empty; it comes back when it is needed."""
        with self._lock:
            if self._thread is not None:
                self._queue.put(_STOP)
                self._thread, self._queue = None, queue.SimpleQueue()

    def _send(self, item: Any) -> bool:
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run, args=(self._queue,), name="rllm-trace-writer", daemon=True)
                try:
                    contextvars.Context().run(thread.start)
                except RuntimeError:
                    return False
                self._thread = thread
            self._queue.put(item)
        return True

    def _run(self, items: queue.SimpleQueue[Any]) -> None:
        settling: list[tuple[float, int, OpenEpisode]] = []
        while True:
            try:
                item = items.get(timeout=max(0.0, settling[0][0] - time.monotonic()) if settling else None)
            except queue.Empty:
                with guard("settle"):
                    heapq.heappop(settling)[-1].expire(_SETTLED, "")
                continue
            if item is _STOP:
                return
            if isinstance(item, OpenEpisode):
                self._finish(item)
            else:
                heapq.heappush(settling, item)
            item = None  # a waiting writer keeps no episode alive

    def _finish(self, episode: OpenEpisode) -> None:
        with guard("episode"):
            self._deliver(episode)
        with self._idle:
            self._pending -= 1
            self._idle.notify_all()
