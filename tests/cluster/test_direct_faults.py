"""A killed rank of the direct engine on Ray ends the run with its name, node and last lines; the same cluster is looked at beforehand."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the program beside this file printed."""
    folder = tmp_path_factory.mktemp("direct-faults")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__).with_name("direct_faults.py")), str(folder)],
        capture_output=True,
        text=True,
        timeout=850,
        env={name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"} | {"HF_HUB_OFFLINE": "1"},
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return json.loads(done.stdout.splitlines()[-1])


def test_a_killed_rank_ends_the_run_with_its_name_and_node(found: dict[str, Any]) -> None:
    """Not with what its peer says of the connection, and not with Ray's page."""
    error, pid = found["error"], found["killed"][0]
    assert re.match(r"the engine failed in '\w+': engine rank [01] on Ray has ended: ActorDiedError: ", error)
    assert f" ActorDiedError: process {pid} on node {found['node']} ended without a word to Ray: it was killed" in error
    assert "class_name" not in error


def test_nothing_of_the_run_stays_on_the_cluster(found: dict[str, Any]) -> None:
    """The other rank is gone, and its CPU is free."""
    assert found["left"] == {}


def test_the_command_looks_at_a_running_cluster(found: dict[str, Any]) -> None:
    """Fit for two nodes; too few CPUs for many app workers, and too few nodes, are told before a run would be."""
    fit, busy, small = found["preflight"]
    assert fit == [0, "the cluster is fit for the run"]
    assert busy[0] == 1
    assert busy[1].startswith(
        "WRONG all: the layout needs 2 nodes with 3 CPUs each and 75 in all, as Ray counts them; the cluster has nodes with"
    )
    assert small[0] == 1
    assert "WRONG all: 2 nodes have 1 GPUs or more, and the layout needs 3" in small[1]


def test_a_cluster_that_runs_takes_only_what_can_be_said_of_it(found: dict[str, Any]) -> None:
    """A namespace is the user's; cores are the cluster's own, and Ray's refusal says so. Attached to, it is let go at the end."""
    assert found["refused"].startswith("SettingError: ray={'address': ")
    assert "num_cpus and num_gpus must not be provided" in found["refused"]
    assert found["namespace"] == "of-the-user"
    assert found["shut"]
