"""Credit: verl's estimators on units, then given to tokens; numbers by hand, and parity with verl's own functions."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from rllm_trace.types import Reward, Trajectory
from rllm_trainer.advantages import RULES, Rule, Units, credit, register, rules
from rllm_trainer.config import make_settings
from rllm_trainer.engine.verl import VerlEngine
from rllm_trainer.exceptions import SettingError
from rllm_trainer.samples import SampleSet, build_samples
from rllm_trainer.testing import make_call, make_episode
from rllm_trainer.types import Group, Rollout, Row

USABLE = sorted(name for name, rule in RULES.items() if rule.refused is None)


def rollout(episode: Any, reward: float | None, *, task: str = "t", row: Any = None, fault: Any = None, rewards: Any = None) -> Rollout:
    return Rollout(task_id=task, index=0, row=row or {"q": task}, episode=episode, reward=reward, rewards=rewards or {}, fault=fault)


def one_call(name: str, reply: list[int], **fields: Any) -> Any:
    return make_episode(make_call(f"{name}-s1", [1, 2], reply), episode_id=name, task_id="t", **fields)


def agent(name: str, role: str, calls: list[Any], reward: float | None) -> Trajectory:
    rewards = [] if reward is None else [Reward(name="r", value=reward, target=name)]
    return Trajectory(id=name, name=role, calls=calls, tools=[], rewards=rewards, reward=reward, started=0, ended=0)


def credited(engine: VerlEngine, groups: list[Group], mode: Any = "tree", **given: Any) -> Any:
    algorithm = given.pop("per_role", None)
    settings = make_settings({"threads": 1, **given})
    episodes = [r.episode for g in groups for r in g.rollouts if r.episode is not None]
    samples: dict[str, SampleSet] = {episode.id: build_samples(episode, mode=mode) for episode in episodes}
    engine.restart(settings)
    return credit(groups, samples, settings=settings, estimator=engine, algorithm=algorithm)


def trained(rows: list[Row]) -> list[list[float]]:
    return [np.round(row.advantages[row.sample.trained_mask].astype(float), 3).tolist() for row in rows]


def test_grpo_by_hand(process: VerlEngine) -> None:
    """Rewards 1, 0, 0, 1: mean 0.5, deviation (n - 1) 0.57735, advantages +-0.866 on every trained token, 0 on the prompt."""
    group = Group(task_id="t", rollouts=[rollout(one_call(f"e{n}", [5] * (n + 1)), r) for n, r in enumerate([1.0, 0.0, 0.0, 1.0])])
    rows = credited(process, [group])
    assert trained(rows) == [[0.866], [-0.866] * 2, [-0.866] * 3, [0.866] * 4]
    assert [row.advantages[:2].tolist() for row in rows] == [[0.0, 0.0]] * 4
    assert [row.group for row in rows] == ["t"] * 4
    assert rows[0].credit[0].level == "episode"
    assert (rows[0].credit[0].rule, rows[0].credit[0].score, rows[0].credit[0].shares) == ("grpo", 1.0, {"main": 1.0})


def test_an_episode_counts_once_however_many_rows_it_has(process: VerlEngine) -> None:
    """One episode of three unconnected calls against two of one call: the mean is 1/3, not 3/5."""
    many = make_episode(*(make_call(f"s{n}", [n + 1, 9], [7]) for n in range(3)), episode_id="many", task_id="t")
    group = Group(task_id="t", rollouts=[rollout(many, 1.0), rollout(one_call("a", [5]), 0.0), rollout(one_call("b", [6]), 0.0)])
    rows = credited(process, [group], norm_by_std=False)
    assert len(rows) == 5
    assert trained(rows) == [[0.667]] * 3 + [[-0.333]] * 2


@pytest.mark.parametrize("name", USABLE)
def test_rules_do_not_depend_on_how_rows_are_cut(process: VerlEngine, name: str) -> None:
    """Tree, prefix and call mode: the same advantage for the same reply, for each of verl's estimators."""
    long = [make_call("s1", [1, 2], [5, 6]), make_call("s2", [1, 2, 5, 6, 3], [7]), make_call("s3", [1, 2, 5, 6, 4], [8, 9, 4])]
    rollouts = [rollout(make_episode(*long, episode_id="long", task_id="t"), 1.0, rewards={"a": 1.0, "b": 0.5})]
    rollouts += [rollout(one_call(f"e{n}", [5] * n), r, rewards={"a": r, "b": 0.1 * n}) for n, r in ((2, 0.0), (3, 0.25))]
    found = {}
    for mode in ("tree", "prefix", "call"):
        group = Group(task_id="t", rollouts=rollouts, greedy=rollout(one_call("greedy", [5]), 0.5))
        rows = credited(process, [group], mode=mode, algorithm=name)
        found[mode] = {
            (row.sample.episode_id, span.span_id): np.round(row.advantages[span.start : span.stop].astype(float), 5).tolist()
            for row in rows
            for span in row.sample.spans
            if span.trained
        }
    assert found["tree"] == found["prefix"] == found["call"]
    assert len(found["tree"]) == 5
    assert any(any(values) for values in found["tree"].values())


