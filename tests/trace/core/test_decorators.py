"""Decorated code does the same work, gives the same objects, and stays what it was."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import gc
import inspect
import pickle
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np
import pytest

import rllm_trace as rllm
from rllm_trace._context import current


@rllm.workflow
def plain(question: str, *, times: int = 2) -> list[str]:
    """Repeats a question."""
    return [question] * times


@rllm.workflow
async def coroutine(question: str) -> str:
    return question


@rllm.workflow
def generator(n: int) -> Iterator[int]:
    yield from range(n)


@rllm.workflow
async def async_generator(n: int) -> AsyncIterator[int]:
    for i in range(n):
        yield i


@rllm.agent("solver")
def solve(x: int) -> int:
    return x + 1


@rllm.tool
def search(query: str) -> str:
    return query.upper()


@rllm.reward
def right(answer: str) -> float:
    return 1.0


@rllm.no_train
def judge(x: int) -> int:
    return x


class Team:
    def __init__(self, factor: int = 3) -> None:
        self.factor = factor

    @rllm.workflow
    def run(self, x: int) -> int:
        return x * self.factor

    @rllm.workflow
    @classmethod
    def make(cls, factor: int) -> Team:
        return cls(factor)

    @staticmethod
    @rllm.workflow
    def double(x: int) -> int:
        return 2 * x

    @rllm.workflow
    @staticmethod
    def triple(x: int) -> int:
        return 3 * x


class Callable_:
    def __init__(self, factor: int) -> None:
        self.factor = factor

    def __call__(self, x: int) -> int:
        return x * self.factor


DECORATED: list[Callable[..., Any]] = [plain, coroutine, generator, async_generator, solve, search, right, judge]


def test_the_kind_of_a_function_is_kept() -> None:
    """A decorated function is a function of the same kind, as ``inspect`` sees it."""
    assert all(inspect.isfunction(function) for function in DECORATED)
    assert [inspect.iscoroutinefunction(function) for function in DECORATED] == [False, True, False, False, False, False, False, False]
    assert [inspect.isgeneratorfunction(function) for function in DECORATED] == [False, False, True, False, False, False, False, False]
    assert [inspect.isasyncgenfunction(function) for function in DECORATED] == [False, False, False, True, False, False, False, False]


def test_name_docstring_and_signature_are_the_functions_own() -> None:
    """What ``help`` shows is unchanged."""
    assert plain.__name__ == "plain"
    assert plain.__doc__ == "Repeats a question."
    assert plain.__qualname__ == "plain"
    assert plain.__module__ == __name__
    assert str(inspect.signature(plain)) == "(question: 'str', *, times: 'int' = 2) -> 'list[str]'"


@pytest.mark.parametrize("function", DECORATED, ids=lambda function: function.__name__)
def test_decorated_functions_pickle_by_qualified_name(function: Callable[..., Any]) -> None:
    """Unpickling gives the very same function."""
    assert pickle.loads(pickle.dumps(function)) is function
    assert pickle.loads(pickle.dumps(Team.run)) is Team.run


@pytest.mark.parametrize("recording", [False, True])
def test_results_and_exceptions_are_the_same_objects(recording: bool) -> None:
    """What the code returns, yields and raises passes through untouched, recorded or not."""
    marker = object()
    error = KeyError("mine")

    @rllm.workflow
    def gives() -> object:
        return marker

    @rllm.workflow
    def raises() -> None:
        raise error

    @rllm.workflow
    async def raises_later() -> None:
        raise error

    @rllm.workflow
    def yields() -> Iterator[object]:
        yield marker
        raise error

    def everything() -> None:
        assert gives() is marker
        with pytest.raises(KeyError) as caught:
            raises()
        assert caught.value is error
        with pytest.raises(KeyError) as caught:
            asyncio.run(raises_later())
        assert caught.value is error
        steps = yields()
        assert next(steps) is marker
        with pytest.raises(KeyError) as caught:
            next(steps)
        assert caught.value is error

    if recording:
        with rllm.collect() as episodes:
            everything()
        assert [episode.termination for episode in episodes] == ["completed", "failed", "failed", "failed"]
    else:
        everything()


def test_methods_of_every_sort_can_be_decorated() -> None:
    """Methods bind, class and static methods stay what they are, in either order of decorators."""
    with rllm.collect() as episodes:
        team = Team.make(5)
        assert (team.run(2), Team.double(4), team.triple(4), Team().triple(1)) == (10, 8, 12, 3)
    assert [episode.workflow for episode in episodes] == ["make", "run", "double", "triple", "triple"]
    assert [episode.input for episode in episodes] == [{"factor": 5}, {"x": 2}, {"x": 4}, {"x": 4}, {"x": 1}]


def test_partials_and_callable_objects_stay_what_they_were() -> None:
    """A partial is a partial with its arguments, an object keeps its attributes, a bound method its object; all pickle and record."""
    partial = rllm.workflow(functools.partial(Team.__init__, factor=9))
    assert isinstance(partial, functools.partial)
    assert partial.keywords == {"factor": 9}
    scaled = rllm.workflow(functools.partial(pow, 2))
    thing = rllm.workflow(Callable_(7))
    bound = rllm.workflow(Team(4).run)
    with rllm.collect() as episodes:
        assert (scaled(5), thing(2), bound(2)) == (32, 14, 8)
        assert pickle.loads(pickle.dumps(scaled))(3) == 8
        assert pickle.loads(pickle.dumps(thing))(3) == 21
    assert (thing.factor, isinstance(thing, Callable_)) == (7, True)
    thing.factor = 10
    assert thing(2) == 20
    assert [episode.workflow for episode in episodes] == ["pow", "Callable_", "run", "pow", "Callable_"]


def test_a_callable_object_with_an_async_call_is_recorded_while_it_runs(call: Any) -> None:
    """``async def __call__`` counts as a coroutine function."""

    class Async:
        async def __call__(self, x: int) -> int:
            await asyncio.sleep(0)
            call("inside")
            return x

    app = rllm.workflow(Async())
    with rllm.collect() as episodes:
        assert asyncio.run(app(3)) == 3
    assert [len(episode.calls) for episode in episodes] == [1]


def test_what_cannot_be_decorated_is_refused_with_what_to_do() -> None:
    """A class, a value and an empty name each get one clear error."""
    with pytest.raises(rllm.ConfigurationError, match=r"got the class .*Team; decorate the method"):
        rllm.workflow(Team)
    with pytest.raises(rllm.ConfigurationError, match="got 3 of type int; expected a function"):
        rllm.tool(3)  # type: ignore[arg-type]
    with pytest.raises(rllm.ConfigurationError, match=r'such as @rllm\.agent\("solver"\)'):
        rllm.agent("")
    with pytest.raises(rllm.ConfigurationError, match="got '' as the name of a workflow"):
        rllm.workflow(name="")
    with pytest.raises(rllm.ConfigurationError, match="got session_id=3; expected a string, or a function"):
        rllm.workflow(session_id=3)  # type: ignore[call-overload]
    with pytest.raises(rllm.ConfigurationError, match="got metadata=3; expected a dict"):
        rllm.workflow(metadata=3)  # type: ignore[call-overload]


def test_a_cached_function_keeps_its_cache() -> None:
    """What ``functools.cache`` adds to a function is there on the decorated one, and the cache is the same."""

    @rllm.workflow
    @functools.cache
    def double(x: int) -> int:
        return 2 * x

    assert (double(3), double(3), double.cache_info().hits) == (6, 6, 1)
    double.cache_clear()
    assert double.cache_info().currsize == 0


def test_a_generator_keeps_send_throw_close_and_its_return_value(call: Any) -> None:
    """The body sees what the consumer does, and the consumer what the body does."""
    seen: list[Any] = []

    @rllm.workflow
    def talk() -> Iterator[Any]:
        try:
            seen.append((yield "first"))
            try:
                yield "second"
            except ValueError as error:
                seen.append(error)
            call("in the body")
            yield "third"
        finally:
            seen.append("closed")
        return "returned"

    error = ValueError("thrown")
    with rllm.collect() as episodes:
        steps = talk()
        assert next(steps) == "first"
        assert steps.send("sent") == "second"  # type: ignore[attr-defined]
        assert steps.throw(error) == "third"  # type: ignore[attr-defined]
        with pytest.raises(StopIteration) as stop:
            next(steps)
        assert stop.value.value == "returned"
    assert seen == ["sent", error, "closed"]
    assert [(episode.termination, episode.output, len(episode.calls)) for episode in episodes] == [
        ("completed", ["first", "second", "third"], 1)
    ]


def test_closing_a_generator_ends_its_episode_as_completed() -> None:
    """A consumer that has enough is no failure; a body that ignores the close fails as it would without us."""

    @rllm.workflow
    def stubborn() -> Iterator[int]:
        try:
            yield 1
        except GeneratorExit:
            yield 2

    with rllm.collect() as episodes:
        steps = generator(5)
        assert next(steps) == 0
        steps.close()  # type: ignore[attr-defined]
        for value in generator(9):
            assert value == 0
            break
        never_started = generator(3)
        del never_started
        other = stubborn()
        next(other)
        with pytest.raises(RuntimeError, match="generator ignored GeneratorExit"):
            other.close()  # type: ignore[attr-defined]
        del other
        gc.collect()
    assert [(episode.termination, episode.output) for episode in episodes] == [
        ("completed", [0]),
        ("completed", [0]),
        ("completed", [1, 2]),
    ]


def test_an_async_generator_keeps_asend_athrow_and_aclose() -> None:
    """The asynchronous protocol reaches the body unchanged."""
    seen: list[Any] = []
    error = ValueError("thrown")

    @rllm.workflow
    async def talk() -> AsyncIterator[Any]:
        try:
            seen.append((yield "first"))
            try:
                yield "second"
            except ValueError as caught:
                seen.append(caught)
            yield "third"
        finally:
            await asyncio.sleep(0)
            seen.append("closed")

    async def main() -> None:
        steps: Any = talk()
        assert await steps.__anext__() == "first"
        assert await steps.asend("sent") == "second"
        assert await steps.athrow(error) == "third"
        await steps.aclose()
        with pytest.raises(StopAsyncIteration):
            await steps.__anext__()

    with rllm.collect() as episodes:
        asyncio.run(main())
    assert seen == ["sent", error, "closed"]
    assert [(episode.termination, episode.output) for episode in episodes] == [("completed", ["first", "second", "third"])]


def test_a_generators_scope_never_reaches_its_consumer(call: Any) -> None:
    """Between two steps the consumer's code is outside the workflow."""

    @rllm.workflow
    def steps() -> Iterator[int]:
        for i in range(3):
            call(f"inside {i}")
            yield i

    with rllm.collect() as episodes:
        for _ in steps():
            assert current() is None
            assert call("outside") is None
        assert current() is None
    assert [[message["content"] for c in episode.calls for message in c.messages] for episode in episodes] == [
        ["inside 0", "inside 1", "inside 2"]
    ]


