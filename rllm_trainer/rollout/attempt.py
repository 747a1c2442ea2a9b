"""One attempt of one rollout: the app called with a row, its episode taken in, its rewards given.

A sync app runs in a thread of its own, an async one in the lane; what follows (waiting for the episode, judging, scoring) is in a
thread either way, so that no reward function blocks an app. An attempt ends once: by itself, or given up from outside, and after
that its calls are refused and its outcome is not listened to.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any

import msgspec

from rllm_trace._recorder import recorder
from rllm_trace.exceptions import RewardError as BadReward
from rllm_trace.rollouts import Rollout, rollout
from rllm_trace.routing import Endpoint, Route
from rllm_trace.types import Episode
from rllm_trainer.exceptions import RewardError
from rllm_trainer.rollout.app import consumed, drained
from rllm_trainer.rollout.arguments import Arguments, own_row
from rllm_trainer.rollout.faults import Verdict, describe, judge, leaves_gradient
from rllm_trainer.rollout.lane import Lane, LaneTask, stack_of_thread
from rllm_trainer.rollout.rewards import RewardPlan, Scored, given_rewards, total_reward
from rllm_trainer.rollout.scoring import scored_by

__all__ = ["Attempt", "Conditions", "Job", "Outcome", "RolloutOver"]

_DELIVERY = 10.0
"""Seconds that the recorder has to deliver the episode of an app that has ended, beyond its settle time."""


class RolloutOver(RuntimeError):
    """A call of an app whose rollout has ended or been given up; the message says by what."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout to make."""

    task_id: str
    index: int
    """Which of its group."""
    row: Any
    seed: int
    """From which the seeds of its calls follow."""


