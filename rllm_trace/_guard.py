"""Keeps our own faults away from the app: what goes wrong in here is counted and logged once, never raised.

One ``guard(kind)`` around each entry of ours into the app's control flow. An exception of the app itself is never inside a
guard; a ``BaseException`` (cancellation, interrupt) always passes. The counters are what ``stats()`` shows.
"""

from __future__ import annotations

import functools
import logging
import threading
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Final, Literal, ParamSpec, TypeVar

from rllm_trace.exceptions import RllmWarning

__all__ = ["OUTCOMES", "Counters", "Outcome", "counters", "guard", "warn_once"]

P = ParamSpec("P")
R = TypeVar("R")

Outcome = Literal["recorded", "exported", "dropped", "failed", "late", "orphan", "faults"]

OUTCOMES: Final[tuple[Outcome, ...]] = ("recorded", "exported", "dropped", "failed", "late", "orphan", "faults")

_log = logging.getLogger("rllm_trace")


class Counters:
    """Counts by outcome and kind, from any thread. The lock is re-entrant: a garbage collection may count inside a count."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._counts: dict[Outcome, dict[str, int]] = {outcome: {} for outcome in OUTCOMES}
        self._told: set[str] = set()

    def add(self, outcome: Outcome, kind: str, n: int = 1) -> None:
        """Counts ``n`` more of ``kind``."""
        if not n:
            return
        with self._lock:
            kinds = self._counts[outcome]
            kinds[kind] = kinds.get(kind, 0) + n

    def get(self, outcome: Outcome, kind: str) -> int:
        """How many of ``kind`` so far."""
        with self._lock:
            return self._counts[outcome].get(kind, 0)

    def snapshot(self) -> dict[Outcome, dict[str, int]]:
        """A copy; every outcome is there, also where nothing was counted."""
        with self._lock:
            return {outcome: dict(kinds) for outcome, kinds in self._counts.items()}

    def first(self, key: str) -> bool:
        """True the first time that ``key`` is asked for."""
        with self._lock:
            if key in self._told:
                return False
            self._told.add(key)
            return True

    def clear(self) -> None:
        """Forgets everything; a forked child starts from zero."""
        self._lock = threading.RLock()
        self._counts = {outcome: {} for outcome in OUTCOMES}
        self._told = set()


counters: Final = Counters()


class guard:
    """Context manager and decorator: swallows and counts an ``Exception`` under ``kind``. A guarded function then returns None."""

    __slots__ = ("_kind",)

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        if not isinstance(error, Exception):
            return False
        self.count(self._kind, error)
        return True

    def __call__(self, function: Callable[P, R]) -> Callable[P, R | None]:
        @functools.wraps(function)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> R | None:
            try:
                return function(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - the one place where our faults end
                self.count(self._kind, error)
                return None

        return guarded

    @staticmethod
    def count(kind: str, error: Exception) -> None:
        """Counts a fault that an ``except`` of its own has kept from the app."""
        counters.add("faults", kind)
        if counters.first(f"fault:{kind}"):
            _log.warning("a fault of rllm_trace in %r was kept from the app; more are only counted", kind, exc_info=error)


def warn_once(key: str, message: str, *, stacklevel: int = 3) -> None:
    """Warns the first time that ``key`` comes up. Where warnings are errors it is logged instead: tracing never breaks the app."""
    if not counters.first(f"warning:{key}"):
        return
    try:
        warnings.warn(message, RllmWarning, stacklevel=stacklevel)
    except RllmWarning:
        _log.warning("%s", message)
