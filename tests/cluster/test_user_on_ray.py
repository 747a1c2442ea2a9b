"""The process that called ``fit`` is stopped or killed, or its disk is full: Ray has nothing left of the run, and a new process goes on."""

from __future__ import annotations

import json
import os
import signal
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
from rllm_trainer.rollout.record import read_lines

pytestmark = [pytest.mark.faults, pytest.mark.timeout(2400)]

GIVEN: dict[str, Any] = {"batch_tasks": 2, "group_size": 3, "max_model_len": 512, "lr": 5e-4, "eps": 1e-5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("user")


@pytest.fixture(scope="module")
def ended(folder: Path) -> list[dict[str, Any]]:
    """In one folder a run that is terminated, one out of disk, one killed in a checkpoint, one that ends; in another two that are ahead."""
    script = Path(__file__).with_name("user_on_ray.py")
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    done = subprocess.run(
        ["unshare", "--mount", "--map-root-user", sys.executable, "-W", "ignore", str(script), str(folder)],
        capture_output=True,
        text=True,
        timeout=2300,
        env=environment | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return json.loads(done.stdout.splitlines()[-1])


def require_direct(found: dict[str, Any], model: Path, trained: dict[int, Any], folder: Path, direct_batch: Any, **given: Any) -> None:
    """Every step's loss and gradient norm, and the weights after the last one, are those of one engine that takes all of them."""
    settings = make_settings({**GIVEN, **given, "threads": 1})
    lines = {int(line["step"]): line for line in found["metrics"] if line["step"] > 0}
    assert sorted(lines) == sorted(trained)
    with VerlEngine.start(resolve_model("tiny-qwen2"), settings, folder, device="cpu") as engine:
        for step in sorted(trained):
            report = engine.update(direct_batch(trained[step], step, settings, engine), lr=GIVEN["lr"])
            assert lines[step]["loss"] == pytest.approx(report.loss, abs=1e-5)
            assert lines[step]["grad_norm"] == pytest.approx(report.grad_norm, rel=1e-3)
        direct = load_file(engine.export_weights(len(trained)).path)
    ours = load_file(model / "model.safetensors")
    assert ours.keys() == direct.keys()
    for name, value in direct.items():
        np.testing.assert_allclose(ours[name], value, rtol=0, atol=1e-5, err_msg=name)


def test_no_run_leaves_anything_on_the_cluster(ended: list[dict[str, Any]]) -> None:
    """No CPU or GPU set aside, no named actor, no process, though the one that had started them is gone."""
    assert [one["left"] for one in ended] == [[]] * 6


def test_sigterm_ends_at_a_whole_step(ended: list[dict[str, Any]]) -> None:
    """In the second step: the exit code says so, and how to go on is told."""
    assert ended[0]["code"] == 128 + signal.SIGTERM, ended[0]["err"]
    assert "resume=True" in ended[0]["err"]


def test_a_full_disk_is_the_cause_that_is_told(ended: list[dict[str, Any]]) -> None:
    """There was room for the second step's rollouts, and for half of its checkpoint."""
    assert ended[1]["code"] == 1
    assert "No space left on device" in ended[1]["err"]


def test_after_all_of_them_the_run_is_the_same_run(
    ended: list[dict[str, Any]], folder: Path, optimizer_steps: Any, trained_rollouts: Any, direct_batch: Any
) -> None:
    """Terminated, out of disk, killed in a checkpoint: the second step is on the rows drawn for it, from the first one's moments."""
    assert [one["code"] for one in ended[2:4]] == [-signal.SIGKILL, 0], ended[3]["err"]
    kept = folder / "kept"
    drawn = [{line.task_id for line in read_lines(kept) if line.step == step} for step in (1, 2)]
    assert [len(tasks) for tasks in drawn] == [2, 2]
    assert not drawn[0] & drawn[1]
    assert [optimizer_steps(kept, step, ranks=2) for step in (1, 2)] == [{1.0}, {2.0}]
    require_direct(ended[3], kept / "model", trained_rollouts(kept), folder / "direct", direct_batch)


def test_a_run_that_was_ahead_trains_each_group_once(
    ended: list[dict[str, Any]], folder: Path, optimizer_steps: Any, trained_rollouts: Any, direct_batch: Any
) -> None:
    """Killed with groups begun for later steps: of the six that were drawn for three steps none is lost, and none is trained twice."""
    assert [one["code"] for one in ended[4:]] == [-signal.SIGKILL, 0], ended[5]["err"]
    run_dir = folder / "ahead" / "run"
    trained = trained_rollouts(run_dir)
    numbers = {step: [one.row["number"] for one in rollouts] for step, rollouts in trained.items()}
    assert {step: (len(of), len(set(of))) for step, of in numbers.items()} == {1: (6, 2), 2: (6, 2), 3: (6, 2)}
    assert sorted(number for of in numbers.values() for number in set(of)) == [0, 1, 2, 3, 4, 5]
    assert [optimizer_steps(run_dir, step, ranks=2) for step in (1, 2, 3)] == [{1.0}, {2.0}, {3.0}]
    require_direct(ended[5], run_dir / "model", trained, folder / "direct-ahead", direct_batch, staleness=1)