def test_groups_of_one_and_without_spread_are_zero_and_counted(process: VerlEngine) -> None:
    """No baseline, or nothing to tell apart: advantage exactly 0; 0.1 eight times leaves no rounding behind."""
    alone = Group(task_id="alone", rollouts=[rollout(one_call("x", [5]), 1.0, task="alone")])
    equal = Group(task_id="t", rollouts=[rollout(one_call(f"e{n}", [5]), 0.1) for n in range(8)])
    rows = credited(process, [alone, equal])
    assert all(not row.advantages.any() for row in rows)
    assert (rows.counters.groups, rows.counters.groups_of_one, rows.counters.groups_without_spread) == (2, 1, 1)
    assert rows.counters.measures()["credit/groups_of_one"] == 1.0


def test_a_group_of_one_has_no_say_in_what_is_whitened_over_the_batch(process: VerlEngine) -> None:
    """Its advantage is 0, and the others' are what they are without it."""
    alone = Group(task_id="alone", rollouts=[rollout(one_call("x", [5, 6, 7]), 9.0, task="alone")])
    pair = Group(task_id="t", rollouts=[rollout(one_call("a", [5]), 1.0), rollout(one_call("b", [5, 6]), 0.0)])
    without = credited(process, [pair], algorithm="reinforce_plus_plus_baseline")
    both = credited(process, [alone, pair], algorithm="reinforce_plus_plus_baseline")
    assert trained(both) == [[0.0, 0.0, 0.0], *trained(without)]
    assert all(value != 0.0 for row in trained(without) for value in row)


def test_two_agents_of_one_name_are_two_units_with_their_own_rewards(process: VerlEngine) -> None:
    """Two solvers, rewards 1 and 0, in each of two episodes; the judge, unscored, is credited by episode."""

    def episode(name: str, judge_reply: int) -> Any:
        solvers = [
            agent(f"{name}-{n}", "solver", [make_call(f"{name}-s{n}", [1, 2], [5 + n])], reward) for n, reward in enumerate([1.0, 0.0])
        ]
        judge = agent(f"{name}-j", "judge", [make_call(f"{name}-sj", [3, 4], [judge_reply])], None)
        return make_episode(agents=[*solvers, judge], episode_id=name, task_id="t")

    group = Group(task_id="t", rollouts=[rollout(episode("a", 8), 1.0), rollout(episode("b", 9), 0.0)])
    rows = credited(process, [group], norm_by_std=False)
    found = {row.sample.spans[0].span_id: row.advantages[row.sample.trained_mask].tolist() for row in rows}
    assert found == {"a-s0": [0.5], "a-s1": [-0.5], "a-sj": [0.5], "b-s0": [0.5], "b-s1": [-0.5], "b-sj": [-0.5]}
    assert rows.counters.units_by_level == {"trajectory": 4, "episode": 2}


