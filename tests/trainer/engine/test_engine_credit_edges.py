"""Credit where there is next to nothing: one token in the batch, no named reward, a rejected rollout, a call on record twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from rllm_trace.types import Episode, Reward, Trajectory
from rllm_trainer.advantages import Credited, credit
from rllm_trainer.config import make_settings
from rllm_trainer.engine.verl import VerlEngine
from rllm_trainer.preparation import make_samples
from rllm_trainer.testing import make_call, make_episode
from rllm_trainer.types import Group, Rollout


def credited(engine: VerlEngine, rollouts: Sequence[Rollout], **given: Any) -> Credited:
    settings = make_settings({"threads": 1, **given})
    engine.restart(settings)
    samples = make_samples(rollouts, settings=settings, vocab_size=None)
    return credit([Group(task_id="t", rollouts=list(rollouts))], samples, settings=settings, estimator=engine)


def rollout(episode: Episode, reward: float | None, *, fault: Any = None) -> Rollout:
    named = {} if reward is None else {"r": reward}
    return Rollout(task_id="t", index=0, row={}, episode=episode, reward=reward, rewards=named, fault=fault)


def reply(name: str, *tokens: int) -> Episode:
    return make_episode(make_call(f"{name}-c", [1, 2], tokens), episode_id=name, task_id="t")


def trained(rows: Credited) -> list[list[float]]:
    return [np.round(row.advantages[row.sample.trained_mask].astype(float), 3).tolist() for row in rows]


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo"])
def test_a_single_token_has_no_deviation(process: VerlEngine, name: str) -> None:
    """What verl cannot whiten is 0: one trained token in the whole batch, beside a rollout whose reply is empty."""
    rows = credited(process, [rollout(reply("a", 5), 1.0), rollout(reply("b"), 0.0)], algorithm=name)
    assert trained(rows) == [[0.0]]
    assert rows.counters.units == 2


def test_failures_alone_have_no_named_reward(process: VerlEngine) -> None:
    """gdpo takes each reward by name: a batch of nothing but unscored failures is worth 0, and is trained as such."""
    failed = [rollout(reply(name, 5, 6), None, fault="policy") for name in ("a", "b")]
    assert trained(credited(process, failed, algorithm="gdpo")) == [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("returns", ["whole", "to_go"])
def test_a_rejected_rollout_is_compared(process: VerlEngine, returns: str) -> None:
    """The one that is kept is better than the group's mean, be its score the episode's or a return to go."""
    rows = credited(
        process, [rollout(reply("a", 5, 6), 1.0), rollout(reply("b", 7), 0.0)], algorithm="rloo", reject_below=0.5, returns=returns
    )
    assert trained(rows) == [[1.0, 1.0]]
    assert (rows.counters.units, rows.counters.groups_of_one) == (2, 0)


def test_a_call_on_record_twice_is_compared_once(process: VerlEngine) -> None:
    """Three scored calls, one of them listed twice: its baseline is the mean of the two others, theirs counts it once."""
    episodes: list[Episode] = []
    for name, score, copies in (("a", 1.0, 2), ("b", 0.0, 1), ("c", 0.5, 1)):
        own = Reward(name="r", value=score, target=f"{name}-c")
        calls = [make_call(f"{name}-c", [1, 2], [5, 6])] * copies
        agent = Trajectory(id=f"{name}-t", name="solver", calls=calls, tools=[], rewards=[own], reward=None, started=0, ended=0)
        episodes.append(make_episode(agents=[agent], episode_id=name, task_id="t"))
    rows = credited(process, [rollout(episode, None) for episode in episodes], algorithm="rloo")
    assert trained(rows) == [[0.75, 0.75], [-0.75, -0.75], [0.0, 0.0]]
    assert rows.counters.units_by_level == {"call": 3}


def test_a_group_that_refill_left_out_is_counted_as_one_without_signal(process: VerlEngine) -> None:
    """Two equal scores: no unit is left to compare, and the report still has a group without signal."""
    flat = [rollout(reply(name, 5, 6), 1.0) for name in ("a", "b")]
    kept = credited(process, flat, algorithm="grpo").counters
    assert (kept.groups, kept.groups_left_out, kept.groups_without_signal) == (1, 0, 1)
    left = credited(process, flat, algorithm="grpo", refill=1).counters
    assert (left.groups, left.groups_left_out, left.groups_without_signal) == (0, 1, 1)
