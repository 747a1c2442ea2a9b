"""Which workers of a ``multiprocessing.Pool`` died over work that a workflow had given it: the pool never says, its result never comes.

A worker that did not leave by itself, in a pool that still owes a result, took with it what it had recorded and not sent. One that is
killed while nothing is owed, as idle ones are when a pool is terminated, took nothing. Processes are let go as soon as they have ended.
"""

from __future__ import annotations

import importlib
import threading
import weakref
from typing import Any, Final, cast

__all__ = ["newly_dead", "reset", "started", "watch"]

_MAX_POOLS: Final = 1_000
_UNKNOWN: Final = 1_000_000


class _Workers:
    """Of one pool."""

    __slots__ = ("__weakref__", "died", "living")

    def __init__(self) -> None:
        self.living: list[Any] = []
        self.died = 0

    def look(self) -> None:
        """Sorts out those that have ended."""
        codes = [(process, _exit_code(process)) for process in self.living]
        self.died += sum(code not in (None, 0) for _, code in codes)
        self.living = [process for process, code in codes if code is None]


class _Watched:
    """A pool that was given work of a workflow."""

    __slots__ = ("_handler", "_owed", "_queue", "_told", "_workers")

    def __init__(self, pool: Any, workers: _Workers) -> None:
        self._queue = pool._inqueue
        self._handler: threading.Thread = pool._worker_handler
        """Starts new workers in the place of those that have ended, until the pool is over."""
        self._owed: dict[int, Any] = pool._cache
        """Results that have not come."""
        self._workers = workers
        self._told = 0

    @property
    def is_over(self) -> bool:
        return not self._handler.is_alive() and all(_exit_code(process) is not None for process in self._workers.living)

    def newly_dead(self) -> int:
        self._workers.look()
        dead = min(self._workers.died, sum(_parts(result) for result in list(self._owed.values())))
        new, self._told = max(0, dead - self._told), max(dead, self._told)
        return new


class _Pools:
    """Those of this process."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self.lock = threading.RLock()
        self.workers: weakref.WeakKeyDictionary[Any, _Workers] = weakref.WeakKeyDictionary()
        """Of every pool, by the queue that it hands its tasks out by."""
        self.watched: dict[int, _Watched] = {}
        """By the id of that queue, which is held."""


_pools: Final = _Pools()


def started(process: Any) -> None:
    """A process is about to start; looked at if it is a worker of a pool."""
    pool: Any = importlib.import_module("multiprocessing.pool")
    if getattr(process, "_target", None) is not pool.worker:
        return
    queue: Any = process._args[0]
    with _pools.lock:
        workers = _pools.workers.get(queue)
        if workers is None:
            workers = _pools.workers[queue] = _Workers()
        workers.look()
        workers.living.append(process)


def watch(pool: Any) -> None:
    """The pool is given work of a workflow."""
    queue: Any = pool._inqueue
    with _pools.lock:
        if id(queue) in _pools.watched:
            return
        workers = _pools.workers.get(queue)
        if workers is None:  # it was made before anybody asked for processes
            workers = _pools.workers[queue] = _Workers()
        workers.living += [process for process in list(pool._pool) if all(process is not known for known in workers.living)]
        if len(_pools.watched) < _MAX_POOLS:
            _pools.watched[id(queue)] = _Watched(pool, workers)


def newly_dead() -> int:
    """How many have died so since this was last asked."""
    with _pools.lock:
        over = [key for key, watched in _pools.watched.items() if watched.is_over]
        found = sum(watched.newly_dead() for watched in _pools.watched.values())
        for key in over:
            del _pools.watched[key]
        return found


def reset() -> None:
    """In a forked child: the pools are the parent's."""
    _pools.begin()


def _parts(result: Any) -> int:
    """How many workers may be at work for a result."""
    left = getattr(result, "_number_left", None)
    if left is not None:
        return cast("int", left)
    index, length = getattr(result, "_index", None), getattr(result, "_length", None)
    return 1 if index is None else _UNKNOWN if length is None else cast("int", length) - cast("int", index)


def _exit_code(process: Any) -> int | None:
    """None while it runs or has not started."""
    if getattr(process, "_closed", False):
        return 0
    popen = getattr(process, "_popen", None)
    return None if popen is None else cast("int | None", popen.poll())
