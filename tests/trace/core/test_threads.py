"""Threads and executors carry the scope of a workflow, and nothing outside one."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool
from typing import Any

import pytest

import rllm_trace as rllm
from rllm_trace._context import current
from rllm_trace.rollouts import current_rollout, rollout


def join(thread: threading.Thread) -> None:
    thread.start()
    thread.join()


class Subclass(threading.Thread):
    """A thread that overrides ``run``, as many frameworks do."""

    def __init__(self, work: Any) -> None:
        super().__init__()
        self.work = work

    def run(self) -> None:
        self.work()


def with_timer(work: Any) -> None:
    join(threading.Timer(0.0, work))


def with_pool(work: Any) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()


def with_map(work: Any) -> None:
    with ThreadPoolExecutor(1) as pool:
        list(pool.map(lambda _: work(), [0]))


def with_run_in_executor(work: Any) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, work)
        await asyncio.to_thread(work)

    asyncio.run(main())


def with_thread_pool(work: Any) -> None:
    with ThreadPool(1) as pool:
        pool.apply(work)


def with_loop_in_thread(work: Any) -> None:
    async def main() -> None:
        await asyncio.sleep(0)
        work()

    join(threading.Thread(target=asyncio.run, args=(main(),)))


def with_thread_in_thread(work: Any) -> None:
    join(threading.Thread(target=lambda: join(threading.Thread(target=work))))


@pytest.mark.parametrize(
    "way, calls",
    [
        (lambda work: join(threading.Thread(target=work)), 1),
        (lambda work: join(Subclass(work)), 1),
        (with_timer, 1),
        (with_pool, 1),
        (with_map, 1),
        (with_run_in_executor, 2),
        (with_thread_pool, 1),
        (with_loop_in_thread, 1),
        (with_thread_in_thread, 1),
    ],
    ids=["Thread", "subclass", "Timer", "submit", "map", "run_in_executor", "ThreadPool", "asyncio.run", "nested"],
)
def test_every_way_to_a_thread_keeps_the_agent(call: Any, way: Any, calls: int) -> None:
    """A call made there lands in the trajectory that started it."""

    @rllm.workflow
    def app() -> None:
        with rllm.agent("solver"):
            way(lambda: call("threaded"))

    with rllm.collect() as episodes:
        app()
    assert [(t.name, len(t.calls)) for t in episodes[0].trajectories] == [("solver", calls)]


def test_an_executor_made_before_the_workflow_carries_it_too(call: Any) -> None:
    """Each piece of work runs in the scope that handed it in."""

    @rllm.workflow
    def app(n: int) -> None:
        pool.submit(call, f"{n}").result()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        with rllm.collect() as episodes:
            app(1)
            app(2)
            assert pool.submit(call, "outside").result() is None
    assert [[c.messages[0]["content"] for c in e.calls] for e in episodes] == [["1"], ["2"]]


def test_a_worker_started_by_a_workflow_does_not_keep_its_scope(call: Any) -> None:
    """The pool outlives the workflow: work from outside is outside, while the first workflow is still open too."""

    @rllm.workflow
    def app() -> None:
        pool.submit(call, "inside").result()
        outside.put(contextvars.Context().run(pool.submit, current).result())

    outside: queue.Queue[Any] = queue.Queue()
    with ThreadPoolExecutor(1) as pool, rllm.collect() as episodes:
        app()
    assert outside.get() is None
    assert len(episodes[0].calls) == 1


def test_outside_a_workflow_threads_are_left_alone() -> None:
    """The wrapper is there and does nothing: the thread's own ``run`` is untouched."""
    with rllm.collect():
        rllm.workflow(lambda: None)()
    seen: list[Any] = []
    thread = Subclass(lambda: seen.append((current(), "run" in vars(thread))))
    join(thread)
    assert seen == [(None, False)]


def test_only_our_own_variables_travel() -> None:
    """A context variable of the app has in the thread the value that it would have without us."""
    theirs: contextvars.ContextVar[str] = contextvars.ContextVar("theirs", default="default")
    seen: list[str] = []

    @rllm.workflow
    def app() -> None:
        theirs.set("changed")
        join(threading.Thread(target=lambda: seen.append(theirs.get())))
        with_pool(lambda: seen.append(theirs.get()))

    with rllm.collect():
        app()
    assert seen == ["default", "default"]


