"""Two solvers and a judge without a model: a scripted server stands in for it, and says now the right thing, now the wrong one."""

import asyncio
import itertools
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import rllm_trace as rllm
from rllm_trace.testing import Exchange, Reply, ReplyChoice, ScriptedServer
from rllm_trainer.advantages import RULES, Rule, credit
from rllm_trainer.config import make_settings
from rllm_trainer.samples import build_samples
from rllm_trainer.types import Group, Rollout

FOLDER = Path(__file__).parents[2] / "examples" / "solver_judge"
MODULES = ("app", "questions", "figures", "check")
COLOURS = ("red", "blue", "green", "grey")
FIRST_ID = 1_000


class Model:
    """Says something else each time, in ids that no other reply has; remembers what it said."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._random = random.Random(3)
        self.said: dict[int, str] = {}
        """First id of a reply -> its text."""

    def __call__(self, exchange: Exchange) -> Reply:
        number, messages = next(self._numbers), exchange.body["messages"]
        asked = messages[-1]["content"]
        colour = next(colour for colour in COLOURS if colour in asked)
        judges = "A or B" in messages[0]["content"]
        text = self._random.choice("ABC") if judges else self._random.choice((colour, "some colour"))
        self.said[FIRST_ID + 2 * number] = text
        ids = [FIRST_ID + 2 * number, FIRST_ID + 2 * number + 1]
        return Reply(choices=[ReplyChoice(text=text, token_ids=ids, logprobs=[-0.5, -0.25])])


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch, model: Model, lasting: list[ModuleType]) -> Iterator[ModuleType]:
    """The app, freshly imported, its endpoint the scripted server."""
    monkeypatch.syspath_prepend(FOLDER)
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    with ScriptedServer(model) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
        monkeypatch.setenv("OPENAI_API_KEY", server.api_key)
        import app

        lasting.append(app)

        monkeypatch.setattr(app, "MEAN_LATENCY", 0.001)
        monkeypatch.setattr(app, "LATENCY", random.Random(5))
        yield app
    for name in MODULES:
        sys.modules.pop(name, None)


def run(app: ModuleType, rows: list[dict[str, str]], *, at_once: int) -> list[Any]:
    """The rows' episodes, so many at the same time, in the order of the rows."""

    async def all_of_them() -> None:
        places = asyncio.Semaphore(at_once)

        async def one(row: dict[str, str]) -> None:
            async with places:
                await app.decide(**row)

        await asyncio.gather(*map(one, rows))

    with rllm.collect() as episodes:
        asyncio.run(all_of_them())
    by_sentence = {episode.input["sentence"]: episode for episode in episodes}
    assert len(by_sentence) == len(episodes) == len(rows)
    return [by_sentence[row["sentence"]] for row in rows]


