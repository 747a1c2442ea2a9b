"""Where no Ray cluster answers, that is said within seconds, with what was asked and what to do."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import ray.util

from rllm_trainer.cluster.address import require_cluster_at
from rllm_trainer.exceptions import EngineError

DO = "; start one there with `ray start --head`, or give the address that it printed"


@contextmanager
def listening(reply: bytes | None) -> Iterator[str]:
    """An address where somebody listens and sends that; None: takes the call and says nothing."""
    host = ray.util.get_node_ip_address()  # loopback, to Ray, is this
    with socket.socket() as door:
        door.bind((host, 0))
        door.listen()
        over = threading.Event()

        def answer() -> None:
            connection, _ = door.accept()
            with connection:
                if reply is not None:
                    connection.sendall(reply)
                over.wait(60)

        threading.Thread(target=answer, daemon=True).start()
        try:
            yield f"{host}:{door.getsockname()[1]}"
        finally:
            over.set()


def refusal(address: str) -> str:
    with pytest.raises(EngineError) as refused:
        require_cluster_at(address, within=0.5)
    return str(refused.value)


def test_a_port_that_nobody_listens_on_is_told() -> None:
    """With the address as Ray reads it."""
    said = refusal("127.0.0.1:1")
    assert said.startswith("no Ray cluster answers at address '127.0.0.1:1'")
    assert "Connection refused" in said
    assert said.endswith(DO)


def test_a_listener_that_says_nothing_is_told_after_its_time() -> None:
    """Ray would try again for minutes."""
    with listening(None) as address:
        assert f"no Ray cluster answers at address '{address}': nothing came within 0.5 s{DO}" == refusal(address)


def test_another_program_is_told_from_a_cluster() -> None:
    """A web server; and one that speaks as Ray does is let through."""
    with listening(b"HTTP/1.1 400 Bad Request\r\n\r\n") as address:
        assert f"at address '{address}': what listens there is another program" in refusal(address)
    with listening(bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])) as address:
        require_cluster_at(address, within=30)


def test_no_address_is_a_start_of_ones_own() -> None:
    """Nothing is asked."""
    for address in (None, "", "local"):
        require_cluster_at(address, within=0)


def test_an_address_that_is_none_is_told() -> None:
    """Without a port."""
    assert "no Ray cluster answers at address 'head-node': " in refusal("head-node")


def test_the_command_gives_its_verdict_on_a_dead_address() -> None:
    """One line on stderr, and 1."""
    command = [sys.executable, "-W", "ignore", "-m", "rllm_trainer.cluster.preflight", "--model", "m", "--run-dir", "r"]
    done = subprocess.run([*command, "--address", "127.0.0.1:1"], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("no Ray cluster answers at address '127.0.0.1:1'")
    assert "Traceback" not in done.stderr
