"""Where spans of this process's own children arrive: one receiver with a token, opened when the first of them needs it. It listens on
loopback, or where ``configure(reachable_at=...)`` says, so that children on other machines find it.

What a child records in a workflow that runs here becomes part of that workflow's record; what comes after its end is late and counted.
Each thing that is handed over has a number, which comes back when it has run to its end: where a process is gone and its number has not
come, what it had recorded last is lost, and is counted; a child says with its own which of those that it handed on have ended. Open
until ``shutdown`` or the next ``configure``; a forked child closes it.
"""

from __future__ import annotations

import collections
import contextvars
import threading
from collections.abc import Callable
from typing import Any, Final

from rllm_trace import _pool_watch
from rllm_trace._context import current
from rllm_trace._episode import IDLE
from rllm_trace._guard import counters, guard
from rllm_trace._handover import live_in
from rllm_trace._homeward import Address
from rllm_trace._recorder import recorder
from rllm_trace._spans import sources
from rllm_trace.episode_receiver import EpisodeReceiver
from rllm_trace.types import Episode

__all__ = ["address", "close", "ended_here", "expect", "forget", "is_elsewhere", "lost_of", "open_at", "over"]

_MAX_EXPECTED: Final = 10_000
LOST: Final = "process that ended without a word"
_MISSING: Final = object()


class _Home:
    """The receiver of this process, while there is one."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.receiver: EpisodeReceiver | None = None
        self.place: dict[str, Any] = {}
        """``host`` and ``http_port`` of the receiver; empty: loopback, any port."""
        self.expected: dict[str, tuple[Callable[[], bool], str]] = {}
        """By number: whether what runs there has ended, and the episode that it belongs to."""
        self.silent: collections.OrderedDict[str, int] = collections.OrderedDict()
        """By episode: what ended without a word before its record was made."""
        self.passed_on: dict[str, Callable[[], bool]] = {}
        """The same for what is handed on in a process that is a child itself: its words go to the one that keeps the record."""
        self.arrived: collections.OrderedDict[str, None] = collections.OrderedDict()
        """Numbers that have come and were not expected: of what children have handed on."""
        self.watches = False


_home: Final = _Home()


def address() -> Address:
    """Where the receiver is; opens it. Raises ConfigurationError where it cannot be."""
    with _home.lock:
        if _home.receiver is None:
            _home.receiver = contextvars.Context().run(_opened, _home.place)
            _home.receiver.on_receipt = _received
            _home.receiver.on_record = recorder.adopt
        if not _home.watches:
            _home.watches = True
            recorder.child_hooks.append(_in_forked_child)
            recorder.stat_hooks.append(look_for_lost)
            recorder.processes_lost = lost_of
        return Address(endpoint=_home.receiver.http_endpoint, token=_home.receiver.token)


def _opened(place: dict[str, Any]) -> EpisodeReceiver:
    return EpisodeReceiver(on_episode=_keep_nothing, **place)


def open_at(host: str, port: int | None) -> None:
    """Opens the receiver at an address of this machine that others reach. Raises ConfigurationError where it cannot be."""
    with _home.lock:
        close()
        _home.place = {"host": host, "http_port": port or 0}
        address()


def is_elsewhere() -> bool:
    """Whether it listens for other machines."""
    return bool(_home.place)


def close() -> None:
    """Stops listening; what comes then is lost, and counted where it was sent. The next receiver is on loopback."""
    with _home.lock:
        receiver, _home.receiver, _home.place = _home.receiver, None, {}
    if receiver is not None:
        with guard("receiver"):
            receiver.close()


def expect(has_ended: Callable[[], bool], home: Address) -> str:
    """A number for what is handed over here. ``has_ended`` says, later, whether nothing more can come of it; it must not keep it alive.

    Its word is awaited where it is sent; a child that hands on what it was given only says, there, what has ended.
    """
    number, scope = sources.span_id(), current()
    with _home.lock:
        if _home.receiver is None or _home.receiver.token != home.token:
            if len(_home.passed_on) < _MAX_EXPECTED:
                _home.passed_on[number] = has_ended
            return number
        if len(_home.expected) >= _MAX_EXPECTED:
            look_for_lost()
        if len(_home.expected) < _MAX_EXPECTED:
            _home.expected[number] = (has_ended, "" if scope is None else scope.episode.id)
    return number


def look_for_lost() -> None:
    """Counts what has ended and did not say so."""
    with _home.lock:
        for number in [number for number, (has_ended, _) in _home.expected.items() if has_ended()]:
            _lost(_home.expected.pop(number)[1])
    counters.add("dropped", LOST, _pool_watch.newly_dead())


def _lost(episode_id: str) -> None:
    counters.add("dropped", LOST)
    _home.silent[episode_id] = _home.silent.pop(episode_id, 0) + 1
    if len(_home.silent) > _MAX_EXPECTED:
        _home.silent.popitem(last=False)


def lost_of(episode_id: str) -> int:
    """How many processes have ended without a word so far, of those that this episode had started or handed work."""
    with _home.lock:
        for number, (has_ended, belongs_to) in list(_home.expected.items()):
            if belongs_to == episode_id and has_ended():
                del _home.expected[number]
                _lost(episode_id)
        return _home.silent.pop(episode_id, 0)


def forget(number: str) -> bool:
    """No more is expected of ``number``. False: it has come already."""
    with _home.lock:
        _home.passed_on.pop(number, None)
        return _home.expected.pop(number, None) is not None


def over(number: str) -> None:
    """What runs under ``number`` has ended, or never will: so has its word come, or never will."""
    with _home.lock:
        if number in _home.passed_on:
            _home.passed_on[number] = _yes
        elif (found := _home.expected.pop(number, None)) is not None:
            _lost(found[1])


def _yes() -> bool:
    return True


def ended_here() -> list[str]:
    """Numbers of what was handed on here and has ended since this was last asked."""
    with _home.lock:
        ended = [number for number, has_ended in _home.passed_on.items() if has_ended()]
        for number in ended:
            del _home.passed_on[number]
    return ended + [sources.span_id() for _ in range(_pool_watch.newly_dead())]


def _received(number: str, lost: int, ended: list[str]) -> None:
    with _home.lock:
        if _home.expected.pop(number, None) is None:
            _home.arrived[number] = None
            if len(_home.arrived) > _MAX_EXPECTED:
                _home.arrived.popitem(last=False)
        silent = [one for one in ended if _home.arrived.pop(one, _MISSING) is _MISSING]
    counters.add("dropped", "span of another process", lost)
    counters.add("dropped", LOST, len(silent))


def _keep_nothing(episode: Episode) -> None:
    """Spans of an episode that is not this process's: there is nobody to give it to."""
    counters.add("dropped", "episode of another process")


def _in_forked_child() -> None:
    """The child listens to nobody; what it goes on with is recorded by its parent."""
    receiver, _home.receiver = _home.receiver, None
    _home.lock = threading.RLock()
    for numbers in (_home.expected, _home.passed_on, _home.arrived, _home.silent):
        numbers.clear()
    _pool_watch.reset()
    if receiver is None:
        return
    at = Address(endpoint=receiver.http_endpoint, token=receiver.token)
    with guard("receiver in a forked child"):
        receiver.abandon()
    scope = current()
    if scope is not None and scope is not IDLE and scope.episode.id and not scope.episode.closed:
        live_in(at)
