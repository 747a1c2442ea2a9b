"""verl's policy losses on wanted tokens: what ``set_loss_fn`` gets.

Losses of verl that treat each token by itself see the tokens of a micro-batch as one long line; losses over sequences see one line per
trajectory. Either way verl sums (``token-sum``), each token weighted by its share, and the batch's one denominator divides: so loss and
gradient depend neither on rows nor on micro-batches. KL and entropy terms carry the same shares. A loss that looks at the whole batch is
computed once over it (``over_batch``), and each micro-batch takes its tokens' part of the gradient.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from rllm_trainer.engine._verl_api import core_algos, torch
from rllm_trainer.engine.policy_losses import PolicyLoss
from rllm_trainer.engine.verl_batch import Columns

__all__ = ["TokenLoss"]

_SUM = "token-sum"


class TokenLoss:
    """Called by verl's engine for each micro-batch, with jagged fields that have one entry per wanted token."""

    def __init__(self, kind: PolicyLoss, config: Any, *, loss_agg: str, kl_coef: float, kl_estimator: str, entropy_coef: float) -> None:
        self.kind = kind
        self.entropy = entropy_coef != 0
        self._policy_loss = core_algos.get_policy_loss_fn(kind.name)
        self._config = config
        self._loss_agg = loss_agg
        self._kl_coef = kl_coef
        self._kl_estimator = kl_estimator
        self._entropy_coef = entropy_coef
        self._terms: defaultdict[str, float] = defaultdict(float)
        self._averages: defaultdict[str, float] = defaultdict(float)
        self._tokens = 0

    def clear(self) -> None:
        self._terms.clear()
        self._averages.clear()
        self._tokens = 0

    def totals(self) -> tuple[dict[str, float], dict[str, float]]:
        """Since ``clear``: terms of the loss, summed; verl's other metrics, averaged over the tokens computed."""
        return dict(self._terms), {name: value / self._tokens for name, value in self._averages.items()}

    def __call__(self, model_output: Any, data: Any, dp_group: Any = None) -> tuple[Any, dict[str, Any]]:
        log_probs = model_output["log_probs"].values()
        weights = data["weights"].values()
        denominator = float(data["denominator"])
        ranks = int(data["dp_size"])
        loss, found = self._policy_term(log_probs, weights, data, denominator=denominator, ranks=ranks)
        terms = {"actor/pg_loss": loss}
        if self.entropy:
            terms["actor/entropy"] = _weighted_sum(model_output["entropy"].values(), weights, ranks) / denominator
            loss = loss - self._entropy_coef * terms["actor/entropy"]
        if self._kl_coef:
            estimate = core_algos.kl_penalty(log_probs, data["ref_logprobs"].values(), self._kl_estimator)
            terms["kl_loss"] = _weighted_sum(estimate, weights, ranks) / denominator
            loss = loss + self._kl_coef * terms["kl_loss"]
        terms["loss"] = loss
        if float(data["live"]):
            self._count(terms, found, log_probs.numel())
        return loss, {}

    def _count(self, terms: dict[str, Any], found: dict[str, Any], tokens: int) -> None:
        for name, value in terms.items():
            self._terms[name] += float(value.detach())
        for name, value in found.items():
            self._averages[name] += float(value) * tokens
        self._tokens += tokens

    def over_batch(self, now: Any, columns: Columns, wanted: Any, *, denominator: float) -> tuple[Any, float, dict[str, float]]:
        """(N) what the loss changes with each wanted token's logprob, the loss itself, and verl's metrics.

        Args:
            now: (N) logprobs under the weights as they are.
            wanted: (S) N of them.
        """

        def take(values: Any) -> Any:
            return torch.from_numpy(values[wanted])

        log_probs = torch.from_numpy(now).requires_grad_()
        lay = _Lines(take(columns.sequences))
        mask = lay(torch.ones_like(log_probs.detach()))
        shares = None if columns.is_weights is None else take(columns.is_weights)
        if self.kind.mean == "ours":
            shares = take(columns.weights) if shares is None else shares * take(columns.weights)
        self._config.global_batch_info.update(
            dp_size=1, batch_num_tokens=len(now), global_batch_size=int(mask.shape[0]), loss_scale_factor=self._config.loss_scale_factor
        )
        loss, found = self._policy_loss(
            old_log_prob=lay(take(columns.old_logprobs)),
            log_prob=lay(log_probs),
            advantages=lay(take(columns.advantages)),
            response_mask=mask,
            loss_agg_mode=_SUM if self.kind.mean == "ours" else self._loss_agg,
            config=self._config,
            rollout_is_weights=None if shares is None else lay(shares),
        )
        if self.kind.mean == "ours":
            loss = loss / denominator
        loss.backward()
        return log_probs.grad.numpy(), float(loss.detach()), {name: float(value) for name, value in found.items()}

    def _policy_term(self, log_probs: Any, weights: Any, data: Any, *, denominator: float, ranks: int) -> tuple[Any, dict[str, Any]]:
        if self.kind.whole_batch:
            return (log_probs * data["coefficients"].values()).sum() * ranks, {}
        old, advantages = data["old_logprobs"].values(), data["advantages"].values()
        lay = _Lines(data["sequences"].values()) if self.kind.over_sequences else _one_line
        mask = lay(torch.ones_like(old))
        shares = weights
        if self.kind.mean == "token-mean of sequences":
            shares = weights * weights.numel()  # verl divides the one line by its token count
        elif self.kind.mean == "mean of sequences":
            shares = torch.ones_like(weights)
        if "is_weights" in data:
            shares = shares * data["is_weights"].values()
        self._config.global_batch_info.update(
            dp_size=ranks, batch_num_tokens=denominator, global_batch_size=denominator, loss_scale_factor=None
        )
        loss, found = self._policy_loss(
            old_log_prob=lay(old),
            log_prob=lay(log_probs),
            advantages=lay(advantages),
            response_mask=mask,
            loss_agg_mode=_SUM,
            config=self._config,
            rollout_is_weights=lay(shares),
        )
        if self.kind.mean == "token-mean of sequences":
            return loss, found
        if self.kind.mean == "mean of sequences":
            return loss * (int(mask.shape[0]) * float(data["live"]) * ranks / denominator), found
        return loss / denominator, found


def _one_line(values: Any) -> Any:
    return values.unsqueeze(0)


class _Lines:
    """(N) values of a micro-batch -> (trajectories, longest), in the order of the rows; 0 where there is no token."""

    def __init__(self, sequences: Any) -> None:
        _, self._line = torch.unique(sequences, return_inverse=True)
        counts = torch.bincount(self._line)
        order = torch.argsort(self._line, stable=True)
        starts = torch.cumsum(counts, 0) - counts
        self._column = torch.empty_like(order)
        self._column[order] = torch.arange(len(order), device=order.device) - torch.repeat_interleave(starts, counts)
        self._shape = (len(counts), int(counts.max()))

    def __call__(self, values: Any) -> Any:
        return torch.zeros(self._shape, dtype=values.dtype, device=values.device).index_put((self._line, self._column), values)


def _weighted_sum(values: Any, weights: Any, ranks: int) -> Any:
    line = (values * weights).unsqueeze(0)
    return core_algos.agg_loss(loss_mat=line, loss_mask=torch.ones_like(line), loss_agg_mode=_SUM, dp_size=ranks)
