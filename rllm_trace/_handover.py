"""A running scope in, a few strings out that another process of ours continues it from.

The strings say which episode, trajectory and span, what is asked of the calls (tokens, route, seed), and where the record is made: a
receiver with its token. The process that takes them over sends every span that it ends in that episode there, and nowhere else. It
sends them before it gives a result, so that a caller that waits for the result has them. What is handed over outside a workflow, while
somebody collects, has whole episodes sent. Nothing here is started, sent or read where nothing is recorded.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import sys
import threading
import weakref
from collections.abc import Generator, Mapping
from typing import Any, Final

import msgspec

from rllm_trace import attributes as A
from rllm_trace import routing
from rllm_trace._context import Scope, carry, current, enter, leave
from rllm_trace._given import texts, words
from rllm_trace._guard import counters, guard
from rllm_trace._homeward import FLUSH, PATIENCE, Address, Homeward, Link, flush_home, send_receipt
from rllm_trace._instruments import ensure_instrumented
from rllm_trace._open import OpenEpisode
from rllm_trace._recorder import recorder
from rllm_trace._spans import sources
from rllm_trace.rollouts import EPISODE_TIMEOUT

__all__ = ["Handover", "attach_env", "child_env", "continued", "hand_over", "hand_over_collecting", "inherit", "live_in", "read_handover"]

_STILL_RUNNING: Final = "still running when the work that began it had given its result"
_FIRST_STEP: Final = 2**32
_NEXT_STEP: Final = 2**16
"""Numbers of calls begin here, so that no two processes of an episode number theirs alike (their seeds depend on it)."""


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """A ``Route`` that can travel: its endpoint is settled."""

    base_url: str
    api_key: str
    model: str
    replaces: frozenset[str] | None = None
    sampling: dict[str, Any] = {}
    constrained: routing.Constrained = "as_auto"
    call_timeout: float | None = None

    def __repr__(self) -> str:
        return f"Way(base_url={self.base_url!r}, model={self.model!r})"

    def route(self) -> routing.Route:
        return routing.Route(**msgspec.structs.asdict(self))


class Handover(msgspec.Struct, frozen=True, kw_only=True):
    """A scope, for another process."""

    headers: dict[str, str]
    """As ``rllm_trace.headers`` makes them; none: no workflow runs, and the episodes that start there are collected here."""
    home: Address
    tokens: bool
    seed: int | None
    first: int
    """Number of the first call that is made there."""
    way: Way | None


_steps: Final[weakref.WeakKeyDictionary[OpenEpisode, itertools.count[int]]] = weakref.WeakKeyDictionary()
_firsts: Final[weakref.WeakKeyDictionary[OpenEpisode, int]] = weakref.WeakKeyDictionary()
_steps_lock = threading.Lock()


def hand_over() -> Handover | None:
    """The running scope for another process; None outside a recorded workflow.

    Raises ConfigurationError if spans cannot be received here (extra ``otlp``).
    """
    from rllm_trace import _home
    from rllm_trace._episode import IDLE
    from rllm_trace._propagation import headers

    scope = current()
    if scope is None or scope is IDLE:
        return None
    episode = scope.episode
    if episode.closed or not episode.recorded or not episode.id:
        return None
    if episode.remote:
        if recorder.home is None:
            return None
        address = recorder.home.address
    else:
        address = _home.address()
    return Handover(
        headers=headers(),
        home=address,
        tokens=episode.wants_tokens,
        seed=episode.seed,
        first=_first_number(episode),
        way=_way(scope),
    )


def hand_over_collecting() -> Handover | None:
    """For a process that is started outside any workflow while somebody collects: the episodes that start there come home as a whole.

    None where nobody collects. Raises ConfigurationError if spans cannot be received here (extra ``otlp``).
    """
    from rllm_trace import _home

    if not recorder.inboxes or recorder.disabled:
        return None
    link: Link | None = recorder.home
    passes_on = link is not None and any(isinstance(inbox, Homeward) for inbox in recorder.inboxes)
    address = link.address if link is not None and passes_on else _home.address()
    return Handover(headers={}, home=address, tokens=recorder.tokens is not False, seed=None, first=0, way=None)


def _first_number(episode: OpenEpisode) -> int:
    with _steps_lock:
        base = _firsts.get(episode, 0)
        number = next(_steps.setdefault(episode, itertools.count(1)))
    return base + number * (_NEXT_STEP if base else _FIRST_STEP)


def _way(scope: Scope) -> Way | None:
    route = routing.current_route()
    if route is None:
        return None
    endpoint = route.endpoint(scope)
    return Way(
        base_url=endpoint.base_url,
        api_key=endpoint.api_key,
        model=endpoint.model,
        replaces=route.replaces,
        sampling=route.sampling,
        constrained=route.constrained,
        call_timeout=route.call_timeout,
    )


def child_env(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """An environment for a child process that is to belong to the running workflow: a copy of ``env``, or of this process's own.

    A Python child that uses ``rllm_trace`` records what it does into this workflow's episode, from its first decorated function on; one
    that does not is as it would be. ``with rllm.attach_env():`` does the same at once, for code without decorators. The variable
    that is added names ids, a receiver with its token, and where calls are redirected to. Outside a workflow nothing is added.
    Raises ConfigurationError if spans cannot be received here (extra ``otlp``).
    Also what a task of a queue or a cluster is given to go on from: ``child_env({})``.
    """
    made = dict(os.environ) if env is None else texts(env, "env")
    handover = hand_over()
    if handover is not None:
        made[A.ENV_CONTEXT] = msgspec.json.encode(handover).decode()
    return made


def attach_env(environ: Mapping[str, str] | None = None) -> contextlib.AbstractContextManager[None]:
    """Runs its block in the workflow that ``child_env`` was called in: ``environ`` is what it made, or this process's own environment.

    Unlike ``attach`` it does what it is told, such as where to send records: never give it what came from a client. Without a context
    the block runs as it would. When it is left, what was recorded inside has been sent.
    """
    if environ is not None:
        words(environ, "environ")
    return continued(read_handover(os.environ if environ is None else environ))


def read_handover(environ: Mapping[str, str]) -> Handover | None:
    """What ``child_env`` put there; None where there is nothing, or something malformed (counted)."""
    text = environ.get(A.ENV_CONTEXT)
    if not text:
        return None
    try:
        return msgspec.json.decode(text, type=Handover)
    except (msgspec.DecodeError, UnicodeError):
        counters.add("orphan", "malformed context")
        return None


def _taken_over(handover: Handover) -> Scope | None:
    """The scope here; None where RLLM_DISABLED is set. From now on this process has a home."""
    from rllm_trace._propagation import _scope_of

    recorder.check_environment()
    if recorder.disabled:
        return None
    if not _is_kept_here(handover):
        link = _linked(handover.home)
        link.tokens = handover.tokens
    ensure_instrumented()
    scope = _scope_of(handover.headers)
    if scope is not None and scope.episode.remote:
        episode = scope.episode
        episode.wants_tokens, episode.keeps_content, episode.seed = handover.tokens, True, handover.seed
        _firsts[episode] = handover.first
        scope.trajectory.number_from(handover.first)
    return scope


def _is_kept_here(handover: Handover) -> bool:
    """Whether this is the process that makes the record."""
    entries = (entry.strip().partition("=") for entry in handover.headers.get(A.HEADER_BAGGAGE, "").split(","))
    return any(key == A.EPISODE_ID and value in recorder.open_episodes for key, _, value in entries)


def _linked(address: Address) -> Link:
    link = recorder.home
    if link is None or link.address != address:
        if link is not None:
            link.close(PATIENCE)
        link = recorder.home = Link(address)
        recorder.refresh()
        _see_to_exit()
    return link


@contextlib.contextmanager
def continued(handover: Handover | None, receipt: str | None = None) -> Generator[None]:
    """Runs its block in the scope that was handed over; what was recorded inside is home when it is left."""
    if handover is not None and not handover.headers:
        with _collected(handover, receipt):
            yield
        return
    scope: Scope | None = None
    if handover is not None:
        with guard("handover"):
            scope = _taken_over(handover)
    if scope is None or handover is None:
        yield
        return
    before, route_before = enter(scope), routing._route.get()
    if handover.way is not None:
        carry(routing._route)
        routing._route.set(handover.way.route())
    try:
        yield
    finally:
        leave(scope, before)
        routing._route.set(route_before)
        if scope.episode.remote:
            send_receipt(receipt, scope.episode.trace_id, scope.episode.id)
            flush_home(FLUSH)


@contextlib.contextmanager
def _collected(handover: Handover, receipt: str | None) -> Generator[None]:
    """Sends home the episodes that begin in its block; those that still run when it is left are waited for, within a deadline."""
    recorder.check_environment()
    if recorder.disabled:
        yield
        return
    inbox = Homeward(_linked(handover.home), wants_tokens=handover.tokens)
    recorder.open_inbox(inbox)
    try:
        yield
    finally:
        recorder.close_inbox(inbox)
        with guard("record"):
            inbox.drain(FLUSH, _STILL_RUNNING, EPISODE_TIMEOUT)
        send_receipt(receipt, sources.trace_id(), "")
        flush_home(FLUSH)


def inherit() -> Scope | None:
    """What a process that was started with ``child_env`` begins in."""
    with guard("inherited context"):
        handover = read_handover(os.environ)
        if handover is not None:
            scope = _taken_over(handover)
            if scope is not None and handover.way is not None:
                routing.inherit(handover.way.route())
            return scope
    return None


class _Exit:
    registered = False


def _see_to_exit() -> None:
    if not _Exit.registered:
        _Exit.registered = True
        atexit.register(_leave)
        recorder.child_hooks.append(_in_forked_child)
    _finalize_child()


def _leave() -> None:
    if recorder.home is not None:
        flush_home(FLUSH)


def _finalize_child(_: object = None) -> None:
    """A child of ``multiprocessing`` leaves without running ``atexit``; its own finalizers it does run."""
    if "multiprocessing.util" in sys.modules:
        from multiprocessing import parent_process, util

        if parent_process() is not None:
            util.Finalize(None, _leave, exitpriority=11)


def _in_forked_child() -> None:
    """A child of a process that has a home has the same one."""
    global _steps_lock
    _steps_lock = threading.Lock()
    link = recorder.home
    if link is not None:
        link.renew_lock()
        keep_recording()
        if "multiprocessing.util" in sys.modules:
            from multiprocessing import util

            util.register_after_fork(recorder, _finalize_child)


def keep_recording() -> None:
    """In a forked child that has a home: what runs on in the episodes that it was forked in is recorded there."""
    scope = current()
    while scope is not None:
        if scope.episode.id and not scope.episode.closed:
            scope.episode.recorded, scope.episode.exported = True, False
            scope.trajectory.number_from(_first_number(scope.episode) + os.getpid() * _NEXT_STEP)
        scope = scope.parent


def live_in(address: Address) -> None:
    """In a forked child: home is where its parent receives."""
    _linked(address)
    keep_recording()
