"""An ended episode and reward functions in, the scored episode out, with what the functions called under their spans.

Live and replayed episodes are scored in here alike. A function that raises, exits, or returns what is no reward is told by its name.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import msgspec

from rllm_trace.scoring import Scoring
from rllm_trace.types import Episode
from rllm_trainer.exceptions import RewardError
from rllm_trainer.rollout.faults import describe
from rllm_trainer.rollout.rewards import RewardFunction, given_rewards, read_value

__all__ = ["Awaited", "scored_by", "without_rewards"]

Awaited = Callable[[Coroutine[Any, Any, Any]], Any]
"""Runs a coroutine to its end and gives its result: where async rewards run."""


def scored_by(
    functions: Sequence[RewardFunction], episode: Episode, *, output: Any, row: Any, error: BaseException | None, awaited: Awaited
) -> Episode:
    """The episode with the rewards of these functions, called in their order; each sees the ones before it.

    Raises:
        rllm_trainer.exceptions.RewardError: one has a parameter that nothing fills, or raised.
        rllm_trace.exceptions.RewardError: one returned something that is no reward.
    """
    for function in functions:
        arguments = function.arguments(output=output, row=row, episode=episode, error=error)
        scoring = Scoring(episode, function.name)
        try:
            with scoring.running():
                value = function.call(**arguments)
            if inspect.isawaitable(value):
                value = awaited(_inside(scoring, value))
        except BaseException as raised:  # a reward that exits, too, is the reward's fault
            scoring.ended()
            raise RewardError(f"the reward {function.name} raised {describe(raised)}") from raised
        try:
            given = read_value(function, value, given=given_rewards(episode), span_id=scoring.span_id)
        except BaseException:
            scoring.ended()
            raise
        episode = scoring.ended(given)
    return episode


def without_rewards(episode: Episode) -> Episode:
    """The episode as if nothing had scored it."""
    trajectories = [msgspec.structs.replace(trajectory, rewards=[], reward=None) for trajectory in episode.trajectories]
    return msgspec.structs.replace(episode, trajectories=trajectories, rewards=[], reward=None)


async def _inside(scoring: Scoring, work: Awaitable[Any]) -> Any:
    with scoring.running():
        return await work
