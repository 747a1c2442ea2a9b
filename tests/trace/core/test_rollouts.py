"""A rollout's handle gets every episode that starts inside it, with tokens, and always in the end."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from typing import Any

import rllm_trace as rllm
from rllm_trace._calls import open_call
from rllm_trace._context import current
from rllm_trace._recorder import recorder
from rllm_trace.rollouts import current_rollout, rollout
from rllm_trace.routing import Route, current_route


def test_every_episode_inside_belongs_to_the_handle(call: Any) -> None:
    """With the task's id, the rollout's metadata, and tokens asked for."""

    @rllm.workflow(metadata={"app": 1})
    def app(n: int) -> tuple[bool, int | None] | None:
        opened = open_call(operation="chat", requested_model="m")
        if opened is None:
            return None
        wants, seed = opened.wants_tokens, opened.scope.episode.seed
        call()
        opened.end(_data())
        return wants, seed

    with rollout(task_id="t7", metadata={"index": 3}, seed=11) as handle:
        app(1)
        app(2)
    assert app(3) is None
    episodes = handle.wait(5)
    assert [(e.task_id, e.metadata, e.output, len(e.calls)) for e in episodes] == [("t7", {"index": 3, "app": 1}, (True, 11), 2)] * 2
    assert handle.wait(0) is episodes
    assert current_rollout() is None
    assert recorder.rollouts == 0


def _data() -> Any:
    from rllm_trace._calldata import CallData

    return CallData(operation="chat", model="m", requested_model="m", request=b'{"messages":[]}')


def test_five_hundred_rollouts_in_one_loop_never_mix(call: Any) -> None:
    """Each handle has its own episode, whichever ends first."""

    @rllm.workflow
    async def app(n: int) -> int:
        await asyncio.sleep(0.001 * (n % 7))
        call(f"{n}")
        return n

    async def one(n: int) -> tuple[int, list[Any]]:
        with rollout(task_id=f"t{n}", metadata={"n": n}) as handle:
            await app(n)
        episodes = await handle.wait_async(10)
        return n, [(e.task_id, e.output, e.metadata, [c.messages[0]["content"] for c in e.calls]) for e in episodes]

    async def main() -> list[tuple[int, list[Any]]]:
        return await asyncio.gather(*(one(n) for n in range(500)))

    assert asyncio.run(main()) == [(n, [(f"t{n}", n, {"n": n}, [f"{n}"])]) for n in range(500)]


def test_a_rollouts_route_is_carried_into_threads() -> None:
    """Where calls go is known wherever they are made."""
    route = Route(base_url="http://127.0.0.1:1/v1", api_key="k", model="policy")
    seen: list[Any] = []

    @rllm.workflow
    def app() -> None:
        thread = threading.Thread(target=lambda: seen.append(current_route()))
        thread.start()
        thread.join()

    with rollout():
        app()
    with rollout(route=route):
        app()
        assert current_route() is route
    assert seen == [None, route]
    assert current_route() is None


def test_waiting_ends_at_the_deadline_with_what_there_is(call: Any) -> None:
    """A hung app is a timeout; the handle has its calls, and what comes later does not change the record."""
    release, running = threading.Event(), threading.Event()

    @rllm.workflow
    def hangs() -> None:
        call("before")
        running.set()
        release.wait(10)
        call("after")

    with rollout(task_id="t") as handle:
        thread = threading.Thread(target=hangs)
        thread.start()
        assert running.wait(10)
    (episode,) = handle.wait(0.02)
    release.set()
    thread.join()
    assert (episode.termination, [c.messages[0]["content"] for c in episode.calls]) == ("timeout", ["before"])
    assert handle.open_episodes == []
    assert len(handle.episodes) == 1
    assert rllm.stats()["late"] == {"start of a call": 1, "episode": 1}


def test_an_expired_episode_is_delivered_at_once_with_the_reason() -> None:
    """The runner decides that it has taken too long."""
    release, running = threading.Event(), threading.Event()

    @rllm.workflow
    def hangs() -> None:
        opened = open_call(operation="chat", requested_model="m")
        running.set()
        release.wait(10)
        assert opened is not None
        opened.end(_data())

    with rollout() as handle:
        thread = threading.Thread(target=hangs)
        thread.start()
        assert running.wait(10)
        assert handle.expire("no answer within 3 s") == 1
        assert handle.expire("again") == 0
    (episode,) = handle.wait(5)
    release.set()
    thread.join()
    assert (episode.termination, episode.open_calls, list(episode.calls)) == ("timeout", 1, [])
    assert episode.error is not None
    assert (episode.error.type, episode.error.message) == ("rllm_trace.EpisodeTimeout", "no answer within 3 s")


def test_what_starts_after_a_rollout_was_left_does_not_belong_to_it() -> None:
    """A context that was kept finds it closed."""
    kept: list[contextvars.Context] = []

    @rllm.workflow
    def app() -> None:
        pass

    with rollout() as handle:
        kept.append(contextvars.copy_context())
    kept[0].run(app)
    assert handle.wait(0.1) == []
    assert kept[0].run(current_rollout) is None


def test_collect_around_a_rollout_gets_its_episodes_too(call: Any) -> None:
    """Both lists hold the same record."""

    @rllm.workflow
    def app() -> None:
        call()

    with rllm.collect() as episodes, rollout(task_id="t") as handle:
        app()
    assert handle.wait(5)[0] is episodes[0]


def test_a_failed_app_is_an_episode_of_its_rollout(call: Any) -> None:
    """With its calls and the error."""

    @rllm.workflow
    def app() -> None:
        call()
        raise ValueError("x" * 5000)

    with rollout() as handle, contextlib.suppress(ValueError):
        app()
    (episode,) = handle.wait(5)
    assert episode.error is not None
    assert (episode.termination, len(episode.calls), episode.error.type, len(episode.error.message)) == ("failed", 1, "ValueError", 2000)


def test_nested_rollouts_each_get_their_own() -> None:
    """The innermost counts; the outer one is there again afterwards."""

    @rllm.workflow
    def app(n: int) -> int:
        return n

    with rollout(task_id="outer") as outer:
        with rollout(task_id="inner") as inner:
            app(1)
        app(2)
    assert [(e.task_id, e.output) for e in inner.wait(5)] == [("inner", 1)]
    assert [(e.task_id, e.output) for e in outer.wait(5)] == [("outer", 2)]


def test_a_finished_thread_keeps_no_episode_alive(call: Any) -> None:
    """A worker that was started inside a workflow and lives on holds the scope, not the records."""
    held: list[Any] = []

    @rllm.workflow
    def app() -> None:
        call()
        held.append(current())

    with rollout() as handle:
        app()
    assert len(handle.wait(5)) == 1
    episode = held[0].episode
    assert (episode.spans, episode.inboxes, episode.rollout) == ([], (), None)
