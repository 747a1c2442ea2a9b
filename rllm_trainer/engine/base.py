"""What the loop asks of an engine: logprobs of rows, one update from a batch, the weights as a file, and its state on disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from rllm_trainer.types import Batch, Float32, Int32

__all__ = ["Engine", "UpdateReport", "WeightsFile"]


class WeightsFile(msgspec.Struct, frozen=True, kw_only=True):
    """Weights handed from the engine to a server: one safetensors file on this host, every tensor under its Hugging Face name."""

    path: Path
    version: int
    digest: str
    """sha256 over names, shapes, dtypes and bytes of all tensors, in sorted order of name."""
    tensors: int
    num_bytes: int
    lora: bool = False
    """True: the file holds an adapter (PEFT names), not the whole model."""


class UpdateReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one optimizer step did."""

    loss: float
    grad_norm: float
    """Before clipping."""
    lr: float
    rows: int
    tokens: int
    """Tokens that went through the model, prompts included."""
    trained_tokens: int
    seconds: float
    metrics: dict[str, float]
    """verl's own metrics under verl's names."""


class Engine(Protocol):
    """Lives in a child process that we own; the caller's torch, environment and random states stay as they were."""

    def logprobs(self, rows: Sequence[Int32], *, temperatures: Sequence[float], reference: bool = False) -> list[Float32]:
        """For each row (T) the logprob of each token given the ones before it, (T) with NaN first.

        ``reference``: under the run's initial weights."""
        ...

    def update(self, batch: Batch, *, lr: float) -> UpdateReport:
        """One optimizer step (or ``ppo_epochs`` of them)."""
        ...

    def export_weights(self, version: int) -> WeightsFile:
        """Write the current weights where a server on this host can read them."""
        ...

    def save(self, folder: Path) -> None:
        """Model as Hugging Face safetensors, optimizer, schedule and random states, complete or not at all."""
        ...

    def load(self, folder: Path) -> None:
        """Back to what ``save`` wrote; the KL reference stays the run's initial weights."""
        ...

    def close(self) -> None: ...
