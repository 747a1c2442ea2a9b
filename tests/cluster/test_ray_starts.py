"""Ray is started with the user's options and no others; where it does not come up, that is one sentence, and nothing of it stays."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What the program beside this file printed."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__).with_name("ray_starts.py"))],
        capture_output=True,
        text=True,
        timeout=550,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_options_for_ray_reach_it_as_they_are(found: dict[str, Any]) -> None:
    """Cores, devices, resources of one's own and the namespace; where the user says nothing, the layout does."""
    assert found["resources"] == {"CPU": 5.0, "GPU": 3.0, "tape": 2.0}
    assert found["namespace"] == "of-the-user"
    assert found["running"]


def test_an_option_that_ray_does_not_know_is_refused_in_its_words(found: dict[str, Any]) -> None:
    """With what was given."""
    assert found["unknown"].startswith("SettingError: ray={'num_cpu': 5}: Ray refuses it: ")
    assert "num_cpu" in found["unknown"].partition("Ray refuses it: ")[2]


def test_a_start_that_takes_too_long_is_told_with_what_to_do(found: dict[str, Any]) -> None:
    """What was waited for, how long, and what helps; the processes that had come up by then are gone."""
    said = found["did not come up"]
    assert said.startswith(
        "EngineError: Ray did not come up on this machine with ray={}: Exception: The current node timed out during startup."
    )
    assert "it gives each of its processes some 30 s: end what keeps the machine busy, or start Ray before with `ray start --head`" in said
    assert found["left"] == []


def test_ray_ends_with_what_it_was_started_for(found: dict[str, Any]) -> None:
    """And the environment is what it was, also where no device may be seen; a rank that is closed again starts no other Ray."""
    assert found["shut"]
    assert found["environment"]
