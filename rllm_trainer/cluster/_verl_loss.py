"""The engine's loss on verl's rows: the same terms, shares and denominator as where the engine is a process of ours.

verl's worker calls it for each micro-batch with the logprobs of whole rows; the trained tokens are picked out, and what follows is
``TokenLoss``. So loss and gradient depend neither on rows, micro-batches nor ranks, and verl's own aggregation has no say.
"""

from __future__ import annotations

from typing import Any

from rllm_trainer.cluster._verl_v1_api import AggregationType, Metric, no_padding_2_padding, torch
from rllm_trainer.engine._verl_loss import TokenLoss
from rllm_trainer.metrics import GAP_MEAN

__all__ = ["DENOMINATOR", "GAP_MAX", "RowLoss"]

DENOMINATOR = "rllm_denominator"
WEIGHTS = "rllm_weights"
IS_WEIGHTS = "rllm_is_weights"
"""Fields of a batch: what divides the summed losses; (B, r) jagged share of each token; likewise importance weights."""
GAP_MAX = "rollout/logprob_diff_max"


class RowLoss(TokenLoss):
    """Called by verl's worker; ``model_output`` has jagged (B, p + r) ``log_probs``, and ``entropy`` where it is asked for."""

    @classmethod
    def of(cls, loss: TokenLoss) -> RowLoss:
        """The same loss, on verl's rows."""
        made = cls.__new__(cls)
        vars(made).update(vars(loss))
        return made

    def __call__(self, model_output: Any, data: Any, dp_group: Any = None) -> tuple[Any, dict[str, Any]]:
        mask = data["response_mask"].to_padded_tensor(0).bool()
        count = int(mask.sum())
        if not count:
            mask[0, 0] = True  # a token of weight 0, so that every micro-batch has the same terms
        log_probs = no_padding_2_padding(model_output["log_probs"], data)[mask]
        old = _picked(data["old_log_probs"], mask)
        fields: dict[str, Any] = {
            "weights": _one(_picked(data[WEIGHTS], mask)),
            "old_logprobs": _one(old),
            "advantages": _one(_picked(data["advantages"], mask)),
            "denominator": float(data[DENOMINATOR]),
            "dp_size": int(data["dp_size"]),
            "live": 1.0,
        }
        if IS_WEIGHTS in data:
            fields["is_weights"] = _one(_picked(data[IS_WEIGHTS], mask))
        if "ref_log_prob" in data:
            fields["ref_logprobs"] = _one(_picked(data["ref_log_prob"], mask))
        output = {"log_probs": _one(log_probs)}
        if self.entropy:
            output["entropy"] = _one(no_padding_2_padding(model_output["entropy"], data)[mask])
        self.clear()
        loss, _ = super().__call__(output, fields, dp_group)
        terms, averages = self.totals()
        share = count * int(data["dp_size"]) / max(1, int(data["batch_num_tokens"]))
        difference = (log_probs.detach() - _picked(data["rollout_log_probs"], mask)).abs()
        measured = {
            **terms,
            **{name: value * share for name, value in averages.items()},
            GAP_MEAN: float(difference.mean()) * share,
        }
        metrics = {name: Metric(value=value, aggregation=AggregationType.SUM) for name, value in measured.items() if name != "loss"}
        metrics[GAP_MAX] = Metric(value=float(difference.max()) if count else 0.0, aggregation=AggregationType.MAX)
        return loss, metrics


def _picked(field: Any, mask: Any) -> Any:
    """(B, r) jagged -> (N) values where the mask is set."""
    padded = field.to_padded_tensor(0) if field.is_nested else field
    return padded[:, : mask.shape[1]][mask]


def _one(values: Any) -> Any:
    """Flat values as the one row of a jagged tensor."""
    return torch.nested.nested_tensor_from_jagged(values, offsets=torch.tensor([0, len(values)], device=values.device))
