"""Child processes of ours: calls, errors, deadlines, death of either side."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from rllm_trainer._child import Child, ChildDied, ChildError, to_array

WORKER = """
import os, sys, time
from rllm_trainer._child import child_config, serve, to_array

config = child_config()
if config.get("crash"):
    raise SystemExit("no such model: " + config["crash"])
if config.get("slow"):
    time.sleep(60)

def fail(payload):
    raise LookupError("no row 7")

def die(payload):
    print("engine on fire", flush=True)
    os._exit(3)

serve(
    {
        "double": lambda payload: {"array": to_array(payload["array"]) * 2},
        "environ": lambda payload: {"value": os.environ.get(payload["name"])},
        "group": lambda payload: {"pgid": os.getpgrp(), "pid": os.getpid()},
        "sleep": lambda payload: time.sleep(payload["seconds"]),
        "fail": fail,
        "die": die,
    },
    ready={"model": config["model"]},
)
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Child]]:
    (tmp_path / "child_worker.py").write_text(WORKER)
    children: list[Child] = []

    def run(config: dict[str, object] | None = None, start_timeout: float = 30.0) -> Child:
        child = Child.start(
            "child_worker",
            {"model": "tiny", **(config or {})},
            name="worker",
            log_path=tmp_path / "logs" / "worker.log",
            env={"PYTHONPATH": str(tmp_path), "RLLM_TEST_SECRET": None, "RLLM_TEST_ADDED": "1"},
            start_timeout=start_timeout,
        )
        children.append(child)
        return child

    yield run
    for child in children:
        child.close(timeout=1.0)


def test_arrays_and_config_travel_unchanged(start: Callable[..., Child]) -> None:
    """The config reaches the child, its ready message reaches the parent, and an array keeps its shape and dtype both ways."""
    child = start({"model": "smol"})
    assert child.ready == {"model": "smol"}
    doubled = to_array(child.call("double", {"array": np.array([[1, 2], [3, 4]], dtype=np.int32)})["array"])
    assert doubled.tolist() == [[2, 4], [6, 8]]
    assert doubled.dtype == np.int32


def test_environment_is_a_changed_copy(start: Callable[..., Child], monkeypatch: pytest.MonkeyPatch) -> None:
    """The child sees the parent's variables with the changes asked for; the parent's own stay as they were."""
    monkeypatch.setenv("RLLM_TEST_SECRET", "s")
    monkeypatch.setenv("RLLM_TEST_KEPT", "k")
    child = start()
    seen = [child.call("environ", {"name": f"RLLM_TEST_{x}"})["value"] for x in ("SECRET", "KEPT", "ADDED")]
    assert seen == [None, "k", "1"]
    assert os.environ.get("RLLM_TEST_ADDED") is None


def test_a_failing_call_leaves_the_child_up(start: Callable[..., Child]) -> None:
    """An exception in a handler comes back with its type and message, and the next call works."""
    child = start()
    with pytest.raises(ChildError, match="LookupError: no row 7"):
        child.call("fail")
    with pytest.raises(ChildError, match="got method 'nothing'; expected one of"):
        child.call("nothing")
    assert child.call("environ", {"name": "RLLM_TEST_ADDED"}) == {"value": "1"}


def test_a_late_reply_is_dropped(start: Callable[..., Child]) -> None:
    """A call over its deadline raises; the next call gets its own reply, not the late one."""
    child = start()
    with pytest.raises(TimeoutError, match=r"worker did not answer 'sleep' within 0\.05 s"):
        child.call("sleep", {"seconds": 0.3}, timeout=0.05)
    assert child.call("environ", {"name": "RLLM_TEST_ADDED"}) == {"value": "1"}


def test_death_is_told_with_the_last_log_lines(start: Callable[..., Child]) -> None:
    """A child that ends during a call raises its exit code and last log lines, and so does every later call."""
    child = start()
    with pytest.raises(ChildDied, match=r"(?s)worker ended \(exit code 3\); last lines of .*worker.log:.*engine on fire"):
        child.call("die")
    assert not child.alive
    with pytest.raises(ChildDied, match="exit code 3"):
        child.call("group")


def test_a_child_that_cannot_start_says_why(start: Callable[..., Child]) -> None:
    """A child that ends before it serves raises with what it printed; one that hangs is ended at the deadline."""
    with pytest.raises(ChildDied, match="no such model: /nowhere"):
        start({"crash": "/nowhere"})
    with pytest.raises(ChildDied, match=r"was not ready within 0\.5 s and was ended"):
        start({"slow": True}, start_timeout=0.5)


def test_close_ends_the_group_and_is_repeatable(start: Callable[..., Child]) -> None:
    """The child leads its own process group; after close it is gone and calls say so."""
    child = start()
    group = child.call("group")
    assert group["pgid"] == group["pid"] == child.pid
    child.close()
    child.close()
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)
    with pytest.raises(ChildDied, match="worker was closed"):
        child.call("group")


def test_dies_with_a_killed_parent(tmp_path: Path) -> None:
    """When the parent is killed without a chance to clean up, the child ends too: the pipe that it inherited reaches its end."""
    (tmp_path / "child_worker.py").write_text(WORKER)
    parent = textwrap.dedent(f"""
        import os, pathlib, signal
        from rllm_trainer._child import Child
        child = Child.start("child_worker", {{"model": "m"}}, name="w", log_path=pathlib.Path({str(tmp_path)!r}) / "w.log",
                            env={{"PYTHONPATH": {str(tmp_path)!r}}})
        print(child.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    root = str(Path(__file__).resolve().parents[2])
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": root})
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    assert process.wait(30) == -9
    process.stdout.close()
    _wait_gone(pid)


def _wait_gone(pid: int) -> None:
    fd = _pidfd(pid)
    if fd is None:
        return
    import select

    assert select.select([fd], [], [], 10.0)[0], f"process {pid} still runs 10 s after its parent was killed"
    os.close(fd)


def _pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None
