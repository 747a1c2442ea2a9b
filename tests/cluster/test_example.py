"""The example on one machine without accelerators: it starts Ray, trains on two ranks to its end, and leaves nothing running."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

SCRIPT = Path(__file__).parents[2] / "examples" / "cluster" / "run.py"
MARK = "RLLM_TEST_MARK"


def left_of(mark: str) -> list[str]:
    """Command lines of the processes that were started, directly or not, with this mark in their environment."""
    found: list[str] = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def test_the_example_trains_on_two_ranks_of_this_machine(tmp_path: Path) -> None:
    """Evaluations, two steps, a model; after it neither Ray nor any of its workers is there."""
    mark = uuid.uuid4().hex
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPT), "--cpu", "--steps", "2", "--out", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=1100,
        env=os.environ | {MARK: mark, "HF_HUB_OFFLINE": "1"},
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["step"] > 0] == [1, 2]
    assert all(line["grad_norm"] > 0 for line in lines if line["step"] > 0)
    result = json.loads((tmp_path / "run" / "result.json").read_bytes())
    assert len(result["before"]["sampled"]["tasks"]) == len(result["after"]["sampled"]["tasks"]) == 8
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()
    ends = time.monotonic() + 60
    while (left := left_of(mark)) and time.monotonic() < ends:
        time.sleep(0.2)
    assert left == []
