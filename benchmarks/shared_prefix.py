"""One update of a group that shares its prompt: the engine beside verl's own worker, in time, loss and gradient.

    python benchmarks/shared_prefix.py                      # SmolLM2's first 4 layers: 8 replies of 128 tokens to 1,024 tokens of prompt
    python benchmarks/shared_prefix.py --layers 0           # all of its layers
    python benchmarks/shared_prefix.py --model DIR --json

Both compute the same PPO loss of the same rows in float32 with verl's actor settings and AdamW, without gradient checkpointing; each is
a process of its own with the same number of threads. verl runs four ways: with its padding removed and with padded dynamic batches, each
in micro-batches of one row and of four; the fastest of the four counts. What is timed is an update: zero the gradient, forward and
backward, step; the first is not counted, of the others the fastest is. Loss and gradient of the very batch that was timed are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from rllm_trainer.config import make_settings
from rllm_trainer.models import resolve_model
from rllm_trainer.types import Batch, Row, Sample, SampledSpan

SEED = 11
TOLERANCE = 1e-5
"""Of the loss, and of the gradient against its largest entry, both float32."""
GOAL = 3.0
WAYS = {
    "padding removed, row by row": (True, 1),
    "padding removed, four rows": (True, 4),
    "padded, row by row": (False, 1),
    "padded, four rows": (False, 4),
}

_ENVIRONMENT = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",
    "VERL_USE_EXTERNAL_MODULES": "rllm_trainer.engine._verl_cpu",
    "VERL_DISABLE_FLASH_ATTN_CE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""What verl's own worker reads on a machine without a GPU."""


def cut(model: Path, layers: int, folder: Path) -> Path:
    """A copy of the model with its first layers only; 0: the model itself."""
    if layers == 0:
        return model
    from safetensors.numpy import load_file, save_file

    config = json.loads((model / "config.json").read_text())
    config["num_hidden_layers"] = layers
    folder.mkdir()
    for file in model.iterdir():
        if file.is_file() and file.suffix == ".json" and "index" not in file.name:
            shutil.copyfile(file, folder / file.name)
    (folder / "config.json").write_text(json.dumps(config))
    kept: dict[str, Any] = {}
    for file in sorted(model.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            parts = name.split(".")
            number = int(parts[parts.index("layers") + 1]) if "layers" in parts else -1
            if number < layers:
                kept[name] = tensor
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def make_batch(prompt: int, reply: int, rows: int, vocabulary: int, logprobs: Any = None) -> Batch:
    """``rows`` replies to one prompt. ``logprobs``: of each row under the policy, from which the old ones are moved a little."""
    random = np.random.default_rng(SEED)
    shared = random.integers(10, vocabulary, prompt)
    made: list[Row] = []
    for number in range(rows):
        ids = np.concatenate([shared, random.integers(10, vocabulary, reply)]).astype(np.int32)
        mask = np.arange(len(ids)) >= prompt
        moved = random.normal(0, 0.1, len(ids))
        old = np.where(mask, (-8.0 if logprobs is None else logprobs[number]) + moved, np.nan).astype(np.float32)
        span = SampledSpan(span_id=f"c{number}", choice=0, trajectory_id="t", role="r", start=prompt, stop=len(ids))
        sample = Sample(
            id=f"r{number}", episode_id=f"e{number}", task_id="g", token_ids=ids, trained_mask=mask, logprobs=old,
            versions=np.where(mask, 0, -1).astype(np.int32), temperature=1.0, spans=[span],
        )  # fmt: skip
        advantages = np.where(mask, random.normal(1.0, 0.5), 0).astype(np.float32)
        made.append(Row(sample=sample, advantages=advantages, weights=mask.astype(np.float32), old_logprobs=old, group="g"))
    return Batch(rows=made, denominator=float(rows * reply), step=1, policy_version=0)


def ours(model: Path, options: argparse.Namespace, run_dir: Path) -> tuple[Batch, dict[str, Any]]:
    """The batch, and what the engine made of it, with shared prefixes and without."""
    from rllm_trainer.engine.verl import VerlEngine

    found: dict[str, Any] = {}
    settings = make_settings({"threads": options.threads, "micro_batch_tokens": 2 * (options.prompt + options.rows * options.reply)})
    with VerlEngine.start(model, settings, run_dir, device="cpu") as engine:
        bare = make_batch(options.prompt, options.reply, options.rows, engine.vocab_size)
        ids = [row.sample.token_ids for row in bare.rows]
        batch = make_batch(
            options.prompt, options.reply, options.rows, engine.vocab_size, engine.logprobs(ids, temperatures=[1.0] * len(ids))
        )
        found["loss"], found["gradient"] = engine.gradient(batch)
        found["shares"] = engine.shares_prefixes
        times: list[float] = []
        for _ in range(options.updates + 1):
            begun = time.perf_counter()
            report = engine.update(batch, lr=0.0)
            times.append(time.perf_counter() - begun)
        found |= {"seconds": min(times[1:]), "tokens": report.tokens}
        if options.alone:
            engine.restart(settings, shared_prefix=False)
            engine.update(batch, lr=0.0)
            begun = time.perf_counter()
            engine.update(batch, lr=0.0)
            found["seconds_row_by_row"] = time.perf_counter() - begun
    return batch, found


def verls(model: Path, options: argparse.Namespace, batch: Batch, folder: Path, way: str) -> dict[str, Any]:
    """The same of verl's own worker, in a process of its own."""
    removed, rows = WAYS[way]
    length = options.prompt + options.reply
    asked = {
        "model": str(model), "removed": removed, "max_tokens": length * rows, "prompt": options.prompt,
        "updates": options.updates, "threads": options.threads, "out": str(folder / "verl.npz"),
    }  # fmt: skip
    rows_of = {"ids": [r.sample.token_ids for r in batch.rows], "old": [r.old_logprobs for r in batch.rows]}
    columns = rows_of | {"advantages": [r.advantages for r in batch.rows]}
    np.savez(folder / "batch.npz", **{name: np.stack(values) for name, values in columns.items()})
    environment = os.environ | _ENVIRONMENT | {"OMP_NUM_THREADS": str(options.threads)}
    command = [sys.executable, "-W", "ignore", __file__, "--verl", json.dumps(asked | {"batch": str(folder / "batch.npz")})]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800, check=False)
    if done.returncode:
        raise SystemExit(f"verl, {way}: {done.stderr[-2000:]}")
    with np.load(folder / "verl.npz") as made:
        gradient = {name: made[name] for name in made.files if not name.startswith("_")}
        return {"loss": float(made["_loss"]), "seconds": float(made["_seconds"]), "gradient": gradient}


