"""A batch goes in, flat columns and a plan of micro-batches come out: what crosses to the engine's process, and what it computes.

A row costs what its gradient needs. Only tokens that can have a gradient are *wanted*: the model runs up to the token before the last
wanted one, and the head only where a wanted token is predicted. What is left out has a gradient of exactly 0, so loss and gradient are
those of the whole rows, and the denominator is the batch's own. Masks come from lengths and spans, never from a pad id.

Row [5 6 7 2 8 9 2], trained [0 0 1 1 0 1 1]: wanted tokens 2, 3, 5, 6, predicted at 1, 2, 4, 5; tokens 0..5 go through the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from rllm_trainer.types import Batch, Float32, Int32, Mask, Row

__all__ = ["Columns", "Plan", "pack_rows", "pack_token_ids", "plan_micro_batches", "wanted_for_update"]


class Columns(msgspec.Struct, frozen=True, kw_only=True):
    """The rows of a batch as flat arrays. B = rows, S = tokens of all rows, one row after another."""

    lengths: Int32
    """(B)"""
    temperatures: Float32
    """(B)"""
    token_ids: Int32
    """(S)"""
    trained: Mask
    """(S)"""
    advantages: Float32
    """(S)"""
    weights: Float32
    """(S)"""
    old_logprobs: Float32
    """(S) NaN where not sampled."""
    recorded_logprobs: Float32
    """(S) what the server reported; NaN where not sampled."""
    sequences: Int32
    """(S) number of the trajectory that sampled the token; -1 where not trained."""
    ref_logprobs: Float32 | None = None
    """(S)"""
    is_weights: Float32 | None = None
    """(S)"""

    @property
    def offsets(self) -> npt.NDArray[np.int64]:
        """(B + 1) where each row begins."""
        return np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Which rows go through the model together, by rank. Every rank has the same number of micro-batches."""

    micro_batches: list[list[int]]
    """Row numbers; the rows of one entry are computed at once."""
    idle: int = 0
    """How many of the last entries stand in for missing ones, so that all ranks meet: they are computed with weight 0."""


def pack_rows(batch: Batch) -> Columns:
    """Columns of the batch's rows.

    Raises:
        ValueError: a trained token has no logprob to take the ratio to, or its row starts with it.
    """
    rows = batch.rows
    numbers: dict[tuple[str, str], int] = {}
    sequences = [_sequences(row, numbers) for row in rows]
    for row in rows:
        _check(row)
    return Columns(
        lengths=np.array([len(row.sample.token_ids) for row in rows], np.int32),
        temperatures=np.array([row.sample.temperature for row in rows], np.float32),
        token_ids=_flat([row.sample.token_ids for row in rows], np.int32),
        trained=_flat([row.sample.trained_mask for row in rows], np.bool_),
        advantages=_flat([row.advantages for row in rows], np.float32),
        weights=_flat([row.weights for row in rows], np.float32),
        old_logprobs=_flat([row.old_logprobs for row in rows], np.float32),
        recorded_logprobs=_flat([row.sample.logprobs for row in rows], np.float32),
        sequences=_flat(sequences, np.int32),
        ref_logprobs=_optional("ref_logprobs", [row.ref_logprobs for row in rows]),
        is_weights=_optional("is_weights", [row.is_weights for row in rows]),
    )


def pack_token_ids(rows: Sequence[Int32], temperatures: Sequence[float]) -> dict[str, npt.NDArray[Any]]:
    """Columns of rows that are only read: every token but the first of a row has a logprob."""
    return {
        "lengths": np.array([len(row) for row in rows], np.int32),
        "temperatures": np.array(temperatures, np.float32),
        "token_ids": _flat(list(rows), np.int32),
    }


def wanted_for_update(columns: Columns, *, zero_is_inert: bool, whole_sequences: bool) -> Mask:
    """(S) True on tokens whose term of the loss can have a gradient.

    Args:
        zero_is_inert: a token with advantage 0 has no gradient (no KL or entropy term, a loss that is 0 at advantage 0).
        whole_sequences: the loss of a token depends on the other tokens of its trajectory, so a trajectory is wanted whole or not.
    """
    wanted = columns.trained & (columns.weights != 0)
    if not zero_is_inert:
        return wanted
    alive = wanted & (columns.advantages != 0)
    if columns.is_weights is not None and not whole_sequences:
        alive &= columns.is_weights != 0
    if whole_sequences:
        living = np.unique(columns.sequences[alive])
        return wanted & np.isin(columns.sequences, living)
    return alive


