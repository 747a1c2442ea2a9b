"""Any Python value in, JSON-ready data out, and back.

``from_plain(to_plain(x)) == x`` for None, bool, int, float, str, bytes, list, tuple, set, frozenset, dict, dates and times, UUID and
Decimal, nested in any way. Other objects become what describes them best (a dataclass, Struct or pydantic model its fields, an array
its list, an enum its value, the rest its repr) and come back as that. A value that JSON cannot spell is a tagged object
``{"$": kind, "v": ...}``; a dict that has a ``$`` key of its own is tagged too, so nothing is mistaken for a tag.
Never raises for a value, however odd; cycles, large arrays and very large graphs are cut and say so.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime
import decimal
import enum
import json
import math
import os
import uuid
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

import msgspec

__all__ = ["dumps", "from_plain", "loads", "to_plain"]

_TAG: Final = "$"
_VALUE: Final = "v"
_INT_MIN: Final = -(2**63)
_INT_MAX: Final = 2**64 - 1
_MAX_NODES: Final = 2_000_000
_MAX_DEPTH: Final = 100
_MAX_REPR: Final = 2_000
_MAX_ARRAY: Final = 2**20
"""Bytes of an array that is made a list of."""

_TEXT: Final[dict[type, tuple[str, Callable[[Any], str]]]] = {
    datetime.datetime: ("datetime", datetime.datetime.isoformat),
    datetime.date: ("date", datetime.date.isoformat),
    datetime.time: ("time", datetime.time.isoformat),
    uuid.UUID: ("uuid", str),
    decimal.Decimal: ("decimal", str),
    bytes: ("bytes", lambda value: base64.b64encode(value).decode("ascii")),
    bytearray: ("bytearray", lambda value: base64.b64encode(value).decode("ascii")),
}
_SEQUENCES: Final[dict[type, str]] = {tuple: "tuple", set: "set", frozenset: "frozenset"}


def to_plain(value: Any) -> Any:
    """``value`` as JSON-ready data: None, bool, 64-bit int, finite float, valid str, list, dict with str keys."""
    return _Walk().plain(value)


def from_plain(value: Any) -> Any:
    """The value that ``to_plain`` was given."""
    if isinstance(value, list):
        return [from_plain(item) for item in cast("list[Any]", value)]
    if isinstance(value, dict):
        mapping = cast("dict[str, Any]", value)
        if _TAG in mapping:
            return _untag(str(mapping[_TAG]), mapping.get(_VALUE))
        return {key: from_plain(item) for key, item in mapping.items()}
    return value


def dumps(value: Any) -> str:
    """JSON text of decoded JSON or of ``to_plain``'s result; lone surrogates, which UTF-8 cannot spell, stay escaped."""
    try:
        return msgspec.json.encode(value).decode("utf-8")
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":"))


def loads(text: bytes | str) -> Any:
    """Decodes JSON; also what msgspec refuses and the standard library reads, such as lone surrogates."""
    try:
        return msgspec.json.decode(text)
    except msgspec.MsgspecError:
        return json.loads(text)


class _Walk:
    """One pass over a value: knows how much it has seen, and which containers it is inside of."""

    def __init__(self) -> None:
        self._nodes = 0
        self._inside: set[int] = set()

    def plain(self, value: Any) -> Any:
        kind = _type(value)
        if value is None or kind is bool:
            return value
        if kind is str:
            return _text(value)
        if kind is int:
            return value if _INT_MIN <= value <= _INT_MAX else _tagged("int", str(value))
        if kind is float:
            return value if math.isfinite(value) else _tagged("float", repr(value))
        if kind in _TEXT:
            name, convert = _TEXT[kind]
            return _tagged(name, convert(value))
        if kind is datetime.timedelta:
            return _tagged("timedelta", [value.days, value.seconds, value.microseconds])
        return self._container(value)

    def _container(self, value: Any) -> Any:
        self._nodes += len(value) + 1 if type(value) in (list, tuple, dict) else 1
        if id(value) in self._inside:
            return _tagged("object", f"<cycle to a {type(value).__qualname__}>")
        if self._nodes > _MAX_NODES or len(self._inside) > _MAX_DEPTH:
            return _tagged("object", f"<{type(value).__qualname__}, cut: the value is too large to record>")
        self._inside.add(id(value))
        try:
            return self._open(value)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - a user's __iter__, model_dump or repr, which only we call, may raise anything
            return _tagged("object", f"<{type(value).__qualname__}, unreadable: {type(error).__name__}>")
        finally:
            self._inside.discard(id(value))

    def _open(self, value: Any) -> Any:
        kind = _type(value)
        if kind is list:
            return [self.plain(item) for item in value]
        if kind in _SEQUENCES:
            return _tagged(_SEQUENCES[kind], [self.plain(item) for item in value])
        if isinstance(value, Mapping):
            return self._mapping(cast("Mapping[Any, Any]", value))
        return self._object(value)

    def _mapping(self, value: Mapping[Any, Any]) -> Any:
        if all(type(key) is str for key in value) and _TAG not in value and all(key.isascii() or _valid(key) for key in value):
            return {key: self.plain(item) for key, item in value.items()}
        return _tagged("dict", [[self.plain(key), self.plain(item)] for key, item in value.items()])

    def _object(self, value: Any) -> Any:
        if isinstance(value, msgspec.Struct):
            return self.plain({name: getattr(value, name) for name in value.__struct_fields__})
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self.plain({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
        if isinstance(value, enum.Enum):
            return self.plain(value.value)
        if isinstance(value, os.PathLike):
            return self.plain(os.fspath(cast("os.PathLike[str]", value)))
        size = getattr(value, "nbytes", None)
        if type(size) is int and size > _MAX_ARRAY:
            return _tagged("object", f"<{type(value).__qualname__} of {size} bytes, too large to record>")
        for method in ("model_dump", "tolist"):
            convert = getattr(value, method, None)
            if callable(convert) and not isinstance(value, type):
                return self.plain(convert())
        for base in (bool, int, float, str, list, tuple, set, frozenset):
            if isinstance(value, base):
                return self.plain(base(cast("Any", value)))
        return _tagged("object", _text(repr(value)[:_MAX_REPR]))


def _type(value: object) -> type[Any]:
    return type(value)


def _tagged(kind: str, value: Any) -> dict[str, Any]:
    return {_TAG: kind, _VALUE: value}


def _valid(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _text(value: str) -> Any:
    if value.isascii() or _valid(value):
        return value
    return _tagged("surrogates", json.dumps(value))


def _untag(kind: str, value: Any) -> Any:
    return _RESTORE.get(kind, _opaque)(value)


def _opaque(value: Any) -> Any:
    return from_plain(value)


_RESTORE: Final[dict[str, Callable[[Any], Any]]] = {
    "int": int,
    "float": float,
    "surrogates": json.loads,
    "datetime": datetime.datetime.fromisoformat,
    "date": datetime.date.fromisoformat,
    "time": datetime.time.fromisoformat,
    "timedelta": lambda value: datetime.timedelta(days=value[0], seconds=value[1], microseconds=value[2]),
    "uuid": uuid.UUID,
    "decimal": decimal.Decimal,
    "bytes": base64.b64decode,
    "bytearray": lambda value: bytearray(base64.b64decode(value)),
    "tuple": lambda value: tuple(from_plain(item) for item in value),
    "set": lambda value: {from_plain(item) for item in value},
    "frozenset": lambda value: frozenset(from_plain(item) for item in value),
    "dict": lambda value: {from_plain(key): from_plain(item) for key, item in value},
}