class Conditions(msgspec.Struct, frozen=True, kw_only=True):
    """What the rollouts of one batch have in common."""

    route: Route | None
    """Where calls go; None: the app's own endpoints."""
    version: int | Callable[[], int] = 0
    """Policy version being served: a number where it stays, a function where it moves on while the batch runs."""
    metadata: dict[str, Any] = {}
    """Goes into each episode's metadata."""

    def served(self) -> int:
        """The version being served now."""
        return self.version() if callable(self.version) else self.version


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How one attempt ended."""

    verdict: Verdict
    episode: Episode | None
    scored: Scored
    extra_episodes: list[Episode] = []
    """Further root episodes of the same run of the app; recorded, not trained."""
    seconds: float = 0.0


class Attempt:
    """One run of the app on one row, from its start until its outcome."""

    def __init__(
        self,
        job: Job,
        number: int,
        *,
        app: Callable[..., Any],
        is_async: bool,
        arguments: Arguments,
        plan: RewardPlan,
        conditions: Conditions,
        lane: Callable[[], Lane],
        ended: Callable[[Attempt, Outcome], None],
    ) -> None:
        self.job = job
        self.number = number
        self.version = conditions.served()
        """Being served when it started."""
        self.started = time.monotonic()
        self._app = app
        self._is_async = is_async
        self._arguments = arguments
        self._plan = plan
        self._conditions = conditions
        self._lane = lane
        self._ended = ended
        self._lock = threading.Lock()
        self._over = False
        self._given_up = "it had ended"
        """Why its calls are refused."""
        self._handle: Rollout | None = None
        self._thread: threading.Thread | None = None
        self._tasks: list[LaneTask] = []

    def start(self, context: Context) -> None:
        """Run it; its outcome goes to ``ended``, from another thread."""
        target = self._run_async if self._is_async else self._run_sync
        self._thread = threading.Thread(
            target=context.copy().run, args=(self._guarded, target, context), name=f"rllm-{self.job.task_id}-{self.job.index}", daemon=True
        )
        self._thread.start()

    def give_up(self, reason: str) -> tuple[Outcome, str] | None:
        """End it from outside: its outcome as recorded so far, and its stack. None: it has just ended by itself."""
        with self._lock:
            if self._over:
                return None
            self._over = True
            self._given_up = reason
        stack = self._stack()
        for task in self._tasks:
            task.cancel()
        episodes: list[Episode] = []
        if self._handle is not None:
            self._handle.expire(reason)
            episodes = self._handle.wait(_DELIVERY)
        episode, extra = _root(episodes)
        verdict = judge(error=None, deadline=reason, episode=episode)
        return self._outcome(verdict, episode, Scored(reward=None, rewards={}), extra), stack

    def _guarded(self, run: Callable[[Context], Outcome], context: Context) -> None:
        try:
            outcome = run(context)
        except BaseException as error:  # noqa: BLE001 - a fault of ours: told as the outcome, so that the batch ends
            verdict = Verdict(fault="infrastructure", reason=f"the runner failed: {describe(error)}")
            outcome = self._outcome(verdict, None, Scored(reward=None, rewards={}), [])
        with self._lock:
            if self._over:
                return
            self._over = True
        self._ended(self, outcome)

    def _run_sync(self, context: Context) -> Outcome:
        output, error = None, None
        with self._rollout() as handle:
            self._handle = handle
            try:
                output = drained(self._app(*self._arguments.args, **self._arguments.kwargs))
            except BaseException as raised:  # noqa: BLE001 - the app's own, whatever it is: becomes the record
                error = raised
        return self._finish(handle, output, error, context)

    def _run_async(self, context: Context) -> Outcome:
        task = self._lane().submit(self._awaited(), context.copy())
        self._tasks.append(task)
        handle, output, error = task.done.result()
        return self._finish(handle, output, error, context)

    async def _awaited(self) -> tuple[Rollout, Any, BaseException | None]:
        output, error = None, None
        with self._rollout() as handle:
            self._handle = handle
            try:
                output = await consumed(self._app(*self._arguments.args, **self._arguments.kwargs))
            except BaseException as raised:  # noqa: BLE001 - the app's own, whatever it is: becomes the record
                error = raised
        return handle, output, error

    def _rollout(self) -> Any:
        metadata = self._conditions.metadata | {"index": self.job.index, "attempt": self.number}
        return rollout(task_id=self.job.task_id, metadata=metadata, route=self._route(), seed=self.job.seed)

    def _route(self) -> Route | None:
        route = self._conditions.route
        if route is None:
            return None

        def resolve(scope: object) -> Endpoint:
            if self._over:
                raise RolloutOver(
                    f"rollout {self.job.index} of task {self.job.task_id} has been given up ({self._given_up}), and the app still runs: "
                    "its calls are refused; let this error end the app, or raise the deadline"
                )
            return route.endpoint(scope)

        return msgspec.structs.replace(route, resolve=resolve)

    def _finish(self, handle: Rollout, output: Any, error: BaseException | None, context: Context) -> Outcome:
        episode, extra = _root(handle.wait(recorder.settle + _DELIVERY))
        verdict = self._verdict(handle, error, episode)
        if episode is None and verdict.fault is None:
            verdict = Verdict(fault="infrastructure", reason="no episode was recorded for it")
        if leaves_gradient(verdict.fault) or episode is None:
            return self._outcome(verdict, episode, _scored(episode), extra)
        try:
            episode = self._score(episode, output, error, context)
        except (RewardError, BadReward) as refused:
            return self._outcome(Verdict(fault="reward", reason=f"{refused} (task {self.job.task_id})"), episode, _scored(episode), extra)
        scored = total_reward(episode)
        if scored.reward is None and verdict.fault == "policy":
            scored = Scored(reward=0.0, rewards={})
        elif scored.reward is None:
            verdict = Verdict(fault="reward", reason=f"no reward was given (task {self.job.task_id})")
        return self._outcome(verdict, episode, scored, extra)

    def _verdict(self, handle: Rollout, error: BaseException | None, episode: Episode | None) -> Verdict:
        for fault in handle.reward_faults[:1]:
            what = f"the reward {fault.name} failed: {fault.error.type}: {fault.error.message}"
            return Verdict(fault="reward", reason=f"{what} (task {self.job.task_id})")
        return judge(error=error, deadline=None, episode=episode)

    def _score(self, episode: Episode, output: Any, error: BaseException | None, context: Context) -> Episode:
        def awaited(work: Coroutine[Any, Any, Any]) -> Any:
            task = self._lane().submit(work, context.copy())
            self._tasks.append(task)
            return task.done.result()

        due = self._plan.due(episode, error)
        return scored_by(due, episode, output=output, row=own_row(self.job.row), error=error, awaited=awaited)

    def _outcome(self, verdict: Verdict, episode: Episode | None, scored: Scored, extra: list[Episode]) -> Outcome:
        return Outcome(verdict=verdict, episode=episode, scored=scored, extra_episodes=extra, seconds=time.monotonic() - self.started)

    def _stack(self) -> str:
        if self._tasks:
            return self._tasks[-1].stack()
        return stack_of_thread(self._thread) if self._thread is not None else ""


def _scored(episode: Episode | None) -> Scored:
    return Scored(reward=None, rewards=given_rewards(episode))


def _root(episodes: list[Episode]) -> tuple[Episode | None, list[Episode]]:
    """The episode of the app's own workflow (the first that is not inside another), and the others."""
    roots = sorted(episodes, key=lambda episode: (episode.parent_episode_id is not None, episode.started))
    return (roots[0], roots[1:]) if roots else (None, [])
