"""Every call lands in the episode and trajectory that it was made in, whatever runs beside it."""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import rllm_trace as rllm
from rllm_trace._calls import open_call
from rllm_trace._context import current
from rllm_trace.types import Episode


def texts(episode: Episode) -> dict[str, list[str]]:
    """Contents of the calls by trajectory; same-named trajectories are put one after another."""
    found: dict[str, list[str]] = {}
    for trajectory in episode.trajectories:
        found.setdefault(trajectory.name, []).extend(c.messages[0]["content"] for c in trajectory.calls)
    return found


def test_nothing_is_recorded_where_nothing_collects(call: Any) -> None:
    """Decorators alone record nothing, open no call and count nothing."""

    @rllm.workflow
    def app() -> None:
        with rllm.agent("solver"):
            assert call() is None
        assert rllm.current_episode() is None
        assert rllm.headers() == {}

    app()
    assert rllm.stats() == {
        "recorded": {},
        "exported": {},
        "dropped": {},
        "failed": {},
        "late": {},
        "orphan": {},
        "faults": {},
    }


def test_calls_outside_a_workflow_are_not_recorded(call: Any) -> None:
    """Outside there is no scope; while an episode is open elsewhere such a call is counted as an orphan."""

    @rllm.workflow
    def app() -> None:
        call("inside")
        assert contextvars.Context().run(call, "in another context") is None

    with rllm.collect() as episodes:
        assert call("before") is None
        app()
        assert call("after") is None
    assert texts(episodes[0]) == {"app": ["inside"]}
    assert rllm.stats()["orphan"] == {"call": 1}


def test_a_thousand_workflows_in_one_event_loop_never_mix(call: Any) -> None:
    """Each keeps its calls, its agents' calls and its metadata, however their steps interleave."""

    @rllm.workflow
    async def app(n: int) -> int:
        rng = random.Random(n)
        episode = rllm.current_episode()
        assert episode is not None
        episode.set(n=n)
        await asyncio.sleep(rng.random() * 0.01)
        call(f"{n}")
        async with asyncio.TaskGroup() as group:
            group.create_task(solver(n, "a", rng.random()))
            group.create_task(solver(n, "b", rng.random()))
        await asyncio.sleep(0)
        call(f"{n} last")
        return n

    @rllm.agent("solver")
    async def solver(n: int, which: str, wait: float) -> None:
        call(f"{n}{which}1")
        await asyncio.sleep(wait * 0.01)
        call(f"{n}{which}2")

    async def main() -> list[int]:
        return await asyncio.gather(*(app(n) for n in range(1000)))

    with rllm.collect() as episodes:
        assert asyncio.run(main()) == list(range(1000))
    assert len(episodes) == 1000
    assert sorted(episode.metadata["n"] for episode in episodes) == list(range(1000))
    for episode in episodes:
        n = episode.metadata["n"]
        assert (episode.input, episode.output) == ({"n": n}, n)
        by_trajectory = sorted([c.messages[0]["content"] for c in t.calls] for t in episode.trajectories)
        assert by_trajectory == sorted([[f"{n}", f"{n} last"], [f"{n}a1", f"{n}a2"], [f"{n}b1", f"{n}b2"]])
    assert len({call.span_id for episode in episodes for call in episode.calls}) == 6000


def test_a_thousand_workflows_in_a_thread_pool_never_mix(call: Any) -> None:
    """The same in threads that take one workflow after another."""

    @rllm.workflow
    def app(n: int) -> int:
        with rllm.agent("solver"):
            call(f"{n}")
        call(f"{n} last")
        return n

    with rllm.collect() as episodes, ThreadPoolExecutor(16) as pool:
        assert list(pool.map(app, range(1000))) == list(range(1000))
    assert sorted(episode.output for episode in episodes) == list(range(1000))
    assert all(texts(e) == {"app": [f"{e.output} last"], "solver": [f"{e.output}"]} for e in episodes)


