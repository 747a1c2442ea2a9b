"""What the example's README says of its three layouts is what its script sets, and each of them can be asked for."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from rllm_trainer.cluster.layout_rules import require_micro_batch
from rllm_trainer.cluster.refusals import require_cluster
from rllm_trainer.cluster.verl_overrides import Facts, overrides
from rllm_trainer.config import make_settings

EXAMPLE = Path(__file__).parents[2] / "examples" / "cluster"
ROLLOUTS = 8
LONGEST = 4096


@pytest.fixture(scope="module")
def layouts() -> dict[int, dict[str, Any]]:
    return runpy.run_path(str(EXAMPLE / "run.py"))["LAYOUTS"]


@pytest.fixture(scope="module")
def table() -> dict[int, list[str]]:
    """GPUs -> the cells of its row in the README."""
    lines = (EXAMPLE / "README.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if re.match(r"\| \d", line)]
    return {int(row[0]): row[1:] for row in rows}


def test_the_table_is_what_the_script_sets(layouts: dict[int, dict[str, Any]], table: dict[int, list[str]]) -> None:
    """Layout, share of a GPU's memory that is the replica's, and tokens of a micro-batch."""
    assert table.keys() == layouts.keys() == {1, 8, 64}
    for gpus, (layout, _, replica, _, rest) in table.items():
        given = layouts[gpus]
        cluster = given["cluster"]
        assert ("offload" in layout) == cluster.get("offload", False)
        assert (f"LoRA r={given['lora']['r']}" if "lora" in given else "") in layout
        assert f"({given['verl']['actor_rollout_ref.rollout.gpu_memory_utilization']})" in replica
        assert f"{given['micro_batch_tokens']:,}" in rest
    assert f"TP {layouts[8]['cluster']['rollout_tensor_parallel']}" in table[8][0]
    assert table[64][0] == "32 train, 32 roll out, TP 2"
    far = layouts[64]["cluster"]
    assert (far["nodes"] * far["gpus_per_node"], far["rollout_nodes"] * far["rollout_gpus_per_node"]) == (32, 32)
    assert far["rollout_tensor_parallel"] == 2


def test_concurrency_is_what_replicas_hold_or_a_step_opens(layouts: dict[int, dict[str, Any]]) -> None:
    """Sequences of 4,096 tokens of 57,344 bytes each in what is left of a replica's share, and the rollouts of the open batches."""
    held = {1: 1 * 430_000 // LONGEST, 8: 8 * 570_000 // LONGEST, 64: 16 * 2_100_000 // LONGEST}
    opened = {gpus: (1 + given.get("staleness", 0)) * given["batch_tasks"] * ROLLOUTS for gpus, given in layouts.items()}
    assert opened == {1: 128, 8: 512, 64: 4096}
    assert {gpus: given["concurrency"] for gpus, given in layouts.items()} == {gpus: min(held[gpus], opened[gpus]) for gpus in layouts}
    assert layouts[1]["concurrency"] == 104


@pytest.mark.parametrize("gpus", [1, 8, 64])
def test_each_layout_can_be_asked_for(layouts: dict[int, dict[str, Any]], gpus: int) -> None:
    """Settings, layout and micro-batch pass what a run checks before it starts."""
    given = {"engine": "cluster", "group_size": ROLLOUTS, "max_model_len": LONGEST, "max_tokens": 512, "steps": 100, **layouts[gpus]}
    settings = make_settings(given)
    require_cluster(settings, given)
    require_micro_batch(settings.micro_batch_tokens, LONGEST, {})
    facts = Facts(model="/m", run_dir="/r", steps=100, device="cuda", rollout="vllm", resume=False, max_model_len=LONGEST)
    assert f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={layouts[gpus]['micro_batch_tokens']}" in overrides(settings, facts)
