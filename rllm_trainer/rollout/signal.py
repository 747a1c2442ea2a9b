"""A group in, whether a baseline can tell its rollouts apart out. Pure.

What is looked at is every score that credit could use: of the episode, of each role's agents, of calls. A group in which none of them
differs has no gradient under any rule that compares.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rllm_trainer.rollout.faults import leaves_gradient
from rllm_trainer.types import Group, Rollout

__all__ = ["has_signal", "split_by_signal"]


def has_signal(group: Group, faults: Mapping[Any, str] | None = None) -> bool:
    """Whether two scores of one kind differ among the rollouts that are trained; ``faults`` as in the settings."""
    scores: dict[tuple[str, ...], set[float]] = {}
    for rollout in group.rollouts:
        if not leaves_gradient(rollout.fault, faults):
            for kind, value in _scores(rollout):
                scores.setdefault(kind, set()).add(value)
    return any(len(values) > 1 for values in scores.values())


def split_by_signal(groups: Sequence[Group], faults: Mapping[Any, str] | None = None) -> tuple[list[Group], list[Group]]:
    """The groups with signal, and those without."""
    told = [(group, has_signal(group, faults)) for group in groups]
    return [group for group, there in told if there], [group for group, there in told if not there]


def _scores(rollout: Rollout) -> Iterator[tuple[tuple[str, ...], float]]:
    if rollout.reward is not None or rollout.fault is not None:
        yield ("episode",), rollout.reward or 0.0
    if rollout.episode is None:
        return
    for trajectory in rollout.episode.trajectories:
        if trajectory.reward is not None:
            yield ("agent", trajectory.name), trajectory.reward
        for reward in trajectory.rewards:
            if reward.target not in (None, trajectory.id) and not reward.superseded:
                yield ("call", trajectory.name, reward.name), reward.value