def plan_micro_batches(
    lengths: npt.NDArray[Any],
    wanted: npt.NDArray[Any],
    *,
    max_tokens: int,
    max_wanted: int,
    together: Sequence[Sequence[int]] | None = None,
    rank: int = 0,
    ranks: int = 1,
) -> Plan:
    """Rows of like length together, padding counted, each row once over all ranks; the same plan for the same input.

    Args:
        lengths: (B) tokens of each row that go through the model.
        wanted: (B) tokens of each row that the head is computed for; rows with 0 are left out.
        max_tokens: most tokens of a micro-batch, pads included; one row alone may exceed it.
        max_wanted: most wanted tokens of a micro-batch; one row alone may exceed it.
        together: rows that must not be separated; None: each row stands alone.
    """
    units = [[index] for index in range(len(lengths))] if together is None else [list(unit) for unit in together]
    units = [[index for index in unit if wanted[index]] for unit in units]
    units = sorted((unit for unit in units if unit), key=lambda unit: (-max(int(lengths[i]) for i in unit), unit[0]))
    bins: list[list[int]] = []
    longest = wanted_so_far = 0
    for unit in units:
        length = max(int(lengths[index]) for index in unit)
        count = sum(int(wanted[index]) for index in unit)
        longest = max(longest, length)
        if bins and longest * (len(bins[-1]) + len(unit)) <= max_tokens and wanted_so_far + count <= max_wanted:
            bins[-1] += unit
            wanted_so_far += count
        else:
            bins.append(list(unit))
            longest, wanted_so_far = length, count
    if not bins:
        return Plan(micro_batches=[])
    mine = bins[rank::ranks]
    missing = -(-len(bins) // ranks) - len(mine)
    return Plan(micro_batches=mine + [bins[0][:1]] * missing, idle=missing)


def rows_of_sequences(columns: Columns, wanted: Mask) -> list[list[int]]:
    """Rows joined where a trajectory has wanted tokens in several: what a loss over whole trajectories must see at once."""
    parent = list(range(len(columns.lengths)))

    def root(index: int) -> int:
        while parent[index] != index:
            parent[index] = parent[parent[index]]
            index = parent[index]
        return index

    first_row: dict[int, int] = {}
    offsets = columns.offsets
    for index in range(len(parent)):
        part = slice(offsets[index], offsets[index + 1])
        for sequence in np.unique(columns.sequences[part][wanted[part]]).tolist():
            other = first_row.setdefault(sequence, index)
            parent[max(root(index), root(other))] = min(root(index), root(other))
    joined: dict[int, list[int]] = {}
    for index in range(len(parent)):
        joined.setdefault(root(index), []).append(index)
    return list(joined.values())


def _sequences(row: Row, numbers: dict[tuple[str, str], int]) -> Int32:
    out = np.full(len(row.sample.token_ids), -1, np.int32)
    for span in row.sample.spans:
        if span.trained:
            out[span.start : span.stop] = numbers.setdefault((row.sample.episode_id, span.trajectory_id), len(numbers))
    out[~row.sample.trained_mask] = -1
    return out


def _check(row: Row) -> None:
    trained = row.sample.trained_mask
    if trained[0]:
        raise ValueError(f"row {row.sample.id} trains its first token, which nothing predicts; a row begins with its prompt")
    for name in ("advantages", "weights", "old_logprobs"):
        values: Float32 = getattr(row, name)
        if len(values) != len(trained):
            raise ValueError(f"row {row.sample.id}: {name} has {len(values)} entries, expected {len(trained)}, one per token")
        if not np.isfinite(values[trained]).all():
            raise ValueError(f"row {row.sample.id}: {name} is not finite on a trained token; such a token must not be trained")


def _flat(parts: Sequence[npt.NDArray[Any]], dtype: Any) -> npt.NDArray[Any]:
    return np.concatenate([np.asarray(part, dtype) for part in parts]) if parts else np.zeros(0, dtype)


def _optional(name: str, parts: Sequence[Float32 | None]) -> Float32 | None:
    given = [part for part in parts if part is not None]
    if given and len(given) < len(parts):
        raise ValueError(f"got {name} on {len(given)} of {len(parts)} rows; expected it on all or on none")
    return _flat(given, np.float32) if given else None
