"""What verl finds by name in its configuration: the rows of a run, how a batch is waited for, and a replica on CPUs.

Importing this file registers the replica with verl (``rollout.name=rllm_cpu``). The buffers are verl's own; ours look, between two
polls, whether the run was stopped or a rollout failed for good, and poll more often.
"""

from __future__ import annotations

import os
from typing import Any

from rllm_trainer.cluster._ray_api import NodeAffinity, ray
from rllm_trainer.cluster._replica import CpuReplicaServer
from rllm_trainer.cluster._session import current
from rllm_trainer.cluster._verl_v1_api import (
    ROLLOUT_CLASSES,
    BaseRollout,
    Dataset,
    ReplayBuffer,
    ReplayBufferAsync,
    RolloutReplica,
    RolloutReplicaRegistry,
    ensure_async_iterator,
)
from rllm_trainer.cluster.verl_overrides import MOST_STEPS

__all__ = ["AsyncBuffer", "CpuReplica", "CpuServerAdapter", "SyncBuffer", "TaskRows"]

NAME = "rllm_cpu"
_POLL = 0.1
_ACTOR = "rllm_cpu_replica_{rank}"


class TaskRows(Dataset):
    """Positions in the order in which a run's tasks are drawn; verl's configuration names it as the data set."""

    def __init__(
        self, data_files: Any = None, tokenizer: Any = None, config: Any = None, processor: Any = None, max_samples: int = -1
    ) -> None:
        session = current()
        self._length = (session.steps or MOST_STEPS) * session.settings.batch_tasks

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, position: int) -> dict[str, Any]:
        return {"raw_prompt": [], "position": position, "data_source": "rllm", "reward_model": {}}


class SyncBuffer(ReplayBuffer):
    """For rollouts and updates that take turns."""

    def __init__(self, **options: Any) -> None:
        verls: Any = super()
        verls.__init__(poll_interval=_POLL, **options)

    def _wait_for_next_poll(self, partition_id: str, last_debug_time: float) -> float:
        current().check()
        verls: Any = super()
        return float(verls._wait_for_next_poll(partition_id, last_debug_time))


class AsyncBuffer(ReplayBufferAsync):
    """For rollouts that go on while weights move."""

    def __init__(self, **options: Any) -> None:
        verls: Any = super()
        verls.__init__(poll_interval=_POLL, **options)

    def _wait_for_next_poll(self, partition_id: str, last_debug_time: float) -> float:
        current().check()
        verls: Any = super()
        return float(verls._wait_for_next_poll(partition_id, last_debug_time))


class CpuReplica(RolloutReplica):
    """A replica without an accelerator: one actor, on the node of the first of its ranks."""

    async def launch_servers(self) -> None:
        node = await self.workers[0].__ray_call__.remote(_node_of)
        actor = ray.remote(CpuReplicaServer).options(
            name=_ACTOR.format(rank=self.replica_rank),
            num_cpus=0,
            max_concurrency=self.max_concurrency,
            scheduling_strategy=NodeAffinity(node_id=node, soft=False),
        )
        handle = actor.remote(
            str(self.model_config.path),
            max_len=int(self.config.max_model_len),
            threads=int(os.environ.get("OMP_NUM_THREADS", "1")),
            response_length=int(self.config.response_length),
        )
        address = await handle.ready.remote()
        self.servers = [handle]
        self._server_handle = handle
        self._server_address = f"{address}/{_ACTOR.format(rank=self.replica_rank)}"


class CpuServerAdapter(BaseRollout):
    """The rank's side of a replica: gathers weights and hands them over."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any = None, replica_rank: int = -1, **_: Any) -> None:
        verls: Any = super()
        verls.__init__(config, model_config, device_mesh)
        rank = int(os.environ["RANK"])
        size = int(self.config.tensor_model_parallel_size) * int(self.config.data_parallel_size)
        self.replica_rank = rank // size if replica_rank == -1 else replica_rank
        self.is_leader_rank = rank % size == 0
        self._handle: Any = None

    async def resume(self, tags: list[str]) -> None:
        """Nothing was freed."""

    async def release(self) -> None:
        """Nothing to free."""

    async def update_weights(self, weights: Any, global_steps: int | None = None, **_: Any) -> None:
        """Every rank drains the weights, because gathering one is done by all; the leader sends them."""
        import torch

        tensors: dict[str, Any] = {}
        async for name, tensor in ensure_async_iterator(weights):
            whole = tensor.detach()
            if self.is_leader_rank:
                tensors[name] = whole.to(device="cpu", dtype=torch.float32, copy=True).contiguous().numpy()
        if self.is_leader_rank:
            self._handle = self._handle or ray.get_actor(_ACTOR.format(rank=self.replica_rank))
            await self._handle.load_weights.remote(tensors, int(global_steps or 0))


def _node_of(_: Any) -> str:
    return str(ray.get_runtime_context().get_node_id())


def _load() -> Any:
    return CpuReplica


RolloutReplicaRegistry.register(NAME, _load)
ROLLOUT_CLASSES[NAME, "async"] = f"{__name__}.CpuServerAdapter"
