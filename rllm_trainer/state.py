"""Where a run stands between two steps: what a checkpoint says beside the weights."""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = ["Cursor", "State"]


class Cursor(msgspec.Struct, frozen=True, kw_only=True):
    """Where the rows are when rollouts run ahead of the updates."""

    drawn: int
    """Batches of rows drawn."""
    open: list[tuple[int, str]]
    """(batch, task id) of every group that was drawn and is not trained yet."""


class State(msgspec.Struct, frozen=True, kw_only=True):
    """Where a run stands between two steps."""

    step: int = 0
    """Steps done; the next one is ``step + 1``."""
    version: int = 0
    """Version of the weights; falls behind ``step`` where steps had nothing to learn from."""
    steps: int | None = None
    """Steps in all; None: until the rows run out."""
    cursor: Cursor | None = None
    """None: the rows of the first ``step`` batches are done, and no others are begun."""
    fingerprint: dict[str, Any] = {}
    """What must be the same for a run to be continued: rows, model, seed, batch and group size, algorithm."""
