"""Rollouts in other processes are coordinated as those in this one: spread, given up, tried again where a worker failed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

import rllm_trace as rllm
from rllm_trainer.cluster.app_worker import AppWorker, packed_app
from rllm_trainer.cluster.remote_runner import RemoteRunner
from rllm_trainer.exceptions import SettingError
from rllm_trainer.rollout.attempt import Conditions, Job
from rllm_trainer.rollout.rewards import plan_rewards
from rllm_trainer.rollout.runner import Limits


@rllm.workflow
def double(number: int) -> int:
    """An app that calls no model."""
    return 2 * number


def right(output: int, number: int) -> float:
    """A reward that is called after the app."""
    return float(output == 2 * number)


class Reference:
    """What Ray gives for a call that is under way."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def future(self) -> Future[Any]:
        return self._future


class Method:
    """A method of an actor."""

    def __init__(self, call: Callable[..., Future[Any]]) -> None:
        self._call = call

    def remote(self, *arguments: Any) -> Reference:
        return Reference(self._call(*arguments))


class InProcess:
    """A real ``AppWorker`` behind an actor's interface, in an event loop of this process."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, dies: int = 0) -> None:
        self._loop = loop
        self._worker = AppWorker(packed_app(double, plan_rewards(right, double)), [], node_id="n")
        self._dies = dies
        self.taken = 0

    @property
    def run(self) -> Method:
        return Method(self._run)

    def _run(self, assignment: Any) -> Future[Any]:
        self.taken += 1
        if self._dies:
            self._dies -= 1
            gone: Future[Any] = Future()
            gone.set_exception(RuntimeError("the worker's process ended"))
            return gone
        return asyncio.run_coroutine_threadsafe(self._worker.run(assignment), self._loop)


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join(5)
    loop.close()


def jobs(count: int) -> list[Job]:
    return [Job(task_id=f"t{number}", index=0, row={"number": number}, seed=number) for number in range(count)]


def test_attempts_go_to_the_worker_that_has_the_fewest(loop: asyncio.AbstractEventLoop) -> None:
    """Six jobs, two workers: three each, and every rollout has its episode and its reward."""
    workers = [InProcess(loop), InProcess(loop)]
    runner = RemoteRunner(workers, Limits(concurrency=6))
    rollouts = runner.run(jobs(6), Conditions(route=None, version=lambda: 4))
    assert [worker.taken for worker in workers] == [3, 3]
    assert [rollout.task_id for rollout in rollouts] == ["t0", "t1", "t2", "t3", "t4", "t5"]
    assert [rollout.reward for rollout in rollouts] == [1.0] * 6
    assert {rollout.policy_version for rollout in rollouts} == {4}
    assert [rollout.episode.output for rollout in rollouts if rollout.episode is not None] == [0, 2, 4, 6, 8, 10]


def test_what_a_dead_worker_took_is_tried_again_elsewhere(loop: asyncio.AbstractEventLoop) -> None:
    """The worker that failed rests while another can take its work, though it has the fewest attempts."""
    broken, whole = InProcess(loop, dies=99), InProcess(loop)
    runner = RemoteRunner([broken, whole], Limits(concurrency=1, retries=1))
    rollouts = runner.run(jobs(4), Conditions(route=None))
    assert [rollout.reward for rollout in rollouts] == [1.0] * 4
    assert (broken.taken, whole.taken) == (1, 4)


def test_a_rollout_that_no_worker_can_run_is_an_infrastructure_fault(loop: asyncio.AbstractEventLoop) -> None:
    """It names the worker and what became of it."""
    runner = RemoteRunner([InProcess(loop, dies=99)], Limits(concurrency=1, retries=1))
    (rollout,) = runner.run(jobs(1), Conditions(route=None))
    assert rollout.fault == "infrastructure"
    assert rollout.reason == "app worker 0 failed: RuntimeError: the worker's process ended"


def test_an_app_that_cannot_travel_is_refused_in_words() -> None:
    """A lock that the app closes over is of this process alone."""
    lock = threading.Lock()

    def app(number: int) -> int:
        with lock:
            return number

    with pytest.raises(SettingError, match="cannot be carried to Ray's workers"):
        packed_app(app, plan_rewards(right, app))
