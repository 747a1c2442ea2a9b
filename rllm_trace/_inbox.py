"""Where episodes arrive: knows which have started for it and not been delivered, and lets threads and tasks wait for them.

One inbox stands behind ``collect()`` and behind each rollout. Every wait has a deadline; what is still open then is delivered as it is.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

from rllm_trace._guard import guard
from rllm_trace._open import OpenEpisode
from rllm_trace.types import Episode

if TYPE_CHECKING:
    import asyncio

__all__ = ["Episodes", "Inbox", "replace_delivered"]

_HANDOVER: Final = 5.0
"""Seconds that the writer has for making records after the last episode has ended."""


class Episodes(list[Episode]):
    """A plain list of episodes. Its class lets ``add_reward`` find it later without keeping it alive."""

    __slots__ = ("__weakref__",)


_lists: Final[weakref.WeakValueDictionary[int, Episodes]] = weakref.WeakValueDictionary()
_replacing: Final = threading.Lock()


def reset_lists() -> None:
    """In a forked child: the lists are the parent's."""
    _lists.clear()


def replace_delivered(episode_id: str, change: Callable[[Episode], Episode]) -> int:
    """Puts ``change(episode)`` in the place of an episode in every list that holds it; gives in how many. What ``change`` raises passes."""
    found = 0
    with _replacing:
        for episodes in list(_lists.values()):
            for position, episode in enumerate(episodes):
                if episode.id == episode_id:
                    episodes[position] = change(episode)
                    found += 1
    return found


class Inbox:
    """Takes the episodes that start while it is open."""

    wants_tokens = True
    """Whether ids and logprobs are asked for on its account."""

    def __init__(self) -> None:
        self.episodes = Episodes()
        """Delivered so far, in the order of their end."""
        _lists[id(self.episodes)] = self.episodes
        self._open: dict[str, OpenEpisode] = {}
        self._changed = threading.Condition()
        self._wakers: list[Callable[[], None]] = []
        self._waiting = 0

    def add(self, episode: OpenEpisode) -> None:
        """An episode has started for this inbox."""
        with self._changed:
            self._open[episode.id] = episode

    def deliver(self, episode_id: str, record: Episode | None) -> None:
        """It has ended, and this is its record; None where no record could be made."""
        with self._changed:
            self._open.pop(episode_id, None)
            if record is not None:
                self.episodes.append(record)
            self._changed.notify_all()
            wakers = list(self._wakers) if not self._open else []
        for wake in wakers:
            with guard("waiter"):  # its event loop may have been closed meanwhile
                wake()

    @property
    def is_awaited(self) -> bool:
        """Whether somebody waits for the episodes that are open."""
        return bool(self._waiting or self._wakers)

    def _hurry(self) -> None:
        for episode in self._open.values():
            episode.hurry()
            return

    def open_episodes(self) -> list[OpenEpisode]:
        """Those that have started and have not been delivered."""
        with self._changed:
            return list(self._open.values())

    def wait(self, timeout: float) -> bool:
        """Blocks until none is open. False: the deadline came first."""
        with self._changed:
            self._waiting += 1
            self._hurry()
            try:
                return self._changed.wait_for(lambda: not self._open, max(0.0, timeout))
            finally:
                self._waiting -= 1

    async def wait_async(self, timeout: float) -> bool:  # noqa: ASYNC109 - ends by delivering, not by cancelling
        """The same without blocking the event loop."""
        import asyncio

        loop = asyncio.get_running_loop()
        empty: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            loop.call_soon_threadsafe(_settle, empty)

        with self._changed:
            if not self._open:
                return True
            self._wakers.append(wake)
            self._hurry()
        try:
            await asyncio.wait((empty,), timeout=max(0.0, timeout))
            return not self._open
        finally:
            with self._changed:
                self._wakers.remove(wake)

    def expire(self, reason: str, error_type: str, which: Iterable[OpenEpisode] | None = None) -> int:
        """Ends open episodes (all, or ``which``) as they are; gives how many."""
        return sum(episode.expire(reason, error_type) for episode in (self.open_episodes() if which is None else which))

    def drain(self, timeout: float, reason: str, error_type: str) -> bool:
        """Waits until none is open, then delivers what is left as it is. False: something was left."""
        deadline = time.monotonic() + timeout
        in_time = self.wait(timeout)
        if not in_time:
            self.expire(reason, error_type)
            self.wait(max(_HANDOVER, deadline - time.monotonic()))
        return in_time

    async def drain_async(self, timeout: float, reason: str, error_type: str) -> bool:  # noqa: ASYNC109 - ends by delivering, not by cancelling
        """The same without blocking the event loop."""
        in_time = await self.wait_async(timeout)
        if not in_time:
            self.expire(reason, error_type)
            await self.wait_async(_HANDOVER)
        return in_time


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
