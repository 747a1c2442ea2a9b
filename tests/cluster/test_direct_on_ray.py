"""The direct engine's ranks may be Ray workers on two nodes: nothing that it computes changes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


def test_two_ranks_on_ray_give_the_gradient_and_the_weights_of_one_process(tmp_path: Path) -> None:
    """A loss over whole trajectories, which verl's own trainer cannot take: loss, gradient and weights within 1e-5 of one process."""
    script = Path(__file__).with_name("direct_on_ray.py")
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=850,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    for name in ("loss", "last_loss"):
        assert found["ray"][name] == pytest.approx(found["process"][name], abs=1e-5)
    assert found["ray"]["grad_norm"] == pytest.approx(found["process"]["grad_norm"], rel=1e-4)
    ours, theirs = (np.load(tmp_path / name / "found.npz") for name in ("ray", "process"))
    assert sorted(ours) == sorted(theirs)
    for name in ours:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=0, atol=1e-5, err_msg=name)
    assert (tmp_path / "ray" / "checkpoint" / "random-1.safetensors").exists()
