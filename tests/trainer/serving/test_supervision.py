"""A server that the door starts: it ends with the door, and the door with it, whatever it was doing."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rllm_trainer.exceptions import ServerError
from rllm_trainer.serving.base import Capabilities
from rllm_trainer.serving.remote import DoorServer

NOTHING = Capabilities(**dict.fromkeys(Capabilities.__struct_fields__, False))
SERVER = """
import http.server, json, os, pathlib, signal, socketserver, subprocess, sys, threading
signal.signal(signal.SIGTERM, signal.SIG_IGN)
worker = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"])
state = {"status": 200}
class Handler(http.server.BaseHTTPRequestHandler):
    def address_string(self): return "peer"
    def log_message(self, *args): pass
    def do_GET(self):
        if self.path == "/health":
            self.send_response(state["status"]); self.end_headers(); return
        body = json.dumps({"data": [{"id": "policy"}]}).encode()
        self.send_response(200); self.send_header("content-length", str(len(body))); self.end_headers(); self.wfile.write(body)
    def do_POST(self):
        asked = self.rfile.read(int(self.headers.get("content-length") or 0))
        if b"echo" in asked: state["status"] = 503
        self.send_response(200); self.send_header("content-length", "2"); self.end_headers(); self.wfile.write(b"{}")
class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
print("about to serve", flush=True)
pathlib.Path("pids").write_text(f"{os.getpid()} {worker.pid}")
Server("server.sock", Handler).serve_forever()
"""


def open_door(run_dir: Path, script: str = SERVER, **config: Any) -> DoorServer:
    return DoorServer.open(
        {
            "kind": "vllm",
            "version": 0,
            "base_url": "http://server",
            "uds": "server.sock",
            "command": [sys.executable, "-c", script],
            "folder": str(run_dir / "server"),
            "start_timeout": 60.0,
            **config,
        },
        name="the server",
        log_path=run_dir / "server.log",
        capabilities=NOTHING,
    )


@pytest.fixture
def door(tmp_path: Path) -> Iterator[DoorServer]:
    door = open_door(tmp_path)
    yield door
    door.close()


@pytest.fixture
def all_ended(door: DoorServer, tmp_path: Path) -> Callable[[], bool]:
    """Whether the door, the server and the server's own child end within a deadline."""
    handles = [os.pidfd_open(pid) for pid in (door.pid, *map(int, (tmp_path / "server" / "pids").read_text().split()))]

    def wait() -> bool:
        return all(select.select([handle], [], [], 60.0)[0] for handle in handles)

    return wait


def test_the_socket_is_its_owners_alone(door: DoorServer, tmp_path: Path) -> None:
    """Development routes ask for no key: nobody else reaches the socket."""
    assert (tmp_path / "server").stat().st_mode & 0o777 == 0o700
    assert door.model == "policy"


def test_closing_ends_what_ignores_being_asked(door: DoorServer, all_ended: Callable[[], bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """TERM is ignored by the server and by its child; KILL is not."""
    monkeypatch.setattr("rllm_trainer.serving.remote._CLOSE", 0.2)
    door.close()
    assert all_ended()


def test_a_killed_server_ends_the_group_and_is_told(door: DoorServer, all_ended: Callable[[], bool], tmp_path: Path) -> None:
    """Its last log lines are in the error of the next call."""
    os.kill(int((tmp_path / "server" / "pids").read_text().split()[0]), signal.SIGKILL)
    assert all_ended()
    with pytest.raises(ServerError, match=r"(?s)about to serve.*vllm has ended \(SIGKILL\)"):
        door.prompt_logprobs([np.arange(3, dtype=np.int32)])
    with pytest.raises(ServerError, match="the server has ended"):
        door.check()


def test_a_killed_door_takes_the_server_along(door: DoorServer, all_ended: Callable[[], bool]) -> None:
    """As when the run is killed, and the kernel kills the door with it: nothing of the server is left."""
    os.kill(door.pid, signal.SIGKILL)
    assert all_ended()


def test_a_server_that_says_it_is_not_well_is_ended(door: DoorServer, all_ended: Callable[[], bool]) -> None:
    """As vLLM's API process does when its engine has died, and then goes on for ever."""
    with pytest.raises(ServerError):
        door.prompt_logprobs([np.arange(3, dtype=np.int32)])
    assert all_ended()
    with pytest.raises(ServerError, match="says that it is not well"):
        door.stats()


def test_a_server_that_ends_while_it_starts_says_why(tmp_path: Path) -> None:
    """The error has the exit code and what it printed."""
    with pytest.raises(ServerError, match=r"(?s)it ended with exit code 3 before it answered.*no such device"):
        open_door(tmp_path, "print('no such device', flush=True); raise SystemExit(3)")


def test_a_server_that_hangs_is_ended(tmp_path: Path) -> None:
    """Stopped, it answers nothing; after the set time its group is gone."""
    door = open_door(tmp_path, hung_after=0.5)
    server, worker = map(int, (tmp_path / "server" / "pids").read_text().split())
    handles = [os.pidfd_open(pid) for pid in (server, worker)]
    os.kill(server, signal.SIGSTOP)
    assert all(select.select([handle], [], [], 90.0)[0] for handle in handles)
    with pytest.raises(ServerError, match=r"has not answered for 0\.5 s"):
        door.stats()
    door.close()
