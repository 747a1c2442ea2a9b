"""Coroutines in, futures out: one event loop in a thread of its own, for apps and rewards that are async.

The loop lives as long as the runner, so that clients bound to it are used in one loop only. A coroutine that blocks it is found by
``responds``; such a loop is left behind and another one made.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import traceback
from collections.abc import Coroutine
from concurrent.futures import Future
from contextvars import Context
from typing import Any

__all__ = ["Lane", "LaneTask", "stack_of_coroutine", "stack_of_thread"]

_ANSWERS = 1.0
"""Seconds in which a loop that nothing blocks answers."""
_DEEPEST = 200
_FRAMES = ("cr_frame", "ag_frame", "gi_frame")
_AWAITED = ("cr_await", "ag_await", "gi_yieldfrom")


class Lane:
    """An event loop in a daemon thread."""

    def __init__(self, name: str = "rllm-apps") -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, Any], context: Context) -> LaneTask:
        """Start a coroutine in the loop, in this context."""
        return LaneTask(self, work, context)

    def responds(self, timeout: float) -> bool:
        """Whether the loop takes work; False: something blocks it, or it has been closed."""
        answered = threading.Event()
        try:
            self._loop.call_soon_threadsafe(answered.set)
        except RuntimeError:
            return False
        return answered.wait(timeout)

    def stack(self) -> str:
        """Where the loop's thread is now."""
        return stack_of_thread(self._thread)

    def close(self, timeout: float) -> bool:
        """Cancel what still runs and end the thread; False: it is blocked and stays behind."""
        with contextlib.suppress(RuntimeError):
            asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop).add_done_callback(lambda _: self._stop())
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _stop(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            while not self._run_on():
                pass
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
        finally:
            asyncio.set_event_loop(None)
            self._loop.close()

    def _run_on(self) -> bool:
        """Runs until it is stopped; False: a task of the app's own exited, which asyncio tells its waiter and then the loop."""
        try:
            self._loop.run_forever()
        except (SystemExit, KeyboardInterrupt):
            return False
        return True


class LaneTask:
    """One coroutine in a lane."""

    def __init__(self, lane: Lane, work: Coroutine[Any, Any, Any], context: Context) -> None:
        self.lane = lane
        self.done: Future[Any] = Future()
        self._work = work
        self._context = context
        self._task: asyncio.Task[None] | None = None
        lane._loop.call_soon_threadsafe(self._start)

    def cancel(self) -> None:
        """Ask it to end."""
        with contextlib.suppress(RuntimeError):
            self.lane._loop.call_soon_threadsafe(self._cancel)

    def stack(self) -> str:
        """Where it waits; where the loop's thread is, if something blocks it."""
        return stack_of_coroutine(self._work) if self.lane.responds(_ANSWERS) else self.lane.stack()

    def _start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._settle(), context=self._context)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _settle(self) -> None:
        try:
            result = await self._work
        except BaseException as error:  # noqa: BLE001 - it is the waiting thread's to see
            self.done.set_exception(error)
        else:
            self.done.set_result(result)


def stack_of_thread(thread: threading.Thread) -> str:
    """Where a thread is now, as a traceback prints it; empty where it has ended."""
    frame = sys._current_frames().get(thread.ident or 0)
    return "".join(traceback.format_stack(frame)) if frame is not None else ""


def stack_of_coroutine(work: Any) -> str:
    """Where a suspended coroutine waits, through everything that it awaits, as a traceback prints it."""
    lines: list[str] = []
    while work is not None and len(lines) < _DEEPEST:
        frame = next((f for name in _FRAMES if (f := getattr(work, name, None)) is not None), None)
        if frame is not None:
            lines += traceback.format_stack(frame, limit=1)
        work = next((w for name in _AWAITED if (w := getattr(work, name, None)) is not None), None)
    return "".join(lines)


async def _cancel_all() -> None:
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks, timeout=1.0) if tasks else None