def test_parallel_agents_of_one_name_keep_their_own_calls_and_rewards(call: Any) -> None:
    """Identity is the span: the one that ends first does not take the other's."""

    @rllm.reward
    def correct(answer: str) -> bool:
        return answer == "slow"

    @rllm.agent("solver")
    async def solver(answer: str, turn: asyncio.Event, after: asyncio.Event) -> None:
        await turn.wait()
        call(answer)
        correct(answer)
        after.set()

    @rllm.workflow
    async def app() -> None:
        first, second, done = asyncio.Event(), asyncio.Event(), asyncio.Event()
        first.set()
        await asyncio.gather(solver("slow", second, done), solver("quick", first, second))

    with rllm.collect() as episodes:
        asyncio.run(app())
    solvers = episodes[0].trajectories
    assert [(t.name, [c.messages[0]["content"] for c in t.calls], t.reward) for t in solvers] == [
        ("solver", ["slow"], 1.0),
        ("solver", ["quick"], 0.0),
    ]
    assert episodes[0].reward is None
    assert len({t.id for t in solvers}) == 2


def test_a_workflow_inside_a_workflow_is_a_span_of_the_same_episode(call: Any) -> None:
    """Its calls belong to the trajectory around it, and its span is their parent."""

    @rllm.workflow
    def inner() -> None:
        call("inner")

    @rllm.workflow
    def outer() -> None:
        call("outer")
        inner()
        with rllm.agent("solver"):
            inner()

    with rllm.collect() as episodes:
        outer()
    assert [episode.workflow for episode in episodes] == ["outer"]
    assert texts(episodes[0]) == {"outer": ["outer", "inner"], "solver": ["inner"]}
    default, _ = episodes[0].trajectories
    assert default.calls[0].parent_id == episodes[0].span_id
    assert default.calls[1].parent_id not in (None, episodes[0].span_id)


def test_a_new_episode_inside_another_one_knows_where_it_came_from(call: Any) -> None:
    """``new_episode=True`` makes an episode and a trace of its own."""

    @rllm.workflow(new_episode=True)
    def part(n: int) -> None:
        call(f"part {n}")

    @rllm.workflow
    def whole() -> None:
        part(1)
        call("whole")
        part(2)

    with rllm.collect() as episodes:
        whole()
    assert [(e.workflow, texts(e)) for e in episodes] == [
        ("part", {"part": ["part 1"]}),
        ("part", {"part": ["part 2"]}),
        ("whole", {"whole": ["whole"]}),
    ]
    assert [e.parent_episode_id for e in episodes] == [episodes[2].id, episodes[2].id, None]
    assert len({e.trace_id for e in episodes}) == 3


def test_a_new_episode_inside_a_reward_is_never_trained(call: Any) -> None:
    """Code under a reward or ``no_train`` stays untrained, also where it starts an episode."""

    @rllm.workflow(new_episode=True)
    def judge() -> None:
        call("judging")

    @rllm.reward
    def judged() -> float:
        judge()
        return 1.0

    @rllm.workflow
    def app() -> None:
        judged()

    with rllm.collect() as episodes:
        app()
    assert [(c.no_train, c.trainable) for e in episodes for c in e.calls] == [(True, False)]


def test_calls_of_one_trajectory_are_numbered_from_zero(call: Any) -> None:
    """Seeds follow from the number, so parallel trajectories do not disturb one another's."""

    @rllm.workflow
    async def app() -> dict[str, list[int]]:
        numbers: dict[str, list[int]] = {}

        async def work(name: str) -> None:
            with rllm.agent(name):
                for _ in range(3):
                    await asyncio.sleep(0)
                    opened = open_call(operation="chat", requested_model="m")
                    assert opened is not None
                    numbers.setdefault(name, []).append(opened.number)
                    opened.end(_nothing())

        await asyncio.gather(work("a"), work("b"))
        return numbers

    with rllm.collect():
        assert asyncio.run(app()) == {"a": [0, 1, 2], "b": [0, 1, 2]}


def _nothing() -> Any:
    from rllm_trace._calldata import CallData

    return CallData(operation="chat", model="m", requested_model="m", request=b'{"messages":[]}')


def test_ids_repeat_for_no_seed_and_leave_the_apps_random_numbers_alone(call: Any) -> None:
    """Tracing neither uses nor advances ``random``."""

    @rllm.workflow
    def app() -> float:
        random.seed(42)
        call()
        with rllm.agent("a"):
            call()
        return random.random()

    random.seed(42)
    expected = random.random()
    with rllm.collect() as episodes:
        assert [app() for _ in range(4)] == [expected] * 4
    ids = [e.trace_id for e in episodes] + [c.span_id for e in episodes for c in e.calls]
    assert max(Counter(ids).values()) == 1


