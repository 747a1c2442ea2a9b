"""Rows cross to verl's side batch by batch, when they are asked for; what was drawn is used once, and the end is told."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pickle import PicklingError
from typing import Any

import pytest

from rllm_trainer.cluster.events import Mailbox
from rllm_trainer.cluster.rows import RowFeed, Rows, RowsRanOut, packed_rows
from rllm_trainer.exceptions import DatasetError, EngineError
from rllm_trainer.rollout.dataset import StreamedTasks, Task, read_tasks


class Gone:
    """Cannot be found again by its name."""

    def __reduce__(self) -> Any:
        raise PicklingError("it is not where its name says")


class Desk:
    """The mailbox in a loop of its own, and the user's process that answers it: what Ray does, in one process."""

    def __init__(self, feed: RowFeed) -> None:
        self.mailbox = Mailbox()
        self.loop = asyncio.new_event_loop()
        self.asked: list[int] = []
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        threading.Thread(target=self._serve, args=(feed,), daemon=True).start()
        self.rows = self

    def remote(self, *arguments: Any) -> Any:
        return self.mailbox.rows(*arguments)

    def get(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(30)

    def _serve(self, feed: RowFeed) -> None:
        wanted = 0
        while True:
            wanted = asyncio.run_coroutine_threadsafe(self.mailbox.wanted(wanted), self.loop).result()
            self.asked.append(wanted)
            rows, over = feed.draw(wanted)
            self.get(self.mailbox.give(packed_rows(rows), over))


def numbers(count: int, drawn: list[int]) -> Iterator[dict[str, int]]:
    for number in range(count):
        drawn.append(number)
        yield {"n": number}


def feed_of(rows: Iterator[Any], batch: int, said: list[str], stop: threading.Event | None = None) -> RowFeed:
    tasks = read_tasks(rows)
    assert isinstance(tasks, StreamedTasks)
    return RowFeed(tasks.batches(batch), said.append, stop or threading.Event())


def test_rows_are_drawn_batch_by_batch_as_they_are_asked_for() -> None:
    """Of an iterable without end, three batches are drawn where five rows are about to be used."""
    drawn: list[int] = []
    desk = Desk(feed_of(numbers(10**9, drawn), 2, []))
    rows = Rows(desk, desk.get, lambda: None)
    assert drawn == [0, 1]
    assert rows.upto(5) == 5
    assert drawn == [0, 1, 2, 3, 4, 5]
    assert [rows.take(position).row for position in (1, 0, 5)] == [{"n": 1}, {"n": 0}, {"n": 5}]
    assert rows.upto(6) == 6
    assert desk.asked == [5]
    with pytest.raises(EngineError, match="asks for row 5, and the data set has 6 rows"):
        rows.take(5)


def test_the_end_is_told_with_the_rows_that_there_are() -> None:
    """Seven rows in batches of three: six, and one that is left out with a word."""
    said: list[str] = []
    desk = Desk(feed_of(numbers(7, []), 3, said))
    rows = Rows(desk, desk.get, lambda: None)
    assert rows.upto(3) == 3
    assert rows.upto(9) == 6
    assert said == ["got a batch of 1 rows where the first has 3, and verl takes batches of one size: left out"]


def test_rows_of_before_an_interruption_are_passed_over() -> None:
    """A queue that was restored takes its own, and those below are let go."""
    desk = Desk(feed_of(numbers(8, []), 2, []))
    rows = Rows(desk, desk.get, lambda: None)
    assert rows.take(5).row == {"n": 5}
    rows.let_go(below=6)
    assert rows.take(6).row == {"n": 6}
    with pytest.raises(EngineError, match="asks for row 4"):
        rows.take(4)


def test_a_wait_for_rows_ends_with_the_run() -> None:
    """Nobody answers; what ends the run ends the wait."""

    class Silent:
        rows = property(lambda self: self)

        def remote(self, *_: Any) -> Any:
            return [], False

    looks: list[int] = []

    def check() -> None:
        looks.append(1)
        if len(looks) == 3:
            raise RowsRanOut

    with pytest.raises(RowsRanOut):
        Rows(Silent(), lambda found: found, check).upto(1)


def test_a_stop_ends_drawing() -> None:
    """Of an iterable whose batches are never whole, too."""
    stop = threading.Event()

    def repeated() -> Iterator[list[Task]]:
        yield [Task(id="a", row=1), Task(id="b", row=2)]
        stop.set()
        while True:
            yield [Task(id="a", row=1)]

    feed = RowFeed(repeated(), print, stop)
    assert [task.id for task in feed.draw(2)[0]] == ["a", "b"]
    assert feed.draw(4) == ([], False)


def test_a_row_that_cannot_travel_is_refused() -> None:
    """With what to do."""
    with pytest.raises(DatasetError, match=r"a row cannot be carried to the cluster: .*; use plain values in its columns"):
        packed_rows([Task(id="a", row={"lock": threading.Lock()})])
    with pytest.raises(DatasetError, match="use plain values in its columns"):
        packed_rows([Task(id="a", row={"by name": Gone()})])