def test_over_a_thousand_episodes_each_agent_s_tokens_get_its_own_reward(
    app: ModuleType, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each reply has ids of its own, so what the server said is compared, token by token, with the reward that the token was given."""
    given = Rule(
        name="as_given", summary="The score itself.", grouped=False, inert_without_spread=False,
        function=lambda units: np.repeat(units.scores, units.lengths),
    )  # fmt: skip
    monkeypatch.setitem(RULES, "as_given", given)
    rows = [{"sentence": f"The {COLOURS[n % 4]} thing {n}.", "colour": COLOURS[n % 4]} for n in range(1_000)]
    episodes = run(app, rows, at_once=64)
    groups = [
        Group(
            task_id=f"t{n}",
            rollouts=[
                Rollout(task_id=f"t{n}", index=i, row=n, episode=episode, reward=None, rewards={})
                for i, episode in enumerate(episodes[8 * n : 8 * n + 8])
            ],
        )
        for n in range(125)
    ]
    samples = {episode.id: build_samples(episode) for episode in episodes}
    credited = credit(groups, samples, settings=make_settings({"algorithm": "as_given"}), estimator=None)  # type: ignore[arg-type]
    by_id = {episode.id: episode for episode in episodes}
    counted = {"solver": 0, "judge": 0}
    for row in credited:
        episode = by_id[row.sample.episode_id]
        (span,) = row.sample.spans
        text = model.said[int(row.sample.token_ids[span.start])]
        colour, replies = episode.input["colour"], episode.output["replies"]
        picked = replies["AB".index(text)] if text in ("A", "B") else None
        expected = float((text if span.role == "solver" else picked) == colour)
        assert row.advantages[span.start : span.stop].tolist() == [expected, expected], (episode.id, span)
        counted[span.role] += 1
    assert counted == {"solver": 2_000, "judge": 1_000}
    apart = [episode for episode in episodes if len({t.reward for t in episode.trajectories if t.name == "solver"}) == 2]
    assert len(apart) > 300, "in a third or more of the episodes one solver was right and the other wrong"


def test_answers_reach_the_judge_in_the_order_of_the_solvers(app: ModuleType, model: Model) -> None:
    """Whichever answer comes first, A is the first solver's."""
    (episode,) = run(app, [{"sentence": "The red thing.", "colour": "red"}], at_once=1)
    judge = next(t for t in episode.trajectories if t.name == "judge")
    first, second = episode.output["replies"]
    assert judge.calls[0].messages[-1]["content"] == f"The red thing. A: {first} B: {second}"


def test_learning_and_measuring_share_no_thing(app: ModuleType) -> None:
    """No held-out sentence is a training sentence, and none is about a thing that training names."""
    from questions import held_out_rows, training_rows

    training, held_out = training_rows(0), held_out_rows(96)
    things = [
        {word for row in rows for word in row["sentence"].rstrip(".").split() if word != row["colour"]} for rows in (training, held_out)
    ]
    assert things[0] & things[1] == {"The", "is", "here", "I", "lost", "my", "She", "has", "a"}
    assert (len(training), len(held_out)) == (924, 96)
    assert sorted(map(str, training)) == sorted(map(str, training_rows(1)))


def test_the_checker_finds_a_miscredited_reply(app: ModuleType, tmp_path: Path) -> None:
    """A true result passes; another figure, or a reply that was trained on another's reward, is named."""
    from check import Run, figures, worth_of

    from rllm_trainer.rollout.record import RolloutLog

    folder = tmp_path / "seed-0"
    folder.mkdir()
    log = RolloutLog(folder)
    rows = [{"sentence": f"The {colour} thing {step}.", "colour": colour} for step in (0, 1) for colour in COLOURS]
    episodes = run(app, rows, at_once=4)
    credit_lines = []
    for number, (row, episode) in enumerate(zip(rows, episodes, strict=True)):
        again = dict(row, sentence=f"The {row['colour']} thing.")
        rollout = Rollout(task_id=again["sentence"], index=0, row=again, episode=episode, reward=0.5, rewards={})
        log.write(rollout, step=number // 4, split="eval")
        log.write(rollout, step=number // 4, split="train")
        worth = worth_of(episode)
        credit_lines += [
            {"step": 1, "episode_id": episode.id, "span_id": t.calls[0].span_id, "choice": 0, "role": t.name, "level": "trajectory",
             "score": worth[t.name, t.id], "shares": {t.id: 1.0}} for t in episode.trajectories
        ]  # fmt: skip
    log.close()
    write = lambda lines: (folder / "credit.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))  # noqa: E731
    write(credit_lines)
    result = figures(Run(folder)) | {"seconds": 600.0, "seed": 0}

    def check(**changed: Any) -> str:
        (tmp_path / "result.json").write_text(json.dumps(result | changed))
        done = subprocess.run([sys.executable, FOLDER / "check.py", tmp_path], capture_output=True, text=True, timeout=60, check=False)
        return done.stdout + done.stderr

    assert check().startswith("all figures found again from the episodes; 24 trained replies have their own agent's reward")
    assert check(judge_after=0.123).startswith("judge_after: written 0.123, found ")
    write([{**credit_lines[0], "score": 1.0 - credit_lines[0]["score"]}, *credit_lines[1:]])
    assert check().startswith("credit of solver ")


@pytest.mark.timeout(600)
def test_the_tiny_model_is_trained_through_the_whole_loop(app: ModuleType, tmp_path: Path) -> None:
    """A step with a rule for each role, on real episodes: the checker finds every figure again and every reply's own reward."""
    from check import Run, figures, miscredited

    command = [sys.executable, FOLDER / "run.py", "--steps", "1", "--n-eval", "2", "--model", "tiny-qwen2", "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    run, written = Run(tmp_path / "seed-0"), json.loads((tmp_path / "result.json").read_text())
    assert {name: value for name, value in figures(run).items() if not name.endswith("ci95")} == {
        name: written[name] for name in ("n_eval", "solver_before", "solver_after", "judge_before", "judge_after")
    }
    assert miscredited(run) == []
    assert {(line["role"], line["rule"]) for line in run.credit} == {("solver", "grpo"), ("judge", "reinforce_plus_plus")}
    seeds = [[call.sampling["seed"] for call in episode.calls[:2]] for episode in run.episodes.values()]
    assert all(first != second for first, second in seeds), "two solvers of one episode do not draw the same numbers"
