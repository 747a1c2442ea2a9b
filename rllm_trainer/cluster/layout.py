"""How a run lies on a Ray cluster: ``cluster={"nodes": 2, "gpus_per_node": 8, "strategy": "fsdp2"}``.

A *rank* is one process that trains; on machines with accelerators it has one of them, on machines without it computes on CPU cores.
Replicas of the policy lie on the ranks' devices, or on devices of their own where ``mode`` is ``separate_async``.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

__all__ = ["ClusterLayout", "Device", "Mode", "RolloutKind", "Strategy"]

Mode = Literal["sync", "colocate_async", "separate_async"]
"""verl's trainers: rollouts and updates take turns; what an update cuts short goes on after it; rollouts have devices of their own."""
Strategy = Literal["fsdp", "fsdp2", "megatron"]
RolloutKind = Literal["auto", "vllm", "sglang", "cpu"]
Device = Literal["auto", "cpu", "cuda"]

_Positive = Annotated[int, msgspec.Meta(ge=1)]


class ClusterLayout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Read with ``engine="cluster"`` and ``engine="direct-ray"`` only."""

    mode: Mode | None = None
    """None: ``sync`` where ``staleness`` is 0, else ``colocate_async``."""
    nodes: _Positive = 1
    """Nodes that train."""
    gpus_per_node: _Positive = 1
    """Ranks on each of them."""
    strategy: Strategy = "fsdp2"
    """How a model is spread over the ranks."""
    rollout: RolloutKind = "auto"
    """What a replica is; auto: vLLM on accelerators, our own server's core on CPUs."""
    rollout_tensor_parallel: _Positive = 1
    """Devices of one replica."""
    rollout_nodes: _Positive | None = None
    """Nodes that only roll out; needed by, and only read in, ``separate_async``."""
    rollout_gpus_per_node: _Positive | None = None
    """Devices on each of them; likewise."""
    device: Device = "auto"
    """auto: ``cuda`` where Ray sees accelerators that torch can use."""
    app_workers: _Positive | None = None
    """Processes that run the app, spread over all nodes; None: one for each node of the cluster."""
    app_cpus: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    """CPUs that Ray sets aside for each of them."""
    offload: bool = False
    """Keep parameters and moments in host memory while the ranks' devices roll out."""

    @property
    def ranks(self) -> int:
        """Processes that train."""
        return self.nodes * self.gpus_per_node
