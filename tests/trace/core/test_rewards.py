"""Rewards score what they are called in, pass everything through unchanged, and refuse what is no number."""

from __future__ import annotations

import asyncio
import gc
import math
import warnings
from typing import Any

import numpy as np
import pytest

import rllm_trace as rllm
from rllm_trace._recorder import recorder
from rllm_trace.rollouts import rollout


def run(*rewards: Any) -> rllm.Episode:
    """An episode in which each of the reward functions is called once."""

    @rllm.workflow
    def app() -> None:
        for give in rewards:
            give()

    with rllm.collect() as episodes:
        app()
    return episodes[0]


@pytest.mark.parametrize(
    "returned, given",
    [
        (0.5, {"score": 0.5}),
        (3, {"score": 3.0}),
        (True, {"score": 1.0}),
        (False, {"score": 0.0}),
        (np.float32(0.25), {"score": 0.25}),
        (np.int64(2), {"score": 2.0}),
        (np.bool_(True), {"score": 1.0}),
        (np.array(0.5), {"score": 0.5}),
        ({"right": True, "short": np.float64(0.5)}, {"right": 1.0, "short": 0.5}),
        (rllm.Reward(name="own", value=0.75, weight=1.0), {"own": 0.75}),
    ],
)
def test_what_a_reward_function_may_return(returned: Any, given: dict[str, float]) -> None:
    """Numbers, bools, numpy scalars, dicts of them and Reward; the app gets its own object back."""
    kept: list[Any] = []

    @rllm.reward
    def score() -> Any:
        return returned

    episode = run(lambda: kept.append(score()))
    assert kept[0] is returned
    assert {reward.name: reward.value for reward in episode.rewards} == given
    assert all(type(reward.value) is float for reward in episode.rewards)
    assert episode.reward == math.fsum(given.values())


@pytest.mark.parametrize(
    "returned, said",
    [
        (None, "got None"),
        (float("nan"), "got nan"),
        (float("-inf"), "got -inf"),
        ("0.5", "got '0.5' of type str"),
        (1j, "got 1j of type complex"),
        ([1.0], r"got \[1.0\] of type list"),
        ({}, "got an empty dict"),
        ({"right": None}, r"score\['right'\].* got None"),
        (np.array([1.0, 2.0]), "got a ndarray that is no single number"),
        (10**400, "got 1000"),
        (rllm.Reward(name="own", value=float("nan")), "'own' got nan"),
    ],
)
def test_what_is_no_reward_is_passed_through_warned_of_and_counted(returned: Any, said: str) -> None:
    """The app gets its value; the warning names the reward; nothing is recorded as one."""
    kept: list[Any] = []

    @rllm.reward
    def score() -> Any:
        return returned

    with pytest.warns(rllm.RllmWarning, match=said):
        episode = run(lambda: kept.append(score()), lambda: kept.append(score()))
    assert kept[0] is returned
    assert (episode.rewards, episode.reward) == ([], None)
    assert rllm.stats()["failed"] == {"reward": 2}
    assert rllm.stats()["faults"] == {}


def test_weights_and_names_are_the_decorators() -> None:
    """The total is the sum of weight * value."""

    @rllm.reward(name="right", weight=2.0)
    def first() -> float:
        return 0.5

    @rllm.reward(weight=0.1)
    def style() -> dict[str, float]:
        return {"short": 1.0, "plain": 2.0}

    episode = run(first, style)
    assert [(reward.name, reward.value, reward.weight) for reward in episode.rewards] == [
        ("right", 0.5, 2.0),
        ("short", 1.0, 0.1),
        ("plain", 2.0, 0.1),
    ]
    assert episode.reward == math.fsum([1.0, 0.1, 0.2])
    with pytest.raises(rllm.RewardError, match=r"'reward \(its weight\)' got nan"):
        rllm.reward(weight=float("nan"))


def test_a_reward_scores_the_innermost_agent_else_the_episode(call: Any) -> None:
    """Where it is called decides, however deep; a nested workflow is no scope of its own."""

    @rllm.reward
    def score(value: float) -> float:
        return value

    @rllm.workflow
    def inner() -> None:
        score(4.0)

    @rllm.workflow
    def app() -> None:
        with rllm.agent("outer"):
            with rllm.agent("inner"):
                score(1.0)
            score(2.0)
            with rllm.no_train:
                inner()
        score(3.0)

    with rllm.collect() as episodes:
        app()
    assert {t.name: [(r.value, r.superseded) for r in t.rewards] for t in episodes[0].trajectories} == {
        "outer": [(2.0, True), (4.0, False)],
        "inner": [(1.0, False)],
    }
    assert [(reward.value, reward.target) for reward in episodes[0].rewards] == [(3.0, None)]
    assert {t.name: t.reward for t in episodes[0].trajectories} == {"outer": 4.0, "inner": 1.0}


