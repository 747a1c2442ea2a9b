"""Has ``multiprocessing`` take the running workflow along: processes that are started in one, and functions that a pool is given in one.

Six methods of the standard library are wrapped, only after ``configure(processes=True)``: ``Process.start``,
``ProcessPoolExecutor.submit`` and four of ``Pool``. Outside a workflow they do what they always did. What is handed over is a callable
that pickles wherever the app's own does. The workers of a pool belong to no workflow, wherever they were started: each task has its own.
A wrapper is taken out only where it is still the outermost; otherwise it stays and does nothing.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any, Final, cast

from rllm_trace import _home, _pool_watch
from rllm_trace._context import Carried, capture, current
from rllm_trace._episode import IDLE
from rllm_trace._guard import guard
from rllm_trace._handover import Handover, continued, hand_over, hand_over_collecting
from rllm_trace._propagation import _is_in_chain, _put_back, _running, _to_carry
from rllm_trace.rollouts import current_rollout

__all__ = ["install", "uninstall"]

_OWN_MODULES: Final = ("multiprocessing.", "concurrent.futures.")
"""What the standard library runs in a process of its own (workers, managers) belongs to no workflow."""
_POOL_METHODS: Final = ("apply_async", "_map_async", "imap", "imap_unordered")
"""All others of ``Pool`` call these with the function first."""


class CarriedTask:
    """A function of the app that goes on in the scope that it was handed over in, in whichever process it is called."""

    __slots__ = ("__wrapped__", "_handover", "_number", "_values")

    def __init__(self, function: Callable[..., Any], handover: Handover | None, number: str | None, values: Carried | None) -> None:
        self.__wrapped__ = function
        self._handover = handover
        self._number = number
        self._values = values
        """For the process that it was made in; not pickled."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._values is not None:
            with _running(self._values):
                return self.__wrapped__(*args, **kwargs)
        install()  # a spawned process begins without it, and may start processes of its own
        with continued(self._handover, self._number):
            return self.__wrapped__(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return CarriedTask, (self.__wrapped__, self._handover, self._number, None)


class CarriedRun:
    """``run`` of a process object, in the scope that it was started in."""

    __slots__ = ("_handover", "_number", "_process", "_run")

    def __init__(self, process: Any, run: Callable[[], Any] | None, handover: Handover, number: str) -> None:
        self._process = process
        self._run = run
        """The app's own, if it had set one on the object."""
        self._handover = handover
        self._number = number

    def __call__(self) -> Any:
        kind = cast("Any", type(self._process))
        run: Callable[[], Any] = self._run or functools.partial(kind.run, self._process)
        install()
        with continued(self._handover, self._number):
            return run()

    def __getstate__(self) -> tuple[Any, ...]:
        return (self._process, self._run, self._handover, self._number)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._process, self._run, self._handover, self._number = state


def _handed_over() -> Handover | None:
    handover: Handover | None = None
    with guard("handover"):
        handover = hand_over()
        if handover is None and _is_outside():
            handover = hand_over_collecting()
    return handover


def _is_outside() -> bool:
    """Whether the code here belongs to no workflow that runs, and to no rollout."""
    scope = current()
    return (scope is None or scope is IDLE or scope.episode.closed) and current_rollout() is None


def _nothing() -> Carried:
    return tuple((variable, None) for variable, _ in capture())


def _wrap_start(original: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(original)
    def start(self: Any) -> None:
        handover = _handed_over() if _patches.active else None
        if _patches.active:
            with guard("pool"):
                _pool_watch.started(self)
        if handover is None:
            return original(self)
        if str(getattr(getattr(self, "_target", None), "__module__", "")).startswith(_OWN_MODULES):
            with _running(_nothing()):
                return original(self)
        own: dict[str, Any] = cast("dict[str, Any]", vars(self))
        before: Any = own.get("run")
        number = _home.expect(_ended(self), handover.home)
        own["run"] = CarriedRun(self, before, handover, number)
        try:
            return original(self)
        except BaseException:
            _home.forget(number)
            raise
        finally:
            _put_back(own, before)

    return start


def _ended(process: Any) -> Callable[[], bool]:
    reference = weakref.ref(process)

    def ended() -> bool:
        alive = reference()
        if alive is None:
            return True
        popen = getattr(alive, "_popen", None)
        return bool(getattr(alive, "_closed", False)) or (popen is not None and popen.poll() is not None)

    return ended


def _wrap_submit(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def submit(self: Any, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        handover = _handed_over() if _patches.active else None
        if handover is None:
            return original(self, fn, *args, **kwargs)
        number = _home.expect(lambda: False, handover.home)
        try:
            with _running(_nothing()):  # workers and threads that start here outlive this workflow
                future = original(self, CarriedTask(fn, handover, number, None), *args, **kwargs)
        except BaseException:
            _home.forget(number)
            raise
        future.add_done_callback(functools.partial(_done, number))
        return future

    return submit


def _done(number: str, future: Any) -> None:
    """The result is here, or never will be: so is what was recorded."""
    if future.cancelled():
        _home.forget(number)
    else:
        _home.over(number)


def _wrap_pool(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: Any, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        from multiprocessing.pool import ThreadPool

        stays = isinstance(self, ThreadPool)
        values = _to_carry() if stays and _patches.active else None
        handover = _handed_over() if not stays and _patches.active else None
        if values is None and handover is None:
            return original(self, func, *args, **kwargs)
        if handover is not None:
            with guard("pool"):
                _pool_watch.watch(self)
        return original(self, CarriedTask(func, handover, None, values), *args, **kwargs)

    return method


class _Patches:
    """(owner, name) of what is wrapped, and our wrapper."""

    def __init__(self) -> None:
        self.active = False
        self.lock = threading.Lock()
        self.made: dict[tuple[Any, str], Any] = {}


_patches: Final = _Patches()


def install() -> None:
    """Wraps them; asking twice changes nothing."""
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing.pool import Pool
    from multiprocessing.process import BaseProcess

    wanted: list[tuple[Any, str, Callable[..., Any]]] = [(BaseProcess, "start", _wrap_start), (ProcessPoolExecutor, "submit", _wrap_submit)]
    wanted += [(Pool, name, _wrap_pool) for name in _POOL_METHODS]
    with _patches.lock:
        _patches.active = True
        for owner, name, make in wanted:
            running = getattr(owner, name)
            if not _is_in_chain(running, _patches.made.get((owner, name), install)):
                _patches.made[owner, name] = make(running)
                setattr(owner, name, _patches.made[owner, name])


def uninstall() -> None:
    """Stops that; restores a method where our wrapper is its outermost."""
    with _patches.lock:
        _patches.active = False
        for (owner, name), ours in list(_patches.made.items()):
            if getattr(owner, name) is ours:
                setattr(owner, name, ours.__wrapped__)
                del _patches.made[owner, name]
