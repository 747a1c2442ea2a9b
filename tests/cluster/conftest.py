"""One run on a simulated cluster for all tests that look at what it left, and the direct engine to compare it with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ClusterRun = Callable[..., dict[str, Any]]

_SCRIPT = Path(__file__).with_name("two_nodes.py")
_LIMIT = 900


@pytest.fixture(scope="session")
def cluster_run() -> ClusterRun:
    """``cluster_run(run_dir, steps=2, ...)``: what the run printed, as a dict; fails with its last lines."""
    return _run


def _run(run_dir: Path, *, eval_rows: int = 0, app: str = "add_up", **settings: Any) -> dict[str, Any]:
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
