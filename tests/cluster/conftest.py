"""One run on a simulated cluster for all tests that look at what it left, and the direct engine to compare it with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rllm_trainer.config import Settings
from rllm_trainer.credit_log import read_credit
from rllm_trainer.engine.verl import VerlEngine
from rllm_trainer.preparation import make_samples, prepare
from rllm_trainer.rollout.record import groups_of, read_rollouts
from rllm_trainer.types import Batch, Rollout

ClusterRun = Callable[..., dict[str, Any]]

_SCRIPT = Path(__file__).with_name("two_nodes.py")
_LIMIT = 900


@pytest.fixture(scope="session")
def trained_rollouts() -> Callable[[Path], dict[int, list[Rollout]]]:
    """``trained_rollouts(run_dir)``: step -> the rollouts that it trained, by the run's record of its credit."""
    return _trained_rollouts


def _trained_rollouts(run_dir: Path) -> dict[int, list[Rollout]]:
    known = {one.episode.id: one for found in read_rollouts(run_dir).values() for one in found if one.episode is not None}
    trained: dict[int, dict[str, Rollout]] = {}
    for line in read_credit(run_dir):
        trained.setdefault(line.step, {})[line.episode_id] = known[line.episode_id]
    return {step: list(found.values()) for step, found in trained.items()}


@pytest.fixture(scope="session")
def direct_batch() -> Callable[..., Batch]:
    """``direct_batch(rollouts, step, settings, engine)``: what the direct engine makes of these."""
    return _direct_batch


def _direct_batch(rollouts: Sequence[Rollout], step: int, settings: Settings, engine: VerlEngine) -> Batch:
    samples = make_samples(rollouts, settings=settings, vocab_size=engine.vocab_size)
    return prepare(groups_of(rollouts), samples, step=step, version=step - 1, settings=settings, engine=engine).batch


@pytest.fixture(scope="session")
def optimizer_steps() -> Callable[..., set[float]]:
    """``optimizer_steps(run_dir, step, ranks=2)``: how many steps AdamW has counted for each parameter in that checkpoint of verl's."""
    return _optimizer_steps


def _optimizer_steps(run_dir: Path, step: int, *, ranks: int) -> set[float]:
    import torch

    files = sorted((run_dir / "checkpoints" / f"global_step_{step}" / "actor").glob("optim_world_size_*_rank_*.pt"))
    assert len(files) == ranks
    counted = [torch.load(file, weights_only=False)["state"].values() for file in files]
    return {float(state["step"]) for states in counted for state in states}


@pytest.fixture(scope="session")
def cluster_run() -> ClusterRun:
    """``cluster_run(run_dir, steps=2, ...)``: what the run printed, as a dict; fails with its last lines."""
    return _run


def _run(run_dir: Path, *, eval_rows: int = 0, app: str = "add_up_and_look", **settings: Any) -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(_SCRIPT), str(run_dir), json.dumps(settings), str(eval_rows), app],
        capture_output=True,
        text=True,
        timeout=_LIMIT,
        env=environment | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return json.loads(done.stdout.splitlines()[-1])
