"""Jobs in, rollouts out, whatever the app does: as many at once as asked, every one with a deadline.

The thread that calls ``run`` only coordinates. It starts attempts, takes their outcomes, tries again what an infrastructure fault
ended, gives up what is overdue and prints where it hangs, and returns when every job has its rollout. A straggler may be given up
early where the run has a quorum. What one rollout does never ends the others.
"""

from __future__ import annotations

import contextvars
import math
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from rllm_trace.types import Episode
from rllm_trainer.rollout.app import as_workflow, is_async
from rllm_trainer.rollout.arguments import Binder, own_row
from rllm_trainer.rollout.attempt import Attempt, Conditions, Job, Outcome
from rllm_trainer.rollout.faults import Verdict
from rllm_trainer.rollout.lane import Lane
from rllm_trainer.rollout.places import Places
from rllm_trainer.rollout.rewards import RewardPlan, Scored
from rllm_trainer.types import Rollout

__all__ = ["Limits", "Listener", "RunInterrupted", "Runner"]

_POLL = 0.2
"""Seconds between looks at the stop event."""
_LANE_ANSWERS = 2.0
_MOST_STACKS = 3
"""Stacks printed of one batch; of many rollouts that hang at one place, the first few say it."""


class RunInterrupted(Exception):
    """The stop event was set while rollouts ran; those that had ended have been told."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """How many at once, and for how long."""

    concurrency: int = 48
    """Of all runs of a runner together."""
    rollout_timeout: float = 900.0
    """Seconds, from an attempt's start to its last reward."""
    batch_timeout: float = 3600.0
    """Seconds, from the call of ``run``."""
    retries: int = 1
    quorum: float = 1.0
    """Share of each group that must have ended before stragglers may be given up; 1: never early."""
    quorum_grace: float = 30.0


class Listener:
    """What the runner tells while it runs; override what is of interest. Called in the coordinating thread."""

    def ended(self, rollout: Rollout, extra: Sequence[Episode]) -> None:
        """A job has its rollout."""

    def retried(self, job: Job, outcome: Outcome) -> None:
        """An attempt ended in an infrastructure fault; the job gets another one."""

    def hung(self, job: Job, reason: str, stack: str) -> None:
        """An attempt was given up; ``stack`` says where it is."""


class Runner:
    """Runs one app with one reward plan. Its event loop, for async apps and rewards, lives until ``close``."""

    def __init__(self, app: Callable[..., Any], plan: RewardPlan, limits: Limits) -> None:
        self.binder = Binder(app)
        self.plan = plan
        self.limits = limits
        self.places = Places(limits.concurrency)
        self._is_async = is_async(app)
        self._app = as_workflow(app)
        self._context = contextvars.copy_context()
        self._lane_lock = threading.Lock()
        self._lane: Lane | None = None

    def run(
        self, jobs: Sequence[Job], conditions: Conditions, *, listener: Listener | None = None, stop: threading.Event | None = None
    ) -> list[Rollout]:
        """One rollout for each job, in the order of the jobs. Several runs may go on at once; the first to begin is served first.

        Raises:
            RunInterrupted: ``stop`` was set; what still ran has been given up.
            AppArgumentsError: a row does not fill the app's parameters.
        """
        batch = _Batch(self, jobs, conditions, listener or Listener(), stop or threading.Event())
        return batch.run()

    def lane(self) -> Lane:
        """The event loop for async work."""
        with self._lane_lock:
            if self._lane is None:
                self._lane = Lane()
            return self._lane

    def leave_blocked_lane(self) -> None:
        """Further async work gets another loop if something blocks this one."""
        with self._lane_lock:
            if self._lane is not None and not self._lane.responds(_LANE_ANSWERS):
                self._lane = None

    def close(self) -> None:
        """End the event loop."""
        with self._lane_lock:
            if self._lane is not None:
                self._lane.close(timeout=_LANE_ANSWERS)
                self._lane = None

    def attempt(self, job: Job, number: int, conditions: Conditions, ended: Callable[[Attempt, Outcome], None]) -> Attempt:
        """A started attempt."""
        attempt = Attempt(
            job,
            number,
            app=self._app,
            is_async=self._is_async,
            arguments=self.binder.bind(own_row(job.row)),
            plan=self.plan,
            conditions=conditions,
            lane=self.lane,
            ended=ended,
        )
        attempt.start(self._context)
        return attempt


