"""A batch goes in, flat columns and a plan of micro-batches come out: what crosses to the engine's process, and what it computes. Pure.

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

from rllm_trainer.engine.shared_prefix import Trie
from rllm_trainer.types import Batch, Float32, Int32, Mask, Row

__all__ = ["Columns", "Plan", "pack_rows", "pack_token_ids", "plan_micro_batches", "rows_of_sequences", "wanted_for_update"]


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
    """What goes through the model together, by rank. Every rank has the same number of micro-batches."""

    micro_batches: list[list[Trie]]
    """The tries of one entry are padded to the longest and computed at once."""
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
    tries: Sequence[Trie],
    *,
    max_tokens: int,
    max_wanted: int,
    together: Sequence[Sequence[int]] = (),
    rank: int = 0,
    ranks: int = 1,
) -> Plan:
    """Tries of like length together, each once over all ranks; the same plan for the same input.

    Args:
        max_tokens: most tokens of a micro-batch, pads included; one trie alone may exceed it.
        max_wanted: most wanted tokens of a micro-batch; one trie alone may exceed it.
        together: rows that must be in one micro-batch, whatever it comes to.
    """
    blocks = sorted(_blocks(tries, together), key=lambda block: (-max(trie.tokens for trie in block), block[0].rows[0]))
    bins: list[list[Trie]] = []
    longest = wanted = 0
    for block in blocks:
        length, count = max(trie.tokens for trie in block), sum(trie.wanted for trie in block)
        longest = max(longest, length)
        if bins and longest * (len(bins[-1]) + len(block)) <= max_tokens and wanted + count <= max_wanted:
            bins[-1] += block
            wanted += count
        else:
            bins.append(list(block))
            longest, wanted = length, count
    if not bins:
        return Plan(micro_batches=[])
    mine = bins[rank::ranks]
    missing = -(-len(bins) // ranks) - len(mine)
    return Plan(micro_batches=mine + [bins[0]] * missing, idle=missing)


def _blocks(tries: Sequence[Trie], together: Sequence[Sequence[int]]) -> list[list[Trie]]:
    """Tries joined where rows of theirs must not be separated."""
    holder = {row: number for number, trie in enumerate(tries) for row in trie.rows}
    sets = _Disjoint(len(tries))
    for rows in together:
        first, *others = [holder[row] for row in rows if row in holder] or [0]
        for other in others:
            sets.join(first, other)
    return [[tries[number] for number in members] for members in sets.members()]


class _Disjoint:
    """Numbers 0 .. n-1 in sets that only grow."""

    def __init__(self, count: int) -> None:
        self._parent = list(range(count))

    def join(self, left: int, right: int) -> None:
        a, b = self._root(left), self._root(right)
        self._parent[max(a, b)] = min(a, b)

    def members(self) -> list[list[int]]:
        found: dict[int, list[int]] = {}
        for index in range(len(self._parent)):
            found.setdefault(self._root(index), []).append(index)
        return list(found.values())

    def _root(self, index: int) -> int:
        while self._parent[index] != index:
            self._parent[index] = self._parent[self._parent[index]]
            index = self._parent[index]
        return index


def rows_of_sequences(columns: Columns, wanted: Mask) -> list[list[int]]:
    """Rows joined where a trajectory has wanted tokens in several: what a loss over whole trajectories must see at once."""
    sets = _Disjoint(len(columns.lengths))
    first_row: dict[int, int] = {}
    offsets = columns.offsets
    for index in range(len(columns.lengths)):
        part = slice(offsets[index], offsets[index + 1])
        for sequence in np.unique(columns.sequences[part][wanted[part]]).tolist():
            sets.join(index, first_row.setdefault(sequence, index))
    return sets.members()


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
