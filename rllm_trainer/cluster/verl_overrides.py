"""The run's settings in, overrides of verl's own configuration out, as Hydra reads them. Pure.

``verl={"actor_rollout_ref": {"rollout": {"gpu_memory_utilization": 0.6}}}`` passes through untouched, also as dotted names
(``{"actor_rollout_ref.rollout.gpu_memory_utilization": 0.6}``). Where verl knows no such entry, verl's schema refuses it; where a
setting of ours fixes it, it is refused here, so that no entry has two masters.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

import msgspec

from rllm_trainer.cluster.dotted import dotted
from rllm_trainer.cluster.layout import Mode
from rllm_trainer.cluster.refusals import mode_of
from rllm_trainer.config import Settings
from rllm_trainer.exceptions import SettingError

__all__ = ["DATASET_MODULE", "MANAGER", "MOST_STEPS", "WEIGHTS_MODULE", "Facts", "overrides", "passed_entries"]

DATASET_MODULE = "pkg://rllm_trainer.cluster._verl_plugins"
MANAGER = "rllm_trainer.cluster._verl_manager.AgentLoopManager"
WEIGHTS_MODULE = "rllm_trainer.cluster._verl_weights"

_A, _R, _M = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"

_OURS: dict[str, str] = {
    "algorithm.adv_estimator": "algorithm",
    "algorithm.norm_adv_by_std_in_grpo": "norm_by_std",
    "algorithm.use_kl_in_reward": "kl_in",
    "algorithm.filter_groups.enable": "algorithm (every group is kept, those without spread have no gradient)",
    f"{_A}.clip_ratio": "clip_low and clip_high",
    f"{_A}.clip_ratio_high": "clip_high",
    f"{_A}.clip_ratio_low": "clip_low",
    f"{_A}.entropy_coeff": "entropy_coef",
    f"{_A}.kl_loss_coef": "kl_coef",
    f"{_A}.kl_loss_type": "kl_estimator",
    f"{_A}.loss_agg_mode": "loss_agg",
    f"{_A}.optim.betas": "betas",
    f"{_A}.optim.clip_grad": "clip_grad",
    f"{_A}.optim.lr": "lr",
    f"{_A}.optim.lr_scheduler_type": "schedule",
    f"{_A}.optim.lr_warmup_steps": "warmup_steps",
    f"{_A}.optim.weight_decay": "weight_decay",
    f"{_A}.policy_loss.loss_mode": "policy_loss",
    f"{_A}.ppo_epochs": "ppo_epochs",
    f"{_A}.ppo_max_token_len_per_gpu": "micro_batch_tokens",
    f"{_A}.ppo_mini_batch_size": "batch_tasks (one optimizer step takes a whole batch)",
    f"{_A}.strategy": "cluster={'strategy': ...}",
    f"{_A}.use_kl_loss": "kl_coef",
    f"{_M}.lora_alpha": "lora",
    f"{_M}.lora_rank": "lora",
    f"{_M}.path": "model",
    f"{_M}.target_modules": "lora",
    f"{_R}.agent.agent_loop_manager_class": "app",
    f"{_R}.n": "group_size",
    f"{_R}.name": "cluster={'rollout': ...}",
    f"{_R}.temperature": "sampling",
    f"{_R}.tensor_model_parallel_size": "cluster={'rollout_tensor_parallel': ...}",
    "data.train_batch_size": "batch_tasks",
    "data.train_files": "dataset",
    "data.val_files": "eval_dataset",
    "trainer.n_gpus_per_node": "cluster={'gpus_per_node': ...}",
    "trainer.nnodes": "cluster={'nodes': ...}",
    "trainer.resume_mode": "resume",
    "trainer.save_freq": "save_every",
    "trainer.test_freq": "eval_every",
    "trainer.total_training_steps": "steps",
    "trainer.v1.trainer_mode": "cluster={'mode': ...}",
}
"""verl's entry -> the setting of ours that fixes it."""
_TUNED = (
    f"{_M}.enable_gradient_checkpointing",
    f"{_M}.override_config",
    f"{_M}.use_remove_padding",
    f"{_A}.fsdp_config",
    f"{_A}.megatron",
    f"{_A}.use_torch_compile",
    f"{_R}.checkpoint_engine",
    f"{_R}.free_cache_engine",
    "actor_rollout_ref.ref.fsdp_config",
    "data.dataloader_num_workers",
    "reward.num_workers",
    "trainer.experiment_name",
    "trainer.logger",
    "trainer.project_name",
    "transfer_queue",
)
"""Beginnings of entries that the run sets and a user may set otherwise."""


