"""Entries for verl as a user writes them, nested or dotted, in; the same by dotted name out. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

__all__ = ["dotted"]


def dotted(entries: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """``{"a": {"b": 1}, "c.d": {}}`` gives ``a.b``, 1 and ``c.d``, {}; a name keeps its ``+``."""
    for name, value in entries.items():
        if isinstance(value, Mapping) and value:
            for further, inner in dotted(cast("Mapping[str, Any]", value)):
                yield f"{name}.{further}", inner
        else:
            yield str(name), value
