"""A start that nobody waits for any more: it ends, with every process that it began."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest

from rllm_trainer._child import Child, ChildDied
from rllm_trainer._starts import Starts, starting
from rllm_trainer.exceptions import ServerError
from rllm_trainer.serving.base import Capabilities
from rllm_trainer.serving.remote import DoorServer

NEVER_UP = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
line = os.open(sys.argv[1], os.O_WRONLY)
os.set_inheritable(line, True)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], close_fds=False)
os.write(line, b"up")
time.sleep(600)
"""


def test_a_server_that_is_still_starting_ends_when_it_is_given_up(tmp_path: Path) -> None:
    """Its door, the server that ignores TERM, and what that began: all gone, and the start has failed."""
    line = tmp_path / "line"
    os.mkfifo(line)
    starts, failures = Starts(), list[Exception]()

    def start() -> None:
        starting.set(starts)
        config = {"kind": "vllm", "version": 0, "base_url": "http://server", "uds": "s.sock", "start_timeout": 600.0}
        command = [sys.executable, "-c", NEVER_UP, str(line)]
        try:
            DoorServer.open(
                {**config, "command": command, "folder": str(tmp_path / "server")},
                name="the server",
                log_path=tmp_path / "server.log",
                capabilities=Capabilities(**dict.fromkeys(Capabilities.__struct_fields__, False)),
            )
        except ServerError as error:
            failures.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    with line.open("rb", buffering=0) as reader:
        assert reader.read(2) == b"up"
        starts.give_up()
        thread.join(60)
        assert not thread.is_alive()
        assert reader.read() == b"", "every process that held the other end is gone"
    assert "the server ended" in str(failures[0])


def test_what_is_started_after_that_is_refused(tmp_path: Path) -> None:
    """A start of several parts begins no further one, and one that is waited for in any case is not concerned."""
    starts = Starts()
    starts.give_up()
    token = starting.set(starts)
    try:
        with pytest.raises(ChildDied, match="given up while it started"):
            Child.start("rllm_trainer.serving._local.main", {}, name="server", log_path=tmp_path / "log")
    finally:
        starting.reset(token)