MOST_STEPS = 10**9
"""What verl counts to where nobody knows how many steps the rows make."""
_SCALE_FACTOR = "actor.loss_scale_factor"
"""Read where denominators are made, as in every engine."""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What the overrides need to know besides the settings."""

    model: str
    """The model's folder."""
    run_dir: str
    steps: int | None
    """In all; None: until the rows run out."""
    device: str
    """``cpu`` or ``cuda``."""
    rollout: str
    """``cpu``, ``vllm`` or ``sglang``: what ``auto`` came to."""
    resume: bool
    max_model_len: int
    """Most tokens of prompt and reply together."""


def overrides(settings: Settings, facts: Facts) -> list[str]:
    """What verl's ``ppo_trainer`` configuration is composed with.

    Raises:
        SettingError: an entry for verl that a setting of ours fixes, or whose name or value cannot be written down.
    """
    passed = passed_entries(settings.verl)
    mode = mode_of(settings)
    entries: dict[str, Any] = {
        **_data(settings),
        **_model(settings, facts),
        **_actor(settings, facts),
        **_rollout(settings, facts, mode),
        **_trainer(settings, facts, mode),
    }
    for name in passed:
        _require_free(name, entries)
    groups = ["model_engine=megatron"] if settings.cluster.strategy == "megatron" else []
    return [*groups, *(f"{name}={_value(value)}" for name, value in {**entries, **passed}.items())]


def passed_entries(verl: Mapping[str, Any]) -> dict[str, Any]:
    """``settings.verl`` as dotted names, checked against what our settings fix. A name that begins with ``+`` adds an entry."""
    found: dict[str, Any] = {}
    for name, value in dotted(verl):
        if name == _SCALE_FACTOR:
            continue
        bare = name.lstrip("+")
        if bare in _OURS:
            raise SettingError(f"verl={{{bare!r}: ...}} is the setting {_OURS[bare]} here; set that instead")
        found[name] = value
    return found


def _require_free(name: str, entries: Mapping[str, Any]) -> None:
    """An entry that the run itself fixes is the user's only where it chooses how fast verl is, and not what it does."""
    if name.startswith("~"):
        raise SettingError(f"got verl={{{name!r}: ...}}; entries are set, or added with a +, and not taken away")
    bare = name.lstrip("+")
    fixed = {entry.lstrip("+"): value for entry, value in entries.items()}
    for entry, value in fixed.items():
        if (entry == bare or entry.startswith(f"{bare}.") or bare.startswith(f"{entry}.")) and not entry.startswith(_TUNED):
            raise SettingError(f"verl={{{bare!r}: ...}} is fixed by the run, which sets {entry} to {value!r}; leave it out")


def _data(settings: Settings) -> dict[str, Any]:
    return {
        "data.train_batch_size": settings.batch_tasks,
        "data.custom_cls.path": DATASET_MODULE,
        "data.custom_cls.name": "TaskRows",
        "data.shuffle": False,  # the order of the rows is ours, and is the same in every engine
        "data.dataloader_num_workers": 0,
    }


def _model(settings: Settings, facts: Facts) -> dict[str, Any]:
    entries: dict[str, Any] = {f"{_M}.path": facts.model}
    if facts.device == "cpu":
        entries |= {
            f"+{_M}.override_config.attn_implementation": "sdpa",
            f"{_M}.use_remove_padding": False,
            f"{_M}.enable_gradient_checkpointing": False,
        }
    if settings.lora is not None:
        entries |= {
            f"{_M}.lora_rank": settings.lora.r,
            f"{_M}.lora_alpha": settings.lora.alpha,
            f"{_M}.target_modules": settings.lora.targets,
            f"{_M}.lora.merge": True,  # replicas get whole weights: no adapter has to be known there
        }
    return entries


def _actor(settings: Settings, facts: Facts) -> dict[str, Any]:
    layout = settings.cluster
    entries: dict[str, Any] = {
        f"{_A}.ppo_mini_batch_size": settings.batch_tasks,
        f"{_A}.ppo_epochs": settings.ppo_epochs,
        f"{_A}.use_dynamic_bsz": True,
        f"{_A}.clip_ratio_low": settings.clip_low,
        f"{_A}.clip_ratio_high": settings.clip_high,
        f"{_A}.entropy_coeff": settings.entropy_coef,
        f"{_A}.use_kl_loss": settings.kl_coef > 0,
        f"{_A}.policy_loss.loss_mode": settings.policy_loss,
        f"{_A}.optim.lr": settings.lr,
        f"{_A}.optim.betas": list(settings.betas),
        f"{_A}.optim.weight_decay": settings.weight_decay,
        f"{_A}.optim.clip_grad": settings.clip_grad,
        f"{_A}.data_loader_seed": settings.seed,
        f"{_A}.ppo_max_token_len_per_gpu": settings.micro_batch_tokens or _tokens(facts),
    }
    if layout.strategy == "megatron":
        entries |= {f"+{_A}.optim.override_optimizer_config.adam_eps": settings.eps}
        return entries | {f"{_A}.megatron.{name}": True for name in ("param_offload", "optimizer_offload") if layout.offload}
    entries |= {f"{_A}.strategy": layout.strategy, f"{_A}.optim.override_optimizer_config": {"eps": settings.eps}}
    entries |= {f"{_A}.fsdp_config.{name}": True for name in ("param_offload", "optimizer_offload") if layout.offload}
    if facts.device == "cpu":
        entries |= {f"{_A}.use_torch_compile": False, f"{_A}.fsdp_config.use_torch_compile": False}
        entries |= {f"+{_A}.fsdp_config.mixed_precision.{name}": "fp32" for name in ("param_dtype", "reduce_dtype", "buffer_dtype")}
        entries |= {f"+actor_rollout_ref.ref.fsdp_config.mixed_precision.{name}": "fp32" for name in ("param_dtype", "reduce_dtype")}
    return entries


