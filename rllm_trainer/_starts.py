"""Whoever waits for something to start may stop waiting: what is being started then ends at once.

A start runs in threads of its own; which start a thread works for goes along with the context.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["GivenUp", "Starts", "starting"]


class GivenUp(Exception):
    """Nobody waits for this start any more."""


class Starts:
    """One start, whatever it is made of. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._given_up = False
        self._ends: list[Callable[[], None]] = []

    def give_up(self) -> None:
        """End what is starting now, and refuse what would be started next."""
        with self._lock:
            self._given_up = True
            ends = list(self._ends)
        for end in ends:
            end()

    @contextmanager
    def held(self, end: Callable[[], None]) -> Generator[None]:
        """While this is open, giving up calls ``end``. Raises ``GivenUp`` where that has happened already."""
        with self._lock:
            if self._given_up:
                raise GivenUp
            self._ends.append(end)
        try:
            yield
        finally:
            with self._lock:
                self._ends.remove(end)


starting: ContextVar[Starts | None] = ContextVar("rllm_starting", default=None)
"""The start that this thread works for; None: one that is waited for in any case."""
