"""The run's settings in, verl's configuration for the engine's process out; what would have no effect is refused here.

``verl={"actor": {"clip_ratio_c": 5.0}, "optim": {"optimizer": "AdamW"}}`` reaches verl as it is. Only entries that change something in
this engine are let through: a switch that it would ignore is an error, not a surprise.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast

import msgspec

from rllm_trainer.advantages.rules import rules_of
from rllm_trainer.batching import require_scale_factor
from rllm_trainer.config import Settings
from rllm_trainer.engine.policy_losses import PolicyLoss, policy_loss
from rllm_trainer.exceptions import SettingError

__all__ = ["PASSED", "Objective", "child_settings", "passed_to_verl", "require_supported"]

Objective = Literal["policy", "sft"]
"""What an update follows: the policy loss on advantages, or the likelihood of the rows' tokens."""

PASSED: dict[str, frozenset[str]] = {
    "actor": frozenset({"clip_ratio_c", "loss_scale_factor", "policy_loss", "tau_neg", "tau_pos"}),
    "algorithm": frozenset({"gamma", "gdpo_reward_weights"}),
    "engine": frozenset({"mixed_precision", "model_dtype"}),
    "model": frozenset({"enable_gradient_checkpointing", "exclude_modules", "override_config"}),
    "optim": frozenset({"optimizer", "optimizer_impl", "override_optimizer_config"}),
}
"""Section of verl's configuration -> entries that have an effect here."""

_POLICY_LOSS_ENTRIES = {
    "clip_cov_lb": "clip_cov",
    "clip_cov_ratio": "clip_cov",
    "clip_cov_ub": "clip_cov",
    "dro_beta": "dro",
    "kl_cov_ratio": "kl_cov",
    "ppo_kl_coef": "kl_cov",
    "rollout_correction": "bypass_mode",
}
"""Entry of verl's policy_loss section -> the loss that reads it."""
_OURS = {
    "clip_ratio_low": "clip_low",
    "clip_ratio_high": "clip_high",
    "clip_ratio": "clip_low and clip_high",
    "entropy_coeff": "entropy_coef",
    "kl_loss_coef": "kl_coef",
    "kl_loss_type": "kl_estimator",
    "use_kl_loss": "kl_coef",
    "loss_agg_mode": "loss_agg",
    "loss_mode": "policy_loss",
    "ppo_epochs": "ppo_epochs",
    "lr": "lr",
    "betas": "betas",
    "weight_decay": "weight_decay",
    "clip_grad": "clip_grad",
    "lr_scheduler_type": "schedule",
    "lora_rank": "lora",
    "lora_alpha": "lora",
    "target_modules": "lora",
    "norm_adv_by_std_in_grpo": "norm_by_std",
    "adv_estimator": "algorithm",
    "use_kl_in_reward": "kl_in",
    "max_token_len_per_gpu": "micro_batch_tokens",
    "ppo_max_token_len_per_gpu": "micro_batch_tokens",
}
"""What verl calls a setting of ours."""


def passed_to_verl(settings: Settings) -> dict[str, dict[str, Any]]:
    """``settings.verl``, checked.

    Raises:
        SettingError: an unknown section or entry, one that a setting of ours fixes, or one that the policy loss needs is missing.
    """
    passed: dict[str, dict[str, Any]] = {}
    for section, entries in settings.verl.items():
        if section not in PASSED:
            raise SettingError(f"verl={{{section!r}: ...}}: got an unknown section; expected one of {', '.join(sorted(PASSED))}")
        if not isinstance(entries, Mapping):
            raise SettingError(f"verl[{section!r}]: got {type(entries).__name__}, expected a dict of verl's entries")
        passed[section] = {str(name): value for name, value in cast("Mapping[Any, Any]", entries).items()}
        for name in passed[section]:
            _check_entry(section, name)
    kind = policy_loss(settings.policy_loss, loss_agg=settings.loss_agg)
    for name in passed.get("actor", {}).get("policy_loss", {}):
        if name not in _POLICY_LOSS_ENTRIES or (kind.module is None and _POLICY_LOSS_ENTRIES[name] != kind.name):
            entries = ", ".join(f"{entry} (of {loss!r})" for entry, loss in _POLICY_LOSS_ENTRIES.items())
            raise SettingError(
                f"verl['actor']['policy_loss'][{name!r}] has no effect with policy_loss={kind.name!r}; entries are {entries}"
            )
    _check_needs(kind, passed)
    return passed


def require_supported(settings: Settings) -> None:
    """Refuse what could only fail later, once rollouts have been paid for.

    Raises:
        SettingError: the algorithm, the policy loss, their aggregation or an entry for verl cannot be honoured.
    """
    rules_of(settings.algorithm)
    passed_to_verl(settings)
    if settings.policy_loss == "bypass_mode" and settings.staleness:
        raise SettingError(
            "policy_loss='bypass_mode' takes its ratio to the recorded logprobs, and with staleness above 0 they are replaced by "
            "recomputed ones; use another loss, or staleness=0"
        )
    require_scale_factor(settings)


def child_settings(settings: Settings, model_path: Path, *, shared_prefix: bool = True, objective: Objective = "policy") -> dict[str, Any]:
    """What the engine's process must know, in plain types; ``micro_batch_tokens`` is set by now."""
    kind = policy_loss(settings.policy_loss, loss_agg=settings.loss_agg)
    passed = passed_to_verl(settings)
    model = dict(passed.get("model", {}))
    checkpointing = bool(model.pop("enable_gradient_checkpointing", False))
    if model:
        passed["model"] = model
    else:
        passed.pop("model", None)
    return {
        "model_path": str(model_path),
        "objective": objective,
        "lora": None if settings.lora is None else msgspec.to_builtins(settings.lora),
        "policy_loss": msgspec.to_builtins(kind),
        "loss_agg": settings.loss_agg,
        "modules": sorted({found.module for found in [kind, *rules_of(settings.algorithm)] if found.module is not None}),
        "import_path": list(sys.path),
        "clip_low": settings.clip_low,
        "clip_high": settings.clip_high,
        "kl_coef": settings.kl_coef if settings.kl_in == "loss" else 0.0,
        "kl_estimator": settings.kl_estimator,
        "entropy_coef": settings.entropy_coef,
        "betas": list(settings.betas),
        "eps": settings.eps,
        "weight_decay": settings.weight_decay,
        "clip_grad": settings.clip_grad,
        "seed": settings.seed,
        "threads": settings.threads or len(os.sched_getaffinity(0)),
        "micro_batch_tokens": settings.micro_batch_tokens,
        "gradient_checkpointing": checkpointing,
        "shared_prefix": shared_prefix,
        "verl": {section: entries for section, entries in passed.items() if section != "algorithm"},
    }


def _check_entry(section: str, name: str) -> None:
    if name in PASSED[section]:
        return
    if name in _OURS:
        raise SettingError(f"verl[{section!r}][{name!r}] is the setting {_OURS[name]} here; set that instead")
    raise SettingError(
        f"verl[{section!r}][{name!r}] has no effect in this engine; entries of {section!r} are {', '.join(sorted(PASSED[section]))}"
    )


def _check_needs(kind: PolicyLoss, passed: Mapping[str, Mapping[str, Any]]) -> None:
    for path in kind.needs:
        found: Any = passed.get("actor", {})
        for part in path.split("."):
            found = cast("Mapping[str, Any]", found).get(part) if isinstance(found, Mapping) else None
        if found is None:
            section, _, entry = path.partition(".")
            raise SettingError(f"policy_loss={kind.name!r} needs verl={{'actor': {{{section!r}: {{{entry!r}: ...}}}}}}")
