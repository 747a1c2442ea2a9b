"""A run's metrics in, its reward curve as a PNG out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from rllm_trainer.metrics import EVAL_SAMPLED, REWARD_MEAN, STEP, Line

__all__ = ["draw_reward_curve"]

_WINDOW = 5


def draw_reward_curve(lines: Sequence[Line], path: Path, *, title: str) -> None:
    """Mean training reward per step, its running mean over 5 steps, and held-out means, into one PNG."""
    from matplotlib.figure import Figure

    figure: Any = cast("Any", Figure)(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    points = [(line[STEP], line[REWARD_MEAN]) for line in lines if REWARD_MEAN in line]
    if points:
        steps, rewards = zip(*points, strict=True)
        axes.plot(steps, rewards, color="0.7", marker=".", linewidth=1, label="training, each step")
        axes.plot(steps, _running_mean(rewards), color="C0", linewidth=2, label=f"training, mean of {_WINDOW} steps")
    held_out = {int(line[STEP]): line[EVAL_SAMPLED] for line in lines if EVAL_SAMPLED in line}
    if held_out:
        axes.plot(list(held_out), list(held_out.values()), color="C1", marker="o", linewidth=2, label="held out")
    axes.set_xlabel("step")
    axes.set_ylabel("mean reward")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    if points or held_out:
        axes.legend()
    temporary = path.with_suffix(".tmp.png")
    figure.savefig(temporary, dpi=120)
    temporary.replace(path)


def _running_mean(values: Sequence[float]) -> list[float]:
    return [sum(part := values[max(0, i - _WINDOW + 1) : i + 1]) / len(part) for i in range(len(values))]
