"""Parts of a real run on Ray are killed: it goes on, or ends with the cause; nothing is left, and a resumed run takes the same step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from rllm_trainer.config import make_settings
from rllm_trainer.engine.verl import VerlEngine
from rllm_trainer.models import resolve_model
from rllm_trainer.preparation import make_samples, prepare
from rllm_trainer.rollout.record import groups_of, read_lines, read_rollouts

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

GIVEN: dict[str, Any] = {
    "steps": 2,
    "batch_tasks": 2,
    "group_size": 3,
    "max_model_len": 512,
    "lr": 2e-3,
    "save_every": 1,
    "lora": {"r": 4, "alpha": 8},
    "kl_coef": 0.05,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def ended(folder: Path) -> list[dict[str, Any]]:
    """Four runs that ask for what the cluster has not; one whose app worker and rank, one whose replica is killed; one that ends well."""
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__).with_name("faults_on_ray.py")), str(folder), json.dumps(GIVEN)],
        capture_output=True,
        text=True,
        timeout=1700,
        env=environment | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return json.loads(done.stdout.splitlines()[-1])


def test_what_the_users_ray_does_not_have_is_refused_by_name(ended: list[dict[str, Any]]) -> None:
    """Devices, CPUs, settings for a Ray that runs already, a queue of one's own: one sentence each, before anything is started."""
    devices, cpus, settings, alone = ended[:4]
    assert devices["error"].startswith("the layout needs 2 nodes with 3 GPUs each and 6 in all; the cluster has nodes with [1, 1] GPUs")
    assert cpus["error"].startswith(
        "the layout needs 2 nodes with 3 CPUs each and 51 in all, as Ray counts them; the cluster has nodes with"
    )
    assert alone["error"].startswith("another run of verl's trainer is on this Ray cluster, which has one queue for all")
    assert settings["error"].startswith("ray=['num_gpus'] would have no effect: Ray is running in this process already")


def test_a_killed_app_worker_costs_nothing_but_time(ended: list[dict[str, Any]], folder: Path) -> None:
    """Its rollouts are tried again: the first step has all six, each with its reward."""
    assert (folder / "killed-app worker").exists()
    first = read_rollouts(folder / "run", steps=[1])[1]
    assert len(first) == 6
    assert all(rollout.fault is None and rollout.reward is not None for rollout in first)


def test_a_killed_rank_or_replica_ends_the_run_with_its_name(ended: list[dict[str, Any]], folder: Path) -> None:
    """The error says which process it was and what its log ends with."""
    rank, replica = ended[4:6]
    assert rank["error"].startswith("training rank 1 on Ray has ended: ActorDiedError")
    assert replica["error"].startswith("rollout replica 1 on Ray has ended: ActorDiedError")
    assert "Its last log lines (worker-" in rank["error"]
    assert (folder / "killed-WorkerDict").exists()
    assert (folder / "killed-rllm_cpu_replica").exists()


def test_no_run_leaves_anything_on_the_cluster(ended: list[dict[str, Any]]) -> None:
    """Every CPU and GPU is free again, and no named actor is there, whatever the run ended with."""
    assert [one["left"] for one in ended] == [{}] * 7


def test_a_resumed_run_takes_the_step_that_was_left(ended: list[dict[str, Any]], folder: Path) -> None:
    """The rows that the killed runs had drawn, and what one engine makes of both steps: adapter, moments, KL term and schedule hold."""
    drawn = [sorted({line.task_id for line in read_lines(folder / "run") if line.step == step}) for step in (1, 2)]
    assert [len(tasks) for tasks in drawn] == [2, 2]
    assert not set(drawn[0]) & set(drawn[1])
    lines = {int(line["step"]): line for line in ended[6]["metrics"] if line["step"] > 0}
    settings = make_settings({**GIVEN, "threads": 1})
    with VerlEngine.start(resolve_model("tiny-qwen2"), settings, folder / "direct", device="cpu") as engine:
        for step in (1, 2):
            rollouts = read_rollouts(folder / "run", steps=[step])[step]
            samples = make_samples(rollouts, settings=settings, vocab_size=engine.vocab_size)
            batch = prepare(groups_of(rollouts), samples, step=step, version=step - 1, settings=settings, engine=engine).batch
            report = engine.update(batch, lr=2e-3)
            assert lines[step]["loss"] == pytest.approx(report.loss, abs=1e-5)
            assert lines[step]["grad_norm"] == pytest.approx(report.grad_norm, rel=1e-4)
            assert lines[step]["kl_loss"] == pytest.approx(report.metrics["kl_loss"], abs=1e-6)
        direct = load_file(engine.export_weights(2, merged=True).path)
    assert lines[1]["kl_loss"] == pytest.approx(0.0, abs=1e-6)
    assert lines[2]["kl_loss"] > 1e-6
    trained = load_file(Path(ended[6]["model"]) / "model.safetensors")
    assert trained.keys() == direct.keys()
    for name, value in direct.items():
        np.testing.assert_allclose(trained[name], value, rtol=0, atol=1e-5, err_msg=name)
