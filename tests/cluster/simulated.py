"""A Ray cluster of two nodes on one machine, for the programs that tests start: begun, attached to, and ended whatever happens."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import psutil
import ray
from ray._private import services
from ray.cluster_utils import Cluster

__all__ = ["MARK", "at_work", "left_on", "two_nodes"]

MARK = "RLLM_TEST_MARK"
"""Environment variable that all processes of a cluster have, and those of no other."""

_OF_A_NODE = ("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""Titles of processes that every node has."""
_UP = 120.0
"""Seconds that a node has to come up; Ray's own 30 are too few where a machine has other things to do."""
_TRIES = 5
"""A node gives its agents 15 s, which no option changes."""
_ENVIRONMENT = {
    "RAY_agent_register_timeout_ms": str(round(1000 * _UP)),
    "RAY_health_check_timeout_ms": "60000",
    "RAY_worker_register_timeout_seconds": "300",
    "RAY_memory_monitor_refresh_ms": "0",  # both nodes would count the memory of the one machine
    "RAY_enable_worker_prestart": "0",  # else as many processes as the nodes say that they have CPUs
    "RAY_prestart_worker_first_driver": "0",
    "RAY_worker_niceness": "0",  # else whatever else the machine does comes first
}
_WITHOUT = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
"""Processes of Ray's that no test needs."""


@contextmanager
def two_nodes(*, gpus: int = 0, cpus: int = 16) -> Generator[Any]:
    """Ray, attached to a new cluster whose nodes say that they have so many of each."""
    os.environ |= _ENVIRONMENT
    os.environ.setdefault(MARK, uuid.uuid4().hex)
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # Ray refuses logical GPUs where it is empty
    cluster = _started(num_cpus=cpus, num_gpus=gpus, object_store_memory=200 * 2**20, **_WITHOUT)
    try:
        ray.init(address=cluster.address, log_to_driver=False)
        yield ray
    finally:
        ray.shutdown()
        cluster.shutdown()


def at_work() -> dict[str, int]:
    """Title -> pid of this cluster's processes that are actors, or run a task: ``ray::Front``, ``ray::WorkerDict.update_actor`` ..."""
    found: dict[str, int] = {}
    for process in psutil.process_iter():
        try:
            title = (process.cmdline() or [""])[0]
            if title.startswith("ray::") and not title.startswith(_OF_A_NODE) and process.environ().get(MARK) == os.environ[MARK]:
                found[f"{title} {process.pid}"] = process.pid
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def left_on(ray: Any, whole: Mapping[str, float], *, known: Collection[str] = ()) -> list[str]:
    """What a run has left on the cluster, once Ray has had time to end it: CPUs and GPUs set aside, named actors, processes.

    ``known``: names of actors that are not the run's.
    """
    left: list[str] = []
    ends = time.monotonic() + 90
    while time.monotonic() < ends:
        free = ray.available_resources()
        left = [f"{whole[kind] - free.get(kind, 0.0):g} {kind}" for kind in ("CPU", "GPU") if free.get(kind, 0.0) < whole[kind]]
        left += [one["name"] for one in ray.util.list_named_actors(all_namespaces=True) if one["name"] not in known]
        left += [] if known else sorted(at_work())
        if not left:
            break
        time.sleep(0.2)
    return left


def _started(**options: Any) -> Any:
    asked, services.get_node = services.get_node, _patient(services.get_node)
    try:
        for left in reversed(range(_TRIES)):
            cluster = Cluster()
            try:
                for _ in range(2):
                    cluster.add_node(wait=False, **options)
                cluster.wait_for_nodes(timeout=_UP)
                return cluster
            except Exception:
                if not left:
                    raise
                _end_children()
    finally:
        services.get_node = asked
    return None


def _end_children() -> None:
    """What a node that did not come up has started."""
    children = psutil.Process().children(recursive=True)
    for process in children:
        process.kill()
    psutil.wait_procs(children, timeout=30)


def _patient(get_node: Any) -> Any:
    """Ray's look at a node that comes up, asked again until it has, or its process has ended."""

    def look(*arguments: Any) -> Any:
        ends = time.monotonic() + _UP
        while True:
            try:
                return get_node(*arguments)
            except RuntimeError:
                if time.monotonic() > ends or any(one.status() == psutil.STATUS_ZOMBIE for one in psutil.Process().children()):
                    raise TimeoutError("a node of Ray's did not come up") from None
                time.sleep(0.2)

    return look
