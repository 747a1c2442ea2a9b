"""A short run of `fit` on the tiny model, as a process of its own that a test can break: python run.py FOLDER [--steps N] ...

Prints one JSON line: where the trained model is, what each step came to, every token that it sampled, and the groups that it trained.
``--at N`` does what ``--do`` says in the N-th run of the app: one at a time, so that it is always the same moment.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import openai
import psutil

import rllm_trace as rllm
from rllm_trainer import checkpoint, fit
from rllm_trainer.credit_log import read_credit
from rllm_trainer.engine.base import UpdateReport
from rllm_trainer.engine.verl import VerlEngine
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
    parser.add_argument("--do", choices=["server", "stream", "engine", "self", "term", "hang"], default="hang")
    parser.add_argument(
        "--save", type=int, default=0, help="kill this process in the N-th checkpoint, once it is written and not yet named"
    )
    parser.add_argument("--update", type=int, default=0, help="kill this process after the N-th update of the weights, before it is saved")
    return parser.parse_args()


def children() -> dict[str, int]:
    """Kind -> pid of the processes that this run started."""
    found: dict[str, int] = {}
    for child in psutil.Process().children(recursive=True):
        line = " ".join(child.cmdline())
        found |= {kind: child.pid for kind, module in _MODULES.items() if module in line}
    return found


def fault(options: argparse.Namespace, *, streaming: bool = False) -> None:
    """What goes wrong in this run of the app, if anything; ``streaming``: between the tokens of a reply."""
    if runs != options.at or streaming != (options.do == "stream"):
        return
    match options.do:
        case "stream":
            os.kill(children()["server"], signal.SIGKILL)
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
        global runs
        runs += 1
        if runs == 1:
            (options.folder.parent / CHILDREN).write_text(json.dumps(children()))
        fault(options)
        request: dict[str, Any] = {
            "model": "gpt-4o-mini",
            "messages": [{"role": "user", "content": word}],
            "max_tokens": 8,
            "temperature": 1.0,
        }
        if options.do != "stream":
            return client.chat.completions.create(**request).choices[0].message.content or ""
        parts: list[str] = []
        for chunk in client.chat.completions.create(**request, stream=True):
            parts += [choice.delta.content or "" for choice in chunk.choices]
            if "".join(parts):
                fault(options, streaming=True)
        return "".join(parts)

    def lowercase(output: str) -> float:
        return sum(letter.islower() for letter in output) / max(1, len(output))

    if options.save:
        _kill_in_save(options.save)
    if options.update:
        _kill_after_update(options.update)
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
    groups: dict[int, dict[str, list[int]]] = {}
    for line in read_credit(result.run_dir):
        groups.setdefault(line.step, {}).setdefault(line.task_id, []).append(line.tokens)
    print(json.dumps({"model": str(result.model_path), "steps": steps, "tokens": tokens, "groups": groups, "warnings": result.warnings}))


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


def _kill_after_update(number: int) -> None:
    """Kill this process when the engine has taken the N-th step, which nothing on disk knows of."""
    updates = 0
    real = VerlEngine.update

    def update(engine: VerlEngine, *arguments: Any, **named: Any) -> UpdateReport:
        nonlocal updates
        report = real(engine, *arguments, **named)
        updates += 1
        if updates == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return report

    VerlEngine.update = update  # type: ignore[method-assign]


if __name__ == "__main__":
    sys.exit(main())
