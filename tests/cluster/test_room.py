"""A cluster that is smaller than the layout is told before anything waits for it, with what would help."""

from __future__ import annotations

from typing import Any

import pytest

from rllm_trainer.cluster.layout import ClusterLayout
from rllm_trainer.cluster.ray_session import require_room
from rllm_trainer.exceptions import EngineError


class Cluster:
    """What Ray says of its nodes."""

    def __init__(self, *nodes: dict[str, float]) -> None:
        self._nodes = nodes

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": node} for node in self._nodes]


@pytest.mark.parametrize(
    "nodes, layout, device, words",
    [
        (
            [{"GPU": 2, "CPU": 16}],
            {"nodes": 2},
            "cpu",
            "needs 2 nodes with 1 GPUs each and 2 in all; the cluster has nodes with [2] GPUs; attach to more of them with "
            "ray={'address': ...}, or ask for gpus_per_node instead",
        ),
        (
            [{"CPU": 16}],
            {"gpus_per_node": 2},
            "cpu",
            "the cluster has nodes with [0] GPUs; on machines without accelerators start Ray with logical ones, as in ray={'num_gpus': 2}",
        ),
        (
            [{"GPU": 4, "CPU": 64}],
            {"gpus_per_node": 8},
            "cuda",
            "needs 1 nodes with 8 GPUs each and 8 in all; the cluster has nodes with [4] GPUs",
        ),
        (
            [{"GPU": 2, "CPU": 4}],
            {"gpus_per_node": 2},
            "cpu",
            "needs 1 nodes with 6 CPUs each and 11 in all, as Ray counts them; the cluster has nodes with [4] CPUs; "
            "start Ray with more, as in ray={'num_cpus': 11}",
        ),
    ],
)
def test_what_is_missing_is_told_with_what_helps(nodes: list[Any], layout: dict[str, Any], device: str, words: str) -> None:
    """Nodes, devices and CPUs, as Ray counts them."""
    with pytest.raises(EngineError) as refused:
        require_room(Cluster(*nodes), ClusterLayout(**layout), device)
    assert words in str(refused.value)
