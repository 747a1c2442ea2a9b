"""The worked example of docs/credit.md: its first table is made into episodes, and every number that follows is computed again."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from rllm_trace.types import Logprobs, Reward, Trajectory
from rllm_trainer.advantages import Credited, credit
from rllm_trainer.batching import make_batch
from rllm_trainer.config import make_settings
from rllm_trainer.engine.verl import VerlEngine
from rllm_trainer.samples import build_samples
from rllm_trainer.testing import make_call, make_choice, make_episode
from rllm_trainer.types import Group, Rollout

TEXT = (Path(__file__).parents[3] / "docs" / "credit.md").read_text().partition("## A worked example")[2]


def table(first_column: str) -> list[dict[str, str]]:
    """The document's table with this first column."""
    lines = TEXT.split(f"| {first_column} |")[1].partition("\n\n")[0].splitlines()
    names = [first_column, *(name.strip() for name in lines[0].strip(" |").split("|"))]
    rows = [[cell.strip() for cell in line.removeprefix("|").removesuffix("|").split("|")] for line in lines[2:]]
    return [dict(zip(names, row, strict=True)) for row in rows]


def stated(words: str) -> float:
    """The number that stands where ``words`` has ``#``."""
    text = " ".join(TEXT.split())
    found = re.findall(re.escape(words).replace(r"\#", r"(-?[\d.]*\d)"), text)
    assert len(found) == 1, (words, found)
    return float(found[0])


def ids(text: str) -> list[int]:
    return [int(token) for token in text.split()]


def group(engine: VerlEngine) -> Group:
    """The first table as rollouts; every recorded logprob is the engine's own, as after a rollout under its weights."""
    agents: dict[str, dict[str, list[dict[str, str]]]] = {}
    for row in table("rollout"):
        agents.setdefault(row["rollout"], {}).setdefault(row["agent"], []).append(row)
    rollouts: list[Rollout] = []
    for number, (name, members) in enumerate(agents.items()):
        trajectories: list[Trajectory] = []
        for agent, rows in members.items():
            calls = [call(engine, row) for row in rows]
            reward = float(rows[-1]["reward"])
            given = [Reward(name="r", value=reward, target=f"{name} {agent}")]
            trajectories.append(
                Trajectory(
                    id=f"{name} {agent}",
                    name=agent.partition("-")[0],
                    calls=calls,
                    tools=[],
                    rewards=given,
                    reward=reward,
                    started=0,
                    ended=0,
                )
            )
        episode = make_episode(agents=trajectories, episode_id=name, task_id="t")
        rollouts.append(Rollout(task_id="t", index=number, row="t", episode=episode, reward=None, rewards={}))
    return Group(task_id="t", rollouts=rollouts)


def call(engine: VerlEngine, row: dict[str, str]) -> Any:
    prompt, reply = ids(row["prompt"]), ids(row["reply"])
    (now,) = engine.logprobs([np.array([*prompt, *reply], np.int32)], temperatures=[1.0])
    return make_call(row["call"], prompt, make_choice(reply, logprobs=Logprobs(now[len(prompt) :].tobytes())))


def credited(engine: VerlEngine, mode: Any = "tree", **given: Any) -> Credited:
    """The rows of the example under these settings."""
    settings = make_settings({"threads": 1, **given})
    engine.restart(settings)
    example = group(engine)
    samples = {r.episode.id: build_samples(r.episode, mode=mode) for r in example.rollouts if r.episode is not None}
    return credit([example], samples, settings=settings, estimator=engine)


@pytest.fixture
def engine(process: VerlEngine) -> VerlEngine:
    return process


def test_rows_and_advantages_are_those_of_the_second_table(engine: VerlEngine) -> None:
    """Tokens, masks and the advantage of each row, to four places."""
    rows = credited(engine)
    found = [
        {
            "row": row.credit[0].shares and next(iter(row.credit[0].shares)),
            "tokens": " ".join(map(str, row.sample.token_ids.tolist())),
            "trained": " ".join(map(str, row.sample.trained_mask.astype(int).tolist())),
            "advantage": [float(f"{value:.4f}") for value in np.unique(row.advantages[row.sample.trained_mask])],
        }
        for row in rows
    ]
    assert found == [row | {"advantage": [float(row["advantage"])]} for row in table("row")]


def test_the_baselines_are_as_stated(engine: VerlEngine) -> None:
    """Means and deviations with n - 1, of the scores in the first table."""
    scores = {r["agent"].partition("-")[0]: [] for r in table("rollout")}  # type: dict[str, list[float]]
    for row in table("rollout"):
        if row["reward"]:
            scores[row["agent"].partition("-")[0]].append(float(row["reward"]))
    solvers, judges = np.array(scores["solver"]), np.array(scores["judge"])
    assert solvers.tolist() == [1, 0, 0, 0]
    assert stated("1, 0, 0, 0: mean #, deviation") == solvers.mean()
    assert stated("deviation (n - 1) #.") == solvers.std(ddof=1)
    assert stated("has 1, 0: mean #, deviation") == judges.mean()
    assert stated("mean 0.5, deviation #.") == pytest.approx(judges.std(ddof=1), abs=5e-5)


def test_the_loss_is_as_stated_however_the_calls_are_cut(engine: VerlEngine) -> None:
    """Through the engine, with a ratio of 1: minus the sum of the advantages over the trained tokens, in 6 rows and in 7."""
    found: list[tuple[int, float, float]] = []
    for mode in ("tree", "call"):
        rows = credited(engine, mode)
        batch = make_batch(rows, settings=make_settings({"threads": 1}), step=1, policy_version=0)
        found.append((len(batch.rows), batch.denominator, engine.gradient(batch)[0]))
    assert [count for count, _, _ in found] == [len(table("row")), int(stated("there are # rows"))]
    assert {denominator for _, denominator, _ in found} == {stated("There are # trained tokens")}
    assert [float(f"{loss:.4f}") for _, _, loss in found] == [stated("over 11: #.")] * 2
    assert found[0][2] == pytest.approx(found[1][2], abs=1e-6)


def test_returns_to_go_are_as_stated(engine: VerlEngine) -> None:
    """The scores of the first solver's two calls."""
    rows = credited(engine, returns="to_go", discount=0.5)
    scores = {record.span_id: record.score for row in rows for record in row.credit}
    assert (scores["a1"], scores["a2"]) == (stated("call a1 scores #"), stated("call a2 scores #."))
    assert {msgspec.structs.asdict(record)["level"] for row in rows for record in row.credit} == {"to_go"}