def test_an_agent_opened_in_a_generator_is_there_again_at_its_next_step(call: Any) -> None:
    """A ``with`` block inside the body spans its steps, and still does not reach the consumer."""

    @rllm.workflow
    def steps() -> Iterator[int]:
        with rllm.agent("solver"):
            call("a")
            yield 1
            call("b")
            yield 2
        call("c")

    with rllm.collect() as episodes:
        for _ in steps():
            assert current() is None
    trajectories = {t.name: [c.messages[0]["content"] for c in t.calls] for t in episodes[0].trajectories}
    assert trajectories == {"steps": ["c"], "solver": ["a", "b"]}


def test_generators_of_two_workflows_may_be_driven_in_turns_in_one_thread(call: Any) -> None:
    """Interleaved steps land in their own episodes."""

    @rllm.workflow
    def steps(name: str) -> Iterator[None]:
        for i in range(3):
            call(f"{name}{i}")
            yield

    with rllm.collect() as episodes:
        for _ in zip(steps("a"), steps("b"), strict=True):
            pass
    assert [[c.messages[0]["content"] for c in episode.calls] for episode in episodes] == [["a0", "a1", "a2"], ["b0", "b1", "b2"]]


def test_a_generator_may_be_driven_in_a_different_context_at_each_step(call: Any) -> None:
    """Nothing is "created in a different Context", and none of the contexts keeps our scope."""

    @rllm.workflow
    def steps() -> Iterator[int]:
        with rllm.agent("solver"):
            for i in range(4):
                call(f"{i}")
                yield i

    contexts = [contextvars.copy_context() for _ in range(5)]
    with rllm.collect() as episodes:
        running = steps()
        assert [contexts[i].run(next, running) for i in range(4)] == [0, 1, 2, 3]
        with pytest.raises(StopIteration):
            contexts[4].run(next, running)
    assert [context.run(current) for context in contexts] == [None] * 5
    assert [c.messages[0]["content"] for c in episodes[0].calls] == ["0", "1", "2", "3"]
    assert episodes[0].trajectories[0].name == "solver"


