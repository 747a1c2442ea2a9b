"""Stored episodes train as the run did that recorded them: the same batch, the same weights, bit for bit; and with other rewards."""

import contextlib
import json
import threading

import numpy as np
import openai
import pytest

import rllm_trainer.loop as loop_module
from rllm_trace.exporters.jsonl import read_episodes
from rllm_trainer import fit, processes, replay
from rllm_trainer.cli import main
from rllm_trainer.config import make_settings
from rllm_trainer.credit_log import read_credit
from rllm_trainer.exceptions import CheckpointError, DatasetError, NoSignal, RewardError, SettingError
from rllm_trainer.models import resolve_model
from rllm_trainer.testing import make_call, make_choice, make_episode

ROWS = [{"word": f"say {i}", "letter": "e"} for i in range(8)]
SHARED = {"lr": 5e-3, "schedule": "linear", "threads": 1, "progress": False, "save_every": 1}
client = openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="own", max_retries=0)


def app(word):
    messages = [{"role": "user", "content": word}]
    first = client.chat.completions.create(model="gpt", messages=messages, max_tokens=6).choices[0].message
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": "more"}]
    return client.chat.completions.create(model="gpt", messages=messages, max_tokens=6).choices[0].message.content


def lowercase(output):
    return sum(letter.islower() for letter in output) / max(1, len(output))


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """An engine and a server, started once; every run gets the model anew."""
    settings = make_settings({"threads": 1})
    with processes.running(settings, resolve_model("tiny-qwen2"), tmp_path_factory.mktemp("run"), threading.Event()) as both:
        yield both


@pytest.fixture(autouse=True)
def _on_started(request, monkeypatch):
    if "lived" not in request.fixturenames:
        return
    engine, _ = request.getfixturevalue("started")

    @contextlib.contextmanager
    def training(settings, model, run_dir, stop, **given):
        engine.restart(settings, model_path=model, **given)
        yield engine

    monkeypatch.setattr("rllm_trainer._replay.training", training)


@pytest.fixture
def batches(monkeypatch):
    """The batches of the loops that run in the test, as they were made."""
    made = []

    def noting(*args, **settings):
        prepared = loop_module_prepare(*args, **settings)
        made.append(prepared.batch)
        return prepared

    loop_module_prepare = loop_module.prepare
    monkeypatch.setattr(loop_module, "prepare", noting)
    return made


@pytest.fixture(scope="module")
def lived(tmp_path_factory, started):
    """A run of two steps, and the batches that it trained on."""
    made, prepare = [], loop_module.prepare

    @contextlib.contextmanager
    def running(settings, model, run_dir, stop):
        started[0].restart(settings, model_path=model)
        yield started

    def noting(*args, **settings):
        prepared = prepare(*args, **settings)
        made.append(prepared.batch)
        return prepared

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop_module, "prepare", noting)
        patch.setattr("rllm_trainer._fit.running", running)
        run_dir = tmp_path_factory.mktemp("lived") / "run"
        result = fit(app, ROWS, "tiny-qwen2", lowercase, output_dir=run_dir, steps=2, batch_tasks=4, group_size=4, **SHARED)
    return result, made


def weights(run_dir, step):
    return (run_dir / "checkpoints" / f"step-{step:06d}" / "engine" / "model.safetensors").read_bytes()


def same_batch(one, other):
    assert (one.denominator, one.step, one.policy_version, len(one.rows)) == (
        other.denominator, other.step, other.policy_version, len(other.rows),
    )  # fmt: skip
    for ours, theirs in zip(one.rows, other.rows, strict=True):
        assert (ours.sample.id, ours.group, ours.credit) == (theirs.sample.id, theirs.group, theirs.credit)
        for name in ("token_ids", "trained_mask", "logprobs", "versions"):
            np.testing.assert_array_equal(getattr(ours.sample, name), getattr(theirs.sample, name))
        for name in ("advantages", "weights", "old_logprobs"):
            np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
        assert ours.is_weights is theirs.is_weights is None


def test_a_run_is_replayed_bit_for_bit(lived, batches, tmp_path):
    """The run folder gives each step the batch and the weights that it had, stopped after the first and continued too."""
    result, made = lived
    given = {"output_dir": tmp_path / "again", "steps": 2, **SHARED}
    again = replay(result.run_dir, "tiny-qwen2", **given)
    assert len(batches) == len(made) == 2
    for ours, theirs in zip(batches, made, strict=True):
        same_batch(ours, theirs)
    assert weights(again.run_dir, 1) == weights(result.run_dir, 1)
    assert weights(again.run_dir, 2) == weights(result.run_dir, 2)
    assert again.trainability == result.trainability
    assert [line.step for line in read_credit(again.run_dir)] == [1] * 32 + [2] * 32
    assert read_credit(again.run_dir) == read_credit(result.run_dir)
    with pytest.raises(CheckpointError, match="had batch_tasks='recorded steps', and now it is 2"):
        replay(result.run_dir, "tiny-qwen2", resume=True, **given, batch_tasks=2)


