"""Runs on one simulated cluster over rows that nobody can count, that run out, and that an end cuts off: ``python rows_on_ray.py FOLDER``.

Prints, as JSON, what each run came to: the error that it ended with or its metrics; and what the last one of each folder has trained.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "cluster"))

import openai
import ray
from app import bills, close
from simulated import two_nodes

from rllm_trainer import fit
from rllm_trainer.cluster.verl_rows import INERT
from rllm_trainer.credit_log import read_credit
from rllm_trainer.rollout.dataset import make_task
from rllm_trainer.rollout.record import read_lines

GIVEN: dict[str, Any] = {
    "model": "tiny-qwen2",
    "reward": close,
    "engine": "cluster",
    "cluster": {"nodes": 1, "gpus_per_node": 1, "app_workers": 1, "app_cpus": 0},
    "batch_tasks": 2,
    "group_size": 2,
    "max_model_len": 512,
    "lr": 2e-4,
}


def ask(bill: str, folder: str) -> str:
    """One call. Once, where ``folder/kill`` asks for it and there is a checkpoint, the rank is killed first."""
    kill = Path(folder) / "kill"
    if (Path(folder) / "run" / "checkpoints" / "latest_checkpointed_iteration.txt").exists() and first(kill):
        name = next(one for one in ray.util.list_named_actors() if "WorkerDict" in one)
        os.kill(ray.get(ray.get_actor(name).__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)
    with openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="unused") as client:
        done = client.chat.completions.create(model="gpt-4o-mini", messages=[{"role": "user", "content": bill}], max_tokens=6)
    return done.choices[0].message.content or ""


def first(mark: Path) -> bool:
    """Whether this is the one that takes it away."""
    try:
        mark.unlink()
    except FileNotFoundError:
        return False
    return True


def rows_in(folder: Path, count: int) -> list[dict[str, Any]]:
    return [{**row, "folder": str(folder)} for row in bills(count, seed=0)]


def stream(folder: Path, count: int, *, breaks: bool) -> Iterator[dict[str, Any]]:
    """So many rows, then an end, or an error of the user's; writes down how many steps had been taken when each was drawn."""
    metrics = folder / "run" / "metrics.jsonl"
    for row in rows_in(folder, count):
        done = [json.loads(line)["step"] for line in metrics.read_text().splitlines()] if metrics.exists() else []
        with (folder / "drawn").open("a") as file:
            file.write(f"{max(done, default=0)}\n")
        yield row
    if breaks:
        raise LookupError("the well is dry")


def run(folder: Path, dataset: Any, **other: Any) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    try:
        result = fit(ask, dataset, output_dir=folder / "run", **GIVEN, **other)
    except Exception as error:  # noqa: BLE001 - what it ended with is the finding
        return {"kind": type(error).__name__, "error": str(error), "trained": trained(folder)}
    return {
        "steps": [line["step"] for line in result.metrics if line["step"] > 0],
        "after": result.after is not None,
        "trained": trained(folder),
        "drawn": sorted({(line.step, numbers(folder)[line.task_id]) for line in read_lines(folder / "run") if line.split == "train"}),
    }


def numbers(folder: Path) -> dict[str, int]:
    """Task id -> number of the row."""
    return {make_task(row, number, "rows").id: number for number, row in enumerate(rows_in(folder, 8))}


def trained(folder: Path) -> dict[str, list[list[int]]]:
    """Step -> (number of the row, its episodes) of each row that was trained."""
    found: dict[int, set[tuple[str, str]]] = {}
    for line in read_credit(folder / "run"):
        assert line.row != INERT
        found.setdefault(line.step, set()).add((line.task_id, line.episode_id))
    counted = {step: Counter(numbers(folder)[task] for task, _ in pairs) for step, pairs in found.items()}
    return {str(step): sorted([number, count] for number, count in rows.items()) for step, rows in sorted(counted.items())}


def main(folder: str) -> None:
    turns, ahead, killed = (Path(folder) / name for name in ("turns", "ahead", "killed"))
    found: dict[str, Any] = {}
    with two_nodes(gpus=1):
        found["breaks"] = run(turns, stream(turns, 4, breaks=True))
        found["drawn"] = [int(line) for line in (turns / "drawn").read_text().splitlines()]
        held_out = rows_in(turns, 10)[8:]
        found["ends"] = run(turns, stream(turns, 7, breaks=False), steps=9, resume=True, eval_dataset=held_out)
        found["ahead breaks"] = run(ahead, stream(ahead, 6, breaks=True), staleness=1)
        found["ahead ends"] = run(ahead, stream(ahead, 8, breaks=False), staleness=1, resume=True)
        killed.mkdir()
        (killed / "kill").touch()
        given: dict[str, Any] = {"staleness": 1, "steps": 3, "save_every": 1, "shuffle": False}
        found["killed"] = run(killed, rows_in(killed, 6), **given)
        found["killed, resumed"] = run(killed, rows_in(killed, 6), resume=True, **given)
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