def test_an_async_generator_may_be_consumed_in_a_task_for_each_step(call: Any) -> None:
    """As a web server does that streams in another task than the one that made the generator."""

    @rllm.workflow
    async def steps() -> AsyncIterator[int]:
        with rllm.agent("solver"):
            for i in range(4):
                await asyncio.sleep(0)
                call(f"{i}")
                yield i

    async def main() -> None:
        running: Any = steps()
        for i in range(2):
            assert await asyncio.create_task(running.__anext__()) == i
            assert current() is None
        await asyncio.create_task(running.aclose())

    with rllm.collect() as episodes:
        asyncio.run(main())
    assert [c.messages[0]["content"] for c in episodes[0].calls] == ["0", "1"]
    assert episodes[0].termination == "completed"


def test_an_abandoned_async_generator_ends_with_its_finalizer(call: Any) -> None:
    """A consumer that breaks off leaves no open episode and no warning behind; the event loop closes the generator."""

    @rllm.workflow
    async def steps() -> AsyncIterator[int]:
        for i in range(4):
            call(f"{i}")
            yield i

    async def main() -> None:
        async for _ in steps():
            break
        assert current() is None
        await asyncio.sleep(0)

    with rllm.collect() as episodes:
        asyncio.run(main())
    assert [(episode.termination, len(episode.calls)) for episode in episodes] == [("completed", 1)]


