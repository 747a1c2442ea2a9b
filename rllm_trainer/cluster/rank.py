"""One rank of the direct engine as a Ray worker: the calls of the engine's process in, its answers out, in the same bytes.

verl is loaded once its environment is set, by name. A rank sees one device, whichever of its node's Ray gave it.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import msgspec

from rllm_trainer import _child

__all__ = ["RankActor"]

_ENGINE = "rllm_trainer.engine._verl_trainer"
_PROCESS = "rllm_trainer.engine._verl_worker"


class RankActor:
    """An actor that answers one call at a time."""

    def __init__(self) -> None:
        self._handlers: dict[str, Any] = {}

    def node(self) -> str:
        """The node that it is on."""
        from rllm_trainer.cluster.loading import ray_api

        return str(ray_api().ray.get_runtime_context().get_node_id())

    def start(self, packed: bytes) -> bytes:
        """Join the other ranks and load the model; gives what the engine says when it is ready."""
        config: dict[str, Any] = msgspec.msgpack.decode(packed)
        importlib.import_module(_PROCESS)._prepare_environment(config)
        os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        if config["several_nodes"]:
            os.environ.pop("GLOO_SOCKET_IFNAME", None)
        trainer = importlib.import_module(_ENGINE).VerlTrainer(config)
        self._handlers = trainer.handlers()
        return _child._encoder.encode(trainer.ready())

    def call(self, method: str, payload: bytes) -> bytes:
        """One call of the engine."""
        return _child._encoder.encode(self._handlers[method](msgspec.msgpack.decode(payload)) or {})
