"""The demo's app, its questions and its checker, without a model: a scripted server stands in for it."""

import difflib
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from rllm_trace.testing import Exchange, Reply, ReplyChoice, ScriptedServer

FOLDER = Path(__file__).parents[2] / "examples" / "smolagents_stock"


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch, lasting: list[ModuleType]) -> ModuleType:
    """The decorated app, freshly imported, and the folder's other modules importable as ``run.py`` has them."""
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setenv("OPENAI_API_KEY", "scripted")
    for name in ("app", "questions"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import app

    lasting.append(app)

    yield app
    for name in ("app", "questions"):
        sys.modules.pop(name, None)


def says(*lines: str) -> list[Reply]:
    return [Reply(choices=[ReplyChoice(text=line)]) for line in lines]


def test_the_decorated_app_differs_by_an_import_and_two_lines() -> None:
    """What an author adds to an app: one import and two decorators, nothing moved or changed."""
    before, after = ((FOLDER / name).read_text().splitlines() for name in ("app_before.py", "app.py"))
    changes = [line for line in difflib.ndiff(before, after) if line[0] in "+-"]
    assert [line for line in changes if line != "+ "] == ["+ import rllm_trace as rllm", "+ @rllm.workflow", "+ @rllm.reward"]


def ask(app: ModuleType, monkeypatch: pytest.MonkeyPatch, *lines: str) -> tuple[object, list[Exchange]]:
    """The app's answer to one question where the model says ``lines``, and the calls that it made."""
    with ScriptedServer(says(*lines)) as server:
        model = app.MODEL
        monkeypatch.setattr(model, "client", type(model)(model_id="m", api_base=server.base_url, api_key=server.api_key).client)
        return app.ask("rugs: how many minus 3?"), server.calls()


def test_the_tool_s_result_comes_back_and_is_used(app: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two calls: the look-up, then the answer; the second call's messages are the first one's, its reply, and what the tool gave."""
    answer, calls = ask(app, monkeypatch, "stock('rugs')", "final_answer(36 - 3)")
    assert answer == 33
    first, second = ([(m["role"], m["content"][0]["text"]) for m in call.body["messages"]] for call in calls)
    assert second == [*first, ("assistant", "stock('rugs')"), ("user", "Observation:\n36 rugs")]


@pytest.mark.parametrize(
    "lines",
    [("what?",), ("stock('rugs')", "stock('rugs')"), ("stock('rugs')", "final_answer('many')")],
    ids=["no code", "no end", "no number"],
)
def test_an_agent_that_goes_wrong_gives_no_answer(app: ModuleType, monkeypatch: pytest.MonkeyPatch, lines: tuple[str, ...]) -> None:
    """A faulty line, a second look-up or an answer that is no number end the episode with None, and with no further call."""
    answer, calls = ask(app, monkeypatch, *lines)
    assert (answer, len(calls)) == (None, len(lines))


def test_learning_and_measuring_share_nothing(app: ModuleType) -> None:
    """Items and stock counts of the held-out questions are not among those of the training questions, and seeds change only the order."""
    from questions import held_out_rows, training_rows

    training, held_out = training_rows(0), held_out_rows(128)
    items = [{re.match(r"\w+", row["question"]).group() for row in rows} for rows in (training, held_out)]
    assert items[0] & items[1] == set()
    assert {app.STOCK[item] for item in items[0]} & {app.STOCK[item] for item in items[1]} == set()
    assert (len(training), len({row["question"] for row in held_out})) == (960, 128)
    assert sorted(map(str, training)) == sorted(map(str, training_rows(1)))


def test_the_answers_are_right(app: ModuleType) -> None:
    """The stock list has 36 rugs."""
    from questions import training_rows

    answers = {row["question"]: row["answer"] for row in training_rows(0)}
    assert [answers[f"rugs: how many {end}?"] for end in ("plus 5", "minus 5", "times 5")] == [41, 31, 180]


def test_the_checker_finds_a_wrong_figure(app: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A result that its episodes do not bear out is refused, figure by figure; the true one passes."""
    from questions import held_out_rows, training_rows

    from rllm_trace.rollouts import rollout
    from rllm_trainer.rollout.record import RolloutLog
    from rllm_trainer.types import Rollout

    run_dir = tmp_path / "seed-0"
    run_dir.mkdir()
    log = RolloutLog(run_dir)
    plan = [("eval", 0), ("eval_greedy", 0), ("train", 1), ("eval", 1), ("eval_greedy", 1)]
    for split, step in plan:
        row = training_rows(0)[0] if split == "train" else held_out_rows(1)[0]
        item, _, word, number = re.fullmatch(r"(\w+)(: how many) (\w+) (\d)\?", row["question"]).groups()
        sign = {"plus": "+", "minus": "-", "times": "*"}[word]
        right = f"final_answer({app.STOCK[item]} {sign} {number})" if step else "final_answer(0)"
        with ScriptedServer(says(f"stock('{item}')", right)) as server:
            client = type(app.MODEL)(model_id="m", api_base=server.base_url, api_key=server.api_key).client
            monkeypatch.setattr(app.MODEL, "client", client)
            with rollout() as handle:
                app.ask(row["question"])
            (episode,) = handle.wait(5)
        reward = float(episode.output == row["answer"])
        log.write(
            Rollout(task_id=row["question"], index=0, row=row, episode=episode, reward=reward, rewards={"correct": reward}),
            step=step,
            split=split,
        )
    log.close()
    result = {
        "before": 0.0, "after": 1.0, "rise_ci95": [1.0, 1.0], "greedy_before": 0.0, "greedy_after": 1.0, "format_before": 1.0,
        "format_after": 1.0, "correct_given_format_before": 0.0, "correct_given_format_after": 1.0, "n_eval": 1,
        "share_multi_call": [1.0, 1.0], "share_multi_span": [0.0, 0.0], "seconds": 600.0, "seed": 0,
    }  # fmt: skip
    check = lambda: subprocess.run([sys.executable, FOLDER / "check.py", tmp_path], capture_output=True, text=True, timeout=60, check=False)  # noqa: E731
    write = lambda name, **figures: (tmp_path / name).write_text(json.dumps(result | figures))  # noqa: E731
    write("result.json")
    write("seed-0/demo.json")
    assert (done := check()).returncode == 0, done.stdout + done.stderr
    write("seed-0/demo.json", after=0.9, seconds=0.0)
    write("result.json", after=0.9, seconds=0.0)
    done = check()
    first, second, *_ = done.stdout.splitlines()
    assert (done.returncode, first) == (1, "after: written 0.9, found 1.0")
    assert second.startswith("seconds: written 0.0, found episodes ")
    write("seed-0/demo.json")
    done = check()
    assert (done.returncode, done.stdout.startswith("result.json: {")) == (1, True)