def test_a_coroutine_finalized_in_another_workflow_leaves_that_ones_scope_alone() -> None:
    """The garbage collector may end a coroutine anywhere; only its own scope is taken away."""

    class Pause:
        def __await__(self) -> Iterator[None]:
            yield

    @rllm.workflow
    async def left() -> None:
        await Pause()

    @rllm.workflow
    def right_here() -> None:
        before = current()
        orphans.pop().close()
        assert current() is before

    orphans: list[Any] = []
    with rllm.collect() as episodes:
        running = left()
        contextvars.copy_context().run(running.send, None)
        orphans.append(running)
        del running
        right_here()
    assert sorted((episode.workflow, episode.termination) for episode in episodes) == [("left", "cancelled"), ("right_here", "completed")]


def test_a_cancelled_workflow_is_cancelled_not_failed() -> None:
    """Cancellation and interrupts end an episode as such, and pass through."""

    @rllm.workflow
    async def waits() -> None:
        await asyncio.sleep(60)

    @rllm.workflow
    def interrupted() -> None:
        raise KeyboardInterrupt

    async def main() -> None:
        task = asyncio.create_task(waits())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with rllm.collect() as episodes:
        asyncio.run(main())
        with pytest.raises(KeyboardInterrupt):
            interrupted()
    assert [(episode.termination, episode.error and episode.error.type) for episode in episodes] == [
        ("cancelled", "asyncio.exceptions.CancelledError"),
        ("cancelled", "KeyboardInterrupt"),
    ]


def test_recursion_is_one_episode(call: Any) -> None:
    """A workflow that calls itself is a span of the outer one."""

    @rllm.workflow
    def countdown(n: int) -> int:
        call(str(n))
        return countdown(n - 1) if n else 0

    with rllm.collect() as episodes:
        countdown(3)
    assert [(episode.workflow, len(episode.calls), len(episode.trajectories)) for episode in episodes] == [("countdown", 4, 1)]


