"""A layout that cannot work out is refused before anything is started: what was got, why not, what to do."""

from __future__ import annotations

from typing import Any

import pytest

from rllm_trainer.cluster.layout import ClusterLayout
from rllm_trainer.cluster.layout_rules import require_device, require_micro_batch
from rllm_trainer.cluster.refusals import require_cluster
from rllm_trainer.config import make_settings
from rllm_trainer.exceptions import SettingError

SEPARATE = {"mode": "separate_async", "rollout_nodes": 1}
ROLLOUT, MEGATRON = "actor_rollout_ref.rollout", "actor_rollout_ref.actor.megatron"
FSDP = "actor_rollout_ref.actor.fsdp_config"


@pytest.mark.parametrize(
    "cluster, further, words",
    [
        (
            SEPARATE | {"rollout_gpus_per_node": 3, "rollout_tensor_parallel": 2},
            {"staleness": 1},
            "3 devices that roll out cannot be cut into replicas of rollout_tensor_parallel=2; choose a divisor of 3, "
            "or other numbers of rollout_nodes and rollout_gpus_per_node",
        ),
        (
            {"gpus_per_node": 2, "rollout_tensor_parallel": 4},
            {},
            "2 ranks cannot be cut into replicas of rollout_tensor_parallel=4; choose a divisor of 2, or other numbers of nodes and gpus",
        ),
        (
            {"gpus_per_node": 4, "rollout_tensor_parallel": 2},
            {"verl": {ROLLOUT: {"pipeline_model_parallel_size": 4}}},
            "4 ranks cannot be cut into replicas of rollout_tensor_parallel=2 x pipeline_model_parallel_size=4",
        ),
        (
            {"nodes": 2, "gpus_per_node": 3, "rollout_tensor_parallel": 2},
            {},
            "replicas of rollout_tensor_parallel=2 would lie across nodes of 3 ranks; choose a divisor or a multiple of 3",
        ),
        (
            {"strategy": "megatron", "gpus_per_node": 8},
            {"verl": {f"{MEGATRON}.tensor_model_parallel_size": 3}},
            "8 ranks cannot be cut into groups of 3, which verl={'actor_rollout_ref.actor.megatron.tensor_model_parallel_size': ...}",
        ),
        (
            {"strategy": "megatron", "gpus_per_node": 8},
            {"verl": {MEGATRON: {"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 4}}},
            "8 ranks cannot be cut into groups of 16",
        ),
        (
            {"gpus_per_node": 8},
            {"verl": {f"{FSDP}.ulysses_sequence_parallel_size": 3}},
            "8 ranks cannot be cut into groups of 3, which verl={'actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size'",
        ),
        ({"gpus_per_node": 8}, {"verl": {f"{FSDP}.fsdp_size": 6}}, "8 ranks cannot be cut into groups of 6"),
        (
            {"rollout": "cpu", "device": "cuda"},
            {},
            "got rollout='cpu' with device='cuda': replicas on CPUs take weights from ranks on CPUs",
        ),
        ({"rollout": "vllm", "device": "cpu"}, {}, "got rollout='vllm' with device='cpu': verl starts it on accelerators only"),
        ({"rollout": "sglang", "device": "cpu"}, {}, "use rollout='cpu', or leave it out"),
        ({"strategy": "megatron", "device": "cpu"}, {}, "got strategy='megatron' with device='cpu'"),
        ({"offload": True, "device": "cpu"}, {}, "offload=True would have no effect with device='cpu'"),
    ],
)
def test_what_cannot_work_is_refused_by_name(cluster: dict[str, Any], further: dict[str, Any], words: str) -> None:
    """One sentence each."""
    given = {"engine": "cluster", "cluster": cluster, **further}
    with pytest.raises(SettingError) as refused:
        require_cluster(make_settings(given), given)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    "cluster, further",
    [
        (SEPARATE | {"rollout_gpus_per_node": 4, "rollout_tensor_parallel": 2, "gpus_per_node": 3}, {"staleness": 1}),
        ({"nodes": 2, "gpus_per_node": 4, "rollout_tensor_parallel": 8}, {}),
        ({"nodes": 2, "gpus_per_node": 4, "rollout_tensor_parallel": 2}, {"verl": {f"{ROLLOUT}.data_parallel_size": 2}}),
        ({"strategy": "megatron", "gpus_per_node": 8}, {"verl": {MEGATRON: {"tensor_model_parallel_size": 4, "context_parallel_size": 2}}}),
        ({"gpus_per_node": 4}, {"verl": {f"{FSDP}.fsdp_size": 8}}),
        ({"gpus_per_node": 4}, {"verl": {f"{FSDP}.fsdp_size": -1}}),
        ({"rollout": "vllm", "device": "cuda"}, {}),
        ({"rollout": "cpu", "device": "cpu"}, {}),
    ],
)
def test_what_works_out_is_let_through(cluster: dict[str, Any], further: dict[str, Any]) -> None:
    """Replicas of whole nodes, nodes of whole replicas, groups without a rest."""
    given = {"engine": "cluster", "cluster": cluster, **further}
    require_cluster(make_settings(given), given)


def test_a_device_that_ray_has_found_is_named_as_such() -> None:
    """``auto`` is known only once Ray runs."""
    with pytest.raises(SettingError, match="rollout='vllm' with device='cpu', which is what Ray has found: verl starts it"):
        require_device(ClusterLayout(rollout="vllm"), "cpu")
    require_device(ClusterLayout(rollout="vllm"), "cuda")
    require_device(ClusterLayout(), "cpu")


def test_a_micro_batch_has_room_for_the_longest_row() -> None:
    """verl asserts it in the middle of a run; sequence parallelism gives each rank a part of a row."""
    words = r"micro_batch_tokens=512 has no room for a row of max_model_len=4096 tokens, .*; set micro_batch_tokens=4096 or more"
    with pytest.raises(SettingError, match=words):
        require_micro_batch(512, 4096, {})
    for tokens, passed in ((None, {}), (4096, {}), (512, {f"{FSDP}.ulysses_sequence_parallel_size": 8})):
        require_micro_batch(tokens, 4096, passed)
