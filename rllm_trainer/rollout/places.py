"""How many rollouts run at once, over all batches of a runner: who began first is served first.

A batch asks for a place before it starts an attempt and gives it back when the attempt is over or given up. A batch that was told to
wait is woken when a place is free for it, so nobody polls and no place lies idle.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["Place", "Places"]


class Places:
    """A fixed number of places, shared in order of arrival."""

    def __init__(self, limit: int) -> None:
        self._lock = threading.Lock()
        self._free = limit
        self._queue: list[Place] = []

    def join(self, wake: Callable[[], None]) -> Place:
        """A place in the queue; ``wake`` is called, from any thread, when ``take`` is worth another try."""
        place = Place(self, wake)
        with self._lock:
            self._queue.append(place)
        return place

    def take(self, place: Place) -> bool:
        """Whether one more may start now; if not, the asker is remembered."""
        with self._lock:
            place.wants = True
            if self._free > 0 and self._first() is place:
                self._free -= 1
                return True
            return False

    def give(self, count: int) -> None:
        """Places back."""
        with self._lock:
            self._free += count
            first = self._first() if self._free > 0 else None
        if first is not None:
            first.wake()

    def enough(self, place: Place) -> None:
        """The batch has nothing more to start for now; those behind it may."""
        with self._lock:
            if not place.wants:
                return
            place.wants = False
        self.give(0)

    def leave(self, place: Place, held: int) -> None:
        """The batch is over."""
        with self._lock:
            self._queue.remove(place)
        self.give(held)

    def _first(self) -> Place | None:
        return next((place for place in self._queue if place.wants), None)


class Place:
    """One batch's place in the queue, and how many attempts it has running."""

    def __init__(self, places: Places, wake: Callable[[], None]) -> None:
        self.wake = wake
        self.wants = False
        self._places = places
        self._held = 0

    def take(self) -> bool:
        """Start one more?"""
        taken = self._places.take(self)
        self._held += taken
        return taken

    def enough(self) -> None:
        """Nothing more to start for now."""
        self._places.enough(self)

    def give(self) -> None:
        """One is over."""
        self._held -= 1
        self._places.give(1)

    def leave(self) -> None:
        """All are over."""
        self._places.leave(self, self._held)
        self._held = 0
