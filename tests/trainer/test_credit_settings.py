"""What leaves a batch on purpose: groups without signal, rejected rollouts, overridden faults; each is counted where it left."""

from __future__ import annotations

import threading
from typing import Any

from rllm_trace.routing import Route
from rllm_trainer.config import make_settings
from rllm_trainer.preparation import make_samples
from rllm_trainer.report import Report
from rllm_trainer.rollout.dataset import read_tasks
from rllm_trainer.rollout.record import RolloutLog
from rllm_trainer.rollout.rewards import plan_rewards
from rllm_trainer.rollout.runner import Limits, Runner
from rllm_trainer.rollout.signal import has_signal
from rllm_trainer.rollout.source import LiveSource
from rllm_trainer.samples import Counters
from rllm_trainer.testing import make_call, make_episode
from rllm_trainer.types import Group, Rollout


def rollout(index: int, reward: float | None, *, task: str = "t", fault: Any = None, **fields: Any) -> Rollout:
    name = f"{task}-{index}"
    episode = make_episode(make_call(f"{name}-c", [1, 2], [7, 8]), episode_id=name, **fields)
    return Rollout(task_id=task, index=index, row={"q": task}, episode=episode, reward=reward, rewards={}, fault=fault)


def counted(rollouts: list[Rollout], **given: Any) -> Counters:
    found = make_samples(rollouts, settings=make_settings(given), vocab_size=None)
    total = Counters()
    for sample_set in found.values():
        assert sum(int(row.trained_mask.sum()) for row in sample_set.samples) == sample_set.counters.trained_tokens
        total += sample_set.counters
    return total


def test_a_rejected_rollout_is_not_trained_and_is_counted() -> None:
    """Two of three are below the bar: their four tokens are lost by that name."""
    found = counted([rollout(0, 1.0), rollout(1, 0.2), rollout(2, 0.0)], reject_below=0.5)
    assert (found.trained_tokens, found.lost_tokens, found.rows) == (2, {"rejected": 4}, 1)


def test_a_group_without_signal_is_left_out_only_where_it_would_be_refilled() -> None:
    """The same rollouts: kept with weight 0 by default, left out of the denominator with refill."""
    flat = [rollout(0, 1.0, task="flat"), rollout(1, 1.0, task="flat")]
    told = [rollout(0, 1.0, task="told"), rollout(1, 0.0, task="told")]
    assert counted(flat + told).trained_tokens == 8
    found = counted(flat + told, refill=1)
    assert (found.trained_tokens, found.lost_tokens) == (4, {"group without signal": 4})


def test_a_fault_can_be_trained_or_left_as_asked() -> None:
    """Infrastructure faults leave the gradient and the policy's stay in it, unless the user says otherwise."""
    rollouts = [rollout(0, 1.0), rollout(1, None, fault="infrastructure"), rollout(2, 0.0, fault="policy")]
    assert counted(rollouts).episodes == 2
    assert counted(rollouts, faults={"infrastructure": "train"}).episodes == 3
    assert counted(rollouts, faults={"policy": "leave"}).episodes == 1


def test_signal_is_in_any_score_that_credit_could_use() -> None:
    """Equal totals with different rewards of agents are signal; what leaves the gradient is not looked at."""
    equal = [rollout(0, 1.0), rollout(1, 1.0)]
    assert not has_signal(Group(task_id="t", rollouts=equal))
    assert has_signal(Group(task_id="t", rollouts=[*equal, rollout(2, None, fault="policy")]))
    assert not has_signal(Group(task_id="t", rollouts=[*equal, rollout(2, None, fault="infrastructure")]))
    assert has_signal(Group(task_id="t", rollouts=[*equal, rollout(2, None, fault="infrastructure")]), {"infrastructure": "train"})


def test_groups_without_signal_are_replaced_by_further_rows(tmp_path: Any) -> None:
    """Rows 0..9, of which only even ones differ between rollouts: a batch of two odd ones draws until it has two with signal."""
    calls: list[int] = []

    def app(number: int) -> int:
        calls.append(number)
        return number

    def reward(output: int, row: Any) -> float:
        return 0.0 if output % 2 else float(calls.count(output) % 2)

    tasks = read_tasks([{"number": number} for number in range(10)])
    runner = Runner(app, plan_rewards(reward, app), Limits(concurrency=1))
    log = RolloutLog(tmp_path)
    by_number = {task.row["number"]: task for task in tasks.tasks}  # type: ignore[union-attr]
    order = [3, 4, 5, 6, 8]
    source = LiveSource(
        iter([[by_number[1], by_number[2]]]),
        runner,
        Route(base_url="http://127.0.0.1:9/v1", api_key="k", model="m"),
        group_size=2,
        seed=0,
        log=log,
        report=Report(progress=False),
        stop=threading.Event(),
        refill=3,
        spare=lambda step: iter([by_number[number] for number in order]),
    )
    try:
        found = source.collect(1, 0)
    finally:
        runner.close()
        log.close()
    assert found is not None
    drawn = {group.rollouts[0].row["number"]: has_signal(group) for group in found.groups}
    assert drawn == {1: False, 2: True, 3: False, 4: True}
    assert found.notes[-1] == "groups without signal, left out: 2 of 4; further rows drawn: 2"
