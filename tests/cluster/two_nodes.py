"""One run on a simulated Ray cluster of two nodes, in a process of its own: ``python two_nodes.py RUN_DIR SETTINGS_JSON [EVAL_ROWS]``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "cluster"))

from app import add_up, bills, close

from rllm_trainer import fit


def main(run_dir: str, settings: str, eval_rows: str = "0") -> None:
    given = json.loads(settings)
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # Ray refuses logical GPUs where it is empty
    cluster = Cluster()
    for _ in range(2):
        cluster.add_node(num_cpus=16, num_gpus=given.pop("gpus_a_node", 1), object_store_memory=200 * 2**20)
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        held_out = bills(int(eval_rows), seed=99) if int(eval_rows) else None
        result = fit(
            add_up,
            bills(16, seed=0),
            reward=close,
            output_dir=run_dir,
            eval_dataset=held_out,
            engine="cluster",
            model="tiny-qwen2",
            **given,
        )
        assert ray.is_initialized(), "Ray of the caller's stays as it was"
        print(json.dumps({"metrics": result.metrics, "model": str(result.model_path), "warnings": result.warnings}))
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