def _tokens(facts: Facts) -> int:
    """On CPUs rows are padded to the longest of a micro-batch, so small ones are faster."""
    return max(facts.max_model_len, 2048) if facts.device == "cpu" else max(facts.max_model_len, 16_384)


def _rollout(settings: Settings, facts: Facts, mode: Mode) -> dict[str, Any]:
    layout = settings.cluster
    entries: dict[str, Any] = {
        f"{_R}.name": {"cpu": "rllm_cpu"}.get(facts.rollout, facts.rollout),
        f"{_R}.n": settings.group_size,
        f"{_R}.tensor_model_parallel_size": layout.rollout_tensor_parallel,
        f"{_R}.max_model_len": facts.max_model_len,
        f"{_R}.prompt_length": facts.max_model_len,
        f"{_R}.response_length": facts.max_model_len,
        f"{_R}.calculate_log_probs": True,
        f"{_R}.logprobs_mode": "processed_logprobs",
        f"+{_R}.agent.agent_loop_manager_class": MANAGER,
        f"{_R}.agent.num_workers": 1,
    }
    if facts.rollout == "cpu":
        entries |= {f"{_R}.free_cache_engine": False, f"{_R}.load_format": "auto", f"{_R}.dtype": "float32"}
    if mode == "separate_async":
        entries |= {
            f"{_R}.nnodes": layout.rollout_nodes,
            f"{_R}.n_gpus_per_node": layout.rollout_gpus_per_node,
            "actor_rollout_ref.hybrid_engine": False,
            "trainer.v1.separate_async.parameter_sync_step": 1,
            "trainer.v1.separate_async.num_warmup_batches": settings.staleness,
        }
        if facts.device == "cpu":
            entries |= {f"{_R}.checkpoint_engine.backend": "rllm_store", f"{_R}.checkpoint_engine.custom_backend_module": WEIGHTS_MODULE}
        else:
            entries |= {f"{_R}.checkpoint_engine.backend": "nccl"}
    elif mode == "colocate_async":
        entries |= {"trainer.v1.colocate_async.num_warmup_batches": settings.staleness}
    return entries


def _trainer(settings: Settings, facts: Facts, mode: Mode) -> dict[str, Any]:
    entries: dict[str, Any] = {
        "algorithm.adv_estimator": "grpo",  # its name is not read: credit is ours
        "algorithm.use_kl_in_reward": False,
        "reward.num_workers": 0,  # rewards are the app's: verl's workers would have nothing to do
        "trainer.device": facts.device,
        "trainer.nnodes": settings.cluster.nodes,
        "trainer.n_gpus_per_node": settings.cluster.gpus_per_node,
        "trainer.total_epochs": 1,
        "trainer.total_training_steps": facts.steps or MOST_STEPS,
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "trainer.save_freq": settings.save_every,
        "trainer.max_actor_ckpt_to_keep": settings.keep,
        "trainer.default_local_dir": f"{facts.run_dir}/checkpoints",
        "trainer.resume_mode": "auto" if facts.resume else "disable",
        "trainer.logger": [],
        "trainer.project_name": "rllm",
        "trainer.experiment_name": "run",
        "trainer.v1.trainer_mode": mode,
        "trainer.v1.sampler.custom_sampler.path": DATASET_MODULE,
        "trainer.v1.sampler.custom_sampler.name": "SyncBuffer" if mode == "sync" else "AsyncBuffer",
        "trainer.v1.sampler.max_off_policy_threshold": settings.staleness + 1,
        "trainer.v1.sampler.max_off_policy_strategy": "wait",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": max(1, settings.cluster.nodes),
    }
    return entries


def _value(value: Any) -> str:
    """As Hydra's grammar reads it back."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(_value(item) for item in cast("list[Any]", value)) + "]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_value(item)}" for key, item in cast("Mapping[str, Any]", value).items()) + "}"
    raise SettingError(f"verl: got a value of type {type(value).__name__}, {value!r}; expected numbers, strings, lists and dicts of them")
