"""Jobs in from any thread, their news out to the event loop; between them one thread that steps the model without a pause.

Continuous batching: jobs join and leave between steps. Every step takes one token of each decoding job and, beside them, chunks of
prompts in order of arrival. A job whose prompt shares a longer prefix with one being computed than with the cache waits for it, so that a
shared prompt is computed once. A swap happens between two steps: every job goes back to the queue with the ids it has, is computed again
under the new weights, and no token of it is lost; or, as asked, it ends as it is, or the swap waits for it and what comes later waits
for the swap. A paused server takes no step, but takes in, swaps and cancels as ever.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec
import numpy as np
import torch

from rllm_trainer.serving._local.jobs import Generation, Scoring, Update
from rllm_trainer.serving._local.prefix_store import Ids, common_prefix
from rllm_trainer.serving._local.runner import Lane, Runner, StepResult
from rllm_trainer.serving._local.sampling import Row, SamplingParams, sample
from rllm_trainer.serving_settings import InFlight

__all__ = ["Busy", "Job", "Scheduler", "Stats", "Swapped"]

Job = Generation | Scoring
News = list[tuple[Job, Update | None]]

_WORTH_WAITING = 16
"""Shared tokens that make it worth waiting for another job's prompt."""
_STEP_TOKENS_BUSY = 128
"""Prompt tokens of a step that also decodes: more would hold up the decoding jobs for longer without being computed faster."""
_STEP_TOKENS_IDLE = 512


class Busy(Exception):
    """The queue is full."""


class Swapped(msgspec.Struct, frozen=True, kw_only=True):
    """A swap that was done."""

    in_flight: int
    """Jobs that were running or waiting, all kept."""
    seconds: float
    """From taking the weights over to the first token under them, or to being ready where no job was there."""


class Stats(msgspec.Struct, kw_only=True):
    """Counters since the start."""

    version: int
    running: int = 0
    waiting: int = 0
    steps: int = 0
    prompt_tokens_computed: int = 0
    prompt_tokens_cached: int = 0
    sampled_tokens: int = 0
    given_up: int = 0
    """Jobs set back for want of memory and computed again."""
    swaps: int = 0
    cancelled: int = 0
    busy_seconds: float = 0.0
    """Time spent in steps; the rest was waiting for work."""


class _Swap(msgspec.Struct, kw_only=True, eq=False):
    weights: Any
    version: int
    done: Future[Swapped]
    policy: InFlight
    after: int
    """Arrivals before it: what is waited for."""
    started: float = 0.0
    in_flight: int = 0


class _Pause(msgspec.Struct, kw_only=True, eq=False):
    at: int
    """Tokens sampled since the start when it begins."""
    begun: Future[None]


