"""What a reward function returned in, finite numbers by name out; or one sentence that says why it is no reward."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any, cast

from rllm_trace.exceptions import RewardError
from rllm_trace.types import Reward

__all__ = ["number", "rewards_of"]

_FIX = "return a finite number, a bool, a dict of them by name, or rllm.Reward"
_LARGEST = 1e18
"""Scores are compared in float32, which holds no square of more."""
_TOO_LARGE = f"scores are compared as float32: scale it to at most {_LARGEST:g}"


def rewards_of(result: Any, name: str, weight: float, *, target: str | None, span_id: str | None) -> list[Reward]:
    """The rewards in ``result``: one for a number, one for each entry of a dict, a ``Reward`` as it is.

    Example: ``rewards_of({"right": True}, "judge", 2.0, target=None, span_id=None)`` is one Reward named ``right``, value 1.0, weight 2.0.
    Raises RewardError, naming the reward, for None, text, NaN, infinities and whatever else is no number.
    """
    if isinstance(result, Reward):
        return [
            Reward(
                name=result.name,
                value=number(result.value, result.name),
                weight=number(result.weight, result.name),
                target=result.target or target,
                span_id=span_id,
            )
        ]
    if isinstance(result, Mapping):
        entries = cast("Mapping[Any, Any]", result)
        if not entries:
            raise RewardError(f"the reward {name!r} got an empty dict; {_FIX}")
        return [
            Reward(name=str(key), value=number(value, f"{name}[{key!r}]"), weight=weight, target=target, span_id=span_id)
            for key, value in entries.items()
        ]
    return [Reward(name=name, value=number(result, name), weight=weight, target=target, span_id=span_id)]


def number(value: Any, name: str) -> float:
    """``value`` as a finite float of at most 1e18 either way: a number, a bool, a decimal, or a numpy or torch scalar."""
    plain = value
    if not isinstance(plain, numbers.Real) and not isinstance(plain, (str, bytes)) and callable(getattr(plain, "item", None)):
        try:
            plain = plain.item()
        except Exception as error:
            raise RewardError(f"the reward {name!r} got a {type(value).__name__} that is no single number; {_FIX}") from error
    if not isinstance(plain, numbers.Real) and not _is_decimal(plain):
        raise RewardError(f"the reward {name!r} got {_shown(value)}; {_FIX}")
    try:
        found = float(cast("Any", plain))
    except OverflowError as error:
        raise RewardError(f"the reward {name!r} got {_shown(value)}; {_TOO_LARGE}") from error
    except Exception as error:
        raise RewardError(f"the reward {name!r} got {_shown(value)}; {_FIX}") from error
    if not math.isfinite(found):
        raise RewardError(f"the reward {name!r} got {found}; {_FIX}")
    if abs(found) > _LARGEST:
        raise RewardError(f"the reward {name!r} got {found}; {_TOO_LARGE}")
    return found


def _is_decimal(value: object) -> bool:
    """A number of the numeric tower's root that is not complex."""
    return isinstance(value, numbers.Number) and not isinstance(value, numbers.Complex)


def _shown(value: Any) -> str:
    if value is None:
        return "None"
    try:
        return f"{repr(value)[:80]} of type {type(value).__name__}"
    except Exception:  # noqa: BLE001 - a user's repr may raise anything
        return f"an object of type {type(value).__name__}"
