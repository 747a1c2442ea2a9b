"""What the loop asks of an engine: logprobs of rows, one update from a batch, the weights as a file, and its state on disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from rllm_trainer.types import Batch, Float32, Int32, Mask

__all__ = ["Engine", "MostOff", "UpdateReport", "WeightsFile"]


class WeightsFile(msgspec.Struct, frozen=True, kw_only=True):
    """Weights handed from the engine to a server: one safetensors file on this host, every tensor under its Hugging Face name."""

    path: Path
    version: int
    digest: str | Callable[[], str]
    """sha256 over names, shapes, dtypes and bytes of all tensors, in sorted order of name; or what takes it when it is asked for."""
    tensors: int
    num_bytes: int
    lora: bool = False
    """True: the file holds an adapter (PEFT names), not the whole model."""

    def taken_digest(self) -> str:
        """The digest itself."""
        return self.digest if isinstance(self.digest, str) else self.digest()


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
    logprobs: list[Float32] = []
    """For each row (T) the logprob of each token under the weights before the step; NaN where the loss did not need it."""
    applied: bool = True
    """False: the batch was beyond ``most_off``, and the weights are what they were."""


class MostOff(msgspec.Struct, frozen=True, kw_only=True):
    """How far trainer and server may be apart for a step to be taken."""

    factor: float
    """99 % of the tokens may be off by at most this factor, either way."""
    at: list[Mask]
    """For each row (T) True on the tokens that count: sampled by the weights that are updated."""


class Engine(Protocol):
    """Lives in a child process that we own; the caller's torch, environment and random states stay as they were."""

    def logprobs(
        self, rows: Sequence[Int32], *, temperatures: Sequence[float], reference: bool = False, at: Sequence[Mask] | None = None
    ) -> list[Float32]:
        """For each row (T) the logprob of each token given the ones before it, (T) with NaN first.

        ``reference``: under the run's initial weights. ``at``: (T) for each row, the tokens that are asked for; NaN elsewhere."""
        ...

    def update(self, batch: Batch, *, lr: float, most_off: MostOff | None = None) -> UpdateReport:
        """One optimizer step (or ``ppo_epochs`` of them); none where the trainer's logprobs are further from the server's than asked."""
        ...

    def export_weights(self, version: int, *, digest_later: bool = False) -> WeightsFile:
        """Write the current weights where a server on this host can read them.

        ``digest_later``: the digest of the weights is taken when it is asked for, which must be before the next update.
        """
        ...

    def save(self, folder: Path) -> None:
        """Model as Hugging Face safetensors, optimizer, schedule and random states, complete or not at all."""
        ...

    def load(self, folder: Path) -> None:
        """Back to what ``save`` wrote; the KL reference stays the run's initial weights."""
        ...

    def close(self) -> None: ...
