"""Where the seconds of a training step go: steps of the demo, on the real app and model, split by what the run was doing.

``generate``: the server computes. ``app``: rollouts run and the server waits for the app and the recorder. ``batch``: episodes become
samples, credit and a batch. ``update``: the optimizer step. ``swap``: the export, the swap and its proof, the trainer's part of it too.
``save``: checkpoints. ``other``: what is left of the step. The first step warms up and is left out; the figures are shares of the others'
time.

    python benchmarks/step.py                    # six steps of 8 x 8 rollouts, as in make demo
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rllm_trainer.loop as loop_module
from rllm_trainer import fit
from rllm_trainer.engine.verl import VerlEngine
from rllm_trainer.learning import Learner
from rllm_trainer.loop import Loop
from rllm_trainer.metrics import read_metrics
from rllm_trainer.serving.local import LocalServer

DEMO = Path(__file__).parent.parent / "examples" / "smolagents_stock"
WATCHED = [
    (Loop, "_require_sound", "batch"),
    (Loop, "_look", "batch"),
    (loop_module, "make_samples", "batch"),
    (loop_module, "prepare", "batch"),
    (VerlEngine, "update", "update"),
    (Learner, "_fix", "swap"),
    (Learner, "_swapped", "swap"),
    (Loop, "_save", "save"),
]
WITHIN = [(VerlEngine, "export_weights"), (VerlEngine, "logprobs"), (LocalServer, "swap"), (LocalServer, "swap_unproven")]
"""Told by themselves too: they overlap."""
PARTS = ("generate", "app", "batch", "update", "swap", "save", "other")
FREE = ("generate", "update")
"""Parts that may take as long as they take; each of the others is to stay below ``MOST``."""
MOST = 0.05


class Watch:
    """Seconds by part, per step; and how long the server had computed when each step ended."""

    def __init__(self) -> None:
        self.seconds: list[defaultdict[str, float]] = [defaultdict(float)]
        self.busy: list[float] = [0.0]
        self.calls: list[tuple[int, str, float]] = []
        """(step, function, seconds) of every counted call."""
        self._inside = False

    def on(self, owner: Any, name: str, part: str) -> None:
        """Count the time of a function; one that is called inside another counted one is part of that."""
        function: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return function(*args, **kwargs)
            started, self._inside = time.perf_counter(), True
            try:
                return function(*args, **kwargs)
            finally:
                self._inside = False
                took = time.perf_counter() - started
                self.seconds[-1][part] += took
                self.calls.append((len(self.seconds), name, took))

        setattr(owner, name, timed)

    def within(self, owner: Any, name: str) -> None:
        """Tell the time of a function that is part of a counted one, in any thread."""
        function: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.calls.append((len(self.seconds), name, time.perf_counter() - started))

        setattr(owner, name, timed)

    def on_steps(self) -> None:
        """Begin a new count with each step, and ask the server how long it has computed."""
        step: Callable[..., Any] = Loop._step

        def counted(loop: Any, number: int, collected: Any) -> None:
            generated = loop._parts.server.stats()["busy_seconds"]
            self.seconds[-1]["generate"] = generated - self.busy[-1]
            step(loop, number, collected)
            self.busy.append(loop._parts.server.stats()["busy_seconds"])
            self.seconds.append(defaultdict(float))

        Loop._step = counted  # pyright: ignore[reportAttributeAccessIssue]


def main() -> None:
    options = _options()
    sys.path.insert(0, str(DEMO))
    from app import ask  # pyright: ignore[reportMissingImports]
    from questions import training_rows  # pyright: ignore[reportMissingImports]

    watch = Watch()
    for owner, name, part in WATCHED:
        watch.on(owner, name, part)
    for owner, name in WITHIN:
        watch.within(owner, name)
    watch.on_steps()
    with tempfile.TemporaryDirectory() as folder:
        result = fit(
            ask,
            training_rows(0),
            output_dir=Path(folder) / "run",
            steps=options.steps,
            batch_tasks=8,
            group_size=8,
            lr=2e-5,
            betas=(0.9, 0.99),
            max_model_len=256,
            concurrency=64,
            save_every=options.steps + 1,
            micro_batch_tokens=options.micro_batch_tokens,
            progress=False,
        )
        lines = [line for line in read_metrics(result.run_dir / "metrics.jsonl") if "rollouts/seconds" in line]
    steps = [_split(line, seconds) for line, seconds in zip(lines, watch.seconds, strict=False)][1:]
    total = sum(sum(step.values()) for step in steps)
    shares = {part: round(sum(step[part] for step in steps) / total, 3) for part in PARTS}
    inside: dict[str, float] = {}
    for step, name, took in watch.calls:
        if 1 < step <= len(steps) + 1:
            inside[name] = round(inside.get(name, 0.0) + took / total, 3)
    print(json.dumps({"seconds_per_step": round(total / len(steps), 2), "shares": shares, "by function": inside}))
    over = {part: share for part, share in shares.items() if part not in FREE and share > MOST}
    if over:
        print(f"more than {MOST:.0%} of a step: {over}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument(
        "--micro-batch-tokens", type=int, default=None, help="for a machine with little memory; default: the engine's choice"
    )
    return parser.parse_args()


def _split(line: dict[str, float], seconds: dict[str, float]) -> dict[str, float]:
    """The seconds of one step by part; they add up to the step."""
    split = {part: seconds.get(part, 0.0) for part in PARTS}
    split["app"] = max(line["rollouts/seconds"] - split["generate"], 0.0)
    split["other"] = line["seconds"] - sum(split.values())
    return split


if __name__ == "__main__":
    main()
