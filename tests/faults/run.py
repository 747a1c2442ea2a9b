"""A short run of `fit` on the tiny model, as a process of its own that a test can break: python run.py FOLDER [--steps N] ...

Prints one JSON line: where the trained model is, what each step came to, and every token that it trained. ``--at N`` does what
``--do`` says in the N-th run of the app: one at a time, so that it is always the same moment.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
from pathlib import Path

import openai
import psutil

import rllm_trace as rllm
from rllm_trainer import checkpoint, fit
from rllm_trainer.rollout.record import read_rollouts

CHILDREN = "children.json"
"""Pids of the run's child processes, as its app saw them."""
_MODULES = {"server": "rllm_trainer.serving._local.main", "engine": "rllm_trainer.engine"}

client = openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="unused", max_retries=0)
runs = 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--staleness", type=int, default=0)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--at", type=int, default=0, help="number of the run of the app, from 1")
    parser.add_argument("--do", choices=["server", "engine", "self", "term", "hang"], default="hang")
    parser.add_argument(
        "--save", type=int, default=0, help="kill this process in the N-th checkpoint, once it is written and not yet named"
    )
    return parser.parse_args()


def children() -> dict[str, int]:
    """Kind -> pid of the processes that this run started."""
    found: dict[str, int] = {}
    for child in psutil.Process().children(recursive=True):
        line = " ".join(child.cmdline())
        found |= {kind: child.pid for kind, module in _MODULES.items() if module in line}
    return found


def fault(options: argparse.Namespace) -> None:
    """What goes wrong in this run of the app, if anything."""
    global runs
    runs += 1
    if runs == 1:
        (options.folder.parent / CHILDREN).write_text(json.dumps(children()))
    if runs != options.at:
        return
    match options.do:
        case "server" | "engine":
            os.kill(children()[options.do], signal.SIGKILL)
        case "self":
            os.kill(os.getpid(), signal.SIGKILL)
        case "term":
            os.kill(os.getpid(), signal.SIGTERM)
        case _:
            threading.Event().wait(600)


def sampled(episode: rllm.Episode) -> list[int]:
    """Every token that the policy sampled in it."""
    return [token for call in episode.calls for choice in call.choices for token in choice.token_ids.tolist()]


def main() -> None:
    options = parse()

    @rllm.workflow
    def app(word: str) -> str:
        fault(options)
        reply = client.chat.completions.create(
            model="gpt-4o-mini", messages=[{"role": "user", "content": word}], max_tokens=8, temperature=1.0
        )
        return reply.choices[0].message.content or ""

    def lowercase(output: str) -> float:
        return sum(letter.islower() for letter in output) / max(1, len(output))

    if options.save:
        _kill_in_save(options.save)
    result = fit(
        app,
        [{"word": f"say {i}"} for i in range(12)],
        model="tiny-qwen2",
        reward=lowercase,
        output_dir=options.folder,
        resume=options.resume,
        steps=options.steps,
        staleness=options.staleness,
        lr=1e-2,
        batch_tasks=2,
        group_size=3,
        concurrency=1,
        rollout_timeout=20.0,
        threads=1,
        save_every=1,
        keep=5,
        progress=False,
    )
    steps = [[line["step"], line["reward/mean"], line["loss"], line["grad_norm"]] for line in result.metrics if "loss" in line]
    tokens = {
        step: sorted([r.task_id, r.index, *sampled(r.episode)] for r in rollouts if r.episode is not None)
        for step, rollouts in read_rollouts(result.run_dir).items()
    }
    print(json.dumps({"model": str(result.model_path), "steps": steps, "tokens": tokens, "warnings": result.warnings}))


def _kill_in_save(number: int) -> None:
    """Kill this process when the N-th checkpoint lies there complete under its temporary name."""
    saves = 0
    real = checkpoint._sync_tree

    def sync(folder: Path) -> None:
        nonlocal saves
        real(folder)
        saves += folder.name.startswith(".step-")
        if saves == number:
            os.kill(os.getpid(), signal.SIGKILL)

    checkpoint._sync_tree = sync


if __name__ == "__main__":
    sys.exit(main())