def test_a_call_with_a_reward_of_its_own_gets_its_own_advantage(process: VerlEngine) -> None:
    """Calls with rewards are compared with each other, by step if asked; the other calls keep the episode's word."""

    def episode(name: str, first: float) -> Any:
        calls = [make_call(f"{name}-s1", [1, 2], [5]), make_call(f"{name}-s2", [1, 2, 5, 3], [6])]
        return make_episode(*calls, episode_id=name, task_id="t", rewards=[Reward(name="step", value=first, target=f"{name}-s1")])

    group = Group(task_id="t", rollouts=[rollout(episode("a", 0.0), 1.0), rollout(episode("b", 4.0), 0.0)])
    rows = credited(process, [group], norm_by_std=False, group_by="step")
    assert trained(rows) == [[-2.0, 0.5], [2.0, -0.5]]
    assert [record.level for record in rows[0].credit] == ["call", "episode"]


def test_rewards_of_a_call_count_by_their_weights(process: VerlEngine) -> None:
    """2 at weight 0.5 and 1 at weight 3 make 4, against 0: a mean of 2."""

    def episode(name: str, rewards: list[tuple[float, float]]) -> Any:
        given = [Reward(name=f"r{n}", value=value, weight=weight, target=f"{name}-s1") for n, (value, weight) in enumerate(rewards)]
        return make_episode(make_call(f"{name}-s1", [1, 2], [5]), episode_id=name, task_id="t", rewards=given)

    group = Group(task_id="t", rollouts=[rollout(episode("a", [(2.0, 0.5), (1.0, 3.0)]), None), rollout(episode("b", [(0.0, 1.0)]), None)])
    assert trained(credited(process, [group], norm_by_std=False)) == [[2.0], [-2.0]]


def test_a_token_that_two_trajectories_continue_gets_their_mean(process: VerlEngine) -> None:
    """A planner's reply, continued by two executors with advantages 1 and -1 and its own 0.5: weights by ends below it."""

    def episode(name: str, planner: float) -> Any:
        plan = agent(f"{name}-p", "planner", [make_call(f"{name}-s1", [1, 2], [5])], planner)
        done = [agent(f"{name}-x{n}", "executor", [make_call(f"{name}-e{n}", [1, 2, 5, 10 + n], [6])], r) for n, r in enumerate([2.0, 0.0])]
        return make_episode(agents=[plan, *done], episode_id=name, task_id="t")

    group = Group(task_id="t", rollouts=[rollout(episode("a", 1.0), None), rollout(episode("b", 0.0), None)])
    rows = credited(process, [group], norm_by_std=False)
    by_span = {record.span_id: record for row in rows for record in row.credit}
    assert by_span["a-s1"].shares == pytest.approx({"a-p": 1 / 3, "a-x0": 1 / 3, "a-x1": 1 / 3})
    values = {s.span_id: row.advantages[s.start : s.stop].tolist() for row in rows for s in row.sample.spans if s.trained}
    assert values["a-s1"] == pytest.approx([(0.5 + 1.0 - 1.0) / 3])
    assert values["a-e0"] == pytest.approx([1.0])
    assert rows.counters.shared_replies == 2


def test_a_trajectory_has_a_share_for_each_of_its_ends(process: VerlEngine) -> None:
    """A planner's reply that the planner continues twice and an executor once is the planner's by two thirds."""

    def episode(name: str, planner: float) -> Any:
        calls = [make_call(f"{name}-s1", [1, 2], [5]), *(make_call(f"{name}-s{n}", [1, 2, 5, n], [6]) for n in (11, 12))]
        done = agent(f"{name}-x", "executor", [make_call(f"{name}-e", [1, 2, 5, 13], [6])], 0.0)
        return make_episode(agents=[agent(f"{name}-p", "planner", calls, planner), done], episode_id=name, task_id="t")

    group = Group(task_id="t", rollouts=[rollout(episode("a", 1.0), None), rollout(episode("b", 0.0), None)])
    rows = credited(process, [group], norm_by_std=False)
    by_span = {record.span_id: record for row in rows for record in row.credit}
    assert by_span["a-s1"].shares == pytest.approx({"a-p": 2 / 3, "a-x": 1 / 3})


