"""The whole loop on the tiny model: app, OpenAI client, local server, verl, swap. The reward must rise."""

import asyncio
import json
import os
import random
import signal
import threading

import numpy as np
import openai
import psutil
import pytest

import rllm_trace as rllm
from rllm_trainer import fit
from rllm_trainer.exceptions import CheckpointError
from rllm_trainer.rollout.record import read_lines, read_rollouts
from rllm_trainer.samples import build_samples

ROWS = [{"word": f"say {i}"} for i in range(32)]
HELD_OUT = [{"word": f"tell {i}"} for i in range(16)]
SMALL = {"model": "tiny-qwen2", "lr": 5e-3, "batch_tasks": 4, "group_size": 8, "threads": 1, "progress": False, "save_every": 2}

client = openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="the app's own key", max_retries=0)


@rllm.workflow
def app(word):
    reply = client.chat.completions.create(
        model="gpt-4o-mini", messages=[{"role": "user", "content": word}], max_tokens=10, temperature=1.0
    )
    return reply.choices[0].message.content


@rllm.reward
def lowercase(output):
    """The share of lower-case letters in the reply."""
    return sum(letter.islower() for letter in output) / max(1, len(output))


def state_of_process():
    return {
        "environment": dict(os.environ),
        "random": random.getstate(),
        "numpy": repr(np.random.get_state()),
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)],
        "children": psutil.Process().children(recursive=True),
        "folder": os.getcwd(),
    }


def threads_of_ours():
    """Threads of ours other than the recorder's, which lives as long as the process."""
    return {t for t in threading.enumerate() if t.name.startswith("rllm") and t.name != "rllm-trace-writer"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("runs") / "small"
    threads, before = threads_of_ours(), state_of_process()
    result = fit(app, ROWS, eval_dataset=HELD_OUT, output_dir=run_dir, steps=8, **SMALL)
    after, left = state_of_process(), threads_of_ours() - threads
    return result, before, after, left


def test_the_reward_rises(trained):
    """Eight steps on the tiny model raise the held-out reward clearly, sampled and greedy."""
    result, *_ = trained
    assert result.before.sampled.mean < 0.25
    assert result.rise.sampled.mean > 0.2
    assert result.rise.sampled.low > 0.1
    assert result.after.sampled.mean == pytest.approx(result.before.sampled.mean + result.rise.sampled.mean)
    assert result.after.greedy.mean > result.before.greedy.mean
    assert result.warnings == []


def test_every_step_swapped_proven_weights(trained):
    """Each step trained every sampled token at the version that sampled it, and its swap was proved by logprobs."""
    result, *_ = trained
    lines = [line for line in result.metrics if "loss" in line]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [line["version"] for line in lines] == [1, 2, 3, 4, 5, 6, 7, 8]
    for line in lines:
        assert line["tokens/trained_share"] == 1
        assert line["tokens/stale"] == 0
        assert line["swap/proved_by_logprobs"] == 1
        assert line["rollout/logprob_diff_max"] < 1e-4
        assert line["rollouts/excluded"] == 0


def test_the_run_folder_holds_the_run(trained):
    """Settings, metrics, every episode, checkpoints, the curve, the result and the model are in the run folder."""
    result, *_ = trained
    folder = result.run_dir
    assert json.loads((folder / "settings.json").read_text())["settings"]["lr"] == 5e-3
    assert json.loads((folder / "result.json").read_text())["rise"]["sampled"]["mean"] == pytest.approx(result.rise.sampled.mean)
    assert (folder / "reward_curve.png").read_bytes()[:4] == b"\x89PNG"
    assert len(list((folder / "tensorboard").iterdir())) == 1
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["step-000006", "step-000008"]
    lines = read_lines(folder)
    assert {split: sum(line.split == split for line in lines) for split in ("train", "eval", "eval_greedy")} == {
        "train": 8 * 32,
        "eval": 2 * 16,
        "eval_greedy": 2 * 16,
    }
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {p.name for p in result.model_path.iterdir()}
    assert not (result.model_path / "optimizer.safetensors").exists()


def test_what_was_trained_can_be_read_back(trained):
    """Rewards and trained tokens of a step follow from the episodes on file alone."""
    result, *_ = trained
    first = read_rollouts(result.run_dir, steps=[1])[1]
    (line,) = [line for line in result.metrics if line["step"] == 1]
    assert line["reward/mean"] == pytest.approx(sum(lowercase.__wrapped__(r.episode.output) for r in first) / 32)
    assert line["tokens/trained"] == sum(build_samples(r.episode).counters.trained_tokens for r in first)
    assert {call.endpoint for r in first for call in r.episode.calls} == {"policy"}
    assert "own key" not in (result.run_dir / "episodes.jsonl").read_text()


def test_the_apps_process_is_as_it_was(trained):
    """Environment, random states, signal handlers, working folder and children are what they were; no thread of ours stays."""
    _, before, after, left = trained
    assert after == before
    for thread in left:
        thread.join(10)
    assert not any(thread.is_alive() for thread in left)


def test_the_trained_model_can_be_trained_again(trained, tmp_path):
    """The model of one run is the start of another, in the same process; its first rewards are the old run's last."""
    result, *_ = trained
    again = fit(app, ROWS, output_dir=tmp_path / "again", steps=1, **SMALL | {"model": result.model_path})
    assert again.metrics[0]["reward/mean"] > result.before.sampled.mean + 0.15
    assert again.before is None


def test_ctrl_c_and_resume(tmp_path):
    """Ctrl-C ends a run with what it has on file; resumed inside a running event loop, it takes up the step that it was in."""
    calls = []
    lock = threading.Lock()

    def interrupted(word):
        with lock:
            calls.append(word)
            if len(calls) == 2 * 32 + 20:
                os.kill(os.getpid(), signal.SIGINT)
        return app(word)

    settings = SMALL | {"output_dir": tmp_path / "run", "reward": lowercase, "steps": 4, "save_every": 100, "concurrency": 4}
    with pytest.raises(KeyboardInterrupt):
        fit(interrupted, ROWS, **settings)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    begun = sum(line.step == 3 for line in read_lines(tmp_path / "run"))
    assert 8 <= begun < 32
    with pytest.raises(CheckpointError, match="already holds a run; continue it with resume=True"):
        fit(interrupted, ROWS, **settings)
    with pytest.raises(CheckpointError, match="had seed=0, and now it is 1"):
        fit(interrupted, ROWS, resume=True, seed=1, **settings)

    async def notebook():
        return fit(interrupted, ROWS, resume=True, **settings)

    result = asyncio.run(notebook())
    assert [line["step"] for line in result.metrics] == [1, 2, 3, 4]
    third = [line for line in read_lines(tmp_path / "run") if line.step == 3]
    assert len(third) == 32
    assert {line.policy_version for line in third} == {2}
