"""A group's rows in, what verl's queue holds of them out; and the other way, a credited batch as columns for those rows.

A row's prompt is what comes before its first trained token, its response the rest; what the policy did not sample has mask 0. A group
without a single trained token gets one inert row, so that every group that was drawn is in some batch, and is counted there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from rllm_trainer.samples import SampleSet
from rllm_trainer.types import Group, Row, Sample

__all__ = ["INERT", "Columns", "QueueRow", "columns_of", "group_rows"]

INERT = ""
"""Sample id of a row that trains nothing."""


class QueueRow(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One row on its way to verl. p = prompt tokens, r = response tokens."""

    session: int
    """Index of its rollout in the group."""
    index: int
    """Which of the rollout's rows."""
    sample_id: str
    token_ids: Any
    """(p + r) int64"""
    prompt_len: int
    """p, at least 1."""
    mask: Any
    """(r) int64, 1 on trained tokens."""
    logprobs: Any
    """(r) float32, the server's; 0 where nothing was sampled."""
    temperature: float
    reward: float
    min_version: int
    max_version: int


class Columns(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What credit adds to one row; each (r) float32."""

    advantages: Any
    weights: Any
    old_logprobs: Any
    is_weights: Any


def group_rows(group: Group, samples: Mapping[str, SampleSet], *, version: int, pad: int) -> list[QueueRow]:
    """The rows of a group, in the order of rollouts and rows.

    Args:
        version: being served when the group was dispatched; of rows whose replica told none.
        pad: token id of the inert row.
    """
    rows: list[QueueRow] = []
    for rollout in group.rollouts:
        found = samples.get(rollout.episode.id) if rollout.episode is not None else None
        trained = [sample for sample in found.samples if sample.trained_mask.any()] if found is not None else []
        for index, sample in enumerate(trained):
            rows.append(_row(sample, rollout.index, index, rollout.reward or 0.0, version))
    return rows or [_inert(version, pad)]


def columns_of(rows: Sequence[Row]) -> Iterator[tuple[str, Columns]]:
    """Sample id and columns of each row."""
    for row in rows:
        start = _first_trained(row.sample)
        mask = row.sample.trained_mask[start:]
        old = np.where(mask, row.old_logprobs[start:], 0.0).astype(np.float32)
        ones = np.ones(len(mask), np.float32) if row.is_weights is None else row.is_weights[start:]
        yield (
            row.sample.id,
            Columns(advantages=row.advantages[start:], weights=row.weights[start:], old_logprobs=old, is_weights=ones),
        )


def _row(sample: Sample, session: int, index: int, reward: float, version: int) -> QueueRow:
    start = _first_trained(sample)
    mask = sample.trained_mask[start:]
    told = sample.versions[sample.trained_mask]
    told = told[told >= 0]
    return QueueRow(
        session=session,
        index=index,
        sample_id=sample.id,
        token_ids=sample.token_ids.astype(np.int64),
        prompt_len=start,
        mask=mask.astype(np.int64),
        logprobs=np.where(mask, sample.logprobs[start:], 0.0).astype(np.float32),
        temperature=sample.temperature,
        reward=reward,
        min_version=int(told.min()) if len(told) else version,
        max_version=int(told.max()) if len(told) else version,
    )


def _first_trained(sample: Sample) -> int:
    return int(np.argmax(sample.trained_mask))


def _inert(version: int, pad: int) -> QueueRow:
    return QueueRow(
        session=0,
        index=0,
        sample_id=INERT,
        token_ids=np.array([pad, pad], np.int64),
        prompt_len=1,
        mask=np.zeros(1, np.int64),
        logprobs=np.zeros(1, np.float32),
        temperature=1.0,
        reward=0.0,
        min_version=version,
        max_version=version,
    )
