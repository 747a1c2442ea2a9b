"""Short runs of ``fit`` with each kind of update, on the tiny model, with an engine and a server that are started once."""

import contextlib
import threading

import openai
import pytest

from rllm_trainer import fit, processes, replay
from rllm_trainer.config import make_settings
from rllm_trainer.credit_log import read_credit
from rllm_trainer.engine.policy_losses import POLICY_LOSSES
from rllm_trainer.exceptions import CheckpointError, DatasetError, SettingError
from rllm_trainer.models import resolve_model
from rllm_trainer.rollout.record import read_rollouts

ROWS = [{"word": f"say {i}"} for i in range(8)]
GIVEN = {"model": "tiny-qwen2", "lr": 1e-3, "batch_tasks": 2, "group_size": 4, "threads": 1, "progress": False, "steps": 2, "seed": 1}

client = openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="own", max_retries=0)


def app(word):
    messages = [{"role": "user", "content": word}]
    return client.chat.completions.create(model="gpt", messages=messages, max_tokens=8, temperature=1.0).choices[0].message.content


def lowercase(output):
    return sum(letter.islower() for letter in output) / max(1, len(output))


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    settings = make_settings({"threads": 1})
    with processes.running(settings, resolve_model("tiny-qwen2"), tmp_path_factory.mktemp("run"), threading.Event()) as both:
        yield both


@pytest.fixture
def on_started(started, monkeypatch):
    """Runs use what is up: the model anew, under their settings, served as version 0."""
    engine, server = started

    @contextlib.contextmanager
    def running(settings, model, run_dir, stop):
        engine.restart(make_settings({"threads": 1}))
        server.swap(engine.export_weights(0))
        engine.restart(settings)
        yield engine, server

    @contextlib.contextmanager
    def training(settings, model, run_dir, stop):
        engine.restart(settings, model_path=model)
        yield engine

    monkeypatch.setattr("rllm_trainer._fit.running", running)
    monkeypatch.setattr("rllm_trainer._replay.training", training)


def steps_of(tmp_path, **given):
    """The metrics of the two steps of a run, each of which moved the weights and was exact."""
    result = fit(app, ROWS, reward=lowercase, output_dir=tmp_path / "run", **GIVEN | given)
    lines = [line for line in result.metrics if "loss" in line]
    assert [(line["step"], line["version"]) for line in lines] == [(1, 1), (2, 2)]
    for line in lines:
        assert line["grad_norm"] > 0
        assert line["tokens/trained_share"] == 1
        assert line["rollout/logprob_diff_max"] < 1e-3
        assert line["trainability/ratio_p99"] < 1.01
    assert result.warnings == []
    return lines


LOSSES = {
    "bypass_mode": {"verl": {"actor": {"policy_loss": {"rollout_correction": {"bypass_mode": True}}}}},
    "dro": {"verl": {"actor": {"policy_loss": {"dro_beta": 0.1}}}},
    "geo_mean": {"loss_agg": "seq-mean-token-mean"},
    "sapo": {"loss_agg": "seq-mean-token-mean"},
}


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_each_policy_loss(on_started, tmp_path, name):
    """Every loss that verl has trains two exact steps."""
    steps_of(tmp_path, policy_loss=name, **LOSSES.get(name, {}))


@pytest.mark.parametrize(
    "given, rates",
    [
        ({"schedule": "linear"}, [1e-3, 5e-4]),
        ({"schedule": "cosine"}, [1e-3, 5e-4]),
        ({"schedule": "linear", "warmup_steps": 1}, [1e-3, 1e-3]),
        ({"warmup_steps": 2}, [5e-4, 1e-3]),
    ],
)
def test_each_schedule(on_started, tmp_path, given, rates):
    """The learning rate of each step follows from the schedule."""
    assert [line["lr"] for line in steps_of(tmp_path, **given)] == pytest.approx(rates)


def test_kl_in_the_loss(on_started, tmp_path):
    """At the first step the policy is the reference; then it has moved."""
    first, second = steps_of(tmp_path, kl_coef=0.1)
    assert abs(first["kl_loss"]) < 1e-6
    assert second["kl_loss"] > 1e-6


def test_kl_in_the_reward(on_started, tmp_path):
    """It is part of the score, and no term of the loss."""
    assert not any("kl_loss" in line for line in steps_of(tmp_path, kl_coef=0.1, kl_in="reward", kl_estimator="k1"))


def test_an_adapter_with_kl(on_started, tmp_path):
    """LoRA trains and is served, its reference the model without the adapter; the model that comes out is whole."""
    first, second = steps_of(tmp_path, lora={"r": 4, "alpha": 8}, kl_coef=0.05, lr=1e-2)
    assert abs(first["kl_loss"]) < 1e-6
    assert second["kl_loss"] > 0
    names = {path.name for path in (tmp_path / "run" / "model").iterdir()}
    assert {"model.safetensors", "adapter"} <= names


def test_entropy_and_two_epochs(on_started, tmp_path):
    """An entropy bonus and a second pass over the batch are both taken."""
    assert all(line["actor/entropy"] > 0 for line in steps_of(tmp_path, entropy_coef=0.01, ppo_epochs=2))


