"""A Ray cluster of two nodes on one machine, for the programs that tests start: begun, attached to, and ended whatever happens."""

from __future__ import annotations

import os
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import psutil
import ray
from ray._private import services
from ray.cluster_utils import Cluster

__all__ = ["two_nodes"]

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
}
_WITHOUT = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
"""Processes of Ray's that no test needs."""


@contextmanager
def two_nodes(*, gpus: int = 0, cpus: int = 16) -> Generator[Any]:
    """Ray, attached to a new cluster whose nodes say that they have so many of each."""
    os.environ |= _ENVIRONMENT
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # Ray refuses logical GPUs where it is empty
    cluster = _started(num_cpus=cpus, num_gpus=gpus, object_store_memory=200 * 2**20, **_WITHOUT)
    try:
        ray.init(address=cluster.address, log_to_driver=False)
        yield ray
    finally:
        ray.shutdown()
        cluster.shutdown()


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