def test_its_episodes_alone_give_the_same_step(lived, batches, tmp_path):
    """Bare episodes of the first step, in any order, are grouped and scored again into the same batch and weights; then it is resumed."""
    result, made = lived
    episodes = [e for e in read_episodes(result.run_dir / "episodes.jsonl") if e.metadata["step"] == 1]
    given = {"reward": lowercase, "output_dir": tmp_path / "again", **SHARED, "schedule": "constant"}
    again = replay(episodes[::-1], "tiny-qwen2", **given, epochs=1)
    same_batch(batches[0], made[0])
    assert weights(again.run_dir, 1) == weights(result.run_dir, 1)
    further = replay(episodes, "tiny-qwen2", **given, epochs=2, resume=True)
    assert [line["step"] for line in further.metrics] == [1, 2]
    assert [line.step for line in read_credit(further.run_dir)] == [1] * 32 + [2] * 32
    # the weights have moved: the second pass is corrected
    assert "rollout_corr/rollout_is_mean" in further.metrics[1]
    assert not any(name.startswith("rollout_corr/") for name in further.metrics[0])
    assert all(row.is_weights is not None for row in batches[1].rows)


def test_another_reward_and_rule_from_the_command_line(lived, tmp_path, capsys):
    """Rewards are given anew, from output and the row's columns, and another rule of credit takes them."""
    result, _ = lived
    (tmp_path / "rewards.py").write_text("def letters(output, letter):\n    return output.count(letter) + 0.1 * len(output)\n")
    arguments = ["replay", str(result.run_dir), "--model", "tiny-qwen2", "--reward", f"{tmp_path / 'rewards.py'}:letters"]
    settings = ["--output", str(tmp_path / "run"), "--set", "algorithm=rloo", "--set", "threads=1", "--set", "steps=1"]
    assert main([*arguments, *settings]) == 0
    first = [e for e in read_episodes(result.run_dir / "episodes.jsonl") if e.metadata["step"] == 1]
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert line["rewards/letters"] == pytest.approx(sum(e.output.count("e") + 0.1 * len(e.output) for e in first) / len(first))
    assert "rewards/lowercase" not in line
    assert "letters, for every episode anew" in capsys.readouterr().out


# what is refused or set aside, before anything starts


@pytest.mark.parametrize(
    "name, value", [("concurrency", 4), ("sampling", {"temperature": 1}), ("quorum", 0.5), ("group_size", 4), ("port", 1)]
)
def test_settings_of_running_an_app_are_refused(name, value, tmp_path):
    """What a replay does not do cannot be set."""
    with pytest.raises(SettingError, match=f"{name}=.* would have no effect: replay runs no app and serves nothing"):
        replay([], "tiny-qwen2", output_dir=tmp_path / "run", **{name: value})


def test_engines_that_run_the_app_themselves_are_refused(tmp_path):
    """verl's own trainer cannot take steps without an app; what only Ray reads is refused elsewhere."""
    with pytest.raises(SettingError, match="engine='cluster' is verl's own trainer, which runs the app"):
        replay([], "tiny-qwen2", output_dir=tmp_path / "run", engine="cluster")
    with pytest.raises(SettingError, match="cluster="):
        replay([], "tiny-qwen2", output_dir=tmp_path / "run", cluster={"nodes": 2})


def test_a_store_without_anything_to_train(tmp_path):
    """The reason is named: no group, no ids, or no episode at all."""
    call = make_call("a", [1, 2], [3])
    alone = make_episode(call, episode_id="1", reward=1.0)
    with pytest.raises(NoSignal, match=r"nothing in the store can be trained: alone in its group: .*: 1; record episodes with"):
        replay([alone], "tiny-qwen2", output_dir=tmp_path / "run")
    with pytest.raises(NoSignal, match="its episodes made no call"):
        replay([], "tiny-qwen2", output_dir=tmp_path / "run")
    inexact = make_call("a", [1, 2], make_choice([3], logprobs=None), exact=False, inexact_reason="no logprobs", trainable=False)
    pair = [make_episode(inexact, episode_id=name, reward=1.0) for name in "12"]
    with pytest.raises(NoSignal, match=r"inexact \(no logprobs\): 2"):
        replay(pair, "tiny-qwen2", output_dir=tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_rows_for_rewards(tmp_path):
    """A reward that needs a column which was not recorded says so; rows that are not those of the episodes are refused."""
    pair = [make_episode(make_call("a", [1, 2], [3]), episode_id=name, reward=1.0, input={"word": "x"}) for name in "12"]

    def right(output, answer): ...

    with pytest.raises(RewardError, match=r"the reward right needs answer, .* nor the row's columns \(word\) have it"):
        replay(pair, "tiny-qwen2", right, output_dir=tmp_path / "run")
    with pytest.raises(DatasetError, match="2 of 2 episodes are of a task that is none of its rows, such as task"):
        replay(pair, "tiny-qwen2", right, dataset=[{"word": "x", "answer": 1}], output_dir=tmp_path / "run")