class _Batch:
    """The state of one ``run``."""

    def __init__(self, runner: Runner, jobs: Sequence[Job], conditions: Conditions, listener: Listener, stop: threading.Event) -> None:
        self._runner = runner
        self._limits = runner.limits
        self._jobs = jobs
        self._conditions = conditions
        self._listener = listener
        self._stop = stop
        self._waiting = deque((job, 0) for job in jobs)
        self._running: dict[int, Attempt] = {}
        self._outcomes: queue.SimpleQueue[tuple[Attempt, Outcome] | None] = queue.SimpleQueue()
        """None: a place may be free."""
        self._place = runner.places.join(lambda: self._outcomes.put(None))
        self._done: dict[tuple[str, int], Rollout] = {}
        self._ends_at = time.monotonic() + self._limits.batch_timeout
        self._quorum_at: float | None = None
        self._stacks = 0

    def run(self) -> list[Rollout]:
        try:
            while self._waiting or self._running:
                if self._stop.is_set():
                    self._give_up_all("the run was stopped", tell=False)
                    raise RunInterrupted
                self._start_some()
                self._take_one()
                self._give_up_overdue()
        finally:
            self._place.leave()
        return [self._done[job.task_id, job.index] for job in self._jobs]

    def _start_some(self) -> None:
        while self._waiting and self._place.take():
            job, number = self._waiting.popleft()
            attempt = self._runner.attempt(job, number, self._conditions, lambda attempt, outcome: self._outcomes.put((attempt, outcome)))
            self._running[id(attempt)] = attempt
        if not self._waiting:
            self._place.enough()

    def _take_one(self) -> None:
        try:
            came = self._outcomes.get(timeout=_POLL)
        except queue.Empty:
            return
        if came is None:
            return
        attempt, outcome = came
        if self._running.pop(id(attempt), None) is None:
            return
        self._place.give()
        again = outcome.verdict.retry and attempt.number < self._limits.retries and time.monotonic() < self._ends_at
        if again:
            self._listener.retried(attempt.job, outcome)
            self._waiting.append((attempt.job, attempt.number + 1))
        else:
            self._end(attempt.job, outcome, attempt.version)

    def _give_up_overdue(self) -> None:
        now = time.monotonic()
        if now >= self._ends_at:
            self._give_up_all(f"the batch ran past batch_timeout={self._limits.batch_timeout:g} s", tell=True)
            return
        for attempt in list(self._running.values()):
            if now - attempt.started >= self._limits.rollout_timeout:
                self._give_up(attempt, f"it ran past rollout_timeout={self._limits.rollout_timeout:g} s")
        if self._limits.quorum < 1.0 and self._has_quorum():
            self._quorum_at = self._quorum_at or now
            if now - self._quorum_at >= self._limits.quorum_grace:
                self._give_up_all("its group had its quorum, and quorum_grace was over", tell=True)

    def _has_quorum(self) -> bool:
        wanted = Counter(job.task_id for job in self._jobs)
        ended = Counter(task_id for task_id, _ in self._done)
        return all(ended[task_id] >= math.ceil(self._limits.quorum * size) for task_id, size in wanted.items())

    def _give_up_all(self, reason: str, *, tell: bool) -> None:
        for attempt in list(self._running.values()):
            self._give_up(attempt, reason, tell=tell)
        while self._waiting and tell:
            job, _ = self._waiting.popleft()
            self._end(job, _never_started(reason), self._conditions.served())

    def _give_up(self, attempt: Attempt, reason: str, *, tell: bool = True) -> None:
        given_up = attempt.give_up(reason)
        if given_up is None:
            return
        del self._running[id(attempt)]
        self._place.give()
        self._runner.leave_blocked_lane()
        outcome, stack = given_up
        if not tell:
            return
        self._stacks += 1
        self._listener.hung(attempt.job, reason, stack if self._stacks <= _MOST_STACKS else "")
        self._end(attempt.job, outcome, attempt.version)

    def _end(self, job: Job, outcome: Outcome, version: int) -> None:
        rollout = Rollout(
            task_id=job.task_id,
            index=job.index,
            row=job.row,
            episode=outcome.episode,
            reward=outcome.scored.reward,
            rewards=outcome.scored.rewards,
            fault=outcome.verdict.fault,
            reason=outcome.verdict.reason,
            policy_version=version,
            seconds=outcome.seconds,
        )
        self._done[job.task_id, job.index] = rollout
        self._listener.ended(rollout, outcome.extra_episodes)


def _never_started(reason: str) -> Outcome:
    return Outcome(
        verdict=Verdict(fault="infrastructure", reason=f"it was not started: {reason}"),
        episode=None,
        scored=Scored(reward=None, rewards={}),
    )
