"""Runs on one simulated cluster whose parts are killed, in a process of its own: ``python faults_on_ray.py FOLDER SETTINGS``.

Prints what each run came to, as JSON: the error that it ended with, or its metrics and its model; and what it left on the cluster.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "cluster"))

from app import bills
from cluster_apps import add_up_and_kill, varied
from simulated import left_on, two_nodes

from rllm_trainer import fit
from rllm_trainer.cluster.ray_session import QUEUE
from rllm_trainer.exceptions import TrainerError

PARTS = ("Front", "TransferQueueController", "StorageUnit", "LoadBalancer", "Mailbox", "Head")
"""Of their process's title: each is killed in the first step of a run of its own, which has one of everything."""
LAYOUT: dict[str, Any] = {"nodes": 2, "gpus_per_node": 1, "app_workers": 2, "app_cpus": 0}


SMALL: dict[str, Any] = {"nodes": 1, "gpus_per_node": 1, "app_workers": 1, "app_cpus": 0}


def main(folder: str, settings: str) -> None:
    given = json.loads(settings)
    other = Path(folder) / "other"
    other.mkdir()
    found: list[dict[str, Any]] = []
    with two_nodes(gpus=1) as ray:
        whole = ray.cluster_resources()

        def run(faults: Mapping[str, Sequence[str]], known: Sequence[str] = (), at: Path = Path(folder), **more: Any) -> None:
            """``faults``: number of steps that are done -> what then goes wrong."""
            (at / "faults.json").write_text(json.dumps(dict(faults)))
            rows = [{**row, "folder": str(at)} for row in bills(16, seed=0)]
            asked = {"cluster": LAYOUT, "output_dir": at / "run", **given, **more}
            try:
                result = fit(add_up_and_kill, rows, reward=varied, engine="cluster", model="tiny-qwen2", **asked)
            except TrainerError as error:
                found.append({"kind": type(error).__name__, "error": str(error)})
            else:
                found.append({"metrics": result.metrics, "model": str(result.model_path), "warnings": result.warnings})
            assert ray.is_initialized(), "Ray of the caller's stays as it was"
            found[-1]["left"] = left_on(ray, whole, known=known)

        run({}, cluster={**LAYOUT, "gpus_per_node": 3})
        run({}, cluster={**LAYOUT, "app_workers": 40, "app_cpus": 1.0})
        run({}, ray={"num_gpus": 2})
        queue = ray.remote(Other).options(name=QUEUE[0], namespace=QUEUE[1], num_cpus=0).remote()
        ray.get(queue.__ray_ready__.remote())
        run({}, known=[QUEUE[0]])
        ray.kill(queue)
        run({"0": ["worker and app"], "1": ["WorkerDict"]})
        run({"1": ["rllm_cpu_replica"]}, resume=True)
        for number, part in enumerate(PARTS):
            run({"0": [part]}, at=other, cluster=SMALL, resume=number > 0)
        run({}, resume=True)
    print(json.dumps(found))


class Other:
    """Has the name that the queue of another run's would have."""


if __name__ == "__main__":
    main(*sys.argv[1:])