def test_input_and_output_are_copies() -> None:
    """What the app changes later does not change the record, and what cannot be copied becomes its repr."""

    class Strange:
        def __repr__(self) -> str:
            return "<strange>"

        def __deepcopy__(self, memo: object) -> None:
            raise RuntimeError("no copy")

    class Broken:
        __qualname__ = "Broken"

        def __repr__(self) -> str:
            raise RuntimeError("no repr")

    @rllm.workflow
    def app(rows: list[Any], *extra: Any, **more: Any) -> list[Any]:
        rows.append("later")
        return rows

    result: list[Any] = []
    with rllm.collect() as episodes:
        result = app([1, {"a": (2, 3)}], Strange(), key=Broken())
        result.append("even later")
    episode = episodes[0]
    assert episode.input == {"rows": [1, {"a": (2, 3)}], "extra": ("<strange>",), "more": {"key": "<Broken, unreadable: RuntimeError>"}}
    assert episode.output == [1, {"a": (2, 3)}, "later"]


def test_wrong_arguments_raise_the_functions_own_error() -> None:
    """A TypeError of a call is the one that it would be without us, and the episode has failed with it."""
    with rllm.collect() as episodes, pytest.raises(TypeError, match=r"plain\(\) missing 1 required positional argument: 'question'"):
        plain()  # type: ignore[call-arg]
    assert [(episode.termination, episode.input) for episode in episodes] == [("failed", {"args": ()})]


def test_tools_are_recorded_with_arguments_results_and_errors() -> None:
    """Each run of a tool inside a workflow is one ToolCall of the trajectory that it ran in."""

    @rllm.tool(name="divide")
    def divides(a: int, b: int) -> float:
        return a / b

    @rllm.workflow
    def app() -> None:
        search("x")
        with rllm.agent("solver"), pytest.raises(ZeroDivisionError):
            divides(1, b=0)

    search("outside: recorded nowhere")
    with rllm.collect() as episodes:
        app()
    default, solver = episodes[0].trajectories
    assert [(tool.name, tool.arguments, tool.result, tool.error) for tool in default.tools] == [("search", {"query": "x"}, "X", None)]
    assert [(tool.name, tool.arguments, tool.error and tool.error.type) for tool in solver.tools] == [
        ("divide", {"a": 1, "b": 0}, "ZeroDivisionError")
    ]


def test_no_train_marks_calls_as_recorded_but_not_trained(call: Any) -> None:
    """As a decorator, as ``with no_train:`` and as ``with no_train():``; outside it calls are trained again."""

    @rllm.no_train
    def untrained() -> None:
        call("decorated")

    @rllm.workflow
    def app() -> None:
        untrained()
        with rllm.no_train:
            call("block")
            with rllm.no_train(), rllm.agent("inner"):
                call("nested")
        call("trained")

    with rllm.no_train:
        assert call("outside a workflow") is None
    with rllm.collect() as episodes:
        app()
    assert {c.messages[0]["content"]: (c.no_train, c.trainable) for c in episodes[0].calls} == {
        "decorated": (True, False),
        "block": (True, False),
        "nested": (True, False),
        "trained": (False, True),
    }


def test_each_entry_of_one_agent_object_is_a_trajectory_of_its_own(call: Any) -> None:
    """An agent may be kept and entered again, also inside itself."""
    solver = rllm.agent("solver")

    @rllm.workflow
    def app() -> None:
        with solver:
            call("outer")
            with solver:
                call("inner")
            call("outer again")
        with solver:
            call("second")

    with rllm.collect() as episodes:
        app()
    assert [(t.name, [c.messages[0]["content"] for c in t.calls]) for t in episodes[0].trajectories] == [
        ("solver", ["outer", "outer again"]),
        ("solver", ["inner"]),
        ("solver", ["second"]),
    ]


