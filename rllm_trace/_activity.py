"""One entry of decorated code, from its first step to its end: holds the scope that is set while the code runs, and only then.

A function is one step; a generator is one step for each item. Between steps the scope of the consumer is the running one, so nothing of a
generator leaks into it, and what the generator's body has opened (an agent, say) is there again at its next step.
"""

from __future__ import annotations

import functools
import inspect
import re
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol, cast

from rllm_trace._context import Scope, enter, leave
from rllm_trace._guard import counters
from rllm_trace._plain import from_plain, to_plain

__all__ = ["UNTOUCHED", "Activity", "Kind", "arguments", "snapshot"]

_MAX_ITEMS: Final = 100_000
_WITHHELD: Final = "[withheld]"
_SECRET_NAME: Final = re.compile(
    r"(^|[_-])(password|passwd|secret|authorization|(api|private)[_-]?key|(access|auth)[_-]?token)$", re.IGNORECASE
)
_ATOMS: Final = frozenset({str, int, float, bool, bytes, type(None)})


class Activity:
    """Base of the kinds. Their ``succeed`` and ``fail`` are called once, and neither raises."""

    __slots__ = ("_before", "_running", "items", "scope")

    def __init__(self, scope: Scope | None) -> None:
        self.scope = scope
        """What is running while its code runs; None only for code that is left alone."""
        self.items: list[Any] | None = None
        """Copies of what a generator has yielded; None for a function."""
        self._running = scope
        self._before: Scope | None = None

    def resume(self) -> None:
        """Its code runs on."""
        self._before = enter(self._running)

    def suspend(self) -> None:
        """Its code has stopped, for now or for good."""
        self._running = leave(self.scope, self._before)
        self._before = None

    def yielded(self, item: Any) -> None:
        """A generator gave an item."""

    def succeed(self, result: Any) -> None:
        """Returned, or its generator was exhausted (``result`` then is what it returned) or closed (None)."""

    def fail(self, error: BaseException) -> None:
        """Raised, or was cancelled."""

    def keep(self, item: Any) -> None:
        """Adds a copy of a yielded item; what is beyond the limit is counted."""
        if self.items is None:
            self.items = []
        if len(self.items) < _MAX_ITEMS:
            self.items.append(snapshot(item))
        else:
            counters.add("dropped", "yielded item")


class _Untouched(Activity):
    """Code that is left alone."""

    __slots__ = ()

    def resume(self) -> None: ...

    def suspend(self) -> None: ...


UNTOUCHED: Final[Activity] = _Untouched(None)


class Kind(Protocol):
    """What a decorator does: begins an activity for each entry of the function."""

    def begin(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Activity:
        """Never raises; ``UNTOUCHED`` where there is nothing to do."""
        ...


def snapshot(value: Any) -> Any:
    """A copy that later changes of ``value`` do not reach. Objects become plain data, or their repr, large arrays only say so."""
    if type(value) in _ATOMS:
        return value
    return from_plain(to_plain(value))


_BY_POSITION: Final = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_names: weakref.WeakKeyDictionary[Any, tuple[str, ...] | None] = weakref.WeakKeyDictionary()
_signatures: weakref.WeakKeyDictionary[Any, inspect.Signature | None] = weakref.WeakKeyDictionary()
_MAX_SIGNATURES: Final = 10_000


def arguments(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Copies of the call's arguments by parameter name, without ``self`` and ``cls``; what does not bind is under ``args``.

    A text under a name such as ``api_key`` or ``password`` is withheld, however deep.
    """
    names = _plain_names(function)
    if names is not None and not kwargs and len(args) == len(names):
        bound: Mapping[str, Any] = dict(zip(names, args, strict=True))
    else:
        bound = _bound(function, args, kwargs)
    return {name: _open(name, snapshot(value)) for name, value in bound.items() if name not in ("self", "cls")}


def _bound(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    signature = _signature(function)
    try:
        return signature.bind(*args, **kwargs).arguments if signature is not None else {"args": args, **kwargs}
    except TypeError:
        return {"args": args, **kwargs}


def _plain_names(function: Callable[..., Any]) -> tuple[str, ...] | None:
    """The parameters, where each takes one argument by its position; None where there are others."""
    try:
        return _names[function]
    except (KeyError, TypeError):
        pass
    signature = _signature(function)
    names = None
    if signature is not None and all(parameter.kind in _BY_POSITION for parameter in signature.parameters.values()):
        names = tuple(signature.parameters)
    if len(_names) < _MAX_SIGNATURES and inspect.isfunction(function):
        _names[function] = names
    return names


@functools.lru_cache(maxsize=4_096)
def _is_secret(name: str) -> bool:
    return _SECRET_NAME.search(name) is not None


def _open(name: Any, value: Any) -> Any:
    """The value, a plain copy, without the texts whose names say that they are secrets."""
    if isinstance(value, str):
        return _WITHHELD if isinstance(name, str) and _is_secret(name) else value
    if isinstance(value, dict):
        return {key: _open(key, item) for key, item in cast("dict[Any, Any]", value).items()}
    if isinstance(value, (list, tuple)):
        items = cast("list[Any] | tuple[Any, ...]", value)
        return type(items)(_open(name, item) for item in items)
    return value


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return _signatures[function]
    except (KeyError, TypeError):
        pass
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        signature = None
    if len(_signatures) < _MAX_SIGNATURES and inspect.isfunction(function):
        _signatures[function] = signature
    return signature
