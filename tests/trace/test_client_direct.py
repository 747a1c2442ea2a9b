"""Which calls are for this machine, and so go past every proxy."""

from __future__ import annotations

import socket

from rllm_trace.clients._direct import is_this_machine


def test_a_server_at_an_address_of_this_machine_is_on_this_machine() -> None:
    """As on a node of a cluster, where the policy is at the node's own address; no other machine's address is meant, and no name."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("203.0.113.9", 9))  # sends nothing, and says which address would
        except OSError:
            probe.connect(("127.0.0.1", 9))
        own = probe.getsockname()[0]
    assert [is_this_machine(host) for host in (own, "127.8.8.8", "::1", "localhost")] == [True] * 4
    assert [is_this_machine(host) for host in ("203.0.113.9", "2001:db8::9", "example.com")] == [False] * 3