def test_a_thread_gets_its_own_run_back() -> None:
    """What we put on the thread object is gone when its work begins, also where the app had put something there itself."""
    seen: list[Any] = []

    def own() -> None:
        seen.append(vars(replaced).get("run"))

    def look() -> None:
        seen.append("run" in vars(plain))

    plain = threading.Thread(target=look)
    replaced = threading.Thread()
    replaced.run = own  # type: ignore[method-assign]

    @rllm.workflow
    def app() -> None:
        join(plain)
        join(replaced)
        with pytest.raises(RuntimeError, match="threads can only be started once"):
            plain.start()

    with rllm.collect():
        app()
    assert seen == [False, own]
    assert "run" not in vars(plain)


def test_results_and_exceptions_of_an_executor_are_the_works_own() -> None:
    """Futures give the same objects."""
    marker, error = object(), KeyError("x")

    def fails() -> None:
        raise error

    @rllm.workflow
    def app() -> None:
        with ThreadPoolExecutor(2) as pool:
            assert pool.submit(lambda *a, **k: (marker, a, k), 1, fn=2).result() == (marker, (1,), {"fn": 2})
            assert pool.submit(fails).exception() is error

    with rllm.collect() as episodes:
        app()
    assert episodes[0].termination == "completed"


def test_a_rollout_is_carried_into_threads_before_its_workflow_starts() -> None:
    """The app may start its workflow in a thread of its own."""

    @rllm.workflow
    def app() -> str:
        found = current_rollout()
        assert found is not None
        return str(found.task_id)

    with rollout(task_id="warm-up"):
        app()
    with rollout(task_id="t1") as handle:
        join(threading.Thread(target=app))
        with_pool(app)
    assert [(episode.task_id, episode.output) for episode in handle.wait(5)] == [("t1", "t1"), ("t1", "t1")]


def test_bind_runs_a_callback_where_it_was_bound(call: Any) -> None:
    """Functions, coroutine functions and generators, called from anywhere; the caller's own scope is there again afterwards."""
    bound: list[Any] = []

    async def coroutine() -> None:
        await asyncio.sleep(0)
        call("coroutine")

    def generator() -> Any:
        call("step 1")
        yield 1
        call("step 2")

    @rllm.workflow
    def app() -> None:
        with rllm.agent("bound"):
            bound.extend(map(rllm.bind, (functools.partial(call, "plain"), coroutine, generator)))
        with rllm.agent("caller"):
            plain, asynchronous, steps = bound
            plain()
            contextvars.Context().run(plain)
            contextvars.Context().run(asyncio.run, asynchronous())
            for _ in steps():
                call("between")

    with rllm.collect() as episodes:
        app()
    assert {t.name: [c.messages[0]["content"] for c in t.calls] for t in episodes[0].trajectories} == {
        "bound": ["plain", "plain", "coroutine", "step 1", "step 2"],
        "caller": ["between"],
    }
    assert current() is None


def test_uninstalling_restores_only_where_ours_is_outermost() -> None:
    """A wrapper of somebody else on top of ours stays, and ours under it does nothing; on top, ours goes."""
    with rllm.collect():
        rllm.workflow(lambda: None)()
    ours = threading.Thread.start
    plain = ours.__wrapped__  # type: ignore[attr-defined]

    def theirs(self: threading.Thread) -> None:
        ours(self)

    threading.Thread.start = theirs  # type: ignore[method-assign]
    try:
        rllm.shutdown()
        assert threading.Thread.start is theirs
        seen: list[Any] = []
        join(threading.Thread(target=lambda: seen.append(1)))
        assert seen == [1]
    finally:
        threading.Thread.start = ours  # type: ignore[method-assign]
    with rllm.collect():
        rllm.workflow(lambda: None)()
    assert threading.Thread.start is ours
    rllm.shutdown()
    assert threading.Thread.start is plain


