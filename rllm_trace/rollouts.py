"""One run of an app on one row of a data set, for whoever trains on it: every episode that starts inside arrives at its handle.

    with rollout(task_id="t7", metadata={"index": 3}, route=policy, seed=11) as handle:
        app(**row)
    episodes = handle.wait(timeout=30)

Inside, recording is on, with tokens, whatever is configured. The handle follows the context into tasks and threads; what is started after
the ``with`` block has been left, in a thread that was not told, no longer belongs to it. Waiting always ends: what is still open at the
deadline is delivered as it is, and what comes later is counted as late.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

import msgspec

from rllm_trace import attributes as A
from rllm_trace._context import carry
from rllm_trace._given import seconds, text, words
from rllm_trace._inbox import Episodes, Inbox
from rllm_trace._instruments import ensure_instrumented
from rllm_trace._open import OpenEpisode
from rllm_trace._recorder import recorder
from rllm_trace.exceptions import ConfigurationError
from rllm_trace.types import ErrorInfo

if TYPE_CHECKING:
    from rllm_trace.routing import Route

__all__ = ["EPISODE_TIMEOUT", "RewardFault", "Rollout", "current_rollout", "rollout"]

EPISODE_TIMEOUT: Final = "rllm_trace.EpisodeTimeout"
"""``Episode.error.type`` of an episode that was ended by a deadline while its workflow ran."""


class RewardFault(msgspec.Struct, frozen=True, kw_only=True):
    """A reward function that raised, or returned what is no reward."""

    name: str
    episode_id: str
    error: ErrorInfo


class Rollout:
    """The handle of a rollout: its identity, and its episodes as they end."""

    def __init__(self, *, task_id: str | None, metadata: Mapping[str, Any] | None, seed: int | None, route: Route | None = None) -> None:
        self.inbox: Final = Inbox()
        self.route = route
        """Where its calls are sent; for those that arrive from other processes."""
        self.task_id = task_id
        self.metadata: dict[str, Any] = dict(metadata or {})
        self.seed = seed
        self.closed = False
        """The ``with`` block has been left: what starts now does not belong to it."""
        self.reward_faults: list[RewardFault] = []
        """In the order in which they happened."""

    @property
    def episodes(self) -> Episodes:
        """Delivered so far, in the order of their end."""
        return self.inbox.episodes

    @property
    def open_episodes(self) -> list[OpenEpisode]:
        """Those that have started and have not been delivered."""
        return self.inbox.open_episodes()

    def wait(self, timeout: float) -> Episodes:
        """Blocks until all its episodes have been delivered, at most ``timeout`` seconds; open ones are then delivered as they are."""
        self.inbox.drain(seconds(timeout, "timeout"), _overdue(timeout), EPISODE_TIMEOUT)
        return self.episodes

    async def wait_async(self, timeout: float) -> Episodes:  # noqa: ASYNC109 - ends by delivering, not by cancelling
        """The same without blocking the event loop."""
        await self.inbox.drain_async(seconds(timeout, "timeout"), _overdue(timeout), EPISODE_TIMEOUT)
        return self.episodes

    def expire(self, reason: str) -> int:
        """Ends open episodes at once: ``timeout`` where the workflow still runs, else ``unsettled``. Gives how many there were."""
        return self.inbox.expire(reason, EPISODE_TIMEOUT)


_rollout: ContextVar[Rollout | None] = ContextVar("rllm_rollout", default=None)
carry(_rollout)


def _leave_parent() -> None:
    """A forked child delivers nothing to the handle, which is in its parent."""
    _rollout.set(None)


recorder.child_hooks.append(_leave_parent)


def current_rollout() -> Rollout | None:
    """The rollout that the running code belongs to; None outside, and where it has been left."""
    handle = _rollout.get()
    return None if handle is None or handle.closed else handle


@contextlib.contextmanager
def rollout(
    *, task_id: str | None = None, metadata: Mapping[str, Any] | None = None, route: Route | None = None, seed: int | None = None
) -> Generator[Rollout]:
    """Opens a rollout in the running context. ``metadata`` goes into each episode's, ``route`` is where its calls are sent.

    Works around ``await`` too: it is carried like any context variable. Raises ConfigurationError where RLLM_DISABLED is set, and
    for options of another type.
    """
    _check(task_id, metadata, seed, route)
    recorder.check_environment()
    if recorder.disabled:
        raise ConfigurationError(f"{A.ENV_DISABLED} is set, so nothing can be recorded and nothing trained: unset it")
    ensure_instrumented()
    handle = Rollout(task_id=task_id, metadata=metadata, seed=seed, route=route)
    before = _rollout.get()
    recorder.count_rollout(+1)
    _rollout.set(handle)
    try:
        if route is None:
            yield handle
        else:
            from rllm_trace import routing

            carry(routing._route)
            with routing.use_route(route):
                yield handle
    finally:
        handle.closed = True
        if _rollout.get() is handle:  # not where a coroutine is finalized in another context
            _rollout.set(before)
        recorder.count_rollout(-1)


def _check(task_id: object, metadata: object, seed: object, route: object) -> None:
    text(task_id, "task_id", or_none=True)
    if metadata is not None:
        words(metadata, "metadata")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise ConfigurationError(f"got seed={seed!r}; expected a whole number or None")
    if route is not None:
        from rllm_trace.routing import Route

        if not isinstance(route, Route):
            raise ConfigurationError(f"got route={route!r}; expected a rllm_trace.routing.Route or None")


def _overdue(timeout: float) -> str:
    return f"still running {timeout:g} s after its rollout had ended"