def test_rows_are_drawn_in_place_of_groups_without_signal(on_started, tmp_path):
    """Rows whose rollouts are all worth the same are not trained; further ones are drawn for them, on file under the same step."""
    spread = {f"say {i}" for i in range(4)}

    def some(output, word):
        return lowercase(output) if word in spread else 1.0

    given = GIVEN | {"steps": 1, "batch_tasks": 6, "refill": 2}
    result = fit(app, ROWS, reward=some, output_dir=tmp_path / "run", **given)
    (line,) = [line for line in result.metrics if "loss" in line]
    made = read_rollouts(tmp_path / "run")[1]
    words = {r.task_id: r.row["word"] for r in made}
    assert sorted(words.values()) == sorted(row["word"] for row in ROWS)
    assert (line["groups"], line["rollouts"], line["credit/groups"]) == (8, 32, 4)
    assert {words[told.task_id] for told in read_credit(tmp_path / "run")} == spread
    assert 0 < line["tokens/trained"] < line["tokens/sampled"]
    assert line["grad_norm"] > 0
    assert result.trainability.lost_tokens == {"group without signal": line["tokens/sampled"] - line["tokens/trained"]}


def test_remax(on_started, tmp_path):
    """Each group has one more rollout at temperature 0: on file under its own split, its reward the baseline, none of it trained."""
    first, second = steps_of(tmp_path, algorithm="remax")
    run = tmp_path / "run"
    sampled, greedy = read_rollouts(run), read_rollouts(run, split="greedy")
    for line in (first, second):
        step = int(line["step"])
        assert (line["rollouts"], line["rollouts/greedy"], line["rollouts/greedy_lost"], line["calls"]) == (8, 2, 0, 8)
        assert [call.sampling["temperature"] for r in greedy[step] for call in r.episode.calls] == [0, 0]
        worth = {r.task_id: r.reward for r in greedy[step]}
        assert line["reward/greedy_mean"] == pytest.approx(sum(worth.values()) / 2)
        told = {one.episode_id: one.advantage for one in read_credit(run) if one.step == step}
        assert told == pytest.approx({r.episode.id: r.reward - worth[r.task_id] for r in sampled[step]}, abs=1e-6)
    given = {"algorithm": "remax", "lr": 1e-3, "threads": 1, "progress": False}
    again = replay(run, "tiny-qwen2", output_dir=tmp_path / "again", **given)
    assert read_credit(again.run_dir) == read_credit(run)
    with pytest.raises(DatasetError, match="2 of 2 groups in the store have none, such as"):
        replay([r.episode for r in sampled[1]], "tiny-qwen2", output_dir=tmp_path / "alone", **given)


@pytest.mark.parametrize(
    "given, words",
    [({"staleness": 1}, "staleness=1"), ({"refill": 1}, "refill=1"), ({"returns": "to_go"}, "returns='to_go'")],
)
def test_where_remax_can_have_no_greedy_rollout(tmp_path, given, words):
    """It is refused before anything is started, with the setting in its way."""
    with pytest.raises(SettingError, match=f"algorithm='remax' is refused with {words}"):
        fit(app, ROWS, reward=lowercase, output_dir=tmp_path / "run", **GIVEN | {"algorithm": "remax"} | given)


def test_what_may_change_when_a_run_is_continued(on_started, tmp_path):
    """More steps and another rate go on; another batch, group or model is another run. What was refused changed nothing."""
    steps_of(tmp_path)
    settings = (tmp_path / "run" / "settings.json").read_bytes()
    for name, value in {"batch_tasks": 4, "group_size": 2, "seed": 2, "model": "tiny-llama", "algorithm": "rloo"}.items():
        with pytest.raises(CheckpointError, match=f"the run to continue had {name}="):
            fit(app, ROWS, reward=lowercase, output_dir=tmp_path / "run", resume=True, **GIVEN | {name: value})
    assert (tmp_path / "run" / "settings.json").read_bytes() == settings
    result = fit(app, ROWS, reward=lowercase, output_dir=tmp_path / "run", resume=True, **GIVEN | {"steps": 3, "lr": 5e-4})
    assert [(line["step"], line["lr"]) for line in result.metrics] == [(1, 1e-3), (2, 1e-3), (3, 5e-4)]
    again = fit(app, ROWS, reward=lowercase, output_dir=tmp_path / "run", resume=True, **GIVEN)
    assert [line["step"] for line in again.metrics] == [1, 2, 3]
    assert again.warnings == ["the run has taken 3 steps, and there are 2 in all: nothing is left to train"]


def test_rows_that_run_out_end_the_run_after_the_last_of_them(on_started, tmp_path, capfd):
    """Five rows, two a step, nine steps asked for: three are taken, and it says so; with more rows a continued run takes more."""

    def rows(count):
        yield from ({"word": f"say {i}"} for i in range(count))

    given = GIVEN | {"steps": 9, "progress": True}
    result = fit(app, rows(5), reward=lowercase, output_dir=tmp_path / "run", **given)
    assert [(line["step"], line["rollouts"]) for line in result.metrics] == [(1, 8), (2, 8), (3, 4)]
    assert (result.model_path / "model.safetensors").exists()
    assert "the rows ran out after step 3" in capfd.readouterr().out
    more = fit(app, rows(7), reward=lowercase, output_dir=tmp_path / "run", resume=True, **given)
    assert [line["step"] for line in more.metrics] == [1, 2, 3, 4]
    assert [rollout.row["word"] for rollout in read_rollouts(tmp_path / "run", steps=[4])[4]] == ["say 6"] * 4
