"""Asking for records: ``collect`` for a while, ``configure`` for good; and seeing to it that what was recorded arrives.

Every wait in here has a deadline. What is configured is replaced as a whole: an option left out goes back to its default, one that would
do nothing is refused.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any, Final

from rllm_trace._context import current
from rllm_trace._given import seconds
from rllm_trace._guard import Outcome, counters, guard, warn_once
from rllm_trace._inbox import Episodes, Inbox
from rllm_trace._plain import from_plain, to_plain
from rllm_trace._recorder import recorder
from rllm_trace.rollouts import EPISODE_TIMEOUT

__all__ = ["EpisodeHandle", "collect", "current_episode", "stats"]

_TIMEOUT: Final = 30.0


class collect:
    """``with collect() as episodes:`` a list of every episode that starts in this process while it is open, filled as they end.

    Leaving waits for those that still run, at most ``timeout`` seconds; what is open then is delivered as it is (``timeout``,
    ``unsettled``). In an event loop use ``async with``: a plain ``with`` block cannot wait for workflows of the thread that it blocks, and
    delivers them at once. Tokens are asked for. Episodes of nested workflows with ``new_episode=True`` are entries of their own. With
    ``configure(processes=True)`` so are those that processes and pools of ``multiprocessing`` run, once their results are there.
    """

    def __init__(self, *, timeout: float = _TIMEOUT) -> None:
        self._timeout = seconds(timeout, "timeout")
        self._inbox = Inbox()

    def __enter__(self) -> Episodes:
        recorder.check_environment()
        self._inbox = Inbox()
        recorder.open_inbox(self._inbox)
        return self._inbox.episodes

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        recorder.close_inbox(self._inbox)
        here = threading.get_ident()
        stuck = [episode for episode in self._inbox.open_episodes() if episode.thread == here and not episode.returned]
        if stuck:
            warn_once("collect", "collect() was left while workflows of its own thread were running: use `async with collect()`")
            self._inbox.expire("collect() was left in the thread that ran it", EPISODE_TIMEOUT, stuck)
        self._inbox.drain(self._timeout, self._reason(), EPISODE_TIMEOUT)

    async def __aenter__(self) -> Episodes:
        return self.__enter__()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        recorder.close_inbox(self._inbox)
        await self._inbox.drain_async(self._timeout, self._reason(), EPISODE_TIMEOUT)

    def _reason(self) -> str:
        return f"still running {self._timeout:g} s after collect() was left"


class EpisodeHandle:
    """The running episode, for ids and notes."""

    __slots__ = ("_episode",)

    def __init__(self, episode: Any) -> None:
        self._episode = episode

    @property
    def id(self) -> str:
        """What ``add_reward`` and ``Episode.id`` call it."""
        return self._episode.id

    @property
    def trace_id(self) -> str:
        """32 hex digits, as a tracing back end shows it."""
        return self._episode.trace_id

    def set(self, **metadata: Any) -> None:
        """Adds to the episode's metadata, as copies; a later value of one name counts. ``session_id`` sets the session.

        ``user_id`` and ``tags``, a list of texts, also leave as ``user.id`` and ``rllm.tags`` of the workflow's span, for back ends.
        """
        if self._episode.closed:
            counters.add("late", "metadata")
            return
        if "session_id" in metadata:
            self._episode.session_id = str(metadata.pop("session_id"))
        self._episode.metadata.update(from_plain(to_plain(metadata)))

    def __repr__(self) -> str:
        return f"EpisodeHandle(id={self.id!r})"


def current_episode() -> EpisodeHandle | None:
    """The episode that the running code belongs to; None outside a workflow and where nothing is recorded."""
    scope = current()
    if scope is None or not scope.episode.id or scope.episode.closed:
        return None
    return EpisodeHandle(scope.episode)


def stats() -> dict[Outcome, dict[str, int]]:
    """What became of things so far in this process: outcome (recorded, exported, dropped, failed, late, orphan, faults), kind, count."""
    for look in recorder.stat_hooks:
        with guard("stats"):
            look()
    return counters.snapshot()