def test_an_async_reward_scores_where_it_is_awaited(call: Any) -> None:
    """Made in one agent and awaited in another, it scores the other."""

    @rllm.reward
    async def score() -> float:
        await asyncio.sleep(0)
        return 1.0

    @rllm.workflow
    async def app() -> None:
        with rllm.agent("made"):
            made = score()
        with rllm.agent("awaited"):
            await made

    with rllm.collect() as episodes:
        asyncio.run(app())
    assert {t.name: t.reward for t in episodes[0].trajectories} == {"made": None, "awaited": 1.0}


def test_calls_inside_a_reward_are_recorded_under_it_and_never_trained(call: Any) -> None:
    """A judge's calls belong to the trajectory around, or to an agent of its own."""

    @rllm.reward
    def judged() -> float:
        call("judging")
        with rllm.agent("judge"):
            call("deeper")
        return 1.0

    @rllm.workflow
    def app() -> None:
        call("working")
        judged()

    with rllm.collect() as episodes:
        app()
    calls = {c.messages[0]["content"]: c for c in episodes[0].calls}
    assert {text: (c.no_train, c.trainable) for text, c in calls.items()} == {
        "working": (False, True),
        "judging": (True, False),
        "deeper": (True, False),
    }
    assert calls["judging"].parent_id == episodes[0].rewards[0].span_id
    assert [t.name for t in episodes[0].trajectories] == ["app", "judge"]


def test_outside_a_workflow_a_reward_warns_once_and_names_add_reward() -> None:
    """It returns its value, attaches to nothing, and is counted; recording or not."""

    @rllm.reward
    def lonely() -> float:
        return 0.5

    with pytest.warns(rllm.RllmWarning, match=r"'lonely' was called outside a workflow.*rllm.add_reward"):
        value = lonely()
    with warnings.catch_warnings(record=True) as again, rllm.collect():
        warnings.simplefilter("always")
        assert [value, lonely()] == [0.5, 0.5]
    assert again == []
    assert rllm.stats()["orphan"] == {"reward": 2}


def test_inside_a_workflow_that_is_not_recorded_a_reward_says_nothing() -> None:
    """Nothing collects, so nothing is lost."""

    @rllm.reward
    def quiet() -> float:
        return 0.5

    @rllm.workflow
    def app() -> float:
        return quiet()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert app() == 0.5
    assert rllm.stats()["orphan"] == {}


def test_where_warnings_are_errors_the_app_still_gets_its_value() -> None:
    """The warning is logged instead of raised."""

    @rllm.reward
    def strict() -> float:
        return 0.5

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert strict() == 0.5


def test_a_reward_that_raises_raises_in_the_app_and_is_the_rollouts_fault() -> None:
    """The exception passes through; the rollout's handle says which reward it was. So it does for what is no number."""

    @rllm.reward
    def broken() -> float:
        raise KeyError("no answer")

    @rllm.reward
    def odd() -> None:
        return None

    @rllm.workflow
    def app() -> None:
        odd()
        broken()

    with rollout(task_id="t1") as handle, pytest.raises(KeyError, match="no answer"), pytest.warns(rllm.RllmWarning):
        app()
    (episode,) = handle.wait(5)
    assert [(fault.name, fault.episode_id, fault.error.type) for fault in handle.reward_faults] == [
        ("odd", episode.id, "rllm_trace.exceptions.RewardError"),
        ("broken", episode.id, "KeyError"),
    ]
    assert "return a finite number" in handle.reward_faults[0].error.message
    assert episode.termination == "failed"


def test_add_reward_scores_the_running_episode() -> None:
    """Without an id it is the one around; the record says that no function gave it."""

    @rllm.workflow
    def app() -> None:
        rllm.add_reward(0.5, name="click")
        episode = rllm.current_episode()
        assert episode is not None
        rllm.add_reward(True, name="seen", weight=2.0, episode_id=episode.id)

    with rllm.collect() as episodes:
        app()
    assert [(reward.name, reward.value, reward.weight, reward.span_id) for reward in episodes[0].rewards] == [
        ("click", 0.5, 1.0, None),
        ("seen", 1.0, 2.0, None),
    ]
    assert episodes[0].reward == 2.5


