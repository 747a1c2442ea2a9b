"""Ray as this process has it, or started for one run: attached to or begun, and put back as it was.

Ray that was running in this process stays as it is; what we start ends with the run. Environment and signal handlers are what they were.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rllm_trainer.cluster.layout import ClusterLayout
from rllm_trainer.cluster.loading import ray_api
from rllm_trainer.exceptions import EngineError, SettingError

__all__ = ["device_of", "here", "on_ray", "require_room"]

_ADDRESS = "RAY_ADDRESS"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_CPUS_A_RANK = 8
"""verl asks for three CPUs a rank, and small actors need some; on CPUs these are promises, not cores."""
_REAL_GPUS = Path("/proc/driver/nvidia/gpus")
_ACCELERATOR = "accelerator_type:"
"""Prefix of the resource that Ray adds where it has found a real accelerator."""


@contextmanager
def on_ray(options: dict[str, Any], layout: ClusterLayout) -> Generator[Any]:
    """Ray, running; gives the module.

    Raises:
        SettingError: ``ray`` holds what ``ray.init`` does not know, or is given though Ray is running already.
        EngineError: Ray could not start.
    """
    ray = ray_api().ray
    if ray.is_initialized():
        if options:
            raise SettingError(
                f"ray={sorted(options)} would have no effect: Ray is running in this process already; leave ray= out, "
                "or call ray.shutdown() first"
            )
        yield ray
        return
    with _as_before():
        if os.environ.get(_VISIBLE) == "":
            del os.environ[_VISIBLE]  # Ray would refuse logical GPUs where none may be seen
        try:
            ray.init(**(_defaults(options, layout) | options))
        except (TypeError, RuntimeError) as error:
            raise SettingError(f"ray={options!r}: Ray refuses it: {error}") from error
        except (ConnectionError, OSError, ValueError) as error:
            raise EngineError(f"Ray could not start with ray={options!r}: {error}") from error
        try:
            yield ray
        finally:
            ray.shutdown()


def device_of(ray: Any, layout: ClusterLayout) -> str:
    """``cpu`` or ``cuda``: what was asked for, or what Ray has found."""
    if layout.device != "auto":
        return layout.device
    return "cuda" if any(name.startswith(_ACCELERATOR) for name in ray.cluster_resources()) else "cpu"


def require_room(ray: Any, layout: ClusterLayout, device: str) -> None:
    """Raises ``EngineError`` where the cluster is smaller than the layout."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    wanted = layout.nodes * layout.gpus_per_node + (layout.rollout_nodes or 0) * (layout.rollout_gpus_per_node or 0)
    have = [int(node["Resources"].get("GPU", 0)) for node in nodes]
    fit = sum(count >= layout.gpus_per_node for count in have)
    if fit < layout.nodes or sum(have) < wanted:
        logical = "; on machines without accelerators start Ray with logical ones, as in ray={'num_gpus': 2}" if device == "cpu" else ""
        raise EngineError(
            f"the layout needs {layout.nodes} nodes with {layout.gpus_per_node} GPUs each and {wanted} in all; the cluster has nodes with "
            f"{have} GPUs{logical}"
        )


def here(ray: Any) -> dict[str, Any]:
    """Options that pin an actor to this process's node."""
    return {"scheduling_strategy": ray_api().NodeAffinity(node_id=ray.get_runtime_context().get_node_id(), soft=False)}


def _defaults(options: dict[str, Any], layout: ClusterLayout) -> dict[str, Any]:
    found: dict[str, Any] = {"log_to_driver": False, "include_dashboard": False}
    if "address" in options or os.environ.get(_ADDRESS):
        return {"log_to_driver": False}
    if not _REAL_GPUS.exists():
        ranks = layout.ranks + (layout.rollout_nodes or 0) * (layout.rollout_gpus_per_node or 0)
        found |= {"num_gpus": ranks, "num_cpus": max(16, _CPUS_A_RANK * ranks + (layout.app_workers or 1))}
    return found


@contextmanager
def _as_before() -> Generator[None]:
    """Environment and signal handlers, put back at the end."""
    environment = dict(os.environ)
    main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)} if main else {}
    try:
        yield
    finally:
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
        for number, handler in handlers.items():
            if handler is not None:
                signal.signal(number, handler)
