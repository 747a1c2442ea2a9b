"""A rank of verl's trainer, with what our steps need besides: the learning rate and each row's temperature go with the batch.

verl's worker does everything else. On CPUs the process group is made before verl looks for one (verl would ask for the backend
``cpu:gloo,cpu:gloo``, which torch refuses), and a reference model lies in ordinary memory (verl would pin it for an accelerator).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from rllm_trainer.cluster import _verl_plugins
from rllm_trainer.cluster._verl_v1_api import (
    ActorRolloutRefWorker,
    CPUOffloadPolicy,
    DetachActorWorker,
    Dispatch,
    dist,
    fsdp_engine,
    merged_lora_context,
    normalize_peft_param_name,
    offload_fsdp_model_to_cpu,
    on_ranks,
    register,
    tensordict_utils,
    torch,
)
from rllm_trainer.engine import _verl_state
from rllm_trainer.engine._verl_api import DTensor, convert_weight_keys
from rllm_trainer.engine.tensor_file import write_tensors

__all__ = ["DetachedRankWorker", "RankWorker"]

assert _verl_plugins.NAME  # importing it registers the replica with verl

_MERGED = "_merged_lora_per_tensor_param"
"""verl's, which rounds to bfloat16: replicas in float32 and the trained model's file would not be what the ranks have."""
LR = "rllm_lr"
TEMPERATURES = "rllm_temperature"
"""Fields of a batch: the step's learning rate, and (B) each row's temperature."""


class _Rank:
    """Mixed into verl's workers."""

    config: Any
    actor: Any
    rank: int

    def init_model(self) -> None:
        if os.environ.get("VERL_PLATFORM") == "cpu":
            _join_group()
            fsdp_engine.CPUOffloadPolicy = _unpinned
        _verl_state.seed_all(int(self.config.actor.data_loader_seed) + self.rank)  # an adapter begins with random numbers
        verls: Any = super()
        verls.init_model()
        engine = getattr(getattr(self, "actor", None), "engine", None)
        if hasattr(engine, _MERGED):
            setattr(engine, _MERGED, partial(_merged, engine))

    def compute_log_prob(self, data: Any) -> Any:
        _use_temperatures(data)
        verls: Any = super()
        return verls.compute_log_prob(data)

    def compute_ref_log_prob(self, data: Any) -> Any:
        _use_temperatures(data)
        verls: Any = super()
        return verls.compute_ref_log_prob(data)

    def update_actor(self, data: Any) -> Any:
        _use_temperatures(data)
        lr = float(tensordict_utils.pop(data, LR))
        for group in self.actor.engine.optimizer.param_groups:
            group["lr"] = lr
        verls: Any = super()
        return verls.update_actor(data)

    def export_weights(self, path: str) -> dict[str, Any]:
        """The whole model, adapters merged, as one safetensors file written by the first rank. All ranks gather."""
        tensors, _ = self.actor.engine.get_per_tensor_param()
        first = dist.get_rank() == 0
        kept: dict[str, Any] = {}
        for name, tensor in tensors:
            if first:
                kept[name] = tensor.detach().to("cpu", copy=True)
        if not first:
            return {}
        tied = bool(getattr(self.actor.engine.module.config, "tie_word_embeddings", False))
        if tied:
            kept.pop("lm_head.weight", None)
        digest, size = write_tensors(Path(path), list(_verl_state.raw(kept)), sync=True)
        return {"digest": digest, "num_bytes": size, "tensors": len(kept)}


class RankWorker(_Rank, ActorRolloutRefWorker):
    """For ``sync`` and ``colocate_async``."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        _Rank.init_model(self)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def export_weights(self, path: str) -> dict[str, Any]:
        return _Rank.export_weights(self, path)

    @register(dispatch_mode=on_ranks(mesh_name="actor"))
    def compute_log_prob(self, data: Any) -> Any:
        return _Rank.compute_log_prob(self, data)

    @register(dispatch_mode=on_ranks(mesh_name="ref"))
    def compute_ref_log_prob(self, data: Any) -> Any:
        return _Rank.compute_ref_log_prob(self, data)

    @register(dispatch_mode=on_ranks(mesh_name="actor"))
    def update_actor(self, data: Any) -> Any:
        return _Rank.update_actor(self, data)


class DetachedRankWorker(_Rank, DetachActorWorker):
    """For ``separate_async``: also keeps copies of its weights in host memory."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        _Rank.init_model(self)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def export_weights(self, path: str) -> dict[str, Any]:
        return _Rank.export_weights(self, path)

    @register(dispatch_mode=on_ranks(mesh_name="actor"))
    def compute_log_prob(self, data: Any) -> Any:
        return _Rank.compute_log_prob(self, data)

    @register(dispatch_mode=on_ranks(mesh_name="ref"))
    def compute_ref_log_prob(self, data: Any) -> Any:
        return _Rank.compute_ref_log_prob(self, data)

    @register(dispatch_mode=on_ranks(mesh_name="actor"))
    def update_actor(self, data: Any) -> Any:
        return _Rank.update_actor(self, data)


def _merged(engine: Any) -> Iterator[tuple[str, Any]]:
    """Hugging Face name -> whole tensor of base and adapter as one, in the base's own precision. All ranks iterate."""
    try:
        with merged_lora_context(engine.module, backup_adapters=True):
            inner = getattr(engine.module, "_fsdp_wrapped_module", engine.module)
            named = convert_weight_keys(normalize_peft_param_name(engine.module.state_dict()), inner)
            for name, tensor in named.items():
                yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()
    finally:
        if engine._is_offload_param:
            offload_fsdp_model_to_cpu(engine.module)


def _use_temperatures(data: Any) -> None:
    """Each row's own temperature, where verl's batch has one for all."""
    found = tensordict_utils.pop(data, TEMPERATURES, None)
    if found is not None:
        flat = found.values() if found.is_nested else found
        data["temperature"] = flat.to(torch.float32).reshape(-1)


def _join_group() -> None:
    if dist.is_initialized():
        return
    dist.init_process_group(
        "gloo",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        init_method=os.environ.get("DIST_INIT_METHOD"),
    )


def _unpinned(*, pin_memory: bool) -> Any:
    """Stands for torch's policy of keeping weights in host memory, where there is no accelerator to pin it for."""
    return CPUOffloadPolicy(pin_memory=False)
