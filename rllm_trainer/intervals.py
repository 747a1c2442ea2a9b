"""Scores per task in, means with 95 % intervals out, by bootstrap over tasks. Pure, and fixed by a seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

__all__ = ["Interval", "mean_interval", "rise_interval"]

_RESAMPLES = 10_000
_BLOCK = 1_000_000
"""Numbers drawn at once."""


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """A mean over tasks with its 95 % interval; ``low`` = ``high`` = ``mean`` where there is one task."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


def mean_interval(scores: Sequence[float], *, seed: int = 0) -> Interval:
    """The mean of one score per task. Raises ``ValueError`` for no scores."""
    if not len(scores):
        raise ValueError("got no scores; expected one per task")
    values = np.asarray(scores, np.float64)
    means = _resampled_means(values, np.random.default_rng(seed))
    low, high = np.percentile(means, [2.5, 97.5])
    return Interval(mean=float(values.mean()), low=float(low), high=float(high))


def rise_interval(before: Mapping[str, float], after: Mapping[str, float], *, seed: int = 0) -> Interval:
    """The mean rise from ``before`` to ``after``, paired: tasks are drawn with both of their scores.

    Raises ``ValueError`` where the two do not score the same tasks.
    """
    if before.keys() != after.keys():
        odd = sorted(before.keys() ^ after.keys())
        raise ValueError(f"got {len(odd)} tasks scored only once, such as {odd[0]}; expected the same tasks before and after")
    return mean_interval([after[task] - before[task] for task in sorted(before)], seed=seed)


def _resampled_means(values: npt.NDArray[np.float64], random: np.random.Generator) -> npt.NDArray[np.float64]:
    count = len(values)
    rows = max(1, _BLOCK // count)
    blocks = [
        values[random.integers(0, count, size=(min(rows, _RESAMPLES - start), count))].mean(axis=1) for start in range(0, _RESAMPLES, rows)
    ]
    return np.concatenate(blocks)