def run_verl(asked: dict[str, Any]) -> None:
    """verl's own worker on the batch; this process is started by ``verls``."""
    import functools

    import torch
    from verl.utils import tensordict_utils
    from verl.workers.utils.losses import ppo_loss

    from rllm_trainer.engine._verl_api import (
        CheckpointConfig,
        FSDPActorConfig,
        FSDPEngineConfig,
        FSDPOptimizerConfig,
        HFModelConfig,
        TinkerTrainingWorker,
        TrainingWorkerConfig,
    )

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    torch.set_num_threads(asked["threads"])
    model = HFModelConfig(
        path=asked["model"], load_tokenizer=False, use_remove_padding=asked["removed"], enable_gradient_checkpointing=False,
        override_config={"attn_implementation": "sdpa"},
    )  # fmt: skip
    precision = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    engine = FSDPEngineConfig(
        strategy="fsdp2", use_dynamic_bsz=True, max_token_len_per_gpu=asked["max_tokens"], infer_max_token_len_per_gpu=asked["max_tokens"],
        use_torch_compile=False, mixed_precision=precision,
    )  # fmt: skip
    optimizer = FSDPOptimizerConfig(lr=0.0, total_training_steps=1, override_optimizer_config={"fused": True})
    config = TrainingWorkerConfig(
        model_type="language_model",
        model_config=model,
        engine_config=engine,
        optimizer_config=optimizer,
        checkpoint_config=CheckpointConfig(),
    )
    worker: Any = TinkerTrainingWorker(config)
    worker.reset()
    actor = FSDPActorConfig(strategy="fsdp2", rollout_n=1, use_dynamic_bsz=True, loss_agg_mode="token-mean")
    worker.set_loss_fn(functools.partial(ppo_loss, config=actor))
    columns, at = np.load(asked["batch"]), asked["prompt"]

    def jagged(rows: Any) -> Any:
        return torch.nested.as_nested_tensor([torch.from_numpy(np.ascontiguousarray(row)) for row in rows], layout=torch.jagged)

    ids = columns["ids"].astype(np.int64)
    ones = np.ones_like(ids[:, at:])
    tensors = {
        "input_ids": jagged(ids),
        "position_ids": jagged(np.broadcast_to(np.arange(ids.shape[1]), ids.shape)),
        "prompts": jagged(ids[:, :at]),
        "responses": jagged(ids[:, at:]),
        "response_mask": jagged(ones),
        "loss_mask": jagged(ones),
        "old_log_probs": jagged(columns["old"][:, at:]),
        "advantages": jagged(columns["advantages"][:, at:]),
    }
    facts = {
        "temperature": 1.0, "global_token_num": [ids.shape[1]] * len(ids), "pad_token_id": 0, "global_batch_size": len(ids),
        "calculate_entropy": False, "compute_loss": True,
    }  # fmt: skip

    def forward_backward() -> float:
        found = worker.forward_backward(tensordict_utils.get_tensordict(dict(tensors), non_tensor_dict=dict(facts)))
        metrics = tensordict_utils.get(found, "metrics")
        return float(np.sum(metrics["loss"]))

    def whole(gradient: Any) -> Any:
        return (gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient).float().numpy()

    worker.optimizer_zero_grad()
    loss = forward_backward()
    gradients = {name: whole(parameter.grad) for name, parameter in worker.engine.module.named_parameters() if parameter.grad is not None}
    times: list[float] = []
    for _ in range(asked["updates"] + 1):
        begun = time.perf_counter()
        worker.optimizer_zero_grad()
        forward_backward()
        worker.optimizer_step({"lr": 0.0})
        times.append(time.perf_counter() - begun)
    np.savez(asked["out"], _loss=loss, _seconds=min(times[1:]), **gradients)


