"""What a caller gave for an option in, the same in its proper type out; or one sentence that says what was got and what is expected."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from rllm_trace.exceptions import ConfigurationError

__all__ = ["flag", "path", "seconds", "text", "texts", "words"]


def seconds(value: object, name: str) -> float:
    """A finite number of seconds, 0 or more. Raises ConfigurationError."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise ConfigurationError(f"got {name}={value!r}; expected seconds, 0 or more")
    return float(value)


def flag(value: object, name: str, *, or_none: bool = False) -> None:
    """True or False themselves: what merely counts as true is a mistake more often than not. Raises ConfigurationError."""
    if not (value is True or value is False or (or_none and value is None)):
        raise ConfigurationError(f"got {name}={value!r}; expected True{', False or None' if or_none else ' or False'}")


def text(value: object, name: str, *, or_none: bool = False) -> None:
    """A string that is not empty. Raises ConfigurationError."""
    if not (isinstance(value, str) and value) and not (or_none and value is None):
        raise ConfigurationError(f"got {name}={value!r}; expected a non-empty string{', or None' if or_none else ''}")


def path(value: object, name: str) -> Path:
    """A path that says where. Raises ConfigurationError."""
    plain = value
    if isinstance(plain, os.PathLike):
        plain = os.fspath(cast("os.PathLike[Any]", plain))
    if not isinstance(plain, str) or not plain:
        raise ConfigurationError(f"got {name}={value!r}; expected a path, such as {name}='runs/{name}'")
    return Path(plain)


def words(value: object, name: str) -> None:
    """A mapping. Raises ConfigurationError."""
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"got {name}={value!r}; expected a dict")


def texts(value: object, name: str) -> dict[str, str]:
    """A copy of a mapping from str to str. Raises ConfigurationError."""
    words(value, name)
    entries = cast("Mapping[object, object]", value)
    for key, entry in entries.items():
        if not isinstance(key, str) or not isinstance(entry, str):
            raise ConfigurationError(f"got {key!r}: {entry!r} in {name}; expected strings")
    return {str(key): str(entry) for key, entry in entries.items()}