def test_an_agent_may_be_a_coroutine_function_or_a_generator(call: Any) -> None:
    """Decorated agents of every kind are trajectories."""

    @rllm.agent("async")
    async def thinks() -> None:
        call("a")

    @rllm.agent("generator")
    def streams() -> Iterator[int]:
        call("b")
        yield 1
        call("c")

    @rllm.workflow
    async def app() -> None:
        await thinks()
        for _ in streams():
            call("consumer")

    with rllm.collect() as episodes:
        asyncio.run(app())
    assert {t.name: [c.messages[0]["content"] for c in t.calls] for t in episodes[0].trajectories} == {
        "app": ["consumer"],
        "async": ["a"],
        "generator": ["b", "c"],
    }


def test_the_workflows_own_name_session_and_metadata_are_in_the_record() -> None:
    """Given at the decorator, or for each run from its arguments and from inside."""

    @rllm.workflow(name="chat", session_id=lambda user, **_: f"s-{user}", metadata={"version": 2})
    def app(user: str) -> str:
        episode = rllm.current_episode()
        assert episode is not None
        episode.set(tags=["a", "b"], version=3)
        return episode.id

    with rllm.collect() as episodes:
        identity = app("ann")
    assert rllm.current_episode() is None
    episode = episodes[0]
    assert (episode.workflow, episode.session_id, episode.metadata, episode.id) == (
        "chat",
        "s-ann",
        {"version": 3, "tags": ["a", "b"]},
        identity,
    )


def test_secrets_are_in_no_record() -> None:
    """A text under a name that says so is withheld from the input, and a key that an error quotes from its message."""

    @rllm.workflow
    def app(question: str, api_key: str, settings: dict[str, Any]) -> None:
        raise ValueError("Incorrect API key provided: sk-proj-abcdefgh1234, header was Bearer abc.def-ghi_jkl")

    with rllm.collect() as episodes, pytest.raises(ValueError, match="Incorrect"):
        app("what is my password?", "sk-1", {"db": [{"Password": "hunter2", "user": "ann"}], "max_tokens": 5, "openai_api_key": "x"})
    (episode,) = episodes
    assert episode.input == {
        "question": "what is my password?",
        "api_key": "[withheld]",
        "settings": {"db": [{"Password": "[withheld]", "user": "ann"}], "max_tokens": 5, "openai_api_key": "[withheld]"},
    }
    assert episode.error is not None
    assert episode.error.message == "Incorrect API key provided: [withheld], header was [withheld]"


def test_a_workflow_that_returns_work_undone_warns() -> None:
    """A plain function that returns a coroutine has ended before its work begins: said once, with what to decorate instead."""

    async def work() -> int:
        return 1

    @rllm.workflow
    def app() -> Any:
        return work()

    with rllm.collect() as episodes, pytest.warns(rllm.RllmWarning, match=r"'app' returned a coroutine .* decorate the function that"):
        result = app()
    assert asyncio.run(result) == 1
    assert [episode.termination for episode in episodes] == ["completed"]


def test_a_large_array_is_named_not_copied() -> None:
    """Numbers by the million stay with the app, however deep they lie; a small array is recorded as its list."""
    lists: list[Any] = []

    class Image(np.ndarray[Any, Any]):
        def tolist(self) -> Any:
            lists.append(self)
            return super().tolist()

    @rllm.workflow
    def app(image: Any, mask: Any) -> Any:
        return {"frames": [image]}

    with rllm.collect() as episodes:
        app(np.zeros((1024, 1024), dtype=np.float32).view(Image), np.array([1, 0]))
    assert (episodes[0].input["mask"], lists) == ([1, 0], [])
    assert episodes[0].input["image"].endswith("Image of 4194304 bytes, too large to record>")
    assert episodes[0].output == {"frames": [episodes[0].input["image"]]}


def test_a_function_that_is_decorated_in_passing_is_not_kept() -> None:
    """An app may decorate what it defines inside a request: what that holds goes when the app lets it go."""

    class Held:
        pass

    def once() -> weakref.ref[Held]:
        held = Held()

        @rllm.workflow
        def app(question: str) -> str:
            return question if held else ""

        @rllm.reward
        def right(output: str) -> float:
            return float(bool(held))

        with rllm.collect() as episodes:
            right(output=app("a"))
        assert episodes[0].output == "a"
        return weakref.ref(held)

    held = once()
    gc.collect()
    assert held() is None
