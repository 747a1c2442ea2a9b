"""Random programs of tasks, threads, executors, generators and agents: every call lands where the program says it was made.

A program is a tree; each node runs its children in some way. What is expected follows from the tree alone, so any mix-up of scopes shows.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import rllm_trace as rllm
from rllm_trace._context import current

Node = tuple[str, Any]
WAYS = (
    "call",
    "agent",
    "no_train",
    "sequence",
    "gather",
    "thread",
    "executor",
    "to_thread",
    "generator",
    "async generator",
    "workflow",
    "reward",
)


def program(rng: random.Random, depth: int) -> Node:
    way = rng.choice(WAYS) if depth else "call"
    if way == "call":
        return way, None
    return way, [program(rng, depth - 1) for _ in range(rng.randint(1, 3))]


def expected(node: Node, path: str, found: Counter[tuple[str, bool]], *, trained: bool = True) -> None:
    """(path of agents, trained) of each call of the program."""
    way, children = node
    if way == "call":
        found[path, trained] += 1
        return
    for position, child in enumerate(children):
        inside = f"{path}/{way}{position}" if way == "agent" else path
        expected(child, inside, found, trained=trained and way not in ("no_train", "reward"))


class Runner:
    """Runs programs; the name of the agent around a call is the path that the program expects."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call

    async def run(self, node: Node, path: str) -> None:
        way, children = node
        await asyncio.sleep(0)
        if way == "call":
            self.call(path)
            return
        if way == "gather":
            await asyncio.gather(*(self.run(child, path) for child in children))
            return
        for position, child in enumerate(children):
            await getattr(self, way.replace(" ", "_"))(child, path, position)

    def run_sync(self, node: Node, path: str) -> None:
        asyncio.run(self.run(node, path))

    async def sequence(self, node: Node, path: str, _: int) -> None:
        await self.run(node, path)

    async def agent(self, node: Node, path: str, position: int) -> None:
        inside = f"{path}/agent{position}"
        with rllm.agent(inside):
            await self.run(node, inside)

    async def no_train(self, node: Node, path: str, _: int) -> None:
        with rllm.no_train:
            await self.run(node, path)

    async def workflow(self, node: Node, path: str, _: int) -> None:
        await rllm.workflow(self.run)(node, path)

    async def reward(self, node: Node, path: str, _: int) -> None:
        @rllm.reward
        async def score() -> float:
            await self.run(node, path)
            return 1.0

        await score()

    async def thread(self, node: Node, path: str, _: int) -> None:
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def work() -> None:
            self.run_sync(node, path)
            loop.call_soon_threadsafe(done.set)

        threading.Thread(target=work).start()
        await done.wait()

    async def executor(self, node: Node, path: str, _: int) -> None:
        with ThreadPoolExecutor(1) as pool:
            await asyncio.wrap_future(pool.submit(self.run_sync, node, path))

    async def to_thread(self, node: Node, path: str, _: int) -> None:
        await asyncio.to_thread(self.run_sync, node, path)

    async def generator(self, node: Node, path: str, _: int) -> None:
        @rllm.tool
        def steps() -> Iterator[int]:
            yield 1
            thread = threading.Thread(target=self.run_sync, args=(node, path))
            thread.start()
            thread.join()
            yield 2

        before = current()
        for _step in steps():
            assert current() is before

    async def async_generator(self, node: Node, path: str, _: int) -> None:
        @rllm.tool
        async def steps() -> AsyncIterator[int]:
            yield 1
            await self.run(node, path)
            yield 2

        running: Any = steps()
        before = current()
        while True:
            try:
                await asyncio.create_task(running.__anext__())
            except StopAsyncIteration:
                return
            assert current() is before


@pytest.mark.parametrize("seed", range(6))
def test_random_programs_run_side_by_side(call: Any, seed: int) -> None:
    """25 programs in one event loop, with threads under them: each episode holds exactly its own program's calls."""
    rng = random.Random(seed)
    programs = [program(rng, 4) for _ in range(25)]

    @rllm.workflow
    async def app(n: int) -> None:
        await runner.run(programs[n], "app")

    async def main() -> None:
        await asyncio.gather(*(app(n) for n in range(len(programs))))

    runner = Runner(call)
    with rllm.collect() as episodes:
        asyncio.run(main())
    assert len(episodes) == len(programs)
    for episode in episodes:
        wanted: Counter[tuple[str, bool]] = Counter()
        expected(programs[episode.input["n"]], "app", wanted)
        assert Counter((c.messages[0]["content"], c.trainable) for c in episode.calls) == wanted
        for trajectory in episode.trajectories:
            assert {c.messages[0]["content"] for c in trajectory.calls} <= {trajectory.name}
        assert (episode.termination, episode.open_calls) == ("completed", 0)
    assert rllm.stats()["faults"] == {}
    assert rllm.stats()["late"] == {}
    assert current() is None
