"""A run folder in, the figures of ``result.json`` that ``fit`` does not give out: how replies looked, and how calls became rows."""

from pathlib import Path

from rllm_trainer.rollout.record import read_rollouts
from rllm_trainer.samples import build_samples
from rllm_trainer.types import Rollout

__all__ = ["format_figures", "row_figures"]


def format_figures(run_dir: Path, *, step: int) -> tuple[float, float]:
    """Of the held-out rollouts sampled after ``step``: the share that came to a number, and of those the share that is correct."""
    rollouts = read_rollouts(run_dir, split="eval", steps=[step])[step]
    numbers = [r for r in rollouts if r.episode is not None and type(r.episode.output) is int]
    return len(numbers) / len(rollouts), sum(r.reward or 0.0 for r in numbers) / max(1, len(numbers))


def row_figures(run_dir: Path, *, step: int) -> tuple[float, float]:
    """Of the rollouts of ``step``: the share with two or more calls, and of those the share that is one row with two or more replies."""
    rollouts = read_rollouts(run_dir, steps=[step])[step]
    several = [r for r in rollouts if r.episode is not None and len(r.episode.calls) > 1]
    return len(several) / len(rollouts), sum(map(_one_row, several)) / max(1, len(several))


def _one_row(rollout: Rollout) -> bool:
    assert rollout.episode is not None
    samples = build_samples(rollout.episode).samples
    return len(samples) == 1 and len(samples[0].spans) > 1