def differences(mine: dict[str, Any], theirs: dict[str, Any]) -> tuple[float, float]:
    """Of the losses, relative; and the largest of the gradients' entries, against the largest entry of all."""
    assert mine["gradient"].keys() == theirs["gradient"].keys(), sorted(mine["gradient"].keys() ^ theirs["gradient"].keys())
    largest = max(float(np.abs(value).max()) for value in theirs["gradient"].values())
    apart = max(float(np.abs(mine["gradient"][name] - value).max()) for name, value in theirs["gradient"].items())
    return abs(mine["loss"] - theirs["loss"]) / max(abs(theirs["loss"]), 1e-8), apart / largest


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="a model folder; the embedded SmolLM2 if left out")
    parser.add_argument("--layers", type=int, default=4, help="take the model's first layers only; 0: all")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--reply", type=int, default=128)
    parser.add_argument("--updates", type=int, default=2)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--alone", action="store_true", help="also time the engine with every row alone")
    parser.add_argument("--json", action="store_true", help="print the results as one line of JSON, last")
    parser.add_argument("--verl", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.verl:
        run_verl(json.loads(options.verl))
        return 0
    with tempfile.TemporaryDirectory(prefix="rllm-bench-") as name:
        folder = Path(name)
        model = cut(resolve_model(options.model), options.layers, folder / "model")
        batch, mine = ours(model, options, folder / "run")
        whole = sum(len(row.sample.token_ids) for row in batch.rows)
        say(f"shared prefixes: {mine['seconds']:.2f} s, {mine['tokens']} of {whole} tokens through the model; sharing: {mine['shares']}")
        if "seconds_row_by_row" in mine:
            say(f"every row alone, in the same engine: {mine['seconds_row_by_row']:.2f} s")
        results: dict[str, dict[str, float]] = {}
        for way in options.ways:
            theirs = verls(model, options, batch, folder, way)
            loss, gradient = differences(mine, theirs)
            results[way] = {"seconds": theirs["seconds"], "times": theirs["seconds"] / mine["seconds"], "loss": loss, "gradient": gradient}
            times = f"{theirs['seconds']:.2f} s = {results[way]['times']:.2f} x"
            say(f"verl, {way}: {times}; loss differs by {loss:.1e}, gradient by {gradient:.1e}")
        fastest = min(results.values(), key=lambda result: result["seconds"])
        equal = all(result["loss"] <= TOLERANCE and result["gradient"] <= TOLERANCE for result in results.values())
        say(f"{fastest['times']:.2f} times as fast as the fastest of verl's ways; the goal is {GOAL:g}")
        say(f"loss and gradient within {TOLERANCE:g}: {'yes' if equal else 'NO'}")
        if options.json:
            report = {"times": fastest["times"], "seconds": mine["seconds"], "equal": equal, "ways": results}
            say(json.dumps({"benchmark": "shared_prefix", **report}))
    return int(not equal)


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
