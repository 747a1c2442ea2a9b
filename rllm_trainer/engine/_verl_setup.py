"""Settings in plain types in, verl's worker and its loss out: every entry of verl's configuration that we set is set here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from rllm_trainer.engine import _verl_engine
from rllm_trainer.engine._verl_api import (
    CheckpointConfig,
    FSDPActorConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    PolicyLossConfig,
    RolloutCorrectionConfig,
    TinkerTrainingWorker,
    TrainingWorkerConfig,
)
from rllm_trainer.engine._verl_loss import TokenLoss
from rllm_trainer.engine._verl_sft import SftLoss
from rllm_trainer.engine.policy_losses import PolicyLoss

__all__ = ["make_loss", "make_worker"]

assert _verl_engine.VENDOR  # importing it registers the engine with verl

_FP32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
_BF16 = {"param_dtype": "bf16", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}


def make_worker(config: Mapping[str, Any], *, trained: bool) -> Any:
    """``trained=False``: the run's initial weights, never stepped."""
    passed = config["verl"]
    cpu = config["device"] == "cpu"
    lora = config["lora"] if trained else None
    adapter = {"lora_rank": lora["r"], "lora_alpha": lora["alpha"], "target_modules": lora["targets"]} if lora else {}
    model = HFModelConfig(
        path=config["model_path"],
        load_tokenizer=False,
        use_remove_padding=False,
        enable_gradient_checkpointing=bool(config["gradient_checkpointing"]),
        override_config={"attn_implementation": "sdpa", **passed.get("model", {}).get("override_config", {})},
        **adapter,
        **{name: value for name, value in passed.get("model", {}).items() if name != "override_config"},
    )
    engine = FSDPEngineConfig(
        strategy="fsdp2",
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=1,
        infer_micro_batch_size_per_gpu=1,
        use_torch_compile=False,
        seed=int(config["seed"]),
        **{"mixed_precision": _FP32 if cpu else _BF16, **passed.get("engine", {})},
    )
    optimizer = FSDPOptimizerConfig(
        lr=0.0,
        total_training_steps=1,
        weight_decay=config["weight_decay"],
        betas=tuple(config["betas"]),
        clip_grad=config["clip_grad"],
        **_optimizer_fields(passed.get("optim", {}), eps=config["eps"], fused=cpu),
    )
    worker: Any = TinkerTrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=model,
            engine_config=engine,
            optimizer_config=optimizer,
            checkpoint_config=CheckpointConfig(),
        )
    )
    worker.reset()
    return worker


def _optimizer_fields(passed: Mapping[str, Any], *, eps: float, fused: bool) -> dict[str, Any]:
    """verl's AdamW with our epsilon (torch's fused step on a CPU), or the optimizer asked for with its own arguments."""
    own = {"eps": eps, "fused": fused} if passed.get("optimizer", "AdamW") == "AdamW" and "optimizer_impl" not in passed else {}
    return {**passed, "override_optimizer_config": {**own, **passed.get("override_optimizer_config", {})}}


def make_loss(config: Mapping[str, Any]) -> TokenLoss | SftLoss:
    """The loss of the run's objective."""
    if config["objective"] == "sft":
        return SftLoss()
    kind = msgspec.convert(config["policy_loss"], PolicyLoss)
    actor_fields = dict(config["verl"].get("actor", {}))
    loss_fields = dict(actor_fields.pop("policy_loss", {}))
    if "rollout_correction" in loss_fields:
        loss_fields["rollout_correction"] = RolloutCorrectionConfig(**loss_fields["rollout_correction"])
    actor = FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        use_dynamic_bsz=True,
        clip_ratio_low=config["clip_low"],
        clip_ratio_high=config["clip_high"],
        policy_loss=PolicyLossConfig(loss_mode=kind.name, **loss_fields),
        **actor_fields,
    )
    return TokenLoss(
        kind,
        actor,
        loss_agg=config["loss_agg"],
        kl_coef=config["kl_coef"],
        kl_estimator=config["kl_estimator"],
        entropy_coef=config["entropy_coef"],
    )
