"""Ray tasks and actors go on in the workflow that called them."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

RAY = """
import ray
from rllm_trace.remote_tasks import carried, remote

@ray.remote
@carried
def task(n, more=0):
    return ask(n + more)

@ray.remote
@carried
class Actor:
    def __init__(self, base):
        self.base = base
    def sync(self, n):
        with rllm.agent("actor"):
            return ask(self.base + n)

@ray.remote
@carried
class AsyncActor:
    async def later(self, n):
        return ask(n)

@rllm.workflow
def app(actor, later, first):
    tasks = [remote(task)(first), remote(task.options(num_cpus=0.5))(first, more=1)]
    return ray.get([*tasks, remote(actor.sync)(first + 2), remote(later.later)(first + 3)])

if __name__ == "__main__":
    ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level="error", log_to_driver=False)
    try:
        actor, later = Actor.options(num_cpus=0).remote(0), AsyncActor.options(num_cpus=0).remote()
        with rllm.collect() as episodes:
            app(actor, later, 10)
            app(actor, later, 20)
        assert ray.get([task.remote(30), remote(task)(31), actor.sync.remote(32)]) == [30, 31, 32]
        show(episodes)
        print(json.dumps(rllm.stats()["faults"]))
    finally:
        ray.shutdown()
"""


def test_ray_tasks_and_actors(app: Callable[..., str]) -> None:
    """Tasks, options, actors, async actors; one worker serves two workflows and calls outside any; each call is in its own record."""
    *_, shown, faults = app(RAY, timeout=800).splitlines()
    assert json.loads(shown) == [[[n, n + 1, n + 2, n + 3], [n, n + 1, n + 2, n + 3], "completed"] for n in (10, 20)]
    assert json.loads(faults) == {}
