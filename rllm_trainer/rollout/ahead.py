"""A step in, its groups out, while rollouts for later steps go on: bounded staleness.

At most ``staleness + 1`` batches of groups are open at once, and new ones are begun only between a swap and the next step. A step takes
the groups that have ended, oldest first, and must take every group that would otherwise be trained more than ``staleness`` updates
after the weights it began under; for such a one it waits. So a run is paced, never thrown away: no group that ended is discarded.

With ``S`` the staleness, ``B`` the groups of a step and ``v`` the version: before a step there are at most ``(S + 1) B`` open groups, of
which at most ``B`` began under ``v - S`` or earlier, since each step before took ``B``, oldest first. So a step never has to take more.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rllm_trace.routing import Route
from rllm_trainer.report import Report
from rllm_trainer.rollout.attempt import Conditions, Job
from rllm_trainer.rollout.dataset import Task
from rllm_trainer.rollout.record import RolloutLog
from rllm_trainer.rollout.runner import RunInterrupted, Runner
from rllm_trainer.rollout.source import Collected, OnFile, rollout_seed
from rllm_trainer.state import Cursor, State
from rllm_trainer.types import Group, Rollout

__all__ = ["AheadSource", "unfinished"]

_POLL = 0.2
_ENDS_WITHIN = 10.0
"""Seconds that given-up groups have to end in when the run does."""


class _Open:
    """A group that was begun and not yet taken."""

    def __init__(self, batch: int, task: Task, version: int) -> None:
        self.batch = batch
        self.task = task
        self.version = version
        """Served when it began: none of its tokens is older."""
        self.rollouts: list[Rollout] | None = None
        """None: it still runs."""
        self.notes: list[str] = []
        self.failed: BaseException | None = None
        self.thread: threading.Thread | None = None


class AheadSource:
    """Runs the app ahead of the updates. ``close`` gives up what still runs."""

    def __init__(
        self,
        batches: Iterator[list[Task]],
        runner: Runner,
        route: Route,
        *,
        staleness: int,
        batch_tasks: int,
        group_size: int,
        seed: int,
        log: RolloutLog,
        report: Report,
        stop: threading.Event,
        state: State,
        begun: Mapping[int, Sequence[Rollout]] | None = None,
    ) -> None:
        """
        Args:
            batches: from the first on that the state says is not done.
            state: where the run is; the groups that an interruption left open are begun first.
            begun: batch -> rollouts that an interrupted run had on file for groups that it had not taken.
        """
        self._runner = runner
        self._route = route
        self._staleness = staleness
        self._batch_tasks = batch_tasks
        self._group_size = group_size
        self._seed = seed
        self._log = log
        self._report = report
        self._stop = stop
        self._begun = dict(begun or {})
        self._batches = _numbered(batches, state)
        self._drawn = state.step if state.cursor is None else state.cursor.drawn
        self._waiting: deque[tuple[int, Task]] = deque()
        """Drawn and not begun, for want of room or because the same task is open: equal rows are never open twice."""
        self._open: list[_Open] = []
        """In the order in which they began."""
        self._ended: queue.SimpleQueue[_Open] = queue.SimpleQueue()
        self._halt = threading.Event()
        self._version = self._resumed = state.version

    def collect(self, step: int, version: int) -> Collected | None:
        """The groups of one step.

        Raises:
            RunInterrupted: the stop event was set.
        """
        started = time.monotonic()
        self._version = version
        self._begin_more()
        if not self._open:
            return None
        wanted = min(self._batch_tasks, len(self._open))
        due = [group for group in self._open if group.version <= version - self._staleness]
        with self._report.batch(f"train {step}", wanted) as advance:
            self._wait(wanted, due, advance)
        ended = [group for group in self._open if group.rollouts is not None]
        taken = (due + [group for group in ended if group not in due])[: max(wanted, len(due))]
        self._open = [group for group in self._open if group not in taken]
        notes = [note for group in taken for note in group.notes]
        if self._open:
            done = sum(group.rollouts is not None for group in self._open)
            notes.append(f"groups begun for later steps: {len(self._open)}, of which {done} have ended")
        groups = [Group(task_id=g.task.id, rollouts=g.rollouts or []) for g in sorted(taken, key=lambda group: group.task.id)]
        return Collected(groups=groups, seconds=time.monotonic() - started, notes=notes)

    def cursor(self) -> Cursor:
        """Where the rows are, and which groups were begun and not taken."""
        waiting = [(group.batch, group.task.id) for group in self._open] + [(batch, task.id) for batch, task in self._waiting]
        return Cursor(drawn=self._drawn, open=waiting)

    def close(self) -> None:
        """Give up what still runs, and wait until it has ended."""
        self._halt.set()
        ends_at = time.monotonic() + _ENDS_WITHIN
        for group in self._open:
            if group.thread is not None:
                group.thread.join(max(0.0, ends_at - time.monotonic()))

    def _begin_more(self) -> None:
        """Fill up to the bound."""
        while len(self._open) < (self._staleness + 1) * self._batch_tasks:
            found = self._next()
            if found is None:
                return
            self._begin(*found)

    def _next(self) -> tuple[int, Task] | None:
        open_ids = {group.task.id for group in self._open}
        while True:
            for place, (_, task) in enumerate(self._waiting):
                if task.id not in open_ids:
                    found = self._waiting[place]
                    del self._waiting[place]
                    return found
            batch = next(self._batches, None) if len(self._waiting) < self._batch_tasks else None
            if batch is None:
                return None
            self._drawn = max(self._drawn, batch[0])
            self._waiting.extend((batch[0], task) for task in batch[1])

    def _begin(self, batch: int, task: Task) -> None:
        group = _Open(batch, task, self._version)
        kept = {r.index: r for r in self._begun.get(batch, ()) if r.task_id == task.id and self._usable(r)}
        if kept:
            group.notes.append(f"{len(kept)} rollouts of task {task.id} were taken over from before the interruption")
            group.version = min(group.version, *(r.policy_version for r in kept.values()))
        self._open.append(group)
        if len(kept) == self._group_size:
            group.rollouts = [kept[index] for index in sorted(kept)]
            return
        name = f"rllm-group-{batch}-{task.id}"
        group.thread = threading.Thread(target=self._run, args=(group, kept), name=name, daemon=True)
        group.thread.start()

    def _usable(self, rollout: Rollout) -> bool:
        """Whether an interrupted run's rollout may still be trained: not too old, and not of weights that were lost with it."""
        versions = [rollout.policy_version]
        if rollout.episode is not None:
            versions += [call.policy_version_end for call in rollout.episode.calls if call.policy_version_end is not None]
        return rollout.policy_version >= self._version - self._staleness and max(versions) <= self._resumed

    def _run(self, group: _Open, kept: Mapping[int, Rollout]) -> None:
        jobs = [
            Job(task_id=group.task.id, index=i, row=group.task.row, seed=rollout_seed(self._seed, group.task.id, i, group.batch))
            for i in range(self._group_size)
            if i not in kept
        ]
        metadata: dict[str, Any] = {"step": group.batch, "split": "train"}
        conditions = Conditions(route=self._route, version=lambda: self._version, metadata=metadata)
        listener = OnFile(self._log, self._report, lambda _: None, step=group.batch, split="train")
        try:
            made = self._runner.run(jobs, conditions, listener=listener, stop=self._halt)
            group.notes += listener.notes()
            group.rollouts = sorted([*kept.values(), *made], key=lambda rollout: rollout.index)
        except BaseException as error:  # noqa: BLE001 - raised by the next collect, in the run's own thread
            group.failed = error
        self._ended.put(group)

    def _wait(self, wanted: int, due: Sequence[_Open], advance: Any) -> None:
        while sum(g.rollouts is not None for g in self._open) < wanted or any(g.rollouts is None for g in due):
            if self._stop.is_set():
                self.close()
                raise RunInterrupted
            try:
                group = self._ended.get(timeout=_POLL)
            except queue.Empty:
                continue
            if group.failed is not None:
                raise group.failed
            advance(group.rollouts[0] if group.rollouts else None)


def unfinished(cursor: Cursor | None, step: int) -> int:
    """The number of the first batch that still has a group to be trained, counted from 1."""
    if cursor is None:
        return step + 1
    return min([cursor.drawn + 1, *(batch for batch, _ in cursor.open)])


def _numbered(batches: Iterable[list[Task]], state: State) -> Iterator[tuple[int, list[Task]]]:
    """Batches with their numbers; of those that were drawn before, the tasks that were still open."""
    cursor = state.cursor
    wanted: set[tuple[int, str]] = set() if cursor is None else set(cursor.open)
    for number, batch in enumerate(batches, start=unfinished(cursor, state.step)):
        yield number, [task for task in batch if cursor is None or number > cursor.drawn or (number, task.id) in wanted]