class Scheduler:
    """``run`` is the loop of one thread; the other methods may be called from anywhere."""

    def __init__(self, runner: Runner, *, version: int, max_waiting: int, deliver: Callable[[News], None]) -> None:
        self.stats = Stats(version=version)
        self._runner = runner
        self._max_waiting = max_waiting
        self._deliver = deliver
        self._wake = threading.Condition()
        self._inbox: list[Job] = []
        self._swaps: deque[_Swap] = deque()
        self._waited_for: _Swap | None = None
        """A swap that comes when every job that arrived before it has ended."""
        self._pause: _Pause | None = None
        self._stirred = False
        """Something is to be looked at though nothing was sent in: a cancelled job, a pause, its end."""
        self._arrivals = 0
        self._waiting: list[Job] = []
        self._active: dict[int, Job] = {}
        """By id of the lane."""
        self._prefilling: list[Job] = []
        self._first_token: _Swap | None = None

    def submit(self, jobs: list[Job]) -> None:
        """Raises ``Busy`` if the queue has no room for all of them."""
        with self._wake:
            if len(self._waiting) + len(self._inbox) + len(jobs) > self._max_waiting:
                raise Busy(
                    f"{len(self._waiting) + len(self._inbox)} requests are waiting, and at most {self._max_waiting} may; try again later"
                )
            for job in jobs:
                self._arrivals += 1
                job.arrival = self._arrivals
            self._inbox += jobs
            self._wake.notify()

    def cancel(self, jobs: list[Job]) -> None:
        """Their requester has gone: free what they hold at the next step."""
        with self._wake:
            for job in jobs:
                job.cancelled = True
            self._stir()

    def swap(self, weights: Any, version: int, policy: InFlight = "keep") -> Future[Swapped]:
        """Serve these from the next step on, or, with ``wait``, from when the jobs that are there have ended. One at a time."""
        with self._wake:
            swap = _Swap(weights=weights, version=version, done=Future(), policy=policy, after=self._arrivals)
            self._swaps.append(swap)
            self._wake.notify()
        return swap.done

    def pause(self, after_tokens: int) -> Future[None]:
        """Take no further step once so many more tokens have been sampled; done when the pause begins. A pause before it is over."""
        pause = _Pause(at=self.stats.sampled_tokens + after_tokens, begun=Future())
        with self._wake:
            self._end_pause()
            self._pause = pause
        return pause.begun

    def resume(self) -> None:
        """The pause is over, or its beginning is no longer waited for."""
        with self._wake:
            self._end_pause()

    def _end_pause(self) -> None:
        if self._pause is not None:
            self._pause.begun.cancel()
        self._pause = None
        self._stir()

    def _stir(self) -> None:
        self._stirred = True
        self._wake.notify()

    def run(self) -> None:
        """For ever. What it raises is the end of the server."""
        with torch.inference_mode():
            while True:
                self._take_in()
                self._drop_cancelled()
                self._swap_if_drained()
                self._give_up(self._runner.crowded_out())
                self._admit()
                if self._active and not self._paused():
                    started = time.monotonic()
                    self._step()
                    self.stats.busy_seconds += time.monotonic() - started
                    self._swap_if_drained()

    def _paused(self) -> bool:
        with self._wake:
            if self._pause is None or self.stats.sampled_tokens < self._pause.at:
                return False
            if not self._pause.begun.done():
                self._pause.begun.set_result(None)
            return True

    def _take_in(self) -> None:
        paused = self._paused()
        with self._wake:
            while not (self._inbox or self._swaps or self._stirred or ((self._active or self._waiting) and not paused)):
                self._wake.wait()
            self._stirred = False
            self._waiting += self._inbox
            self._inbox.clear()
            swaps = list(self._swaps)
            self._swaps.clear()
        for swap in swaps:
            if swap.policy == "wait":
                self._waited_for = swap
                continue
            if swap.policy == "abort":
                self._abort()
            self._do_swap(swap)

    def _swap_if_drained(self) -> None:
        """A swap that jobs are waited for before comes as soon as none of them is left."""
        swap = self._waited_for
        if swap is not None and all(job.arrival > swap.after for job in [*self._active.values(), *self._waiting]):
            self._waited_for = None
            self._do_swap(swap)

    def _abort(self) -> None:
        """Every reply ends as it is."""
        jobs = [job for job in [*self._active.values(), *self._waiting] if isinstance(job, Generation)]
        for job in jobs:
            if job.lane is not None:
                self._free(job, keep=False)
        ended = {id(job) for job in jobs}
        self._waiting = [job for job in self._waiting if id(job) not in ended]
        self._deliver([(job, job.abort()) for job in jobs])

    def _do_swap(self, swap: _Swap) -> None:
        if self._first_token is not None:
            self._resolve(self._first_token)
        swap.started = time.monotonic()
        swap.in_flight = len(self._active) + len(self._waiting)
        self._runner.use(swap.weights)
        self.stats.version = swap.version
        self.stats.swaps += 1
        self._set_back(list(self._active.values()))
        self._first_token = swap
        if not swap.in_flight:
            self._resolve(swap)

    def _resolve(self, swap: _Swap) -> None:
        self._first_token = None
        swap.done.set_result(Swapped(in_flight=swap.in_flight, seconds=time.monotonic() - swap.started))

    def _set_back(self, jobs: list[Job]) -> None:
        """Their lanes are dead; they wait again, in order of arrival."""
        for job in jobs:
            assert job.lane is not None
            del self._active[id(job.lane)]
            job.lane = None
        self._prefilling = [job for job in self._prefilling if job.lane is not None]
        self._waiting = sorted([*self._waiting, *jobs], key=lambda job: job.arrival)
        self._count()

    def _give_up(self, lanes: list[Lane]) -> None:
        self.stats.given_up += len(lanes)
        if lanes:
            self._set_back([self._active[id(lane)] for lane in lanes])

    def _drop_cancelled(self) -> None:
        gone = [job for job in [*self._waiting, *self._active.values()] if job.cancelled]
        for job in gone:
            self.stats.cancelled += 1
            if job.lane is not None:
                self._free(job, keep=False)
        if gone:
            self._waiting = [job for job in self._waiting if not job.cancelled]
            self._count()
            if self._first_token is not None and not self._active and not self._waiting:
                self._resolve(self._first_token)

    def _free(self, job: Job, *, keep: bool) -> None:
        assert job.lane is not None
        self._runner.end(job.lane, keep=keep)
        del self._active[id(job.lane)]
        if job in self._prefilling:
            self._prefilling.remove(job)
        job.lane = None

    def _admit(self) -> None:
        admitted: set[int] = set()
        for job in self._waiting:
            if sum(p.lane.prompt_left for p in self._prefilling if p.lane is not None) >= _STEP_TOKENS_IDLE:
                break
            if self._waited_for is not None and job.arrival > self._waited_for.after:
                continue
            if self._should_wait(np.asarray(job.ids, np.int32), job.reuse):
                continue
            lane = self._runner.begin(job.ids, decodes=job.decodes, reuse=job.reuse)
            if lane is None:
                break
            job.lane = lane
            if isinstance(job, Scoring):
                job.cached, lane.scored_from = lane.cached, job.start
            elif not job.admitted:
                job.admitted, job.cached_tokens = True, lane.cached
            self.stats.prompt_tokens_cached += lane.cached
            self._active[id(lane)] = job
            self._prefilling.append(job)
            admitted.add(id(job))
        if admitted:
            self._waiting = [job for job in self._waiting if id(job) not in admitted]
        self._count()

    def _should_wait(self, ids: Ids, reuse: int) -> bool:
        if not self._prefilling or reuse < _WORTH_WAITING:
            return False
        cached = self._runner.cached(ids, reuse)
        return any(min(common_prefix(ids, np.asarray(other.ids, np.int32)), reuse) >= cached + _WORTH_WAITING for other in self._prefilling)

    def _step(self) -> None:
        decoding = len(self._active) - len(self._prefilling)
        left = _STEP_TOKENS_BUSY if decoding else _STEP_TOKENS_IDLE
        chunks: list[tuple[Lane, int]] = []
        for job in self._prefilling:
            assert job.lane is not None
            count = min(job.lane.prompt_left, left)
            if count:
                chunks.append((job.lane, count))
                left -= count
        result = self._runner.step(chunks)
        self.stats.steps += 1
        self.stats.prompt_tokens_computed += sum(count for _, count in chunks)
        news = self._score(result) + self._sample(result)
        self._prefilling = [job for job in self._prefilling if job.lane is not None and job.lane.prompt_left]
        if self._first_token is not None and (result.lanes or result.scored):
            self._resolve(self._first_token)
        self._count()
        if news:
            self._deliver(news)

    def _score(self, result: StepResult) -> News:
        for lane, first, logits in result.scored:
            job = self._active[id(lane)]
            assert isinstance(job, Scoring)
            job.take(first, logits)
        done = [job for job in self._prefilling if isinstance(job, Scoring) and job.lane is not None and not job.lane.prompt_left]
        for job in done:
            job.version = self.stats.version
            self._free(job, keep=False)
        return [(job, None) for job in done]

    def _sample(self, result: StepResult) -> News:
        if not result.lanes:
            return []
        jobs = [self._active[id(lane)] for lane in result.lanes]
        rows: list[Row] = []
        news: News = []
        stuck: dict[int, str] = {}
        for index, job in enumerate(jobs):
            assert isinstance(job, Generation)
            try:
                rows.append(job.row())
            except ValueError as error:
                stuck[index] = f"the grammar cannot go on: {error}"
                rows.append(Row(params=SamplingParams(), rng=np.random.default_rng(0), prompt_ids=(), sampled_ids=()))
        for index, (job, drawn) in enumerate(zip(jobs, sample(result.logits, rows), strict=True)):
            assert isinstance(job, Generation)
            if math.isnan(drawn.logprob):
                stuck.setdefault(index, "the model's logits are not finite; its weights have diverged")
            if index in stuck:
                update: Update | None = job.fail(stuck[index])
            else:
                update = job.push(drawn, self.stats.version)
                self.stats.sampled_tokens += 1
            if update is not None:
                news.append((job, update))
                if update.finish_reason is not None:
                    self._free(job, keep=update.error is None)
        return news

    def _count(self) -> None:
        self.stats.running, self.stats.waiting = len(self._active), len(self._waiting)
