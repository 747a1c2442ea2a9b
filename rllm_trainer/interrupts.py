"""Ctrl-C and SIGTERM in, a stop event out, while a run lasts; afterwards the handlers are what they were.

The first one asks the run to end at the next whole step; a second Ctrl-C raises at once. Handlers of the user's own are left alone,
and so is everything where the run is not in the main thread. The one that ``ray.init`` sets ends the process as the system's would.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["Stop", "interruptible"]

_TERMINATED = 128 + signal.SIGTERM
_RAY = "ray."


class Stop:
    """Whether the run is asked to end, and by what."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.signal: int | None = None

    def error(self) -> BaseException:
        """What to raise once the run has ended cleanly: what the signal would have done."""
        return SystemExit(_TERMINATED) if self.signal == signal.SIGTERM else KeyboardInterrupt()


@contextmanager
def interruptible(say: Callable[[str], None]) -> Generator[Stop]:
    """Take SIGINT and SIGTERM while it is open, where they have Python's, the system's or Ray's default handler."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def asked(number: int, _: FrameType | None) -> None:
        if stop.event.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.signal = number
        stop.event.set()
        say("stopping at the next whole step; what has been collected is kept (Ctrl-C again to stop at once)")

    before: dict[int, Any] = {}
    for number, default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
        if _is_default(signal.getsignal(number), default):
            before[number] = signal.signal(number, asked)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_default(handler: Any, default: Any) -> bool:
    return handler is default or str(getattr(handler, "__module__", "")).startswith(_RAY)
