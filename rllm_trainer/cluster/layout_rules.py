"""A layout in, one sentence for the first thing in it that cannot work out: sizes that do not divide, and replicas on the wrong device.

Asked before anything is started, and of the device once more where Ray has found out which one there is. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rllm_trainer.cluster.layout import ClusterLayout, Mode
from rllm_trainer.exceptions import SettingError

__all__ = ["require_device", "require_micro_batch", "require_sizes"]

_R, _A = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
_OF_A_REPLICA = (f"{_R}.data_parallel_size", f"{_R}.pipeline_model_parallel_size")
_OF_MEGATRON = tuple(f"{_A}.megatron.{kind}_parallel_size" for kind in ("tensor_model", "pipeline_model", "context"))
_OF_FSDP = (f"{_A}.fsdp_config.ulysses_sequence_parallel_size", f"{_A}.ulysses_sequence_parallel_size", f"{_A}.fsdp_config.fsdp_size")


def require_sizes(layout: ClusterLayout, mode: Mode, passed: Mapping[str, Any]) -> None:
    """Raises ``SettingError`` where devices cannot be cut into replicas, or ranks into the groups of a strategy, without a rest.

    Args:
        passed: the user's entries for verl, by dotted name.
    """
    sizes = {name.lstrip("+"): value for name, value in passed.items() if isinstance(value, int) and value > 0}
    _require_replicas(layout, mode, sizes)
    if layout.strategy == "megatron":
        groups = [(" x ".join(name for name in _OF_MEGATRON if name in sizes), _product(sizes, _OF_MEGATRON))]
    else:
        groups = [
            (name, min(sizes[name], layout.ranks) if name.endswith(".fsdp_size") else sizes[name]) for name in _OF_FSDP if name in sizes
        ]
    for names, size in groups:
        if layout.ranks % size:
            raise SettingError(
                f"cluster: {layout.ranks} ranks cannot be cut into groups of {size}, which verl={{{names!r}: ...}} asks for; "
                "choose a divisor, or other nodes and gpus_per_node"
            )


def require_device(layout: ClusterLayout, device: str) -> None:
    """Raises ``SettingError`` where ``device``, which is ``cpu`` or ``cuda``, is the wrong one for what the layout asks for."""
    found = f"device={device!r}" + ("" if layout.device == device else ", which is what Ray has found")
    if device == "cuda" and layout.rollout == "cpu":
        raise SettingError(
            f"cluster: got rollout='cpu' with {found}: replicas on CPUs take weights from ranks on CPUs; "
            "use rollout='vllm' or 'sglang', or device='cpu'"
        )
    if device != "cpu":
        return
    if layout.rollout in ("vllm", "sglang"):
        raise SettingError(
            f"cluster: got rollout={layout.rollout!r} with {found}: verl starts it on accelerators only; use rollout='cpu', or leave it out"
        )
    if layout.strategy == "megatron":
        raise SettingError(f"cluster: got strategy='megatron' with {found}: it trains on accelerators only; use 'fsdp2'")
    if layout.offload:
        raise SettingError(f"cluster: offload=True would have no effect with {found}: host memory is all that there is; leave it out")


def require_micro_batch(tokens: int | None, longest: int, passed: Mapping[str, Any]) -> None:
    """Raises ``SettingError`` where verl could not put the longest row into a micro-batch: it would find that out in the middle of a run.

    Args:
        tokens: ``micro_batch_tokens``; None: as many as the longest row has, or more.
        longest: most tokens of a row.
    """
    sizes = {name.lstrip("+"): value for name, value in passed.items() if isinstance(value, int)}
    together = max(sizes.get(name, 1) for name in _OF_FSDP[:2])
    if tokens is not None and tokens * together < longest:
        raise SettingError(
            f"micro_batch_tokens={tokens} has no room for a row of max_model_len={longest} tokens, and verl does not cut rows; "
            f"set micro_batch_tokens={-(-longest // together)} or more, or a smaller max_model_len"
        )


def _require_replicas(layout: ClusterLayout, mode: Mode, sizes: Mapping[str, int]) -> None:
    own = mode == "separate_async"
    nodes, a_node = (layout.rollout_nodes or 1, layout.rollout_gpus_per_node or 1) if own else (layout.nodes, layout.gpus_per_node)
    size = layout.rollout_tensor_parallel * _product(sizes, _OF_A_REPLICA)
    what = "devices that roll out" if own else "ranks"
    further = "".join(f" x {name.rpartition('.')[2]}={sizes[name]}" for name in _OF_A_REPLICA if name in sizes)
    replica = f"replicas of rollout_tensor_parallel={layout.rollout_tensor_parallel}{further}"
    if nodes * a_node % size:
        raise SettingError(
            f"cluster: {nodes * a_node} {what} cannot be cut into {replica}; choose a divisor of {nodes * a_node}, or other numbers of "
            f"{'rollout_nodes and rollout_gpus_per_node' if own else 'nodes and gpus_per_node'}"
        )
    if max(a_node, size) % min(a_node, size):
        raise SettingError(
            f"cluster: {replica} would lie across nodes of {a_node} {what}; choose a divisor or a multiple of {a_node}, "
            "so that a replica has whole nodes or a node whole replicas"
        )


def _product(sizes: Mapping[str, int], names: tuple[str, ...]) -> int:
    found = 1
    for name in names:
        found *= sizes.get(name, 1)
    return found
