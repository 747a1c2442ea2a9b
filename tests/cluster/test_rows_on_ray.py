"""On Ray, too, rows are drawn as steps need them, and each is trained once: without a known end, at the end, and over an interruption."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """What the program beside this file found, and what its runs printed."""
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__).with_name("rows_on_ray.py")), str(tmp_path_factory.mktemp("rows"))],
        capture_output=True,
        text=True,
        timeout=1700,
        env=environment | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return json.loads(done.stdout.splitlines()[-1]), done.stdout + done.stderr


@pytest.fixture(scope="module")
def found(told: tuple[dict[str, Any], str]) -> dict[str, Any]:
    return told[0]


def each(found: dict[str, Any]) -> list[list[int]]:
    """(number of the row, its trained episodes), over all steps."""
    return sorted(pair for pairs in found["trained"].values() for pair in pairs)


def test_an_iterable_without_a_known_end_is_drawn_step_by_step(found: dict[str, Any]) -> None:
    """Two rows before the first step, two after it; what the iterable raises then ends the run, after the last whole step."""
    assert found["drawn"] == [0, 0, 1, 1]
    assert (found["breaks"]["kind"], found["breaks"]["error"]) == ("LookupError", "the well is dry")
    assert found["breaks"]["trained"] == {"1": [[0, 2], [1, 2]], "2": [[2, 2], [3, 2]]}


def test_rows_that_run_out_end_the_run_with_what_is_due_after_the_last_step(told: tuple[dict[str, Any], str]) -> None:
    """Continued, it passes over the rows that are done; of nine steps asked for one is left, and a row that makes no batch."""
    found, printed = told
    assert found["ends"]["steps"] == [1, 2, 3, 3]
    assert found["ends"]["after"]
    assert each(found["ends"]) == [[0, 2], [1, 2], [2, 2], [3, 2], [4, 2], [5, 2]]
    assert "continuing after step 2" in printed
    assert "the rows ran out after step 3" in printed
    assert "got a batch of 1 rows where the first has 2" in printed


def test_calls_of_an_evaluation_are_no_call_sites_of_training(told: tuple[dict[str, Any], str]) -> None:
    """The greedy evaluation before the first step is not taken for an app that trains at temperature 0."""
    assert "use temperature 0" not in told[1]


def test_a_run_ahead_that_was_stopped_trains_what_it_had_drawn(found: dict[str, Any]) -> None:
    """A batch is under way beside each step; stopped in the third and continued, all eight rows are trained, each once."""
    assert found["ahead breaks"]["kind"] == "LookupError"
    assert list(found["ahead ends"]["trained"]) == ["1", "2", "3", "4"]
    assert each(found["ahead ends"]) == [[row, 2] for row in range(8)]


def test_a_run_ahead_that_was_killed_trains_what_it_had_drawn(found: dict[str, Any]) -> None:
    """Its rank is killed after the first checkpoint; continued, all six rows are trained, each once."""
    assert found["killed"]["kind"] == "EngineError"
    assert "training rank 0 on Ray has ended" in found["killed"]["error"]
    assert found["killed, resumed"]["steps"] == [1, 2, 3]
    assert each(found["killed, resumed"]) == [[row, 2] for row in range(6)]


def test_no_row_is_rolled_out_for_a_step_that_there_is_not(found: dict[str, Any]) -> None:
    """verl draws a batch at every step; here the last ones draw none, and each rollout is on file for the batch of its row."""
    assert found["killed, resumed"]["drawn"] == [[1, 0], [1, 1], [2, 2], [2, 3], [3, 4], [3, 5]]
    assert found["ahead ends"]["drawn"] == [[row // 2 + 1, row] for row in range(8)]
