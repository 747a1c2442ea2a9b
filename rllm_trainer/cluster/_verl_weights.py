"""Weights from ranks to replicas that have nodes of their own, through Ray's object store: verl's checkpoint engine ``rllm_store``.

For machines without the transports that verl ships (NCCL, NIXL ...). One bucket at a time is in the store, so a node never holds more
than two. All ranks gather each tensor; the first one sends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

from rllm_trainer.cluster import _verl_plugins
from rllm_trainer.cluster._ray_api import ray
from rllm_trainer.cluster._verl_v1_api import CheckpointEngine, CheckpointEngineRegistry

__all__ = ["BACKEND", "Channel", "StoreCheckpointEngine"]

assert _verl_plugins.NAME  # importing it registers the replica in processes that load nothing else of ours

BACKEND = "rllm_store"
_AHEAD = 2
"""Buckets that may be in the store at once."""


class Channel:
    """An async actor between the sender and the receivers of one transfer."""

    def __init__(self, receivers: int) -> None:
        self._buckets: dict[int, Any] = {}
        self._left: dict[int, int] = {}
        self._receivers = receivers
        self._sent = 0
        self._whole = False
        self._changed = asyncio.Condition()

    async def put(self, reference: list[Any]) -> None:
        """One bucket; waits while two are there that not every receiver has."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._buckets) < _AHEAD)
            self._buckets[self._sent], self._left[self._sent] = reference, self._receivers
            self._sent += 1
            self._changed.notify_all()

    async def close(self) -> None:
        """There is no more."""
        async with self._changed:
            self._whole = True
            self._changed.notify_all()

    async def get(self, number: int) -> list[Any] | None:
        """The bucket of that number; None: there is none."""
        async with self._changed:
            await self._changed.wait_for(lambda: number in self._buckets or (self._whole and number >= self._sent))
            return self._buckets.get(number)

    async def taken(self, number: int) -> None:
        """A receiver has it."""
        async with self._changed:
            self._left[number] -= 1
            if not self._left[number]:
                del self._buckets[number], self._left[number]
            self._changed.notify_all()


@CheckpointEngineRegistry.register(BACKEND)
class StoreCheckpointEngine(CheckpointEngine):
    """verl makes one in each rank and each replica's worker."""

    def __init__(self, bucket_size: int, is_master: bool = False, **_: Any) -> None:
        self._bucket_size = bucket_size
        self._rank = -1
        self._channel: Any = None

    def prepare(self) -> dict[str, Any]:
        """Nothing to allocate."""
        return {}

    @classmethod
    def build_topology(cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]) -> tuple[Any, Any]:
        """Ranks first, then the replicas' workers; one channel for all."""
        channel = ray.remote(Channel).options(num_cpus=0, max_concurrency=256).remote(rollout_world_size)
        senders, receivers = range(actor_wg_world_size), range(rollout_world_size)
        return (
            {"rank": list(senders), "channel": [[channel] for _ in senders]},
            {"rank": [actor_wg_world_size + rank for rank in receivers], "channel": [[channel] for _ in receivers]},
        )

    def init_process_group(self, rank: int, channel: list[Any]) -> None:
        """Take part in the transfer that follows."""
        self._rank, self._channel = rank, channel[0]

    def finalize(self) -> None:
        """The channel ends with its last holder."""
        self._channel = None

    async def send_weights(self, weights: Iterable[tuple[str, Any]], global_steps: int | None = None) -> None:
        """All ranks iterate; the first one fills buckets."""
        bucket: dict[str, Any] = {}
        size = 0
        for name, tensor in weights:
            if self._rank != 0:
                continue
            bucket[name] = tensor.detach().cpu().contiguous()
            size += bucket[name].nbytes
            if size >= self._bucket_size:
                await self._channel.put.remote([ray.put(bucket)])
                bucket, size = {}, 0
        if self._rank == 0:
            if bucket:
                await self._channel.put.remote([ray.put(bucket)])
            await self._channel.close.remote()

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, Any]]:
        """Every tensor, in the order in which it was sent."""
        number = 0
        while (references := await self._channel.get.remote(number)) is not None:
            for name, tensor in (await references[0]).items():
                yield name, tensor
            await self._channel.taken.remote(number)
            number += 1
