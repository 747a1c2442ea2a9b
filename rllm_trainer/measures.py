"""The records of a step in, its metrics out, under names that are spelled here and nowhere else. Pure.

Means over rollouts have every rollout in the denominator: one that was lost to a fault counts as 0 in ``reward/mean``;
``reward/mean_scored`` is over those that have a reward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rllm_trainer.engine.base import UpdateReport
from rllm_trainer.evaluation import Evaluation
from rllm_trainer.metrics import EVAL_GREEDY, EVAL_SAMPLED, REWARD_MEAN
from rllm_trainer.rollout.faults import leaves_gradient
from rllm_trainer.samples import Counters
from rllm_trainer.serving.base import CONTINUED, PROVEN_BY_LOGPROBS, SwapReport
from rllm_trainer.types import Batch, Group

__all__ = [
    "Measures",
    "batch_measures",
    "continuation_measures",
    "continuation_notes",
    "evaluation_measures",
    "rollout_measures",
    "sample_measures",
    "swap_measures",
    "update_measures",
]

Measures = dict[str, float]


def rollout_measures(groups: Sequence[Group], seconds: float, *, faults: Mapping[Any, str] | None = None) -> Measures:
    """What the rollouts were worth, and what failed; ``faults``: the setting's overrides of which are trained."""
    rollouts = [r for g in groups for r in g.rollouts]
    scored = [r.reward for r in rollouts if r.reward is not None]
    found: Measures = {
        REWARD_MEAN: sum(scored) / len(rollouts) if rollouts else 0.0,
        "rollouts": len(rollouts),
        "rollouts/excluded": sum(leaves_gradient(r.fault, faults) for r in rollouts),
        "rollouts/seconds": seconds,
        "groups": len(groups),
        "groups/with_signal_share": _share([_differs([r.reward for r in g.rollouts if r.reward is not None]) for g in groups]),
    }
    greedy = [g.greedy for g in groups if g.greedy is not None]
    if greedy:
        found["rollouts/greedy"] = len(greedy)
        found["rollouts/greedy_lost"] = sum(leaves_gradient(r.fault, faults) for r in greedy)
        found["reward/greedy_mean"] = sum(r.reward or 0.0 for r in greedy) / len(greedy)
    if scored:
        found |= {"reward/mean_scored": float(np.mean(scored)), "reward/std": float(np.std(scored))}
    for fault in ("infrastructure", "app", "reward", "policy"):
        found[f"faults/{fault}"] = sum(r.fault == fault for r in rollouts)
    names = sorted({name for r in rollouts for name in r.rewards})
    for name in names:
        values = [r.rewards[name] for r in rollouts if name in r.rewards]
        found[f"rewards/{name}"] = sum(values) / len(values)
    return found


def sample_measures(counters: Counters, seconds: float) -> Measures:
    """What became of the sampled tokens."""
    found: Measures = {
        "tokens/sampled": counters.sampled_tokens,
        "tokens/trained": counters.trained_tokens,
        "tokens/trained_share": counters.share_trained,
        "tokens/rows": counters.row_tokens,
        "calls": counters.calls,
        "calls/trained": counters.trained_calls,
        "rows": counters.rows,
        "breaks": sum(counters.breaks.values()),
        "episodes/multi_call_share": counters.multi_call_episodes / counters.episodes if counters.episodes else 0.0,
    }
    if counters.multi_call_episodes:
        found["episodes/one_row_share"] = counters.one_row_episodes / counters.multi_call_episodes
    if seconds > 0:
        found["tokens_per_second"] = counters.sampled_tokens / seconds
    return found


def continuation_measures(counts: Mapping[str, int]) -> Measures:
    """How many prompts were made of recorded ids, and how many could not be, or not as far as they might, by cause."""
    return {f"continuation/{name.replace(' ', '_')}": count for name, count in sorted(counts.items())}


def continuation_notes(counts: Mapping[str, int]) -> list[str]:
    """The causes, in a sentence for the report of a step."""
    causes = [f"{name} {count}" for name, count in sorted(counts.items()) if name != CONTINUED]
    return [f"prompts that do not continue all that was recorded: {', '.join(causes)}"] if causes else []


def batch_measures(batch: Batch) -> Measures:
    """What the update will see."""
    trained = [row.advantages[row.sample.trained_mask] for row in batch.rows]
    advantages = np.concatenate(trained) if trained else np.zeros(0, np.float32)
    found: Measures = {"batch/denominator": batch.denominator}
    if len(advantages):
        found |= {
            "advantages/abs_mean": float(np.abs(advantages).mean()),
            "advantages/nonzero_share": float((advantages != 0).mean()),
        }
    versions = np.concatenate([row.sample.versions[row.sample.trained_mask] for row in batch.rows]) if trained else np.zeros(0, np.int32)
    found["tokens/stale"] = int(((versions >= 0) & (versions != batch.policy_version)).sum())
    found["tokens/oldest"] = int(batch.policy_version - versions[versions >= 0].min(initial=batch.policy_version))
    return found


def update_measures(update: UpdateReport) -> Measures:
    """What the optimizer step did; verl's metrics under verl's names."""
    return {
        "loss": update.loss,
        "grad_norm": update.grad_norm,
        "lr": update.lr,
        "update/rows": update.rows,
        "update/tokens": update.tokens,
        "update/trained_tokens": update.trained_tokens,
        "update/seconds": update.seconds,
        **_numbers(update.metrics),
    }


def swap_measures(swap: SwapReport) -> Measures:
    """How the new weights reached the server."""
    return {
        "swap/seconds": swap.seconds,
        "swap/requests_in_flight": swap.requests_in_flight,
        "swap/max_difference": swap.max_difference,
        "swap/proved_by_logprobs": float(swap.proof == PROVEN_BY_LOGPROBS),
    }


def evaluation_measures(evaluation: Evaluation) -> Measures:
    """The held-out means of one evaluation."""
    greedy = {} if evaluation.greedy is None else {EVAL_GREEDY: evaluation.greedy.mean}
    return {EVAL_SAMPLED: evaluation.sampled.mean, **greedy}


def _numbers(metrics: Mapping[str, float]) -> Measures:
    return {name: float(value) for name, value in metrics.items()}


def _differs(rewards: Sequence[float]) -> bool:
    return len(set(rewards)) > 1


def _share(values: Sequence[bool]) -> float:
    return sum(values) / len(values) if values else 0.0
