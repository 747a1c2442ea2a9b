"""A step in, its groups out: run live, or read back from what a run recorded. The loop cannot tell the two apart.

Live, the order of the tasks, the seeds of the rollouts and their places in the groups follow from the run's seed and the step. What
an interrupted run had already collected for a step is used again where the same weights are served.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol

import msgspec

from rllm_trace.routing import Route
from rllm_trace.types import Episode
from rllm_trainer.report import Report
from rllm_trainer.rollout.attempt import Conditions, Job, Outcome
from rllm_trainer.rollout.dataset import Task
from rllm_trainer.rollout.record import RolloutLog, Split, groups_of
from rllm_trainer.rollout.runner import Listener, Runner
from rllm_trainer.rollout.signal import split_by_signal
from rllm_trainer.state import Cursor
from rllm_trainer.types import Group, Rollout

__all__ = ["Collected", "LiveSource", "OnFile", "RecordedSource", "Source", "rollout_seed", "run_jobs"]


class Collected(msgspec.Struct, frozen=True, kw_only=True):
    """The rollouts of one step."""

    groups: list[Group]
    seconds: float
    notes: list[str] = []
    """For the report: retries, further episodes, what was taken over from an interrupted run."""

    @property
    def rollouts(self) -> list[Rollout]:
        return [rollout for group in self.groups for rollout in group.rollouts]


class Source(Protocol):
    """Where a step's groups come from."""

    def collect(self, step: int, version: int) -> Collected | None:
        """The groups of one step under the weights being served; None: there is no more."""
        ...

    def cursor(self) -> Cursor | None:
        """What a checkpoint needs to go on from here; None: the number of steps done says it."""
        ...


class LiveSource:
    """Runs the app."""

    def __init__(
        self,
        batches: Iterator[list[Task]],
        runner: Runner,
        route: Route,
        *,
        group_size: int,
        seed: int,
        log: RolloutLog,
        report: Report,
        stop: threading.Event,
        begun: Mapping[int, Sequence[Rollout]] | None = None,
        refill: int = 0,
        spare: Callable[[int], Iterator[Task]] | None = None,
        faults: Mapping[Any, str] | None = None,
        greedy: bool = False,
    ) -> None:
        """
        Args:
            begun: step -> rollouts that an interrupted run had collected for it.
            refill: rounds of further tasks in place of groups without signal.
            spare: step -> tasks for that, in the order in which they are drawn.
            faults: overrides of which failures are trained.
            greedy: one more rollout of each task at temperature 0, beside its group.
        """
        self._batches = batches
        self._runner = runner
        self._route = route
        self._group_size = group_size
        self._seed = seed
        self._log = log
        self._report = report
        self._stop = stop
        self._begun = dict(begun or {})
        self._refill = refill
        self._spare = spare
        self._faults = faults
        self._greedy = greedy

    def collect(self, step: int, version: int) -> Collected | None:
        tasks = next(self._batches, None)
        if tasks is None:
            return None
        kept = {(r.task_id, r.index): r for r in self._begun.pop(step, ()) if r.policy_version == version}
        notes: list[str] = []
        rollouts, seconds = self._run(tasks, step, version, kept, notes)
        spare = self._spare(step) if self._spare is not None else iter(())
        drawn = {task.id for task in tasks}
        for _ in range(self._refill):
            flat = split_by_signal(groups_of(rollouts), self._faults)[1]
            missing = len(tasks) + len(flat) - len(drawn)
            further = list(islice((task for task in spare if task.id not in drawn), missing))
            if not further:
                break
            drawn |= {task.id for task in further}
            made, spent = self._run(further, step, version, kept, notes)
            rollouts, seconds = [*rollouts, *made], seconds + spent
        groups = groups_of(rollouts)
        if self._refill:
            flat = split_by_signal(groups, self._faults)[1]
            notes.append(f"groups without signal, left out: {len(flat)} of {len(groups)}; further rows drawn: {len(drawn) - len(tasks)}")
        if self._greedy:
            groups, spent = self._with_greedy(groups, step, version, notes)
            seconds += spent
        return Collected(groups=groups, seconds=seconds, notes=notes)

    def _with_greedy(self, groups: Sequence[Group], step: int, version: int, notes: list[str]) -> tuple[list[Group], float]:
        """Each group with one more rollout of its row, whose calls are no call sites of training."""
        route = msgspec.structs.replace(self._route, sampling=self._route.sampling | {"temperature": 0}, sites=None)
        jobs = [Job(task_id=g.task_id, index=0, row=g.rollouts[0].row, seed=rollout_seed(self._seed, g.task_id, -1, step)) for g in groups]
        rollouts, seconds = self._rollouts(jobs, route, step, version, "greedy", notes)
        return [msgspec.structs.replace(group, greedy=one) for group, one in zip(groups, rollouts, strict=True)], seconds

    def _run(
        self, tasks: Sequence[Task], step: int, version: int, kept: Mapping[tuple[str, int], Rollout], notes: list[str]
    ) -> tuple[list[Rollout], float]:
        """The rollouts of these tasks, those that are kept not made again."""
        jobs = [
            Job(task_id=task.id, index=index, row=task.row, seed=rollout_seed(self._seed, task.id, index, step))
            for task in tasks
            for index in range(self._group_size)
            if (task.id, index) not in kept
        ]
        ids = {task.id for task in tasks}
        taken = [rollout for rollout in kept.values() if rollout.task_id in ids]
        if taken:
            notes.append(f"{len(taken)} rollouts were taken over from before the interruption")
        rollouts, seconds = self._rollouts(jobs, self._route, step, version, "train", notes)
        return [*taken, *rollouts], seconds

    def _rollouts(
        self, jobs: Sequence[Job], route: Route, step: int, version: int, split: Split, notes: list[str]
    ) -> tuple[list[Rollout], float]:
        return run_jobs(
            self._runner,
            jobs,
            Conditions(route=route, version=version, metadata={"step": step, "split": split}),
            step=step,
            split=split,
            log=self._log,
            report=self._report,
            stop=self._stop,
            notes=notes.append,
        )

    def cursor(self) -> Cursor | None:
        return None

    def close(self) -> None:
        """Nothing runs between steps."""


