"""The direct engine on two simulated nodes, beside the same engine as one process: ``python direct_on_ray.py FOLDER``.

First the engine alone, on rows given; then whole runs, one rollout at a time, so that both draw the same tokens.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "cluster"))

import numpy as np
from app import add_up, bills, close
from safetensors.numpy import load_file
from simulated import two_nodes

from rllm_trainer import fit
from rllm_trainer.batching import make_batch
from rllm_trainer.cluster.direct import RayEngine
from rllm_trainer.config import make_settings
from rllm_trainer.engine.verl import VerlEngine
from rllm_trainer.models import resolve_model
from rllm_trainer.types import Row, Sample, SampledSpan

RUN: dict[str, Any] = {
    "steps": 2,
    "batch_tasks": 2,
    "group_size": 2,
    "concurrency": 1,
    "max_model_len": 512,
    "lr": 2e-4,
    "policy_loss": "gspo",
    "loss_agg": "seq-mean-token-mean",
}


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
    model = resolve_model("tiny-qwen2")
    given: dict[str, Any] = {"engine": "direct-ray", "policy_loss": "gspo", "loss_agg": "seq-mean-token-mean", "threads": 1}
    settings = make_settings({**given, "cluster": {"nodes": 2}})
    batch = make_batch([row(number) for number in range(5)], settings=settings, step=1, policy_version=0)
    found: dict[str, Any] = {}
    with two_nodes(cpus=4):
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
        for name, engine in (("ray", {"engine": "direct-ray", "cluster": {"nodes": 2}}), ("process", {})):
            result = fit(
                add_up, bills(8, seed=0), model="tiny-qwen2", reward=close, output_dir=Path(folder) / f"fit-{name}", **RUN, **engine
            )
            found[name] |= {"metrics": result.metrics, "model": str(result.model_path)}
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
