"""The direct engine's ranks may be Ray workers on two nodes: nothing that it computes changes."""

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

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("direct")


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Any]:
    """What the program beside this file printed."""
    script = Path(__file__).with_name("direct_on_ray.py")
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), str(folder)],
        capture_output=True,
        text=True,
        timeout=850,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_two_ranks_on_ray_give_the_gradient_and_the_weights_of_one_process(found: dict[str, Any], folder: Path) -> None:
    """A loss over whole trajectories, which verl's own trainer cannot take: loss, gradient and weights within 1e-5 of one process."""
    for name in ("loss", "last_loss"):
        assert found["ray"][name] == pytest.approx(found["process"][name], abs=1e-5)
    assert found["ray"]["grad_norm"] == pytest.approx(found["process"]["grad_norm"], rel=1e-4)
    ours, theirs = (np.load(folder / name / "found.npz") for name in ("ray", "process"))
    assert sorted(ours) == sorted(theirs)
    for name in ours:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=0, atol=1e-5, err_msg=name)
    assert (folder / "ray" / "checkpoint" / "random-1.safetensors").exists()


def test_a_run_on_ray_is_the_run_of_one_process(found: dict[str, Any]) -> None:
    """``fit(engine="direct-ray")`` to its end: the same tokens, rewards, losses and gradient norms, and the same model within 1e-5."""
    ours, theirs = ([line for line in found[name]["metrics"] if line["step"] > 0] for name in ("ray", "process"))
    assert [line["step"] for line in ours] == [line["step"] for line in theirs] == [1, 2]
    for mine, its in zip(ours, theirs, strict=True):
        for name in ("reward/mean", "loss", "grad_norm", "batch/denominator"):
            assert mine[name] == pytest.approx(its[name], rel=1e-4, abs=1e-5), name
        assert mine["grad_norm"] > 0
    mine, its = (load_file(Path(found[name]["model"]) / "model.safetensors") for name in ("ray", "process"))
    assert mine.keys() == its.keys()
    for name, value in its.items():
        np.testing.assert_allclose(mine[name], value, rtol=0, atol=1e-5, err_msg=name)
