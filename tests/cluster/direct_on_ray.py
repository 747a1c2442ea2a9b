"""The direct engine on two simulated nodes, beside the same engine as one process: ``python direct_on_ray.py FOLDER``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.cluster_utils import Cluster
from safetensors.numpy import load_file

from rllm_trainer.batching import make_batch
from rllm_trainer.cluster.direct import RayEngine
from rllm_trainer.config import make_settings
from rllm_trainer.engine.verl import VerlEngine
from rllm_trainer.models import resolve_model
from rllm_trainer.types import Row, Sample, SampledSpan


def row(number: int) -> Row:
    """One row of random tokens, half of them trained."""
    draw = np.random.default_rng(number)
    length = 12 + 7 * number
    ids = draw.integers(5, 250, length).astype(np.int32)
    mask = np.arange(length) >= 5
    logprobs = np.where(mask, -3.0, np.nan).astype(np.float32)
    sample = Sample(
        id=f"e{number}/row",
        episode_id=f"e{number}",
        task_id="g",
        token_ids=ids,
        trained_mask=mask,
        logprobs=logprobs,
        versions=np.where(mask, 0, -1).astype(np.int32),
        temperature=1.0,
        spans=[SampledSpan(span_id=f"{number}", choice=0, trajectory_id="t", role="solver", start=5, stop=length)],
    )
    advantages = np.where(mask, (-1.0) ** number, 0.0).astype(np.float32)
    return Row(sample=sample, advantages=advantages, weights=mask.astype(np.float32), old_logprobs=logprobs, group="g")


def main(folder: str) -> None:
    os.environ |= {"RAY_memory_monitor_refresh_ms": "0"}  # both nodes would count the memory of the one machine
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    model = resolve_model("tiny-qwen2")
    given: dict[str, Any] = {"engine": "direct-ray", "policy_loss": "gspo", "loss_agg": "seq-mean-token-mean", "threads": 1}
    settings = make_settings({**given, "cluster": {"nodes": 2}})
    batch = make_batch([row(number) for number in range(5)], settings=settings, step=1, policy_version=0)
    found: dict[str, Any] = {}
    cluster = Cluster()
    for _ in range(2):
        cluster.add_node(num_cpus=4, object_store_memory=100 * 2**20)
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        for name in ("ray", "process"):
            run_dir = Path(folder) / name
            run_dir.mkdir(parents=True)
            start = RayEngine.start_on_ray if name == "ray" else VerlEngine.start
            with start(model, settings, run_dir) as engine:
                loss, gradients = engine.gradient(batch)
                reports = [engine.update(batch, lr=1e-4) for _ in range(2)]
                weights = load_file(engine.export_weights(1).path)
                engine.save(run_dir / "checkpoint")
            np.savez(run_dir / "found.npz", **{f"g/{n}": g for n, g in gradients.items()}, **{f"w/{n}": w for n, w in weights.items()})
            found[name] = {"loss": loss, "grad_norm": reports[-1].grad_norm, "last_loss": reports[-1].loss}
    finally:
        ray.shutdown()
        cluster.shutdown()
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
