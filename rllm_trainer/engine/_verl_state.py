"""The state of verl's engine as named tensors, and back: weights under Hugging Face names, adapter, moments, random states.

Whole tensors, whatever the sharding; a tied head is the embedding and is not listed twice. No pickle: safetensors and JSON only.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np

from rllm_trainer.engine._verl_api import DTensor, convert_weight_keys, distribute_tensor, torch
from rllm_trainer.engine.tensor_file import RawTensor

__all__ = [
    "adapter",
    "load_into",
    "load_optimizer",
    "merged_weights",
    "optimizer_state",
    "random_states",
    "raw",
    "read_tensors",
    "seed_all",
    "set_random_states",
    "weights",
    "whole",
]

_CODES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_PEFT_PREFIX = "base_model.model."
_BASE_LAYER = ".base_layer"
_LORA = ".lora_"
_RANDOM = "random."


def weights(engine: Any) -> dict[str, Any]:
    """Hugging Face name -> whole tensor. All ranks call it; the tensors of one rank may be the live ones."""
    tensors, _ = engine.get_per_tensor_param()
    tied = _tied_names(engine.module)
    return {name: tensor.detach() for name, tensor in tensors if name not in tied}


def adapter(engine: Any) -> dict[str, Any]:
    """PEFT name -> whole tensor of the LoRA adapter."""
    tensors, _ = engine.get_per_tensor_param(base_sync_done=True)
    return {name: whole(tensor.detach()) for name, tensor in tensors}


def merged_weights(engine: Any) -> dict[str, Any]:
    """Hugging Face name -> base + (alpha / r) * B @ A, computed in the base's own precision."""
    scale = _lora_scales(engine.module)
    tied = _tied_names(engine.module)
    lora: dict[str, dict[str, Any]] = {}
    base: dict[str, Any] = {}
    for name, tensor in engine.module.state_dict().items():
        plain = name.removeprefix(_PEFT_PREFIX)
        if _LORA in plain:
            layer, side = plain.split(_LORA)
            lora.setdefault(layer, {})[side[0]] = whole(tensor.detach())
        elif plain not in tied:
            base[plain.replace(_BASE_LAYER, "")] = whole(tensor.detach())
    for layer, sides in lora.items():
        key = f"{layer}.weight"
        base[key] = torch.addmm(base[key], sides["B"].to(base[key].dtype), sides["A"].to(base[key].dtype), alpha=scale[layer])
    return base


def load_into(engine: Any, tensors: Mapping[str, Any]) -> None:
    """Overwrite parameters (and persistent buffers) in place.

    ``tensors`` has Hugging Face names for a full model, PEFT names for an adapter.

    Raises:
        ValueError: a tensor is missing, unknown, or has another shape.
    """
    module = engine.module
    own = _own_names(module, lora=any(_LORA in name for name in tensors))
    missing, unknown = sorted(own.keys() - tensors.keys()), sorted(tensors.keys() - own.keys())
    if missing or unknown:
        raise ValueError(
            f"got weights of another model: {len(missing)} tensors missing {missing[:3]}, {len(unknown)} unknown {unknown[:3]}"
        )
    with torch.no_grad():
        for name, target in own.items():
            if tuple(target.shape) != tuple(tensors[name].shape):
                raise ValueError(f"got {name} of shape {tuple(tensors[name].shape)}; expected {tuple(target.shape)}")
            target.copy_(_like(target, tensors[name]))


def optimizer_state(engine: Any) -> dict[str, Any]:
    """``parameter.key`` -> whole tensor of each moment and step count. All ranks call it."""
    out: dict[str, Any] = {}
    for name, parameter in engine.module.named_parameters():
        for key, value in engine.optimizer.state.get(parameter, {}).items():
            if not isinstance(value, torch.Tensor):
                raise ValueError(f"the optimizer keeps {key} as {type(value).__name__}; only optimizers that keep tensors can be saved")
            out[f"{name}.{key}"] = whole(value.detach())
    return out


def load_optimizer(engine: Any, tensors: Mapping[str, Any]) -> None:
    """Back to what ``optimizer_state`` gave; parameters that have none get none."""
    by_parameter: dict[str, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        parameter, _, key = name.rpartition(".")
        by_parameter.setdefault(parameter, {})[key] = tensor
    parameters = dict(engine.module.named_parameters())
    unknown = sorted(by_parameter.keys() - parameters.keys())
    if unknown:
        raise ValueError(f"got optimizer state of {len(unknown)} unknown parameters {unknown[:3]}; expected this model's")
    engine.optimizer.state.clear()
    for name, state in by_parameter.items():
        parameter = parameters[name]
        engine.optimizer.state[parameter] = {
            key: _like(parameter, value).clone() if value.shape == parameter.shape else value.clone() for key, value in state.items()
        }


def seed_all(seed: int) -> None:
    """Every generator of this process that verl and the libraries below it draw from."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_states() -> dict[str, Any]:
    """This process's torch generators."""
    states = {f"{_RANDOM}cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[f"{_RANDOM}cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_states(states: Mapping[str, Any]) -> None:
    torch.set_rng_state(states[f"{_RANDOM}cpu"])
    if torch.cuda.is_available() and f"{_RANDOM}cuda" in states:
        torch.cuda.set_rng_state(states[f"{_RANDOM}cuda"])


def raw(tensors: Mapping[str, Any]) -> Iterator[RawTensor]:
    """Each tensor as bytes on the host; copies only what is not there already."""
    for name, tensor in tensors.items():
        host = tensor.to("cpu").contiguous()
        data = host.reshape(-1).view(torch.uint8).numpy().data if host.numel() else memoryview(b"")
        yield RawTensor(name=name, dtype=_CODES[host.dtype], shape=tuple(host.shape), data=data)


def read_tensors(path: Path) -> dict[str, Any]:
    """All tensors of a safetensors file."""
    import safetensors.torch as safetensors

    return cast("Any", safetensors).load_file(str(path))


def whole(tensor: Any) -> Any:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _like(target: Any, whole: Any) -> Any:
    """``whole`` in the dtype, device and sharding of ``target``."""
    moved = whole.to(dtype=target.dtype, device=target.device)
    return distribute_tensor(moved, target.device_mesh, target.placements) if isinstance(target, DTensor) else moved


def _tied_names(module: Any) -> set[str]:
    every = (name for name, _ in module.named_parameters(remove_duplicate=False))
    once = {name for name, _ in module.named_parameters()}
    return {name.removeprefix(_PEFT_PREFIX) for name in every if name not in once}


def _own_names(module: Any, *, lora: bool) -> dict[str, Any]:
    if lora:
        return {name.replace(".default.", "."): parameter for name, parameter in module.named_parameters() if _LORA in name}
    tied = _tied_names(module)
    state = {name: tensor for name, tensor in module.state_dict(keep_vars=True).items() if name not in tied}
    return convert_weight_keys(state, module)


def _lora_scales(module: Any) -> dict[str, float]:
    """Layer name -> alpha / r, as peft applies it."""
    layers: Iterable[tuple[str, Any]] = module.named_modules()
    return {
        name.removeprefix(_PEFT_PREFIX): float(layer.scaling["default"])
        for name, layer in layers
        if hasattr(layer, "lora_A") and hasattr(layer, "scaling")
    }
