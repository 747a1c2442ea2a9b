"""verl's loss of supervised fine-tuning on wanted tokens: what ``set_loss_fn`` gets where there is no advantage.

The mean negative logprob over the batch's tokens, each with its share: verl's function sums over a micro-batch, the batch's one
denominator divides, so that loss and gradient depend neither on rows nor on micro-batches.
"""

from __future__ import annotations

from typing import Any

from rllm_trainer.engine._verl_api import sft_loss, torch
from rllm_trainer.engine.policy_losses import PolicyLoss

__all__ = ["SftLoss"]


class SftLoss:
    """Called by verl's engine for each micro-batch, with jagged fields that have one entry per wanted token."""

    kind = PolicyLoss(name="sft", zero_is_inert=False)
    entropy = False

    def __init__(self) -> None:
        self._total = 0.0

    def clear(self) -> None:
        self._total = 0.0

    def totals(self) -> tuple[dict[str, float], dict[str, float]]:
        """Since ``clear``: the loss, and no other metric."""
        return {"loss": self._total}, {}

    def __call__(self, model_output: Any, data: Any, dp_group: Any = None) -> tuple[Any, dict[str, Any]]:
        weights = data["weights"]
        ahead = torch.roll(weights.values(), 1)  # verl rolls the mask back by one, to the position that predicts
        given = {
            "loss_mask": torch.nested.nested_tensor_from_jagged(ahead, weights.offsets()),
            "dp_size": int(data["dp_size"]),
            "batch_num_tokens": float(data["denominator"]),
        }
        loss, found = sft_loss(None, model_output, given, dp_group)
        if float(data["live"]):
            self._total += float(loss.detach())
        return loss, found
