"""A step's batch in, one line for each reply that it trains out: whose reward gave it which advantage, by which rule.

``credit.jsonl`` lies in the run folder beside the episodes, so what was trained can be told, and checked, long after the run. A reply
that an over-long row was split inside of has a line for each of its pieces.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from rllm_trainer.types import Batch, Row, SampledSpan, SpanCredit

__all__ = ["CREDIT_FILE", "CreditLine", "CreditLog", "credit_lines", "read_credit"]

CREDIT_FILE = "credit.jsonl"


class CreditLine(msgspec.Struct, frozen=True, kw_only=True):
    """One reply, or a piece of one, as a step trained it."""

    step: int
    episode_id: str
    task_id: str
    span_id: str
    """Of the call."""
    choice: int
    trajectory_id: str
    role: str
    row: str
    """Id of the row that holds it."""
    tokens: int
    level: Literal["call", "trajectory", "episode", "to_go", "none"]
    rule: str
    score: float | None
    shares: dict[str, float]
    advantage: float
    """Mean over its tokens; most rules give all of them the same."""


class CreditLog:
    """Appends a step at a time; of a continued run, lines of steps that are taken again are left out first."""

    def __init__(self, folder: Path, *, resume_after: int | None = None) -> None:
        self._path = folder / CREDIT_FILE
        kept = [] if resume_after is None else [line for line in read_credit(folder) if line.step <= resume_after]
        self._path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in kept))

    def write(self, step: int, batch: Batch) -> None:
        """The lines of one batch."""
        with self._path.open("ab") as file:
            file.write(b"".join(msgspec.json.encode(line) + b"\n" for line in credit_lines(step, batch)))


def credit_lines(step: int, batch: Batch) -> Iterator[CreditLine]:
    """One for each trained span of each row, in the order of the rows."""
    for row in batch.rows:
        told = {(record.span_id, record.choice): record for record in row.credit}
        for span in row.sample.spans:
            if span.trained and span.stop > span.start:
                yield _line(step, row, span, told[span.span_id, span.choice])


def read_credit(folder: Path) -> list[CreditLine]:
    """The whole lines of a run folder, in order; none where it has no such file."""
    path = folder / CREDIT_FILE
    found: list[CreditLine] = []
    if path.exists():
        for line in path.read_bytes().splitlines():
            with contextlib.suppress(msgspec.DecodeError):
                found.append(msgspec.json.decode(line, type=CreditLine))
    return found


def _line(step: int, row: Row, span: SampledSpan, credit: SpanCredit) -> CreditLine:
    return CreditLine(
        step=step,
        episode_id=row.sample.episode_id,
        task_id=row.sample.task_id,
        span_id=span.span_id,
        choice=span.choice,
        trajectory_id=span.trajectory_id,
        role=span.role,
        row=row.sample.id,
        tokens=span.stop - span.start,
        level=credit.level,
        rule=credit.rule,
        score=credit.score,
        shares=credit.shares,
        advantage=float(np.mean(row.advantages[span.start : span.stop])),
    )
