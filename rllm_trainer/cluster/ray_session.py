"""Ray as this process has it, or started for one run: attached to or begun, and put back as it was.

Ray that was running in this process stays as it is; what we start ends with the run. Environment and signal handlers are what they were.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rllm_trainer.cluster.layout import ClusterLayout
from rllm_trainer.cluster.loading import ray_api
from rllm_trainer.cluster.starting import ADDRESS, HERE, start_ray
from rllm_trainer.exceptions import EngineError, SettingError

__all__ = ["QUEUE", "device_of", "here", "on_ray", "require_alone", "require_room"]

_VISIBLE = "CUDA_VISIBLE_DEVICES"
QUEUE = ("TransferQueueController", "transfer_queue")
"""Name and namespace of verl's queue, of which a cluster has one."""
_CPUS_A_RANK = 8
"""Promised where this process starts Ray on a machine without accelerators: promises, not cores."""
_CPUS_OF_A_RANK, _CPUS_OF_A_ROLLOUT_RANK = 3, 2
_CPUS_OF_THE_HEAD = 3
"""verl's: what each rank, and each rank that only rolls out, sets aside; the head and its queue, one to spare; a node's store has one."""
_FREED = 30.0
"""Seconds in which what a run has left is given back."""
_POLL = 0.25
_REAL_GPUS = Path("/proc/driver/nvidia/gpus")
_ACCELERATOR = "accelerator_type:"
"""Prefix of the resource that Ray adds where it has found a real accelerator."""


@contextmanager
def on_ray(options: dict[str, Any], layout: ClusterLayout) -> Generator[Any]:
    """Ray, running; gives the module.

    Raises:
        SettingError: ``ray`` holds what ``ray.init`` does not know, or is given though Ray is running already.
        EngineError: Ray could not start, or no cluster answers where it is to attach.
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
    with _as_before() as put_handlers_back:
        if os.environ.get(_VISIBLE) == "":
            del os.environ[_VISIBLE]  # Ray would refuse logical GPUs where none may be seen
        start_ray(ray, _defaults(options, layout) | options, options)
        put_handlers_back()  # Ray's own would end this process at once
        try:
            yield ray
        finally:
            ray.shutdown()


def device_of(ray: Any, layout: ClusterLayout) -> str:
    """``cpu`` or ``cuda``: what was asked for, or what Ray has found."""
    if layout.device != "auto":
        return layout.device
    return "cuda" if any(name.startswith(_ACCELERATOR) for name in ray.cluster_resources()) else "cpu"


def require_room(ray: Any, layout: ClusterLayout, device: str, *, direct: bool = False) -> None:
    """Raises ``EngineError`` where the cluster is smaller than the layout, or what it has is in use: Ray would wait for it without end.

    ``direct``: for ranks of the direct engine, which need an accelerator only where there are some, and none of verl's actors.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    gpus_a_node = 0 if direct and device == "cpu" else layout.gpus_per_node
    rollout = (layout.rollout_nodes or 0) * (layout.rollout_gpus_per_node or 0)
    gpus = gpus_a_node * layout.nodes + rollout
    cpus_a_node = layout.gpus_per_node * (1 if direct else _CPUS_OF_A_RANK)
    cpus = cpus_a_node * layout.nodes + (0 if direct else _other_cpus(layout, rollout, len(nodes)))
    have_gpus, have_cpus = [[int(node.get(kind, 0)) for node in nodes] for kind in ("GPU", "CPU")]
    if sum(count >= gpus_a_node for count in have_gpus) < layout.nodes or sum(have_gpus) < gpus:
        logical = "; on machines without accelerators start Ray with logical ones, as in ray={'num_gpus': 2}" if device == "cpu" else ""
        more = "; attach to more of them with ray={'address': ...}, or ask for gpus_per_node instead" if len(nodes) < layout.nodes else ""
        raise EngineError(
            f"the layout needs {layout.nodes} nodes with {gpus_a_node} GPUs each and {gpus} in all; the cluster has nodes with "
            f"{have_gpus} GPUs{more or logical}"
        )
    if (
        sum(c >= cpus_a_node and g >= gpus_a_node for c, g in zip(have_cpus, have_gpus, strict=True)) < layout.nodes
        or sum(have_cpus) < cpus
    ):
        raise EngineError(
            f"the layout needs {layout.nodes} nodes with {cpus_a_node} CPUs each and {cpus:g} in all, as Ray counts them; the cluster has "
            f"nodes with {have_cpus} CPUs; start Ray with more, as in ray={{'num_cpus': {math.ceil(cpus)}}}"
        )
    wanted = {"GPU": gpus, "CPU": cpus}
    if not _until(lambda: not _missing(ray, wanted)):
        found = ", ".join(f"{free:g} of {wanted[name]:g} {name}s" for name, free in _missing(ray, wanted).items())
        raise EngineError(f"others use what the layout needs: the cluster has {found} free; end them, or use another cluster")


def require_alone(ray: Any) -> None:
    """Raises ``EngineError`` while another run of verl's trainer is on this cluster: the two would mix their rows in one queue."""
    if not _until(lambda: not _has_queue(ray)):
        raise EngineError(
            "another run of verl's trainer is on this Ray cluster, which has one queue for all; wait for its end, or use another cluster"
        )


def _other_cpus(layout: ClusterLayout, rollout_ranks: int, nodes: int) -> float:
    """What is set aside besides the ranks': for replicas of their own, the head, verl's queue and its stores, and the app's workers."""
    apps = layout.app_cpus * (layout.app_workers or nodes)
    return _CPUS_OF_A_ROLLOUT_RANK * rollout_ranks + _CPUS_OF_THE_HEAD + layout.nodes + apps


def _missing(ray: Any, wanted: dict[str, float]) -> dict[str, float]:
    free: dict[str, float] = ray.available_resources()
    return {name: free.get(name, 0.0) for name, count in wanted.items() if free.get(name, 0.0) < count}


def _has_queue(ray: Any) -> bool:
    name, namespace = QUEUE
    try:
        ray.get_actor(name, namespace=namespace)
    except ValueError:
        return False
    return True


def _until(holds: Callable[[], bool]) -> bool:
    """Whether it holds within the time that a run before this one may take to go."""
    ends = time.monotonic() + _FREED
    while not holds():
        if time.monotonic() > ends:
            return False
        time.sleep(_POLL)
    return True


def here(ray: Any) -> dict[str, Any]:
    """Options that pin an actor to this process's node."""
    return {"scheduling_strategy": ray_api().NodeAffinity(node_id=ray.get_runtime_context().get_node_id(), soft=False)}


def _defaults(options: dict[str, Any], layout: ClusterLayout) -> dict[str, Any]:
    if (options.get("address") or os.environ.get(ADDRESS) or HERE) != HERE:
        return {"log_to_driver": False}
    found: dict[str, Any] = {"address": HERE, "log_to_driver": False, "include_dashboard": False}  # else Ray attaches to any that it finds
    if not _REAL_GPUS.exists():
        ranks = layout.ranks + (layout.rollout_nodes or 0) * (layout.rollout_gpus_per_node or 0)
        found |= {"num_gpus": ranks, "num_cpus": max(16, _CPUS_A_RANK * ranks + (layout.app_workers or 1))}
    return found


@contextmanager
def _as_before() -> Generator[Callable[[], None]]:
    """Environment and signal handlers, put back at the end; gives what puts the handlers back before it."""
    environment = dict(os.environ)
    main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)} if main else {}

    def put_back() -> None:
        for number, handler in handlers.items():
            if handler is not None:
                signal.signal(number, handler)

    try:
        yield put_back
    finally:
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
        put_back()
