"""``workflow``, ``agent``, ``tool`` and ``no_train``: what each begins when decorated code is entered, and records when it is left.

Where nothing is recorded they cost a few lookups. A workflow outside any other starts an episode; inside one it is a span of it, unless
``new_episode=True``. An agent's entry is a trajectory of its own. Agents, tools and ``no_train`` outside a workflow leave the code alone.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Final, TypeVar, cast, overload

import msgspec

from rllm_trace import attributes as A
from rllm_trace._activity import UNTOUCHED, Activity, arguments, snapshot
from rllm_trace._context import Scope, current
from rllm_trace._episode import IDLE, begin_episode, child_span, recording_scope
from rllm_trace._given import flag
from rllm_trace._guard import guard, warn_once
from rllm_trace._open import OpenEpisode
from rllm_trace._recorder import recorder
from rllm_trace._shapes import wrap
from rllm_trace._spans import Span, error_info, sources
from rllm_trace.exceptions import ConfigurationError
from rllm_trace.types import Termination

__all__ = ["SpanActivity", "agent", "checked_name", "name_of", "no_train", "tool", "workflow"]

F = TypeVar("F", bound=Callable[..., Any])
_UNSTARTED: Final = (types.CoroutineType, types.GeneratorType, types.AsyncGeneratorType)
SessionId = str | Callable[..., str] | None


class SpanActivity(Activity):
    """An agent, a tool, a reward, or a workflow inside another: a span that ends with the code."""

    __slots__ = ("_result_key", "span")

    def __init__(self, scope: Scope, span: Span, result_key: str | None = None) -> None:
        super().__init__(scope)
        self.span = span
        self._result_key = result_key
        """Attribute that the result is kept under; None: it is not kept."""

    def yielded(self, item: Any) -> None:
        if self._result_key is not None:
            with guard("yielded item"):
                self.keep(item)

    def succeed(self, result: Any) -> None:
        try:
            if self._result_key is not None:
                with guard("result"):
                    self.span.facts[self._result_key] = snapshot(result) if self.items is None else self.items
        finally:
            self._end()

    def fail(self, error: BaseException) -> None:
        try:
            with guard("error"):
                self.span.error = error_info(error)
        finally:
            self._end()

    def _end(self) -> None:
        with guard("span"):
            scope = self.scope
            assert scope is not None
            self.span.ended = sources.now()
            scope.episode.end(self.span)


class EpisodeActivity(Activity):
    """A workflow that is an episode."""

    __slots__ = ("episode", "root")

    def __init__(self, scope: Scope, episode: OpenEpisode) -> None:
        super().__init__(scope)
        self.episode = episode
        self.root = episode.root

    def yielded(self, item: Any) -> None:
        if self.episode.keeps_content:
            with guard("yielded item"):
                self.keep(item)

    def succeed(self, result: Any) -> None:
        try:
            if isinstance(result, _UNSTARTED):
                _warn_of_unstarted(self.root.name, cast("object", result))
            if self.episode.keeps_content:
                with guard("output"):
                    self.root.facts[A.EPISODE_OUTPUT] = snapshot(result) if self.items is None else self.items
        finally:
            with guard("episode"):
                self.episode.finish("completed", None)

    def fail(self, error: BaseException) -> None:
        if self.items is not None:
            self.root.facts[A.EPISODE_OUTPUT] = self.items
        with guard("episode"):
            self.episode.finish(_termination(error), error_info(error))


def _warn_of_unstarted(name: str, result: object) -> None:
    warn_once(
        f"unstarted:{name}",
        f"the workflow {name!r} returned a {type(result).__name__} that runs after the workflow has ended, so its calls are not recorded: "
        "decorate the function that does the work",
        stacklevel=5,
    )


class _ScopeActivity(Activity):
    """A scope without a span or a record: ``no_train``, and workflows while nothing is recorded."""

    __slots__ = ()


class _SampledOutActivity(_ScopeActivity):
    """A workflow that is not recorded, with what runs inside it, until it has returned."""

    __slots__ = ()

    def succeed(self, result: Any) -> None:
        assert self.scope is not None
        self.scope.episode.closed = True

    def fail(self, error: BaseException) -> None:
        self.succeed(None)


_IDLE_ACTIVITY: Final = _ScopeActivity(IDLE)


def _termination(error: BaseException) -> Termination:
    """A cancellation or an interrupt is no failure; both are BaseExceptions that are no Exceptions."""
    return "failed" if isinstance(error, (Exception, SystemExit)) else "cancelled"


class WorkflowKind(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one ``@workflow``."""

    name: str | None
    new_episode: bool
    session_id: SessionId
    metadata: dict[str, Any]

    def begin(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Activity:
        scope = current()
        if not recorder.on:
            return _IDLE_ACTIVITY if scope is None or scope is IDLE else UNTOUCHED
        begun: Activity | None = None
        with guard("workflow"):
            begun = self._begin(scope, function, args, kwargs)
        return begun or UNTOUCHED

    def _begin(self, scope: Scope | None, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Activity:
        name = self.name or name_of(function)
        inside = recording_scope(scope)
        if inside is not None and not self.new_episode:
            span = child_span(inside, "workflow", name)
            result_key = A.EPISODE_OUTPUT if inside.episode.keeps_content else None
            if result_key is not None:
                span.facts = {A.EPISODE_INPUT: arguments(function, args, kwargs)}
            begun = inside.episode.start(span)
            return SpanActivity(inside.inside(span_id=span.span_id), span, result_key) if begun else UNTOUCHED
        new = begin_episode(scope, name, parent=inside)
        if new is None:
            return UNTOUCHED
        episode = new.episode
        if not episode.recorded:
            return _SampledOutActivity(new)
        begun = EpisodeActivity(new, episode)
        try:
            episode.metadata.update(snapshot(self.metadata))
            if self.session_id is not None:
                with guard("session_id"):
                    episode.session_id = self.session_id if isinstance(self.session_id, str) else str(self.session_id(*args, **kwargs))
            if episode.keeps_content:
                with guard("input"):
                    episode.root.facts[A.EPISODE_INPUT] = arguments(function, args, kwargs)
        except BaseException as error:  # Ctrl-C, or what session_id= raised: the app's code is not entered any more
            begun.fail(error)
            raise
        return begun


class AgentKind(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one ``agent``."""

    name: str | None

    def begin(self, function: Callable[..., Any] | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Activity:
        scope = recording_scope(current())
        begun: Activity | None = None
        if scope is not None:
            with guard("agent"):
                name = self.name or name_of(function)
                span = child_span(scope, "agent", name)
                span.trajectory_id, span.trajectory_name = span.span_id, name
                if scope.episode.start(span):
                    trajectory = scope.episode.trajectory_of(span.span_id, name)
                    begun = SpanActivity(scope.inside(span_id=span.span_id, trajectory=trajectory), span)
        return begun or UNTOUCHED


class ToolKind(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one ``tool``."""

    name: str | None

    def begin(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Activity:
        scope = recording_scope(current())
        begun: Activity | None = None
        if scope is not None:
            with guard("tool"):
                span = child_span(scope, "tool", self.name or name_of(function))
                keeps = scope.episode.keeps_content
                if keeps:
                    span.facts = {A.TOOL_CALL_ARGUMENTS: arguments(function, args, kwargs)}
                if scope.episode.start(span):
                    begun = SpanActivity(scope.inside(span_id=span.span_id), span, A.TOOL_CALL_RESULT if keeps else None)
        return begun or UNTOUCHED


class NoTrainKind(msgspec.Struct, frozen=True, kw_only=True):
    """``no_train`` has no settings."""

    def begin(self, function: Callable[..., Any] | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Activity:
        scope = recording_scope(current())
        return UNTOUCHED if scope is None else _ScopeActivity(scope.inside(no_train=True))


def name_of(function: Callable[..., Any] | None) -> str:
    """The function's own name; of an object with ``__call__`` its class's."""
    target: Any = function
    name = getattr(target, "__name__", None)
    if name == "__call__":
        name = type(getattr(target, "__self__", target)).__name__
    return str(name or type(target).__name__)


@overload
def workflow(function: F, /) -> F: ...


@overload
def workflow(
    *, name: str | None = None, new_episode: bool = False, session_id: SessionId = None, metadata: Mapping[str, Any] | None = None
) -> Callable[[F], F]: ...


def workflow(
    function: F | None = None,
    /,
    *,
    name: str | None = None,
    new_episode: bool = False,
    session_id: SessionId = None,
    metadata: Mapping[str, Any] | None = None,
) -> F | Callable[[F], F]:
    """Marks the app's entry point: each run of it is an episode.

    Works on functions, coroutine functions, generators, async generators, methods, partials and callable objects; a generator is an
    episode from its first step until it is exhausted or closed. ``name``: None is the function's own. ``new_episode``: an episode of its
    own also inside another workflow. ``session_id``: a string, or a function of the workflow's arguments that gives one.
    ``metadata``: plain values for each of its episodes, such as ``user_id`` and ``tags``. Raises ConfigurationError for what cannot be
    decorated.
    """
    if not isinstance(cast("Any", session_id), (str, types.NoneType)) and not callable(session_id):
        raise ConfigurationError(
            f"got session_id={session_id!r}; expected a string, or a function of the workflow's arguments that gives one"
        )
    if not isinstance(cast("Any", metadata), (Mapping, types.NoneType)):
        raise ConfigurationError(f"got metadata={metadata!r}; expected a dict of plain values, such as metadata={{'team': 'shop'}}")
    flag(new_episode, "new_episode")
    kind = WorkflowKind(name=checked_name("workflow", name), new_episode=new_episode, session_id=session_id, metadata=dict(metadata or {}))
    if function is None:
        return lambda wrapped: wrap(wrapped, kind)
    return wrap(function, kind)


@overload
def tool(function: F, /) -> F: ...


@overload
def tool(*, name: str | None = None) -> Callable[[F], F]: ...


def tool(function: F | None = None, /, *, name: str | None = None) -> F | Callable[[F], F]:
    """Marks a tool of the app: each run inside a workflow is a ``ToolCall`` with its arguments and result."""
    kind = ToolKind(name=checked_name("tool", name))
    if function is None:
        return lambda wrapped: wrap(wrapped, kind)
    return wrap(function, kind)


class _Block:
    """Something that is a decorator and, as often and as concurrently as wanted, a ``with`` block."""

    def __init__(self) -> None:
        self._elsewhere: list[Activity] = []
        """Entries that have not been left yet: one left in another context than it was entered in is found here."""

    def _begin(self) -> Activity:
        raise NotImplementedError

    def __enter__(self) -> None:
        activity = self._begin()
        activity.resume()
        _entered.set((*_entered.get(), (self, activity)))
        self._elsewhere.append(activity)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        activity = self._leaving()
        activity.suspend()
        if error is None or isinstance(error, GeneratorExit):
            activity.succeed(None)
        else:
            activity.fail(error)

    def _leaving(self) -> Activity:
        """The innermost entry of this block in the running context; the last one anywhere if there is none."""
        stack = _entered.get()
        for position in range(len(stack) - 1, -1, -1):
            block, activity = stack[position]
            if block is self:
                _entered.set((*stack[:position], *stack[position + 1 :]))
                break
        else:
            activity = self._elsewhere[-1] if self._elsewhere else UNTOUCHED
        with contextlib.suppress(ValueError):
            self._elsewhere.remove(activity)
        return activity


_entered: Final[ContextVar[tuple[tuple[_Block, Activity], ...]]] = ContextVar("rllm_blocks", default=())


class _Agent(_Block):
    """``agent("name")``."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._kind = AgentKind(name=name)

    def _begin(self) -> Activity:
        return self._kind.begin(None, (), {})

    def __call__(self, function: F, /) -> F:
        return wrap(function, self._kind)


def agent(name: str) -> _Agent:
    """Marks a role inside a workflow: each entry is a trajectory with its own calls, tools and reward.

    A decorator (also for coroutine functions and generators), or a ``with`` block. Two entries of one name, one after the other or at the
    same time, are two trajectories. Raises ConfigurationError unless ``name`` is a non-empty string.
    """
    if not isinstance(cast("Any", name), str) or not name:
        raise ConfigurationError(f'got {name!r} as the name of an agent; give it one, such as @rllm.agent("solver")')
    return _Agent(name)


class _NoTrain(_Block):
    """Calls inside keep their own endpoint, are recorded, never trained: ``@no_train``, ``with no_train:`` or ``with no_train():``."""

    _kind: Final = NoTrainKind()

    def _begin(self) -> Activity:
        return self._kind.begin(None, (), {})

    @overload
    def __call__(self, function: F, /) -> F: ...

    @overload
    def __call__(self, function: None = None, /) -> _NoTrain: ...

    def __call__(self, function: F | None = None, /) -> F | _NoTrain:
        return self if function is None else wrap(function, self._kind)


no_train: Final = _NoTrain()


def checked_name(what: str, name: str | None) -> str | None:
    """``name`` if it is one, or None. Raises ConfigurationError."""
    if name is not None and (not isinstance(cast("Any", name), str) or not name):
        raise ConfigurationError(f"got {name!r} as the name of a {what}; expected a non-empty string, or none for the function's own")
    return name
