"""Parts of a real run on Ray are killed: it goes on, or ends with the cause; nothing is left, and a resumed run takes the same step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file

from rllm_trainer.config import make_settings
from rllm_trainer.engine.verl import VerlEngine
from rllm_trainer.models import resolve_model
from rllm_trainer.rollout.record import read_lines, read_rollouts

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(2400)]

GIVEN: dict[str, Any] = {
    "steps": 2,
    "batch_tasks": 2,
    "group_size": 3,
    "max_model_len": 512,
    "lr": 2e-3,
    "eps": 1e-5,
    "save_every": 1,
    "lora": {"r": 4, "alpha": 8},
    "kl_coef": 0.05,
    "rollout_timeout": 60.0,
}
NOBODY = "http://127.0.0.1:9"
"""A proxy that does not answer."""
PARTS = {
    "WorkerDict": ("training rank 1 on Ray has ended: ActorDiedError", ""),
    "rllm_cpu_replica": ("rollout replica 1 on Ray has ended: ActorDiedError", "version 1: "),
    "Front": ("front ", "front of tiny"),
    "TransferQueueController": ("verl's queue on Ray has ended: ActorDiedError", None),
    "StorageUnit": ("store 0 of verl's queue on Ray has ended: ActorDiedError", None),
    "LoadBalancer": ("load balancer 0 on Ray has ended: ActorDiedError", None),
    "Mailbox": ("the run's mailbox on Ray ended: ActorDiedError", None),
    "Head": ("verl's trainer on Ray ended: ActorDiedError", ""),
}
"""What is killed -> how the error begins, and what is among the last log lines that it tells; None: such a process writes nothing."""


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the runs."""

    refused: list[dict[str, Any]]
    """Four that ask for what the cluster has not."""
    killed: dict[str, dict[str, Any]]
    """Part -> the run in which it was killed. Before the rank was, in the same run, an app worker was, too, and an app hung."""
    whole: dict[str, Any]
    """The one that ends well in the folder in which a rank and a replica were killed."""
    shown: str
    """On the terminal."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def ended(folder: Path) -> Ended:
    """Every run on one cluster, each process of which has a proxy in its environment that does not answer."""
    unset = ("CUDA_VISIBLE_DEVICES", "no_proxy", "NO_PROXY")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    proxies = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), NOBODY)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__).with_name("faults_on_ray.py")), str(folder), json.dumps(GIVEN)],
        capture_output=True,
        text=True,
        timeout=2300,
        env=environment | proxies | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    found = json.loads(done.stdout.splitlines()[-1])
    killed = dict(zip(PARTS, found[4:-1], strict=True))
    return Ended(refused=found[:4], killed=killed, whole=found[-1], shown=done.stderr)


def test_what_the_users_ray_does_not_have_is_refused_by_name(ended: Ended) -> None:
    """Devices, CPUs, settings for a Ray that runs already, a queue of one's own: one sentence each, before anything is started."""
    devices, cpus, settings, alone = ended.refused
    assert devices["error"].startswith("the layout needs 2 nodes with 3 GPUs each and 6 in all; the cluster has nodes with [1, 1] GPUs")
    assert cpus["error"].startswith(
        "the layout needs 2 nodes with 3 CPUs each and 51 in all, as Ray counts them; the cluster has nodes with"
    )
    assert alone["error"].startswith("another run of verl's trainer is on this Ray cluster, which has one queue for all")
    assert settings["error"].startswith("ray=['num_gpus'] would have no effect: Ray is running in this process already")


def test_a_killed_app_worker_costs_nothing_but_time_and_a_hung_app_its_rollout(ended: Ended, folder: Path) -> None:
    """What the worker ran is tried again: the first step has all six rollouts, and all but the hung one have their rewards."""
    assert (folder / "done-worker and app").exists()
    first = read_rollouts(folder / "run", steps=[1])[1]
    assert len(first) == 6
    (hung,) = [rollout for rollout in first if rollout.fault is not None]
    assert (hung.fault, hung.reason) == ("infrastructure", "it ran past rollout_timeout=60 s")
    assert all(rollout.reward is not None for rollout in first if rollout is not hung)
    assert "threading.Event().wait()" in ended.shown


@pytest.mark.parametrize("part", PARTS)
def test_a_part_that_is_killed_ends_the_run_with_its_name(ended: Ended, folder: Path, part: str) -> None:
    """The error says which process it was and, of one that writes any, what its log ends with."""
    begins, last = PARTS[part]
    error = ended.killed[part].get("error", "")
    assert (folder / f"done-{part}").exists() or (folder / "other" / f"done-{part}").exists()
    assert error.startswith(begins), error
    assert "ActorDiedError" in error
    if last is not None:
        assert "Its last log lines (worker-" in error
        assert last in error.partition("Its last log lines (worker-")[2], error


def test_no_run_leaves_anything_on_the_cluster(ended: Ended) -> None:
    """Every CPU and GPU is free again, no named actor and none of its processes is there, whatever the run ended with."""
    assert [one["left"] for one in [*ended.refused, *ended.killed.values(), ended.whole]] == [[]] * 13


def test_a_resumed_run_takes_the_step_that_was_left(ended: Ended, folder: Path, direct_batch: Any) -> None:
    """The rows that the killed runs had drawn, and what one engine makes of both steps: adapter, moments, KL term and schedule hold."""
    drawn = [sorted({line.task_id for line in read_lines(folder / "run") if line.step == step}) for step in (1, 2)]
    assert [len(tasks) for tasks in drawn] == [2, 2]
    assert not set(drawn[0]) & set(drawn[1])
    lines = {int(line["step"]): line for line in ended.whole["metrics"] if line["step"] > 0}
    settings = make_settings({**GIVEN, "threads": 1})
    with VerlEngine.start(resolve_model("tiny-qwen2"), settings, folder / "direct", device="cpu") as engine:
        for step in (1, 2):
            batch = direct_batch(read_rollouts(folder / "run", steps=[step])[step], step, settings, engine)
            report = engine.update(batch, lr=2e-3)
            assert lines[step]["loss"] == pytest.approx(report.loss, abs=1e-5)
            assert lines[step]["grad_norm"] == pytest.approx(report.grad_norm, rel=1e-4)
            assert lines[step]["kl_loss"] == pytest.approx(report.metrics["kl_loss"], abs=1e-6)
        direct = load_file(engine.export_weights(2, merged=True).path)
    assert lines[1]["kl_loss"] == pytest.approx(0.0, abs=1e-6)
    assert lines[2]["kl_loss"] > 1e-6
    trained = load_file(Path(ended.whole["model"]) / "model.safetensors")
    assert trained.keys() == direct.keys()
    for name, value in direct.items():
        np.testing.assert_allclose(trained[name], value, rtol=0, atol=1e-5, err_msg=name)