def test_a_second_end_of_a_call_changes_nothing_and_is_counted() -> None:
    """The record is that of the first end."""

    @rllm.workflow
    def app() -> None:
        opened = open_call(operation="chat", requested_model="m")
        assert opened is not None
        opened.end(_nothing())
        opened.end(_nothing())

    with rllm.collect() as episodes:
        app()
    assert len(episodes[0].calls) == 1
    assert rllm.stats()["dropped"] == {"second end of a call": 1}


def test_the_context_of_an_ended_workflow_starts_no_calls(call: Any) -> None:
    """Code that outlives its workflow is left alone; what it starts is counted as late."""
    kept: list[contextvars.Context] = []

    @rllm.workflow
    def app() -> None:
        kept.append(contextvars.copy_context())

    with rllm.collect() as episodes:
        app()
        assert kept[0].run(call, "late") is None
        assert kept[0].run(rllm.current_episode) is None
        again = kept[0].run(app)
    assert again is None
    assert [texts(episode) for episode in episodes] == [{"app": []}, {"app": []}]
    assert rllm.stats()["late"] == {"start of a call": 1}


def test_an_episode_waits_for_calls_that_were_started_inside(call: Any) -> None:
    """It ends when its workflow has returned and the last call has ended, whichever comes last."""
    opened: list[Any] = []

    @rllm.workflow
    def app() -> str:
        opened.append(open_call(operation="chat", requested_model="m"))
        return "returned"

    with rllm.collect() as episodes:
        app()
        assert list(episodes) == []
        opened[0].end(_nothing())
    assert [(e.termination, len(e.calls), e.open_calls) for e in episodes] == [("completed", 1, 0)]


def test_a_background_tasks_calls_and_rewards_are_part_of_the_episode(call: Any) -> None:
    """A task that is scoring when the workflow returns still counts."""

    @rllm.reward
    async def judged() -> float:
        await asyncio.sleep(0.01)
        call("judging")
        await asyncio.sleep(0)
        return 0.5

    @rllm.workflow
    async def app() -> asyncio.Task[float]:
        task = asyncio.create_task(judged())
        await asyncio.sleep(0)
        return task

    async def main() -> None:
        assert await (await app()) == 0.5

    with rllm.collect() as episodes:
        asyncio.run(main())
    assert [(e.termination, e.reward, len(e.calls)) for e in episodes] == [("completed", 0.5, 1)]


def test_calls_that_are_open_after_the_settle_time_leave_an_unsettled_episode() -> None:
    """The record says how many; what ends later is late, counted, and not in the record."""
    rllm.configure(settle=0.05)
    opened: list[Any] = []

    @rllm.workflow
    def app() -> None:
        opened.append(open_call(operation="chat", requested_model="m"))

    with rllm.collect() as episodes:
        app()
    assert [(e.termination, e.open_calls, len(e.calls)) for e in episodes] == [("unsettled", 1, 0)]
    opened[0].end(_nothing())
    assert rllm.stats()["late"] == {"chat": 1}
    assert [len(e.calls) for e in episodes] == [0]


def test_a_span_to_the_users_own_trace_is_a_link(call: Any) -> None:
    """Their current span is linked to, never used as a parent, and stays current."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider

    from rllm_trace.exporters import MemoryExporter

    memory = MemoryExporter()
    rllm.configure(exporters=[memory])
    tracer = TracerProvider().get_tracer("theirs")

    @rllm.workflow
    def app() -> None:
        call()
        assert trace.get_current_span() is theirs

    with tracer.start_as_current_span("request") as theirs:
        app()
    assert rllm.flush()
    context = theirs.get_span_context()
    root = next(span for span in memory.spans if span.name == "invoke_workflow app")
    assert [(link.context.trace_id, link.context.span_id) for link in root.links] == [(context.trace_id, context.span_id)]
    assert root.parent is None
    assert root.context.trace_id != context.trace_id
    assert type(trace.get_tracer_provider()).__name__ == "ProxyTracerProvider"


def test_the_scope_is_gone_after_every_way_out() -> None:
    """Return, exception and cancellation all restore what was before."""

    @rllm.workflow
    async def app(how: str) -> None:
        with rllm.agent("a"):
            if how == "raise":
                raise ValueError
            await asyncio.sleep(0 if how == "return" else 60)

    async def main() -> None:
        await app("return")
        assert current() is None
        with pytest.raises(ValueError, match=r"^$"):
            await app("raise")
        assert current() is None
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(app("hang"), 0.01)
        assert current() is None

    with rllm.collect() as episodes:
        asyncio.run(main())
    assert [e.termination for e in episodes] == ["completed", "failed", "cancelled"]
