"""Ray is started in this process, with options of the user's, and where its processes do not come up: prints what came of it, as JSON."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private import services

from rllm_trainer.cluster.direct import RayRank
from rllm_trainer.cluster.layout import ClusterLayout
from rllm_trainer.cluster.ray_session import on_ray
from rllm_trainer.exceptions import TrainerError

OPTIONS: dict[str, Any] = {
    "num_cpus": 5,
    "num_gpus": 3,
    "resources": {"tape": 2.0},
    "namespace": "of-the-user",
    "object_store_memory": 100 * 2**20,
}


ENVIRONMENT = {
    "RAY_agent_register_timeout_ms": "120000",
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_worker_register_timeout_seconds": "300",
}
"""More time than Ray gives where a machine has other things to do."""
_LOOK = services.get_node
_UP = 120.0


def never_up(*_: Any) -> Any:
    """Ray's look at a node that it has just started."""
    raise RuntimeError("it is not there")


def patient(*arguments: Any) -> Any:
    """The same, until the node is there."""
    ends = time.monotonic() + _UP
    while True:
        try:
            return _LOOK(*arguments)
        except RuntimeError:
            if time.monotonic() > ends:
                raise
            time.sleep(0.2)


class Idle:
    """An actor that does nothing."""


def of_ray() -> list[str]:
    """Command lines of what runs under this process out of Ray's folder."""
    folder = str(Path(ray.__file__).parent)
    lines = (one.cmdline() for one in psutil.Process().children(recursive=True) if one.status() != psutil.STATUS_ZOMBIE)
    return [line[0] for line in lines if line and folder in " ".join(line)]


def main() -> None:
    os.environ |= ENVIRONMENT
    environment = dict(os.environ)
    found: dict[str, Any] = {}
    services.get_node = never_up
    try:
        with on_ray({}, ClusterLayout()):
            pass
    except TrainerError as error:
        found["did not come up"] = f"{type(error).__name__}: {error}"
    services.get_node = patient
    found["left"] = of_ray()
    try:
        with on_ray({"num_cpu": 5}, ClusterLayout()):
            pass
    except TrainerError as error:
        found["unknown"] = f"{type(error).__name__}: {error}"
    with on_ray(OPTIONS, ClusterLayout()) as started:
        found["resources"] = {name: count for name, count in started.cluster_resources().items() if name in ("CPU", "GPU", "tape")}
        found["namespace"] = started.get_runtime_context().namespace
        found["running"] = bool(of_ray())
        rank = RayRank(started.remote(Idle).options(num_cpus=0).remote(), "a rank")
        rank.close()
    rank.close()
    found["shut"], found["environment"] = not ray.is_initialized(), dict(os.environ) == environment
    print(json.dumps(found))


if __name__ == "__main__":
    main()
