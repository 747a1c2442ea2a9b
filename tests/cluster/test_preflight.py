"""What is wrong with a cluster is said before the first step, node by node, with what to do."""

from __future__ import annotations

from typing import Any

import msgspec

from rllm_trainer.cluster.layout import ClusterLayout
from rllm_trainer.cluster.preflight import NodeFacts, findings, look


def node(**other: Any) -> NodeFacts:
    """A node without fault, but for ``other``."""
    good = {
        "node_id": "n1",
        "host": "one",
        "gpus": 8,
        "python": "3.11.7",
        "versions": {"verl": "0.9.1"},
        "shared_memory": 16 * 2**30,
        "disk": 500 * 2**30,
        "sees_model": True,
        "sees_mark": True,
        "unreachable": [],
        "clock": 1000.0,
    }
    return msgspec.convert({**good, **other}, NodeFacts)


def wrong(*nodes: NodeFacts, **layout: Any) -> list[str]:
    """The sentences of a cluster."""
    found = findings(nodes, ClusterLayout(**{"nodes": 2, "gpus_per_node": 8, **layout}), asked_at=999.0, answered_at=1001.0)
    return [f"{one.host}: {one.sentence}" for one in found]


def test_a_cluster_without_fault_has_no_finding() -> None:
    """Two nodes of eight GPUs for a layout of two times eight."""
    assert wrong(node(), node(host="two")) == []


def test_too_few_devices_are_named() -> None:
    """By node and in all."""
    found = wrong(node(), node(host="two", gpus=4), rollout_nodes=1, rollout_gpus_per_node=8)
    assert found == [
        "all: 1 nodes have 8 GPUs or more, and the layout needs 2; change cluster={...}",
        "all: the cluster has 12 GPUs, and the layout needs 24",
    ]


def test_each_fault_of_a_node_is_one_sentence() -> None:
    """Versions, interpreter, shared memory, disk, folders, ports and clock."""
    bad = node(
        host="two",
        python="3.12.1",
        versions={"verl": "0.9.0"},
        shared_memory=2**26,
        disk=2**30,
        sees_model=False,
        sees_mark=False,
        unreachable=["10.0.0.1"],
        clock=2000.0,
    )
    found = wrong(node(), bad)
    assert [sentence.split(";")[0] for sentence in found] == [
        "two: verl is 0.9.0 here and 0.9.1 on one",
        "two: Python is 3.12.1 here and 3.11.7 on one",
        "two: /dev/shm has 0.1 GiB free",
        "two: the run folder's disk has 1.0 GiB free",
        "two: the model's folder cannot be read here",
        "two: the run folder is not the one that this process sees",
        "two: 10.0.0.1 cannot be reached from here",
        "two: the clock is off by more than 30 s",
    ]


def test_a_node_looks_at_itself(tmp_path: Any) -> None:
    """Folders that are there and that are not, and a port that nobody listens on."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "mark").touch()
    found = look("n", str(tmp_path), str(tmp_path), "mark", [("127.0.0.1", 1)], 2)
    assert (found.sees_model, found.sees_mark, found.unreachable, found.gpus) == (True, True, ["127.0.0.1"], 2)
    assert not look("n", str(tmp_path / "no"), str(tmp_path), "other", [], 0).sees_mark
