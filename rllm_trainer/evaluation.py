"""Fixed rows in, their scores out: sampled as the app samples, and greedy; a rollout that failed counts 0.

Seeds follow from the run's seed and the row alone, so that before and after are paired. Nothing in here is trained: its rollouts
are on file under a split of their own.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

import msgspec

from rllm_trace.routing import Route
from rllm_trainer.intervals import Interval, mean_interval, rise_interval
from rllm_trainer.report import Report
from rllm_trainer.rollout.attempt import Conditions, Job
from rllm_trainer.rollout.dataset import Task
from rllm_trainer.rollout.record import RolloutLog, Split
from rllm_trainer.rollout.runner import Runner
from rllm_trainer.rollout.source import rollout_seed, run_jobs
from rllm_trainer.types import Rollout

__all__ = ["Evaluation", "Evaluator", "Rise", "Scores", "rise_of", "scores_of"]

_STEP_OF_SEEDS = -1
"""Stands in for the step in the seeds of evaluation rollouts: they are the same at every evaluation."""


class Scores(msgspec.Struct, frozen=True, kw_only=True):
    """One way of sampling over all rows."""

    mean: float
    low: float
    high: float
    """``low`` and ``high``: 95 % interval of the mean, by bootstrap over tasks."""
    tasks: dict[str, float]
    """Task id -> mean over its rollouts; a failed one counts 0."""
    rollouts: int
    failures: dict[str, int]
    """Whose fault -> rollouts."""
    seconds: float

    @property
    def interval(self) -> Interval:
        return Interval(mean=self.mean, low=self.low, high=self.high)


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """One evaluation."""

    step: int
    """Training steps done before it."""
    version: int
    """Version of the weights; 0 also where the app's own endpoints were used."""
    sampled: Scores
    greedy: Scores | None = None
    """At temperature 0, one rollout a row; None where it was not asked for, or calls were not redirected."""


class Rise(msgspec.Struct, frozen=True, kw_only=True):
    """After minus before, paired by task."""

    sampled: Interval
    greedy: Interval | None = None


class Evaluator:
    """The fixed rows, and how they are run."""

    def __init__(
        self,
        tasks: Sequence[Task],
        runner: Runner,
        route: Route | None,
        *,
        n: int,
        seed: int,
        log: RolloutLog | None,
        report: Report,
        stop: threading.Event,
    ) -> None:
        self.tasks = tasks
        self._runner = runner
        self._route = route
        self._n = n
        self._seed = seed
        self._log = log
        self._report = report
        self._stop = stop

    def run(self, *, step: int, version: int, greedy: bool) -> Evaluation:
        """Score every row under the weights being served. Raises ``RunInterrupted`` where the run is stopped."""
        sampled = self._scores("eval", self._route, self._n, step=step, version=version)
        at_zero = None
        if greedy and self._route is not None:
            route = msgspec.structs.replace(self._route, sampling=self._route.sampling | {"temperature": 0})
            at_zero = self._scores("eval_greedy", route, 1, step=step, version=version)
        return Evaluation(step=step, version=version, sampled=sampled, greedy=at_zero)

    def _scores(self, split: Split, route: Route | None, n: int, *, step: int, version: int) -> Scores:
        jobs = [
            Job(task_id=task.id, index=index, row=task.row, seed=rollout_seed(self._seed, task.id, index, _STEP_OF_SEEDS))
            for task in self.tasks
            for index in range(n)
        ]
        conditions = Conditions(route=route, version=version, metadata={"step": step, "split": split})
        rollouts, seconds = run_jobs(
            self._runner,
            jobs,
            conditions,
            step=step,
            split=split,
            log=self._log,
            report=self._report,
            stop=self._stop,
            notes=self._report.note,
        )
        return scores_of(rollouts, seconds=seconds, seed=self._seed)


def scores_of(rollouts: Sequence[Rollout], *, seconds: float, seed: int) -> Scores:
    """The scores of evaluation rollouts."""
    worth: dict[str, list[float]] = {}
    for rollout in rollouts:
        worth.setdefault(rollout.task_id, []).append(rollout.reward if rollout.reward is not None else 0.0)
    tasks = {task_id: sum(values) / len(values) for task_id, values in sorted(worth.items())}
    interval = mean_interval(list(tasks.values()), seed=seed)
    failures = Counter(str(r.fault) for r in rollouts if r.fault is not None)
    return Scores(
        mean=interval.mean,
        low=interval.low,
        high=interval.high,
        tasks=tasks,
        rollouts=len(rollouts),
        failures=dict(failures),
        seconds=seconds,
    )


def rise_of(before: Evaluation, after: Evaluation, *, seed: int) -> Rise:
    """The paired rise between two evaluations of the same rows."""
    greedy = None
    if before.greedy is not None and after.greedy is not None:
        greedy = rise_interval(before.greedy.tasks, after.greedy.tasks, seed=seed)
    return Rise(sampled=rise_interval(before.sampled.tasks, after.sampled.tasks, seed=seed), greedy=greedy)
