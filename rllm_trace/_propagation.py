"""Takes the running scope along: into threads and executors by itself, over HTTP by headers, into callbacks by ``bind``.

``Thread.start`` and ``ThreadPoolExecutor.submit`` are wrapped once, at the first episode. Outside a workflow and outside a rollout they
do what they always did. Inside, only our own context variables travel: the app's keep the behaviour that they have without us. A wrapper
is taken out only where it is still the outermost; otherwise it stays and does nothing.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import re
import threading
import urllib.parse
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, TypeVar, cast

from rllm_trace import attributes as A
from rllm_trace._activity import Activity
from rllm_trace._context import Carried, Scope, capture, current, enter, leave, restore
from rllm_trace._episode import IDLE
from rllm_trace._given import texts
from rllm_trace._guard import counters, guard
from rllm_trace._open import OpenEpisode
from rllm_trace._recorder import recorder
from rllm_trace._shapes import wrap
from rllm_trace.exceptions import ConfigurationError
from rllm_trace.rollouts import current_rollout

__all__ = ["attach", "bind", "headers", "install", "uninstall"]

F = TypeVar("F", bound=Callable[..., Any])

_PARENT: Final = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")
_MAX_REMOTE: Final = 1_000
"""Episodes of other processes that are remembered at once."""

_OWN_THREADS: Final = "rllm-trace"
"""Names of our own threads begin so: they belong to no episode."""


def _to_carry() -> Carried | None:
    """What threads started here take along; None where there is nothing."""
    scope = current()
    if (scope is None or scope is IDLE or scope.episode.closed) and current_rollout() is None:
        return None
    return capture()


@contextlib.contextmanager
def _running(values: Carried) -> Generator[None]:
    """The carried variables set as they were captured, then as they were here."""
    before = tuple((variable, variable.get()) for variable, _ in values)
    restore(values)
    try:
        yield
    finally:
        restore(before)


class _Patches:
    """The two wrapped methods of the standard library."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.active = False
        self._start: Callable[..., Any] | None = None
        self._submit: Callable[..., Any] | None = None

    def install(self) -> None:
        with self._lock:
            if self.active:
                return
            self.active = True
            if self._start is None or not _is_in_chain(threading.Thread.start, self._start):
                self._start = _wrap_start(threading.Thread.start, self)
                threading.Thread.start = self._start
            if self._submit is None or not _is_in_chain(ThreadPoolExecutor.submit, self._submit):
                self._submit = _wrap_submit(ThreadPoolExecutor.submit, self)
                ThreadPoolExecutor.submit = cast("Any", self._submit)

    def uninstall(self) -> None:
        with self._lock:
            self.active = False
            if self._start is not None and threading.Thread.start is self._start:
                threading.Thread.start = cast("Any", self._start).__wrapped__
                self._start = None
            if self._submit is not None and ThreadPoolExecutor.submit is self._submit:
                ThreadPoolExecutor.submit = cast("Any", self._submit).__wrapped__
                self._submit = None


def _is_in_chain(outer: Any, ours: Any) -> bool:
    while outer is not None:
        if outer is ours:
            return True
        outer = getattr(outer, "__wrapped__", None)
    return False


def _wrap_start(original: Callable[[threading.Thread], None], patches: _Patches) -> Callable[[threading.Thread], None]:
    @functools.wraps(original)
    def start(self: threading.Thread) -> None:
        values = _to_carry() if patches.active else None
        if values is None or self.name.startswith(_OWN_THREADS):
            return original(self)
        own = vars(self)
        before = own.get("run")
        run = self.run

        def run_inside() -> None:
            with guard("thread"):
                _put_back(own, before)
            restore(values)
            run()

        own["run"] = run_inside
        try:
            return original(self)
        except BaseException:
            if own.get("run") is run_inside:
                _put_back(own, before)
            raise

    return start


def _put_back(own: dict[str, Any], run: Any) -> None:
    if run is None:
        own.pop("run", None)
    else:
        own["run"] = run


