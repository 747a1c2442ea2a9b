"""A run's batches on the user's side in, the same tasks by position on verl's side out: drawn when a step needs them, and not before.

An iterable stays in the process that it was made in, which draws from it while it waits. verl's side says how many rows it is about to
use; it gets whole batches, or word that there are no others. Positions count from the first row of the data set, so what verl's queue has
kept from before an interruption finds its rows again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pickle import PicklingError
from typing import Any

from rllm_trainer.cluster.loading import ray_api
from rllm_trainer.exceptions import DatasetError, EngineError
from rllm_trainer.rollout.dataset import Task

__all__ = ["RowFeed", "Rows", "RowsRanOut"]

_LOOK = 1.0
"""Seconds after which a wait for rows looks whether the run was stopped."""


class RowsRanOut(Exception):
    """There are no rows for another step."""


class RowFeed:
    """The user's side: draws."""

    def __init__(self, batches: Iterator[list[Task]], say: Callable[[str], None], stop: threading.Event) -> None:
        """``batches``: from the run's first on. Raises ``DatasetError`` where there is none."""
        first = next(batches, None)
        if first is None:
            raise DatasetError("there is no row to train on; expected at least one")
        self.size = len(first)
        """Rows of every batch."""
        self._first: list[Task] | None = first
        self._batches = batches
        self._say = say
        self._stop = stop
        self._drawn = 0
        self._said = False

    def draw(self, wanted: int) -> tuple[list[Task], bool]:
        """The rows that are missing to so many in all, and whether there are no others. Raises what the user's iterable raises."""
        found: list[Task] = []
        while self._drawn < wanted and not self._stop.is_set():
            batch = self._next()
            if batch is None:
                return found, not self._stop.is_set()
            found += batch
            self._drawn += len(batch)
        return found, False

    def _next(self) -> list[Task] | None:
        if self._first is not None:
            first, self._first = self._first, None
            return first
        while not self._stop.is_set():
            batch = next(self._batches, None)
            if batch is None or len(batch) == self.size:
                return batch
            if not self._said:
                self._said = True
                self._say(f"got a batch of {len(batch)} rows where the first has {self.size}, and verl takes batches of one size: left out")
        return None


def packed_rows(tasks: Sequence[Task]) -> bytes:
    """As they travel. Raises ``DatasetError`` where a row cannot."""
    try:
        return bytes(ray_api().cloudpickle.dumps(list(tasks)))
    except (TypeError, ValueError, AttributeError, RecursionError, PicklingError) as error:
        raise DatasetError(f"dataset: a row cannot be carried to the cluster: {error}; use plain values in its columns") from error


class Rows:
    """verl's side: asks, and keeps what it got until it is used."""

    def __init__(self, mailbox: Any, get: Callable[[Any], Any], check: Callable[[], None]) -> None:
        """``check`` raises what ends the run while rows are waited for."""
        self._mailbox = mailbox
        self._get = get
        self._check = check
        self._tasks: dict[int, Task] = {}
        self._known = 0
        self._over = False

    def upto(self, count: int) -> int:
        """How many of the data set's first ``count`` rows there are; waits until that is known."""
        while self._known < count and not self._over:
            self._check()
            packs, self._over = self._get(self._mailbox.rows.remote(count, _LOOK))
            for pack in packs:
                tasks: list[Task] = ray_api().cloudpickle.loads(pack)
                self._tasks |= dict(enumerate(tasks, start=self._known))
                self._known += len(tasks)
        return min(count, self._known)

    def take(self, position: int) -> Task:
        """The row at a position; it is not kept any longer."""
        self.upto(position + 1)
        found = self._tasks.pop(position, None)
        if found is None:
            raise EngineError(f"verl's queue asks for row {position}, and the data set has {self._known} rows: it is not the run's")
        return found

    def let_go(self, below: int) -> None:
        """Rows before this position are done with."""
        for position in [one for one in self._tasks if one < below]:
            del self._tasks[position]
