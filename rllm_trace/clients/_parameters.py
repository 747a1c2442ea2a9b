"""What an app gave for a call in; out comes what the ``openai`` client makes of it, without the client's walk through all of it.

Before each call the client walks through all that it was given, once for each type that a message may have, to rename fields and to write
dates and files; that takes longer than the whole of a record. Plain data (dictionaries, lists, texts, numbers) holds no date and no file,
and where no type of the call renames a field, what the walk gives is an equal copy: that copy is made here. All else, and each type of
which one cannot be sure, is left to the client. Inside a workflow only; outside everything is the client's own.
"""

from __future__ import annotations

import functools
import importlib
import typing
from collections.abc import Callable, Iterable
from types import NoneType
from typing import Any, Final, cast

from rllm_trace._context import current
from rllm_trace._guard import guard

__all__ = ["NOT_GIVEN", "agrees", "copied", "install", "renames", "uninstall"]

_MODULE: Final = "openai._utils._transform"
_ATOMS: Final = frozenset({str, int, float, bool, NoneType})
NOT_GIVEN: Final = frozenset({"NotGiven", "Omit"})
"""The client's words for what was left out."""


class _NotPlainError(Exception):
    """Something that the client turns into something else, or might."""


def copied(given: Any, expected: Any) -> dict[str, Any] | None:
    """What the client's ``transform(given, expected)`` gives; None where that may be more than a copy without what was left out."""
    if type(given) is not dict or renames(expected):
        return None
    found: dict[str, Any] = {}
    try:
        for name, value in cast("dict[str, Any]", given).items():
            if type(value) in _ATOMS:
                found[name] = value
            elif type(value).__name__ not in NOT_GIVEN:
                found[name] = _copy(value)
    except (_NotPlainError, RecursionError):
        return None
    return found


def _copy(value: Any) -> Any:
    if type(value) is dict:
        return {name: item if type(item) in _ATOMS else _copy(item) for name, item in cast("dict[str, Any]", value).items()}
    if type(value) is list:
        return [item if type(item) in _ATOMS else _copy(item) for item in cast("list[Any]", value)]
    raise _NotPlainError


@functools.lru_cache(maxsize=256)
def renames(kind: Any) -> bool:
    """Whether a field of the type, or of a type within it, is sent under another name than its own; True where that cannot be told."""
    try:
        return _renames(kind, {})
    except Exception:  # noqa: BLE001 - a type of a release that nobody has seen yet
        return True


def _renames(kind: Any, seen: dict[int, Any]) -> bool:
    if id(kind) in seen:
        return False
    seen[id(kind)] = kind  # held, so that no other type gets its id meanwhile
    if getattr(kind, "alias", None) is not None:
        return True
    within = list(typing.get_args(kind))
    if hasattr(kind, "__total__"):
        within += typing.get_type_hints(kind, include_extras=True).values()
    return any(_renames(item, seen) for item in within)


class _Probe(typing.TypedDict):
    many: Iterable[str]


def agrees(transform: Callable[[Any, Any], Any]) -> bool:
    """Whether the client's ``transform`` leaves a dictionary alone where a list is expected; old releases make a list of its keys."""
    given = {"many": {"a": 1}}
    return transform(given, _Probe) == given


# the patch

_originals: Final[dict[str, tuple[Any, Any]]] = {}
"""Name of a function to what the module had, and what it has in its place."""


def install() -> None:
    """Puts the two functions in place, once. Changes nothing in a release that has no such functions, or others."""
    with guard("client"):
        module = importlib.import_module(_MODULE)
        walk = getattr(module, "transform", None)
        if _originals or walk is None or not agrees(walk):
            return
        for name, make in (("transform", _transform), ("async_transform", _async_transform)):
            original = getattr(module, name, None)
            if original is not None:
                made = functools.wraps(original)(make(original))
                setattr(module, name, made)
                _originals[name] = (original, made)


def uninstall() -> None:
    """Puts the client's own back, unless somebody has put something else in our place: then ours only calls on."""
    for name, (original, made) in list(_originals.items()):
        module = importlib.import_module(_MODULE)
        if getattr(module, name) is made:
            setattr(module, name, original)
            del _originals[name]


def _quickly(data: Any, expected_type: Any, args: Any, kwargs: Any) -> dict[str, Any] | None:
    if current() is None or args or kwargs:
        return None
    try:
        return copied(data, expected_type)
    except Exception as error:  # noqa: BLE001 - as in ``guard``
        guard.count("client", error)
        return None


def _transform(original: Callable[..., Any]) -> Callable[..., Any]:
    def transform(data: Any, expected_type: Any, *args: Any, **kwargs: Any) -> Any:
        quickly = _quickly(data, expected_type, args, kwargs)
        return original(data, expected_type, *args, **kwargs) if quickly is None else quickly

    return transform


def _async_transform(original: Callable[..., Any]) -> Callable[..., Any]:
    async def async_transform(data: Any, expected_type: Any, *args: Any, **kwargs: Any) -> Any:
        quickly = _quickly(data, expected_type, args, kwargs)
        return await original(data, expected_type, *args, **kwargs) if quickly is None else quickly

    return async_transform