def _wrap_submit(original: Callable[..., Future[Any]], patches: _Patches) -> Callable[..., Future[Any]]:
    @functools.wraps(original)
    def submit(self: ThreadPoolExecutor, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        values = _to_carry() if patches.active else None
        if values is None:
            return original(self, fn, *args, **kwargs)
        nothing = tuple((variable, None) for variable, _ in values)
        with _running(nothing):  # a worker thread that starts here outlives this workflow
            return original(self, _Carrier(fn, values), *args, **kwargs)

    return submit


class _Carrier:
    """A function that runs where it was handed over."""

    __slots__ = ("__wrapped__", "_values")

    def __init__(self, function: Callable[..., Any], values: Carried) -> None:
        self.__wrapped__ = function
        self._values = values

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _running(self._values):
            return self.__wrapped__(*args, **kwargs)


patches: Final = _Patches()


class _Bound(Activity):
    """One run of a bound function: all carried variables as they were when it was bound."""

    __slots__ = ("_outside", "_values")

    def __init__(self, values: Carried) -> None:
        super().__init__(None)
        self._values = values
        self._outside: Carried = ()

    def resume(self) -> None:
        self._outside = tuple((variable, variable.get()) for variable, _ in self._values)
        restore(self._values)

    def suspend(self) -> None:
        self._values = tuple((variable, variable.get()) for variable, _ in self._values)
        restore(self._outside)


class _BindKind:
    def __init__(self, values: Carried) -> None:
        self._values = values

    def begin(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Activity:
        return _Bound(self._values)


def bind(function: F, /) -> F:
    """``function``, to be called by whoever, whenever: it runs in the scope that ``bind`` was called in.

    For callbacks, and for pools and threads that do not carry the context. Coroutine functions and generators work too.
    """
    return wrap(function, _BindKind(capture()))


def headers(existing: Mapping[str, str] | None = None) -> dict[str, str]:
    """Headers that carry the running scope to another process: baggage, and a parent header of our own.

    ``existing``: headers to add them to, in a copy; its baggage is kept, its ``traceparent`` is never changed. Outside a workflow nothing
    is added. Ids and names only: no content, no key. Raises ConfigurationError unless ``existing`` are texts by name.
    """
    found = {} if existing is None else texts(existing, "existing")
    scope = current()
    if scope is None or scope.episode.closed or not scope.episode.id:
        return found
    episode = scope.episode
    entries = {
        A.EPISODE_ID: episode.id,
        A.TASK_ID: episode.task_id,
        A.TRAJECTORY_ID: scope.trajectory.id,
        A.TRAJECTORY_NAME: scope.trajectory.name,
        A.CALL_NO_TRAIN: "true" if scope.no_train else None,
        A.CALL_IN_REWARD: "true" if scope.in_reward else None,
    }
    ours = ",".join(f"{key}={urllib.parse.quote(value, safe='')}" for key, value in entries.items() if value is not None)
    key = next((name for name in found if name.lower() == A.HEADER_BAGGAGE), A.HEADER_BAGGAGE)
    theirs = ",".join(entry for entry in found.get(key, "").split(",") if entry.strip() and not entry.strip().startswith(A.BAGGAGE_PREFIX))
    found[key] = f"{theirs},{ours}" if theirs else ours
    found[A.HEADER_PARENT] = f"00-{episode.trace_id}-{scope.span_id}-01"
    return found


@contextlib.contextmanager
def attach(headers: Mapping[str, str] | Iterable[tuple[Any, Any]]) -> Generator[None]:
    """Runs its block in the scope that ``headers()`` described, in this process or another one.

    ``headers``: those of a request, as a mapping or as pairs of str or bytes, in any case. Without ours, or with malformed ones (counted),
    the block runs as it would without us. In another process spans go to its exporters, under the same trace. Raises ConfigurationError
    for what are no headers.
    """
    scope: Scope | None = None
    found = _plain_headers(headers)
    with guard("attach"):
        scope = _scope_of(found)
        if scope is not None:
            from rllm_trace._instruments import ensure_instrumented

            ensure_instrumented()
    if scope is None:
        yield
        return
    before = enter(scope)
    try:
        yield
    finally:
        leave(scope, before)


def _plain_headers(headers: Any) -> dict[str, str]:
    try:
        if isinstance(headers, (str, bytes)):
            raise TypeError
        pairs = cast("Iterable[tuple[Any, Any]]", headers.items() if hasattr(headers, "items") else headers)
        return {_text(name).lower(): _text(value) for name, value in pairs}
    except (TypeError, ValueError):
        raise ConfigurationError(
            f"got an object of type {type(headers).__name__} as headers; expected a mapping, or pairs of name and value, such as "
            "rllm.attach(request.headers)"
        ) from None


def _text(value: Any) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)


def _scope_of(headers: Mapping[str, str]) -> Scope | None:
    parent = _PARENT.fullmatch(headers.get(A.HEADER_PARENT, "").strip())
    entries = dict(entry.strip().split("=", 1) for entry in headers.get(A.HEADER_BAGGAGE, "").split(",") if "=" in entry)
    baggage = {key: urllib.parse.unquote(value.split(";", 1)[0]) for key, value in entries.items() if key.startswith(A.BAGGAGE_PREFIX)}
    episode_id = baggage.get(A.EPISODE_ID)
    if parent is None or not episode_id:
        if A.HEADER_PARENT in headers or episode_id:
            counters.add("orphan", "malformed headers")
        return None
    trace_id, span_id = parent.groups()
    episode = recorder.open_episodes.get(episode_id) or _remote_episode(episode_id, trace_id, baggage)
    trajectory = episode.trajectory_of(baggage.get(A.TRAJECTORY_ID, span_id), baggage.get(A.TRAJECTORY_NAME, ""))
    return Scope(
        episode,
        trajectory,
        span_id,
        no_train=baggage.get(A.CALL_NO_TRAIN) == "true",
        in_reward=baggage.get(A.CALL_IN_REWARD) == "true",
        parent=None,
    )


_remote: Final[collections.OrderedDict[str, OpenEpisode]] = collections.OrderedDict()


def _remote_episode(episode_id: str, trace_id: str, baggage: Mapping[str, str]) -> OpenEpisode:
    """An episode whose record another process makes; kept for a while, so that the calls of its trajectories are numbered on."""
    episode = _remote.get(episode_id)
    has_home = recorder.home is not None
    exported = bool(recorder.on and recorder.span_sinks) and not has_home
    if episode is None or (episode.exported, episode.recorded) != (exported, exported or has_home):
        episode = _remote[episode_id] = OpenEpisode(
            recorder,
            id=episode_id,
            trace_id=trace_id,
            span_id=baggage.get(A.TRAJECTORY_ID, ""),
            workflow=baggage.get(A.TRAJECTORY_NAME, ""),
            recorded=exported or has_home,
            remote=True,
            exported=exported,
            wants_tokens=recorder.home.tokens if has_home else recorder.tokens is True,
            keeps_content=has_home or recorder.content,
            task_id=baggage.get(A.TASK_ID),
        )
        while len(_remote) > _MAX_REMOTE:
            _remote.popitem(last=False)
    return episode


def install() -> None:
    """Has threads and executors carry the scope. Asking twice changes nothing."""
    patches.install()


def uninstall() -> None:
    """Stops that; restores a method where our wrapper is its outermost."""
    patches.uninstall()
