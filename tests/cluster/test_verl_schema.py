"""What we write for verl is what verl's own schema takes: FSDP, FSDP2, Megatron, vLLM, SGLang, LoRA, and all of its trainers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

_PROGRAM = """
import json, sys
from rllm_trainer.cluster._verl_compose import compose
from rllm_trainer.cluster.refusals import require_cluster
from rllm_trainer.cluster.verl_overrides import Facts, overrides
from rllm_trainer.config import make_settings
from rllm_trainer.exceptions import SettingError
from rllm_trainer.models import resolve_model

found = []
for given, facts in json.loads(sys.argv[1]):
    settings = make_settings({"engine": "cluster", "steps": 2, **given})
    require_cluster(settings, given)
    base = dict(model=str(resolve_model("tiny-qwen2")), run_dir="/runs/r", steps=2, resume=False, max_model_len=1024)
    try:
        config = compose(overrides(settings, Facts(**base, **facts)))
        chosen = config.actor_rollout_ref
        found.append([chosen.actor.strategy, chosen.rollout.name, config.trainer.v1.trainer_mode, chosen.model.lora_rank])
    except SettingError as error:
        found.append(str(error))
print("FOUND " + json.dumps(found))
"""

CUDA, SGLANG, CPU = {"device": "cuda", "rollout": "vllm"}, {"device": "cuda", "rollout": "sglang"}, {"device": "cpu", "rollout": "cpu"}
SEPARATE = {"mode": "separate_async", "rollout_nodes": 1, "rollout_gpus_per_node": 8, "gpus_per_node": 8}


def composed(cases: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[Any]:
    """Each case through verl's schema, in one process that has verl's environment."""
    environment = os.environ | {
        "VERL_PLATFORM": "cpu",
        "VERL_USE_EXTERNAL_MODULES": "rllm_trainer.engine._verl_cpu",
        "VERL_ENGINE_DEVICE": "cuda",
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _PROGRAM, json.dumps(cases)],
        capture_output=True,
        text=True,
        timeout=550,
        env=environment,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, done.stderr[-3000:]
    return json.loads(lines[-1].removeprefix("FOUND "))


def test_every_layout_validates_against_verls_own_schema() -> None:
    """Composed by verl's configuration files and accepted by its dataclasses; a misspelt entry is verl's refusal."""
    found = composed(
        [
            ({"cluster": {"nodes": 2, "gpus_per_node": 8, "rollout_tensor_parallel": 2}}, CUDA),
            ({"cluster": {"strategy": "fsdp", "gpus_per_node": 8, "offload": True}, "lora": {"r": 16}}, CUDA),
            ({"cluster": {"strategy": "megatron", "gpus_per_node": 8, "offload": True}}, SGLANG),
            ({"cluster": {"gpus_per_node": 8}, "staleness": 1, "kl_coef": 0.01}, SGLANG),
            ({"cluster": SEPARATE, "staleness": 2}, CUDA),
            ({"cluster": {"nodes": 2}}, CPU),
            ({"verl": {"actor_rollout_ref": {"rollout": {"gpu_memory_utilization": 0.6}}}}, CUDA),
            ({"verl": {"actor_rollout_ref": {"rollout": {"gpu_memory_utilisation": 0.6}}}}, CUDA),
        ]
    )
    assert found[:7] == [
        ["fsdp2", "vllm", "sync", 0],
        ["fsdp", "vllm", "sync", 16],
        ["megatron", "sglang", "sync", 0],
        ["fsdp2", "sglang", "colocate_async", 0],
        ["fsdp2", "vllm", "separate_async", 0],
        ["fsdp2", "rllm_cpu", "sync", 0],
        ["fsdp2", "vllm", "sync", 0],
    ]
    assert "verl refuses an entry of its configuration" in found[7]
    assert "gpu_memory_utilisation" in found[7]