def test_attaching_the_headers_of_a_scope_continues_it(call: Any) -> None:
    """Over a hop inside the process: same trajectory, same flags, calls numbered on."""

    @rllm.workflow
    def app() -> dict[str, str]:
        call("before")
        with rllm.agent("sölver, a=b"), rllm.no_train:
            call("own")
            join(contextvars.Context().run(threading.Thread, target=serve, args=(rllm.headers(),)))
        return rllm.headers({"Traceparent": "00-theirs", "Baggage": "user=1,rllm.episode.id=old"})

    def serve(headers: dict[str, str]) -> None:
        pairs = [(name.upper().encode(), value.encode()) for name, value in headers.items()]
        with contextvars.Context().run(lambda: rllm.attach(pairs)):
            call("served")
        assert served_outside.append(current()) is None

    served_outside: list[Any] = []
    with rllm.collect() as episodes:
        headers = app()
    episode = episodes[0]
    assert {t.name: [(c.messages[0]["content"], c.no_train) for c in t.calls] for t in episode.trajectories} == {
        "app": [("before", False)],
        "sölver, a=b": [("own", True), ("served", True)],
    }
    assert headers["Traceparent"] == "00-theirs"
    assert headers["Baggage"].startswith(f"user=1,rllm.episode.id={episode.id},")
    assert headers["x-rllm-parent"] == f"00-{episode.trace_id}-{episode.span_id}-01"


@pytest.mark.parametrize(
    "headers, malformed",
    [
        ({}, 0),
        ({"traceparent": "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01", "baggage": "user=1"}, 0),
        ({"x-rllm-parent": "nonsense", "baggage": "rllm.episode.id=e"}, 1),
        ({"x-rllm-parent": "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"}, 1),
        ({"baggage": "rllm.episode.id=e"}, 1),
        ({"baggage": "rllm.episode.id"}, 0),
    ],
)
def test_headers_that_are_not_ours_attach_nothing(headers: dict[str, str], malformed: int) -> None:
    """The block runs as it would without us; what is malformed is counted."""
    with rllm.attach(headers):
        assert current() is None
    assert rllm.stats()["orphan"] == ({"malformed headers": 1} if malformed else {})


def test_attached_in_another_process_spans_go_to_its_exporters(call: Any) -> None:
    """Under the same trace, parent and episode; the record is made where the episode is."""
    from rllm_trace.exporters import MemoryExporter

    memory = MemoryExporter()
    rllm.configure(exporters=[memory])
    headers = {
        "x-rllm-parent": "00-0123456789abcdef0123456789abcdef-00000000000000aa-01",
        "baggage": "rllm.episode.id=e1,rllm.task.id=t%201,rllm.trajectory.id=00000000000000aa,rllm.trajectory.name=solver",
    }

    @rllm.workflow
    def handler() -> None:
        call("remote")

    with rllm.attach(headers):
        handler()
        episode = rllm.current_episode()
        assert episode is not None
        assert (episode.id, episode.trace_id) == ("e1", "0123456789abcdef0123456789abcdef")
    assert rllm.flush()
    found = {span.name: span for span in memory.spans}
    assert sorted(found) == ["chat m", "invoke_workflow handler"]
    assert found["invoke_workflow handler"].parent.span_id == 0xAA
    assert found["chat m"].parent.span_id == found["invoke_workflow handler"].context.span_id
    assert {span.context.trace_id for span in memory.spans} == {0x0123456789ABCDEF0123456789ABCDEF}
    assert {span.attributes["rllm.episode.id"] for span in memory.spans} == {"e1"}
    assert {span.attributes["rllm.task.id"] for span in memory.spans} == {"t 1"}
    assert found["chat m"].attributes["rllm.trajectory.name"] == "solver"
    assert memory.episodes == []


def test_a_process_that_records_nothing_still_passes_the_headers_on(call: Any) -> None:
    """A hop in the middle keeps the chain."""
    headers = {
        "x-rllm-parent": "00-0123456789abcdef0123456789abcdef-00000000000000aa-01",
        "baggage": "rllm.episode.id=e1,rllm.trajectory.id=00000000000000aa,rllm.trajectory.name=solver",
    }
    with rllm.attach(headers):
        assert call() is None
        assert rllm.headers() == headers
    assert rllm.headers() == {}