def test_add_reward_scores_an_episode_that_has_ended(call: Any) -> None:
    """The list of ``collect`` holds the new record; trajectories and calls are scored by span id."""

    @rllm.workflow
    def app() -> None:
        with rllm.agent("solver"):
            call()

    with rllm.collect() as episodes:
        app()
    before = episodes[0]
    solver = before.trajectories[0]
    rllm.add_reward(0.7, name="human", episode_id=before.id)
    rllm.add_reward(0.2, name="human", episode_id=before.id, span_id=solver.id)
    rllm.add_reward(0.1, name="human", episode_id=before.id, span_id=solver.calls[0].span_id)
    assert (episodes[0].reward, episodes[0].trajectories[0].reward) == (0.7, 0.2)
    assert [reward.target for reward in episodes[0].trajectories[0].rewards] == [solver.id, solver.calls[0].span_id]
    assert before.reward is None


def test_add_reward_refuses_what_it_cannot_place() -> None:
    """An unknown episode, an unknown span, no episode at all, and what is no number: one clear error each."""

    @rllm.workflow
    def app() -> None:
        pass

    with rllm.collect() as episodes:
        app()
    with pytest.raises(rllm.UnknownEpisodeError, match="no episode 'zz' is held in this process any more"):
        rllm.add_reward(1.0, name="human", episode_id="zz")
    with pytest.raises(rllm.UnknownEpisodeError, match="has no trajectory or call with the span id 'zz'"):
        rllm.add_reward(1.0, name="human", episode_id=episodes[0].id, span_id="zz")
    with pytest.raises(rllm.UnknownEpisodeError, match="outside a workflow without an episode"):
        rllm.add_reward(1.0, name="human")
    with pytest.raises(rllm.RewardError, match="the reward 'human' got None"):
        rllm.add_reward(None, name="human", episode_id=episodes[0].id)
    identity = episodes[0].id
    del episodes
    gc.collect()
    with pytest.raises(rllm.UnknownEpisodeError, match="keep the list of collect"):
        rllm.add_reward(1.0, name="human", episode_id=identity)


def test_add_reward_reaches_an_episode_in_the_store(tmp_path: Any) -> None:
    """Also one that nothing in memory holds any more, and after the process was configured anew."""
    from rllm_trace.store import Store

    @rllm.workflow
    def app() -> str:
        episode = rllm.current_episode()
        assert episode is not None
        return episode.id

    rllm.configure(store=tmp_path)
    first = app()
    assert rllm.flush()
    rllm.configure()
    rllm.configure(store=tmp_path)
    recorder.delivered.clear()
    rllm.add_reward(0.7, name="human", episode_id=first)
    with pytest.raises(rllm.UnknownEpisodeError, match="configure a store or an exporter"):
        rllm.add_reward(0.7, name="human", episode_id="zz")
    assert [(episode.id, episode.reward) for episode in Store(tmp_path)] == [(first, 0.7)]


def test_rewards_of_scoring_reach_the_apps_own_store(tmp_path: Any) -> None:
    """Where whoever runs the app scores its episodes afterwards, the store that the app configured has the rewards, too."""
    from rllm_trace.scoring import Scoring
    from rllm_trace.store import Store

    rllm.configure(store=tmp_path)
    app = rllm.workflow(lambda: None)
    with rollout() as handle:
        app()
    (episode,) = handle.wait(20)
    scoring = Scoring(episode, "judge")
    with scoring.running():
        value = 0.25
    scoring.ended([rllm.Reward(name="judge", value=value, span_id=scoring.span_id)])
    assert rllm.flush()
    (stored,) = Store(tmp_path)
    assert (stored.id, [(reward.name, reward.value) for reward in stored.rewards], stored.reward) == (episode.id, [("judge", 0.25)], 0.25)


def test_whether_a_store_has_an_episode_is_known_without_reading_what_it_writes(tmp_path: Any) -> None:
    """The segment of another process is read, the own one not."""
    from rllm_trace.store import Store

    with rllm.collect() as episodes:
        rllm.workflow(lambda: None)()
    with Store(tmp_path) as store, Store(tmp_path) as other:
        assert not store.has(episodes[0].id)
        store.append(episodes[0])
        (log,) = (tmp_path / "log").iterdir()
        assert other.has(episodes[0].id)
        kept = log.read_bytes()
        log.write_bytes(b"")
        assert store.has(episodes[0].id)
        log.write_bytes(kept)
    assert Store(tmp_path).has(episodes[0].id)
