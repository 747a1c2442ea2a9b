"""Rows in, the batch of one optimizer step out: each trained token's share in the loss, and the one number that divides. Pure.

verl's aggregations, with a *trajectory* as the sequence, however many rows it was cut into. Shares and denominator are those of the
whole batch, so micro-batches and ranks only add up; rows with advantage 0 are in the denominator like all others.

| loss_agg                | share of a token            | denominator                        |
|-------------------------|-----------------------------|------------------------------------|
| token-mean              | 1                           | trained tokens                     |
| token-sum               | 1                           | 1                                  |
| seq-mean-token-sum      | 1                           | trajectories                       |
| seq-mean-token-mean     | 1 / tokens of its trajectory| trajectories                       |
| seq-mean-token-sum-norm | 1                           | trajectories x loss_scale_factor   |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np

from rllm_trainer.config import LossAgg, Settings
from rllm_trainer.exceptions import SettingError
from rllm_trainer.types import Batch, Float32, Row

__all__ = ["make_batch", "make_batches", "require_scale_factor"]

_TrajectoryKey = tuple[str, str]
"""Episode id, trajectory id."""


def make_batch(rows: Sequence[Row], *, settings: Settings, step: int, policy_version: int) -> Batch:
    """All rows as one batch.

    Raises:
        SettingError: the aggregation needs a ``loss_scale_factor`` that is not given.
    """
    kept = [row for row in rows if row.sample.trained_mask.any()]
    lengths = _trajectory_lengths(kept)
    return Batch(
        rows=[_weighted(row, settings.loss_agg, lengths) for row in kept],
        denominator=_denominator(settings, lengths),
        step=step,
        policy_version=policy_version,
    )


def make_batches(rows: Sequence[Row], *, settings: Settings, step: int, policy_version: int, mini_batches: int = 1) -> list[Batch]:
    """The rows cut into mini-batches between task groups, never inside one; each has its own denominator and takes one step.

    Groups are dealt in their order, each to the mini-batch with the fewest trained tokens so far.

    Raises:
        SettingError: there are fewer groups than mini-batches.
    """
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    if mini_batches > max(1, len(groups)):
        raise SettingError(
            f"got {mini_batches} mini-batches for {len(groups)} task groups; a group is never cut, so ask for at most that many"
        )
    parts: list[list[Row]] = [[] for _ in range(mini_batches)]
    tokens = [0] * mini_batches
    for members in groups.values():
        least = tokens.index(min(tokens))
        parts[least] += members
        tokens[least] += sum(int(row.sample.trained_mask.sum()) for row in members)
    return [make_batch(part, settings=settings, step=step, policy_version=policy_version) for part in parts]


def _trajectory_lengths(rows: Sequence[Row]) -> Counter[_TrajectoryKey]:
    """Trained tokens of each trajectory, over all of its rows."""
    lengths: Counter[_TrajectoryKey] = Counter()
    for row in rows:
        for span in row.sample.spans:
            if span.trained:
                lengths[row.sample.episode_id, span.trajectory_id] += int(row.sample.trained_mask[span.start : span.stop].sum())
    return +lengths


def _weighted(row: Row, loss_agg: LossAgg, lengths: Counter[_TrajectoryKey]) -> Row:
    weights: Float32 = row.sample.trained_mask.astype(np.float32)
    if loss_agg == "seq-mean-token-mean":
        for span in row.sample.spans:
            if span.trained and span.stop > span.start:
                weights[span.start : span.stop] /= np.float32(lengths[row.sample.episode_id, span.trajectory_id])
    return msgspec.structs.replace(row, weights=weights)


def _denominator(settings: Settings, lengths: Counter[_TrajectoryKey]) -> float:
    match settings.loss_agg:
        case "token-mean":
            return float(max(1, lengths.total()))
        case "token-sum":
            return 1.0
        case "seq-mean-token-sum" | "seq-mean-token-mean":
            return float(max(1, len(lengths)))
        case "seq-mean-token-sum-norm":
            return max(1, len(lengths)) * _scale_factor(settings)


def require_scale_factor(settings: Settings) -> None:
    """Raises ``SettingError`` where the aggregation needs a ``loss_scale_factor`` that is not given."""
    if settings.loss_agg == "seq-mean-token-sum-norm":
        _scale_factor(settings)


def _scale_factor(settings: Settings) -> float:
    factor = settings.verl.get("actor", {}).get("loss_scale_factor")
    if not isinstance(factor, (int, float)) or factor <= 0:
        raise SettingError(
            "loss_agg='seq-mean-token-sum-norm' divides by a constant length: set verl={'actor': {'loss_scale_factor': N}}, such as "
            f"the most tokens of a trajectory; got {factor!r}"
        )
    return float(factor)