def test_faults_leave_the_gradient_or_count_as_zero(process: VerlEngine) -> None:
    """Infrastructure faults are not in the baseline; an end that the policy caused and nobody scored is a 0 in it."""
    rollouts = [
        rollout(one_call("a", [5]), 1.0),
        rollout(one_call("b", [6]), None, fault="policy"),
        rollout(None, None, fault="infrastructure"),
    ]
    rollouts.append(rollout(one_call("c", [7]), 0.0, fault="infrastructure"))
    settings = {"norm_by_std": False}
    rows = credited(process, [Group(task_id="t", rollouts=rollouts)], **settings)
    assert trained(rows) == [[0.5], [-0.5], [0.0]]
    assert rows.counters.other == {"rollouts_left_out": 2}
    assert rows.counters.uncredited_replies == 1


def test_an_episode_without_trained_tokens_counts_in_its_group(process: VerlEngine) -> None:
    """Its score is in the mean; it has no row."""
    inexact = make_episode(make_call("i-s1", [1, 2], [5], exact=False, trainable=False), episode_id="i", task_id="t")
    group = Group(task_id="t", rollouts=[rollout(inexact, 1.0), rollout(one_call("a", [5]), 0.0), rollout(one_call("b", [6]), 0.5)])
    rows = credited(process, [group], norm_by_std=False)
    assert trained(rows) == [[-0.5], [0.0]]


def test_a_rule_for_each_role(process: VerlEngine) -> None:
    """``algorithm={"solver": ..., "judge": ...}``; a role without a rule is an error."""

    def episode(name: str) -> Any:
        agents = [agent(f"{name}-{role}", role, [make_call(f"{name}-{role}", [1, 2], [5])], None) for role in ("solver", "judge")]
        return make_episode(agents=agents, episode_id=name, task_id="t")

    group = Group(task_id="t", rollouts=[rollout(episode("a"), 1.0), rollout(episode("b"), 0.0)])
    rows = credited(process, [group], per_role={"solver": "rloo", "judge": "grpo"})
    assert {row.credit[0].span_id: (row.credit[0].rule, trained([row])[0]) for row in rows} == {
        "a-solver": ("rloo", [1.0]),
        "a-judge": ("grpo", [0.707]),
        "b-solver": ("rloo", [-1.0]),
        "b-judge": ("grpo", [-0.707]),
    }
    with pytest.raises(SettingError, match="no rule for role 'judge'"):
        credited(process, [group], per_role={"solver": "rloo"})


def test_a_group_never_mixes_tasks_or_rows(process: VerlEngine) -> None:
    """Another task's rollout, or other content under one id, is refused; arrays in a row are compared too."""
    stray = rollout(one_call("a", [5]), 1.0, task="other")
    with pytest.raises(SettingError, match="task 'other'"):
        credited(process, [Group(task_id="t", rollouts=[stray])])
    mixed = [rollout(one_call("a", [5]), 1.0, row={"q": 1}), rollout(one_call("b", [5]), 1.0, row={"q": 2})]
    with pytest.raises(SettingError, match="different content"):
        credited(process, [Group(task_id="t", rollouts=mixed)])
    arrays = [rollout(one_call(n, [5]), 1.0, row={"q": np.arange(3)}) for n in "ab"]
    assert len(credited(process, [Group(task_id="t", rollouts=arrays)])) == 2


def test_kl_in_the_reward_lowers_the_score_by_the_divergence(process: VerlEngine) -> None:
    """score - kl_coef * sum(recorded - reference) over the trained tokens, with verl's own estimator of the KL."""
    group = Group(task_id="t", rollouts=[rollout(one_call("a", [5, 6]), 1.0), rollout(one_call("b", [7]), 0.0)])
    rows = credited(process, [group], norm_by_std=False, kl_coef=0.1, kl_in="reward", kl_estimator="k1")
    reference = process.logprobs([row.sample.token_ids for row in rows], temperatures=[1.0, 1.0], reference=True)
    totals = [r - 0.1 * float((-0.5 - found[2:]).sum()) for r, found in zip([1.0, 0.0], reference, strict=True)]
    expected = (totals[0] - totals[1]) / 2
    assert rows[0].advantages[2:].tolist() == pytest.approx([expected] * 2, abs=1e-5)
    assert rows[0].ref_logprobs is None


