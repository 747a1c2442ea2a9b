"""The README's table of figures in, and what was measured; the same table with those figures in their cells out, a missed goal named."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, cast

__all__ = ["filled", "is_met"]

_ROW: Final = re.compile(r"^\| `(?P<key>\w+)`(?P<what>[^|]*)\| (?P<goal>[^|]*?) \| (?P<ours>[^|]*?) \|", re.MULTILINE)
_MISSED: Final = ", **not met**"


def filled(text: str, goals: Mapping[str, str], numbers: Mapping[str, Any]) -> str:
    """``text`` with the figures of ``numbers``; rows of other keys stay. Raises ValueError for a key that has no row."""
    there = {found["key"] for found in _ROW.finditer(text)}
    if missing := [key for key in numbers if key not in there]:
        raise ValueError(f"no row of the table is about {', '.join(missing)}")

    def row(found: re.Match[str]) -> str:
        key = found["key"]
        if key not in numbers:
            return found[0]
        cell = _shown(numbers[key]) + ("" if is_met(goals[key], numbers[key]) else _MISSED)
        return f"| `{key}`{found['what']}| {found['goal']} | {cell} |"

    return _ROW.sub(row, text)


def is_met(goal: str, figure: Any) -> bool:
    """Whether ``figure`` is as ``goal`` has it: ``"< 1.06"``, ``"> 1500"``, ``"1.0"``, ``"< 12000 / < 24000"``, ``""`` for anything."""
    goals, figures = goal.split(" / "), cast("list[Any]", figure) if isinstance(figure, list) else [figure]
    return not goal or all(_is_within(one, float(value)) for one, value in zip(goals, figures, strict=True))


def _is_within(goal: str, figure: float) -> bool:
    way, _, limit = goal.rpartition(" ")
    return figure < float(limit) if way == "<" else figure > float(limit) if way == ">" else figure == float(limit)


def _shown(figure: Any) -> str:
    if isinstance(figure, list):
        return " / ".join(map(_shown, cast("list[Any]", figure)))
    return f"{figure:,.0f}" if figure >= 100 else f"{figure:.3f}" if figure < 1.5 else f"{figure:.2f}"
