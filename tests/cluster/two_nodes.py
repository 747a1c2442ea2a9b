"""One run on a simulated Ray cluster of two nodes, in a process of its own: ``python two_nodes.py RUN_DIR SETTINGS EVAL_ROWS APP``.

``SETTINGS`` is JSON; ``gpus_a_node`` among them is the cluster's, all others are ``fit``'s.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "cluster"))

from app import bills
from cluster_apps import add_up_and_look, in_a_child, two_at_once, varied
from simulated import two_nodes

from rllm_trainer import fit
from rllm_trainer.cluster.layout import ClusterLayout
from rllm_trainer.cluster.preflight import check_cluster
from rllm_trainer.models import resolve_model

APPS: dict[str, Any] = {"add_up_and_look": add_up_and_look, "two_at_once": two_at_once, "in_a_child": in_a_child}


def main(run_dir: str, settings: str, eval_rows: str = "0", app: str = "add_up_and_look") -> None:
    given = json.loads(settings)
    with two_nodes(gpus=given.pop("gpus_a_node", 1)) as ray:
        facts, wrong = check_cluster(
            ray, msgspec.convert(given.get("cluster", {}), ClusterLayout), model=resolve_model("tiny-qwen2"), run_dir=Path(run_dir)
        )
        held_out = rows(int(eval_rows), 99, run_dir) or None
        result = fit(
            APPS[app],
            rows(16, 0, run_dir),
            reward=varied,
            output_dir=run_dir,
            eval_dataset=held_out,
            engine="cluster",
            model="tiny-qwen2",
            **given,
        )
        assert ray.is_initialized(), "Ray of the caller's stays as it was"
        print(
            json.dumps(
                {
                    "metrics": result.metrics,
                    "model": str(result.model_path),
                    "nodes": [fact.gpus for fact in facts],
                    "findings": [finding.sentence for finding in wrong],
                }
            )
        )


def rows(count: int, seed: int, run_dir: str) -> list[dict[str, Any]]:
    """Bills with their number, and the folder in which rollouts may leave something."""
    return [{**row, "number": number, "folder": str(Path(run_dir).parent)} for number, row in enumerate(bills(count, seed=seed))]


if __name__ == "__main__":
    main(*sys.argv[1:])
