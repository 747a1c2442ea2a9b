"""Runs on one simulated cluster whose parts are killed, in a process of its own: ``python faults_on_ray.py FOLDER SETTINGS``.

Prints what each run came to, as JSON: the error that it ended with, or its metrics and its model; and what it left on the cluster.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "cluster"))

from app import bills, close
from cluster_apps import add_up_and_kill
from simulated import two_nodes

from rllm_trainer import fit
from rllm_trainer.cluster.ray_session import QUEUE
from rllm_trainer.exceptions import TrainerError

LAYOUT: dict[str, Any] = {"nodes": 2, "gpus_per_node": 1, "app_workers": 2, "app_cpus": 0}


def main(folder: str, settings: str) -> None:
    given = json.loads(settings)
    rows = [{**row, "folder": folder} for row in bills(16, seed=0)]
    found: list[dict[str, Any]] = []
    with two_nodes(gpus=1) as ray:
        whole = ray.cluster_resources()

        def run(kills: Mapping[str, str], **other: Any) -> None:
            """``kills``: number of checkpoints -> what is killed then."""
            (Path(folder) / "kills.json").write_text(json.dumps(dict(kills)))
            asked = {"cluster": LAYOUT, "output_dir": Path(folder) / "run", **given, **other}
            try:
                result = fit(add_up_and_kill, rows, reward=close, engine="cluster", model="tiny-qwen2", **asked)
            except TrainerError as error:
                found.append({"kind": type(error).__name__, "error": str(error)})
            else:
                found.append({"metrics": result.metrics, "model": str(result.model_path), "warnings": result.warnings})
            assert ray.is_initialized(), "Ray of the caller's stays as it was"
            found[-1]["left"] = in_use(ray, whole)

        run({}, cluster={**LAYOUT, "gpus_per_node": 3})
        run({}, cluster={**LAYOUT, "app_workers": 40, "app_cpus": 1.0})
        run({}, ray={"num_gpus": 2})
        other = ray.remote(Other).options(name=QUEUE[0], namespace=QUEUE[1], num_cpus=0).remote()
        ray.get(other.__ray_ready__.remote())
        run({})
        ray.kill(other)
        run({"0": "app worker", "1": "WorkerDict"})
        run({"1": "rllm_cpu_replica"}, resume=True)
        run({}, resume=True)
    print(json.dumps(found))


class Other:
    """Has the name that the queue of another run's would have."""


def in_use(ray: Any, whole: Mapping[str, float]) -> dict[str, float]:
    """What of the cluster's CPUs and GPUs is still set aside, once Ray has had time to end the processes that held it."""
    left: dict[str, float] = {}
    named: list[str] = []
    ends = time.monotonic() + 60
    while time.monotonic() < ends:
        free = ray.available_resources()
        left = {kind: whole[kind] - free.get(kind, 0.0) for kind in ("CPU", "GPU") if free.get(kind, 0.0) < whole[kind]}
        named = [one["name"] for one in ray.util.list_named_actors(all_namespaces=True) if one["name"] != QUEUE[0]]
        if not left and not named:
            return {}
        time.sleep(0.2)
    return left | dict.fromkeys(named, 1.0)


if __name__ == "__main__":
    main(*sys.argv[1:])