class RecordedSource:
    """Reads the groups of each step from what a run recorded."""

    def __init__(self, rollouts: Mapping[int, Sequence[Rollout]]) -> None:
        self._rollouts = rollouts

    def collect(self, step: int, version: int) -> Collected | None:
        found = self._rollouts.get(step)
        return Collected(groups=groups_of(found), seconds=0.0) if found else None

    def cursor(self) -> Cursor | None:
        return None


def rollout_seed(seed: int, task_id: str, index: int, step: int) -> int:
    """The seed of one rollout: 62 bits that depend on all four and on nothing else."""
    digest = hashlib.sha256(f"{seed}:{task_id}:{index}:{step}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 2


def run_jobs(
    runner: Runner,
    jobs: Sequence[Job],
    conditions: Conditions,
    *,
    step: int,
    split: Split,
    log: RolloutLog | None,
    report: Report,
    stop: threading.Event,
    notes: Callable[[str], None],
) -> tuple[list[Rollout], float]:
    """Run jobs, put every rollout on file as it ends, and say what was tried again. Gives the rollouts and the seconds."""
    started = time.monotonic()
    with report.batch(f"{split} {step}", len(jobs)) as advance:
        listener = OnFile(log, report, advance, step=step, split=split)
        rollouts = runner.run(jobs, conditions, listener=listener, stop=stop)
    for sentence in listener.notes():
        notes(sentence)
    return rollouts, time.monotonic() - started


class OnFile(Listener):
    """Writes what the runner tells, and counts what is worth a note."""

    def __init__(self, log: RolloutLog | None, report: Report, advance: Callable[[Rollout], None], *, step: int, split: Split) -> None:
        self._log = log
        self._report = report
        self._advance = advance
        self._step = step
        self._split: Split = split
        self._retried = 0
        self._extras = 0

    def ended(self, rollout: Rollout, extra: Sequence[Episode]) -> None:
        self._advance(rollout)
        self._extras += len(extra)
        if self._log is not None:
            self._log.write(rollout, step=self._step, split=self._split)
            self._log.extra(rollout, extra, step=self._step, split=self._split)

    def retried(self, job: Job, outcome: Outcome) -> None:
        self._retried += 1
        if self._log is not None:
            rollout = Rollout(
                task_id=job.task_id,
                index=job.index,
                row=job.row,
                episode=outcome.episode,
                reward=None,
                rewards={},
                fault=outcome.verdict.fault,
                reason=outcome.verdict.reason,
                seconds=outcome.seconds,
            )
            self._log.write(rollout, step=self._step, split=self._split, kind="retried")

    def hung(self, job: Job, reason: str, stack: str) -> None:
        self._report.hung(job, reason, stack)

    def notes(self) -> list[str]:
        found: list[str] = []
        if self._retried:
            found.append(f"rollouts tried again after an infrastructure fault: {self._retried}")
        if self._extras:
            found.append(f"further episodes that the app started on its own, recorded and not trained: {self._extras}")
        return found
