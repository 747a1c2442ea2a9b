"""Jobs in, rollouts out, with the app in Ray workers on any node: what ``Runner`` is to the loop, and coordinated by the same code.

An attempt goes to the worker that has the fewest. Deadlines, retries and quorum are kept here; what a worker says about its attempt
is believed, and what a dead worker cannot say is an infrastructure fault.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import msgspec

from rllm_trace.routing import CallSite
from rllm_trainer.cluster.app_worker import Assignment, FrontAddress
from rllm_trainer.cluster.loading import ray_api
from rllm_trainer.rollout.attempt import Attempt, Conditions, Job, Outcome
from rllm_trainer.rollout.faults import Verdict
from rllm_trainer.rollout.places import Places
from rllm_trainer.rollout.rewards import Scored
from rllm_trainer.rollout.runner import Limits, Runner

__all__ = ["RemoteAttempt", "RemoteRunner", "Worker"]

_ANSWER = 30.0
"""Seconds that a worker has to answer a question that takes it none."""
_ALL_SITES = 10.0
_REST = 15.0
"""Seconds in which Ray starts a worker anew."""


class Worker:
    """One ``AppWorker`` actor, and how many attempts it has."""

    def __init__(self, handle: Any, name: str) -> None:
        self.handle = handle
        self.name = name
        self.running = 0
        self.rests_until = 0.0
        """Monotonic seconds; one that has just failed gets attempts only where no other can take them."""


class RemoteAttempt(Attempt):
    """An attempt that runs in a worker."""

    def __init__(
        self,
        assignment: Assignment,
        worker: Worker,
        version: int,
        ended: Callable[[Attempt, Outcome], None],
        over: Callable[[Worker], None],
    ) -> None:
        self.job = assignment.job
        self.number = assignment.attempt
        self.version = version
        self.started = time.monotonic()
        self._assignment = assignment
        self._worker = worker
        self._told = ended
        self._left = over
        self._once = threading.Lock()
        self._done = False

    def send(self) -> None:
        """Start it; its outcome goes to ``ended``, from another thread."""
        future = self._worker.handle.run.remote(self._assignment).future()
        future.add_done_callback(self._take)

    def give_up(self, reason: str) -> tuple[Outcome, str] | None:
        """As ``Attempt.give_up``; of a worker that does not answer, an outcome without an episode."""
        if not self._close():
            return None
        ray = ray_api().ray
        stack = ""
        found: Any = None
        try:
            found = ray.get(self._worker.handle.give_up.remote(self._assignment.number, reason), timeout=_ANSWER)
        except Exception as error:  # noqa: BLE001 - whatever became of the worker, the attempt is over
            stack = f"{self._worker.name} did not say where it is: {_words(error)}"
        if found is None:
            return self._lost(reason), stack
        return cast("tuple[Outcome, str]", found)

    def _take(self, future: Any) -> None:
        if not self._close():
            return
        error = future.exception()
        if error is not None:
            self._worker.rests_until = time.monotonic() + _REST
        outcome = cast("Outcome", future.result()) if error is None else self._lost(f"{self._worker.name} failed: {_words(error)}")
        self._told(self, outcome)

    def _close(self) -> bool:
        """True for the first that ends it."""
        with self._once:
            first, self._done = not self._done, True
        if first:
            self._left(self._worker)
        return first

    def _lost(self, reason: str) -> Outcome:
        return Outcome(
            verdict=Verdict(fault="infrastructure", reason=reason, retry=True),
            episode=None,
            scored=Scored(reward=None, rewards={}),
            seconds=time.monotonic() - self.started,
        )


class RemoteRunner(Runner):
    """Runs one app in many workers; ``run`` is ``Runner``'s."""

    def __init__(self, workers: Sequence[Any], limits: Limits, *, fronts: Mapping[str, FrontAddress] | None = None) -> None:
        self.limits = limits
        self.places = Places(limits.concurrency)
        self.workers = [Worker(handle, f"app worker {number}") for number, handle in enumerate(workers)]
        self._fronts = dict(fronts or {})
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def attempt(self, job: Job, number: int, conditions: Conditions, ended: Callable[[Attempt, Outcome], None]) -> Attempt:
        version = conditions.served()
        route = None if conditions.route is None else msgspec.structs.replace(conditions.route, sites=None, resolve=None)
        assignment = Assignment(
            number=next(self._numbers),
            job=job,
            attempt=number,
            route=route,
            version=version,
            metadata=dict(conditions.metadata),
            fronts=self._fronts,
            counted=conditions.route is not None and conditions.route.sites is not None,
        )
        attempt = RemoteAttempt(assignment, self._least(), version, ended, self._leave)
        attempt.send()
        return attempt

    def leave_blocked_lane(self) -> None:
        """The worker does that itself."""

    def close(self) -> None:
        """Workers belong to whoever started them."""

    def seen_sites(self) -> list[CallSite]:
        """Call sites of all workers that answer, added up."""
        ray = ray_api().ray
        asked = [worker.handle.sites.remote() for worker in self.workers]
        ready, _ = ray.wait(asked, num_returns=len(asked), timeout=_ALL_SITES)
        merged: dict[tuple[str, str, bool], CallSite] = {}
        for reference in ready:
            try:
                found: list[CallSite] = ray.get(reference)
            except Exception:  # noqa: BLE001 - a worker that died has nothing to say
                continue
            for site in found:
                known = merged.setdefault(
                    (site.model, site.endpoint, site.trained), CallSite(model=site.model, endpoint=site.endpoint, trained=site.trained)
                )
                known.calls += site.calls
                for name, counts in site.values.items():
                    known.values[name] = known.values.get(name, type(counts)()) + counts
        return sorted(merged.values(), key=lambda site: (-site.calls, site.model))

    def _least(self) -> Worker:
        with self._lock:
            now = time.monotonic()
            worker = min(self.workers, key=lambda one: (one.rests_until > now, one.running))
            worker.running += 1
            return worker

    def _leave(self, worker: Worker) -> None:
        with self._lock:
            worker.running -= 1


def _words(error: BaseException) -> str:
    """The cause that Ray wraps, in one line."""
    cause = getattr(error, "cause", None) or error
    return f"{type(cause).__name__}: {str(cause).strip().splitlines()[0][:300] if str(cause).strip() else ''}"
