"""A process of Ray's that dies is named while nobody waits for it, with what it said last."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


def test_a_dead_actor_is_named_once_with_its_last_words() -> None:
    """Of three, one busy for ten minutes and one idle, the killed one is told: its name, process and node, and the end of its log."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__).with_name("watched_actors.py"))],
        capture_output=True,
        text=True,
        timeout=800,
        env={name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert (told["before"], told["more"], told["of_others"]) == (0, 0, "")
    assert told["found"].startswith("the third has ended: ActorDiedError: process ")
    assert " ended without a word to Ray: it was killed (kill -9, " in told["found"]
    assert "the last that it said" in told["found"]
    assert "Its last log lines (worker-" in told["found"]
