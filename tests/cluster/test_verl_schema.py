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
from omegaconf import OmegaConf
from rllm_trainer.cluster._verl_compose import compose
from rllm_trainer.cluster.refusals import require_cluster
from rllm_trainer.cluster.verl_overrides import Facts, overrides
from rllm_trainer.config import make_settings
from rllm_trainer.exceptions import SettingError
from rllm_trainer.models import resolve_model

found = []
for given, facts, *names in json.loads(sys.argv[1]):
    settings = make_settings({"engine": "cluster", "steps": 2, **given})
    require_cluster(settings, given)
    base = dict(model=str(resolve_model("tiny-qwen2")), run_dir="/runs/r", steps=2, resume=False, max_model_len=1024)
    try:
        config = compose(overrides(settings, Facts(**base, **facts)))
        chosen = config.actor_rollout_ref
        kind = [chosen.actor.strategy, chosen.rollout.name, config.trainer.v1.trainer_mode, chosen.model.lora_rank]
        found.append(kind + [OmegaConf.select(config, name) for name in names])
    except SettingError as error:
        found.append(str(error))
print("FOUND " + json.dumps(found, default=OmegaConf.to_container))
"""

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
CUDA, SGLANG, CPU = {"device": "cuda", "rollout": "vllm"}, {"device": "cuda", "rollout": "sglang"}, {"device": "cpu", "rollout": "cpu"}
SEPARATE = {"mode": "separate_async", "rollout_nodes": 1, "rollout_gpus_per_node": 8, "gpus_per_node": 8}


def composed(cases: list[tuple[Any, ...]]) -> list[Any]:
    """Each case (settings, facts, names of entries to look at) through verl's schema, in one process that has verl's environment."""
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
    parallel = f"{ACTOR}.megatron.tensor_model_parallel_size"
    megatron = {"cluster": {"strategy": "megatron", "gpus_per_node": 8, "offload": True}, "eps": 1e-7}
    found = composed(
        [
            ({"cluster": {"nodes": 2, "gpus_per_node": 8, "rollout_tensor_parallel": 2}}, CUDA),
            ({"cluster": {"strategy": "fsdp", "gpus_per_node": 8, "offload": True}, "lora": {"r": 16}}, CUDA),
            ({**megatron, "verl": {parallel: 4}}, SGLANG, parallel, f"{ACTOR}.megatron.param_offload", f"{ROLLOUT}.logprobs_mode"),
            ({"cluster": {"gpus_per_node": 8}, "staleness": 1, "kl_coef": 0.01}, SGLANG, f"{ACTOR}.use_kl_loss"),
            ({"cluster": SEPARATE, "staleness": 2}, CUDA),
            ({"cluster": {"nodes": 2}}, CPU),
            ({"verl": {"actor_rollout_ref": {"rollout": {"gpu_memory_utilization": 0.6}}}}, CUDA, f"{ROLLOUT}.gpu_memory_utilization"),
            ({"verl": {f"+{ROLLOUT}.engine_kwargs.sglang.chunked_prefill_size": 64}}, SGLANG, f"{ROLLOUT}.engine_kwargs.sglang"),
            ({"verl": {"actor_rollout_ref": {"rollout": {"gpu_memory_utilisation": 0.6}}}}, CUDA),
            ({"cluster": {"strategy": "megatron"}, "verl": {f"{ACTOR}.fsdp_config.param_offload": True}}, CUDA),
        ]
    )
    assert found[:8] == [
        ["fsdp2", "vllm", "sync", 0],
        ["fsdp", "vllm", "sync", 16],
        ["megatron", "sglang", "sync", 0, 4, True, "processed_logprobs"],
        ["fsdp2", "sglang", "colocate_async", 0, True],
        ["fsdp2", "vllm", "separate_async", 0],
        ["fsdp2", "rllm_cpu", "sync", 0],
        ["fsdp2", "vllm", "sync", 0, 0.6],
        ["fsdp2", "sglang", "sync", 0, {"chunked_prefill_size": 64}],
    ]
    for refusal, name in zip(found[8:], ("gpu_memory_utilisation", "fsdp_config"), strict=True):
        assert "verl refuses an entry of its configuration" in refusal
        assert name in refusal
