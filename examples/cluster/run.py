"""Trains the clerk on a Ray cluster: ``python examples/cluster/run.py --gpus 8 --model Qwen2.5-7B-Instruct``; 1, 8 or 64 GPUs.

The layouts are those of the README beside this file, with the arithmetic that led to them. ``--cpu`` runs the smallest of them on a
machine without accelerators, with a model of 91 thousand parameters.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from app import add_up, bills, close

from rllm_trainer import fit

LAYOUTS: dict[int, dict[str, Any]] = {
    1: {
        "cluster": {"nodes": 1, "gpus_per_node": 1, "offload": True},
        "lora": {"r": 32, "alpha": 64},
        "batch_tasks": 16,
        "concurrency": 104,
        "micro_batch_tokens": 4096,
        "verl": {"actor_rollout_ref.rollout.gpu_memory_utilization": 0.5},
    },
    8: {
        "cluster": {"nodes": 1, "gpus_per_node": 8, "rollout_tensor_parallel": 1, "offload": True},
        "lr": 1e-6,
        "batch_tasks": 64,
        "concurrency": 512,
        "micro_batch_tokens": 8192,
        "verl": {"actor_rollout_ref.rollout.gpu_memory_utilization": 0.6},
    },
    64: {
        "cluster": {
            "mode": "separate_async",
            "nodes": 4,
            "gpus_per_node": 8,
            "rollout_nodes": 4,
            "rollout_gpus_per_node": 8,
            "rollout_tensor_parallel": 2,
            "app_workers": 32,
        },
        "lr": 1e-6,
        "staleness": 1,
        "batch_tasks": 256,
        "concurrency": 4096,
        "micro_batch_tokens": 16384,
        "verl": {"actor_rollout_ref.rollout.gpu_memory_utilization": 0.85},
    },
}
"""GPUs -> settings of ``fit``."""

CPU: dict[str, Any] = {
    "cluster": {"nodes": 1, "gpus_per_node": 2, "app_workers": 1, "app_cpus": 0},
    "batch_tasks": 2,
    "group_size": 4,
    "max_model_len": 512,
}


def main() -> None:
    """Train, and say where the model is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, choices=sorted(LAYOUTS), default=8)
    parser.add_argument("--cpu", action="store_true", help="two ranks on this machine's CPU")
    parser.add_argument("--model", help="a Hugging Face folder that every node can read")
    parser.add_argument("--steps", type=int, help="100, or 5 with --cpu")
    parser.add_argument("--out", type=Path, default=Path("runs/cluster"))
    asked = parser.parse_args()
    if not asked.cpu and asked.model is None:
        parser.error("--model is needed: a Hugging Face folder that every node can read")
    settings = CPU if asked.cpu else {"group_size": 8, "max_model_len": 4096, "max_tokens": 512, **LAYOUTS[asked.gpus]}
    result = fit(
        add_up,
        bills(4096, seed=0),
        model="tiny-qwen2" if asked.cpu else asked.model,
        reward=close,
        eval_dataset=bills(8 if asked.cpu else 64, seed=1),
        engine="cluster",
        output_dir=asked.out,
        steps=asked.steps or (5 if asked.cpu else 100),
        **settings,
    )
    print(result.rise, result.model_path)


if __name__ == "__main__":
    main()
