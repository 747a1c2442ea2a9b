"""A run folder in, what each role was worth on the held-out sentences: ``fit`` itself reports the mean over all three agents."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from rllm_trainer.rollout.record import read_rollouts

__all__ = ["interval", "role_rises", "role_scores"]

_DRAWS = 10_000


def role_scores(run_dir: Path, role: str, *, step: int) -> dict[str, float]:
    """Task id -> mean reward of the role's agents in the evaluation after ``step``; an agent that got none counts 0."""
    scores: dict[str, float] = {}
    for rollout in read_rollouts(run_dir, split="eval", steps=[step])[step]:
        agents = [] if rollout.episode is None else [t for t in rollout.episode.trajectories if t.name == role]
        scores[rollout.task_id] = sum(t.reward or 0.0 for t in agents) / max(1, len(agents))
    return scores


def role_rises(before: Mapping[str, float], after: Mapping[str, float]) -> list[float]:
    """After minus before, task by task."""
    return [after[task] - before[task] for task in sorted(before)]


def interval(rises: list[float]) -> list[float]:
    """95 % bootstrap interval of the mean, over tasks."""
    values = np.array(rises)
    drawn = np.random.default_rng(0).integers(0, len(values), size=(_DRAWS, len(values)))
    return [float(end) for end in np.percentile(values[drawn].mean(axis=1), [2.5, 97.5])]
