"""verl's advantage estimators and rollout corrections, on units of credit instead of rows.

A unit is what a group counts once: an episode, a trajectory or a call. It lies in one line of verl's matrices, its trained tokens in
the order they were sampled, its score on the last one; so verl's means, deviations and whitening see each unit once, and each of its
tokens once, however it was cut into rows. A unit without trained tokens has an empty line:
its score counts in its group, it has no gradient.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np

from rllm_trainer._child import to_array
from rllm_trainer.engine._verl_api import AlgoConfig, RolloutCorrectionConfig, core_algos, rollout_corr_helper, torch

__all__ = ["advantages", "correction", "estimate"]

_CORRECTION_FIELDS = ("rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize", "rollout_rs", "rollout_rs_threshold")


def advantages(payload: dict[str, Any]) -> dict[str, Any]:
    """The call: arrays of ``estimate`` as they travel."""
    arrays = {name: to_array(value) for name, value in payload["arrays"].items()}
    components = {name: to_array(value) for name, value in payload["components"].items()}
    found, totals = estimate(
        payload["rule"],
        arrays,
        groups=payload["groups"],
        components=components,
        config=payload["config"],
        kl=(payload["kl_estimator"], payload["kl_coef"]),
    )
    return {"advantages": found, "totals": totals}


def estimate(
    rule: str,
    arrays: Mapping[str, Any],
    *,
    groups: list[str] | None,
    components: Mapping[str, Any] | None = None,
    config: Mapping[str, Any],
    kl: tuple[str, float] = ("k1", 0.0),
) -> tuple[Any, Any]:
    """(L) advantage of each trained token, units one after another, float32; and (U) scores with their KL penalty.

    Args:
        rule: verl's name of the estimator.
        arrays: ``lengths`` (U) trained tokens of each unit; ``scores`` (U); and what the rule takes besides: ``old_logprobs`` (L),
            ``ref_logprobs`` (L, then the KL term is part of the reward), ``sum_pi_squared`` (L), ``baselines`` (U).
        groups: (U) which group each unit is in; None where the rule takes none.
        components: reward name -> (U) values, for rules that normalise each by itself.
        config: verl's AlgoConfig fields.
        kl: estimator and coefficient of the KL term in the reward.
    """
    lengths, scores = arrays["lengths"], arrays["scores"]
    lines = _Lines(lengths)
    old = lines.of(arrays.get("old_logprobs"))
    rewards = torch.zeros_like(old)
    if "ref_logprobs" in arrays:
        rewards -= kl[1] * core_algos.kl_penalty(old, lines.of(arrays["ref_logprobs"]), kl[0]) * lines.mask
    rewards[np.arange(len(lengths)), np.maximum(lengths - 1, 0)] += torch.from_numpy(scores.astype(np.float32))
    algorithm = AlgoConfig(**{**config, "gdpo_reward_keys": list(components) if components else None})
    available: dict[str, Any] = {
        "token_level_rewards": rewards,
        "response_mask": lines.mask,
        "config": algorithm,
        "index": None if groups is None else np.array(groups, dtype=object),
        "norm_adv_by_std_in_grpo": algorithm.norm_adv_by_std_in_grpo,
        "old_log_probs": old,
        "sum_pi_squared": lines.of(arrays.get("sum_pi_squared")),
        "non_tensor_batch": dict(components or {}),
        "batch": lines.as_batch(),
    }
    if "baselines" in arrays:
        available["reward_baselines"] = torch.from_numpy(arrays["baselines"].astype(np.float32))
    function = core_algos.get_adv_estimator_fn(rule)
    taken = inspect.signature(function).parameters
    totals = rewards.sum(dim=-1).numpy()
    found, _ = function(**{name: value for name, value in available.items() if name in taken})
    return lines.flat(found), totals


def correction(payload: dict[str, Any]) -> dict[str, Any]:
    """Importance weights (L), kept tokens (L) and metrics of one of verl's decoupled corrections; lines are trajectories."""
    lines = _Lines(to_array(payload["lengths"]))
    config = _correction_config(payload["correction"])
    weights, mask, metrics = rollout_corr_helper.compute_rollout_correction_and_rejection_mask(
        old_log_prob=lines.of(to_array(payload["old_logprobs"])),
        rollout_log_prob=lines.of(to_array(payload["recorded_logprobs"])),
        response_mask=lines.mask,
        **{name: getattr(config, name) for name in _CORRECTION_FIELDS},
    )
    ones = lines.mask if weights is None else weights.batch["rollout_is_weights"]
    return {
        "weights": lines.flat(ones),
        "kept": lines.flat(mask) > 0,
        "metrics": {name: float(value) for name, value in metrics.items()},
    }


def _correction_config(asked: str | dict[str, Any]) -> Any:
    """A preset by name, or verl's fields. The others bypass the recomputation and change the loss: not a correction of rows."""
    if isinstance(asked, dict):
        found = RolloutCorrectionConfig(**asked)
    else:
        known = sorted(name for name in dir(RolloutCorrectionConfig) if name.startswith("decoupled_"))
        if asked not in known:
            raise ValueError(f"got correction {asked!r}; verl's decoupled presets are {', '.join(known)}")
        found = getattr(RolloutCorrectionConfig, asked)()
    if found.bypass_mode or found.rollout_is_batch_normalize:
        raise ValueError("got a correction with bypass_mode or rollout_is_batch_normalize; expected a decoupled one, weight by weight")
    return found


class _Lines:
    """Flat (L) values, units one after another <-> (U, longest) matrices, right-padded with 0."""

    def __init__(self, lengths: Any) -> None:
        self._lengths = lengths.astype(np.int64)
        self._place = np.arange(max(1, int(self._lengths.max(initial=0))))[None, :] < self._lengths[:, None]
        self.mask = torch.from_numpy(self._place.astype(np.float32))

    def of(self, flat: Any) -> Any:
        matrix = np.zeros(self._place.shape, np.float32)
        if flat is not None:
            matrix[self._place] = flat
        return torch.from_numpy(matrix)

    def flat(self, matrix: Any) -> Any:
        return matrix.float().numpy()[self._place]

    def as_batch(self) -> dict[str, Any]:
        """What GDPO reads lengths from: no prompt, and the mask."""
        return {"prompts": torch.zeros(len(self._lengths), 0, dtype=torch.int64), "attention_mask": self.mask.long()}