def test_kl_in_the_loss_gives_rows_their_reference(process: VerlEngine) -> None:
    """The reference's logprobs stand beside the recorded ones; advantages are untouched."""
    group = Group(task_id="t", rollouts=[rollout(one_call("a", [5, 6]), 1.0), rollout(one_call("b", [7]), 0.0)])
    rows = credited(process, [group], norm_by_std=False, kl_coef=0.1)
    assert trained(rows) == [[0.5, 0.5], [-0.5]]
    found = process.logprobs([rows[0].sample.token_ids], temperatures=[1.0])[0]
    np.testing.assert_allclose(rows[0].ref_logprobs, found, rtol=0, atol=1e-5)


def test_remax_takes_off_what_the_greedy_rollout_was_worth(process: VerlEngine) -> None:
    """Score minus the greedy one's, on every token; the greedy one has no row; a group whose greedy rollout was lost is 0, counted."""
    scored = [rollout(one_call(f"e{n}", [5] * n), r) for n, r in ((1, 1.0), (2, 0.0))]
    greedy = rollout(one_call("greedy", [5]), 0.25)
    rows = credited(process, [Group(task_id="t", rollouts=scored, greedy=greedy)], algorithm="remax")
    assert trained(rows) == [[0.75], [-0.25, -0.25]]
    assert rows.counters.other == {}
    lost = msgspec.structs.replace(greedy, fault="infrastructure", reward=None)
    rows = credited(process, [Group(task_id="t", rollouts=scored, greedy=lost)], algorithm="remax")
    assert trained(rows) == [[0.0], [0.0, 0.0]]
    assert rows.counters.other == {"units_without_greedy": 2}
    over = msgspec.structs.replace(greedy, fault="policy", reward=None)
    rows = credited(process, [Group(task_id="t", rollouts=scored, greedy=over)], algorithm="remax")
    assert trained(rows) == [[1.0], [0.0, 0.0]]


def test_remax_for_one_role(process: VerlEngine) -> None:
    """The judge's baseline is what the greedy rollout's judge was given; the solver has another rule; a call's own reward is refused."""
    group = Group(
        task_id="t",
        rollouts=[rollout(solver_and_judge(n, s, j), None) for n, s, j in [("a", 1.0, 3.0), ("b", 0.0, 1.0)]],
        greedy=rollout(solver_and_judge("g", 9.0, 2.5), None),
    )
    rows = credited(process, [group], algorithm={"solver": "rloo", "judge": "remax"})
    assert trained(rows) == [[1.0], [0.5, 0.5], [-1.0], [-1.5, -1.5]]
    own = Group(task_id="t", rollouts=[rollout(two_turns("c", 1.0, 0.0), 0.0)], greedy=rollout(two_turns("h", 1.0, 0.0), 0.0))
    with pytest.raises(SettingError, match="call c-1 of role 'solver' has a reward of its own"):
        credited(process, [own], algorithm="remax")


def test_a_rule_of_ones_own(process: VerlEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Registered by name, given units, asked for one advantage a trained token; verl's names are taken."""
    monkeypatch.setattr(rules, "RULES", dict(RULES))

    def above_half(units: Units) -> Any:
        return np.repeat(units.scores - 0.5, units.lengths)

    rule = register(Rule(name="above_half", summary="Score minus a half.", grouped=False, inert_without_spread=False, function=above_half))
    group = Group(task_id="t", rollouts=[rollout(one_call("a", [5, 6]), 1.0), rollout(one_call("b", [7]), 0.25)])
    assert trained(credited(process, [group], algorithm="above_half")) == [[0.5, 0.5], [-0.25]]
    short = msgspec.structs.replace(rule, name="short", function=lambda units: units.scores)
    register(short)
    with pytest.raises(SettingError, match="one for each trained token"):
        credited(process, [group], algorithm="short")
    with pytest.raises(SettingError, match="another name"):
        register(msgspec.structs.replace(rule, name="grpo"))
    with pytest.raises(SettingError, match="no function"):
        register(msgspec.structs.replace(rule, function=None))


@pytest.mark.parametrize("name, says", [("gae", "critic"), ("remax", "1 of 1 groups have none"), ("ppo", "choose one of")])
def test_what_cannot_be_used_is_refused_with_its_reason(process: VerlEngine, name: str, says: str) -> None:
    """An unknown or unusable estimator is one sentence."""
    group = Group(task_id="t", rollouts=[rollout(one_call("a", [5]), 1.0), rollout(one_call("b", [5]), 0.0)])
    with pytest.raises(SettingError, match=says):
        credited(process, [group], algorithm=name)


@pytest.mark.parametrize("name", USABLE)
@pytest.mark.filterwarnings("ignore")
def test_estimators_are_verls(process: VerlEngine, name: str) -> None:
    """On one row per unit the advantages are those of verl's own function, float32 bit for bit."""
    import torch
    from verl.trainer.config import AlgoConfig
    from verl.trainer.ppo import core_algos

    lengths, scores = np.array([3, 4, 6, 2, 5, 6, 1, 4], np.int32), np.array([1, 0, 0, 1, 0, 1, 0.5, 0], np.float32)
    groups, random = list("aaaabbbb"), np.random.default_rng(0)
    size = int(lengths.sum())
    old, squares = (-random.random(size)).astype(np.float32), random.random(size).astype(np.float32)
    components = {"x": scores, "y": random.random(8).astype(np.float32)}
    baselines = random.random(8).astype(np.float32)
    units = Units(
        lengths=lengths,
        scores=scores,
        groups=groups,
        old_logprobs=old,
        sum_pi_squared=squares if "sum_pi_squared" in RULES[name].needs else None,
        baselines=baselines if "greedy" in RULES[name].needs else None,
        components=components if "components" in RULES[name].needs else {},
    )
    process.restart(make_settings({"threads": 1}))
    found = process.estimate(name, units).advantages
    mask = torch.arange(6)[None] < torch.from_numpy(lengths)[:, None]
    matrix = torch.zeros(8, 6)

    def padded(flat: Any) -> Any:
        out = matrix.clone()
        out[mask] = torch.from_numpy(flat)
        return out

    rewards = matrix.clone()
    rewards[torch.arange(8), torch.from_numpy(lengths).long() - 1] = torch.from_numpy(scores)
    given: dict[str, Any] = {"token_level_rewards": rewards, "response_mask": mask.float(), "index": np.array(groups, dtype=object)}
    config = AlgoConfig(gdpo_reward_keys=["x", "y"])
    if name not in ("grpo", "grpo_vectorized"):
        given["config"] = config
    if "greedy" in RULES[name].needs:
        given["reward_baselines"] = torch.from_numpy(baselines)
    if "sum_pi_squared" in RULES[name].needs:
        given |= {"old_log_probs": padded(old), "sum_pi_squared": padded(squares)}
    if "components" in RULES[name].needs:
        given["non_tensor_batch"] = components
        given["batch"] = {"prompts": torch.zeros(8, 0), "attention_mask": mask.long()}
    expected, _ = core_algos.get_adv_estimator_fn(name)(**given)
    np.testing.assert_array_equal(found, expected[mask].numpy())


def solver_and_judge(name: str, solver: float, judge: float) -> Any:
    """An episode in which each role has a reward of its own."""
    return make_episode(
        agents=[
            agent(f"{name}-s", "solver", [make_call(f"{name}-c1", [1, 2], [5])], solver),
            agent(f"{name}-j", "judge", [make_call(f"{name}-c2", [3, 4], [6, 7])], judge),
        ],
        episode_id=name,
        task_id="t",
    )


def test_a_rule_for_each_role_is_a_setting(process: VerlEngine) -> None:
    """The solver is compared with its group; the judge's scores are whitened over the batch; a role without a rule is refused."""
    group = Group(task_id="t", rollouts=[rollout(solver_and_judge(n, s, j), None) for n, s, j in [("a", 1.0, 3.0), ("b", 0.0, 1.0)]])
    rows = credited(process, [group], algorithm={"solver": "rloo", "judge": "reinforce_plus_plus"})
    assert trained(rows) == [[1.0], [0.866, 0.866], [-1.0], [-0.866, -0.866]]
    assert [row.credit[0].rule for row in rows] == ["rloo", "reinforce_plus_plus"] * 2
    with pytest.raises(SettingError, match="no rule for role 'judge'"):
        credited(process, [group], algorithm={"solver": "rloo"})


def test_leave_one_out_across_roles(process: VerlEngine) -> None:
    """group_by="task": the baseline of each of four units is the mean of the other three, whatever their role."""
    group = Group(task_id="t", rollouts=[rollout(solver_and_judge(n, s, j), None) for n, s, j in [("a", 1.0, 3.0), ("b", 0.0, 2.0)]])
    rows = credited(process, [group], algorithm="rloo", group_by="task")
    assert trained(rows) == [[-0.667], [2.0, 2.0], [-2.0], [0.667, 0.667]]
    assert rows.counters.groups_of_several_roles == 1
    assert credited(process, [group], algorithm="rloo").counters.groups_of_several_roles == 0


def two_turns(name: str, first: float, last: float) -> Any:
    """Two calls of one trajectory, the first with a reward of its own."""
    calls = [make_call(f"{name}-1", [1, 2], [5, 6]), make_call(f"{name}-2", [1, 2, 5, 6, 3], [7])]
    own = Reward(name="step", value=first, target=f"{name}-1")
    main = Trajectory(id=f"{name}-t", name="solver", calls=calls, tools=[], rewards=[own], reward=None, started=0, ended=0)
    return make_episode(agents=[main], episode_id=name, task_id="t", reward=last)


@pytest.mark.parametrize("mode", ["tree", "prefix", "call"])
def test_returns_to_go_by_hand(process: VerlEngine, mode: Any) -> None:
    """Discount 0.5, first calls 1 and 0, ends 2 and 0: returns 2, 2 and 0, 0; compared by step, the first call's group is (2, 0)."""
    group = Group(task_id="t", rollouts=[rollout(two_turns("a", 1.0, 2.0), 2.0), rollout(two_turns("b", 0.0, 0.0), 0.0)])
    rows = credited(process, [group], mode=mode, algorithm="rloo", returns="to_go", discount=0.5, group_by="step")
    by_call = {(record.span_id, record.level, record.score) for row in rows for record in row.credit}
    assert by_call == {("a-1", "to_go", 2.0), ("a-2", "to_go", 2.0), ("b-1", "to_go", 0.0), ("b-2", "to_go", 0.0)}
    assert sorted(value for row in trained(rows) for value in row) == [-2.0] * 3 + [2.0] * 3
    whole = credited(process, [group], mode=mode, algorithm="rloo")
    assert sorted(value for row in trained(whole) for value in row) == [-2.0, -1.0, -1.0, 1.0, 1.0, 2.0]


def test_long_replies_lose_score_softly(process: VerlEngine) -> None:
    """max_tokens 8, buffer 4, factor 1: replies of 4, 6 and 8 tokens lose 0, 0.5 and 1 of their score of 1."""
    group = Group(task_id="t", rollouts=[rollout(one_call(f"e{n}", [5] * n), 1.0) for n in (4, 6, 8)])
    rows = credited(process, [group], algorithm="rloo", max_tokens=8, overlong_penalty={"buffer": 4})
    assert [row[0] for row in trained(rows)] == [0.75, 0.0, -0.75]
    assert rows.counters.other["units_penalised_for_length"] == 2
    assert not any(value for row in trained(credited(process, [group], algorithm="rloo")) for value in row)


def test_a_failure_that_is_trained_by_request_is_worth_nothing(process: VerlEngine) -> None:
    """An infrastructure fault without a reward: left out by default, 0 in its group where it is asked to be trained."""
    group = Group(task_id="t", rollouts=[rollout(one_call("a", [5]), 1.0), rollout(one_call("b", [6]), None, fault="infrastructure")])
    assert trained(credited(process, [group], algorithm="rloo")[:1]) == [[0.0]]
    assert trained(credited(process, [group], algorithm="rloo", faults={"infrastructure": "train"})) == [[1.0], [-1.0]]
