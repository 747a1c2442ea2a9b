"""A real vLLM that dies, and adapters: servers that are not shared."""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from rllm_trainer.engine.base import WeightsFile
from rllm_trainer.exceptions import ServerError
from rllm_trainer.models import resolve_model
from rllm_trainer.serving.base import Probe
from rllm_trainer.serving.remote import DoorServer
from rllm_trainer.serving.vllm import start_vllm
from rllm_trainer.types import Int32


def processes(group: int) -> dict[int, str]:
    """Pid and name of every process of a group that still runs."""
    found: dict[int, str] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                state = (folder / "stat").read_text()
                name = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            fields = state.rpartition(")")[2].split()
            if int(fields[2]) == group and fields[0] != "Z":
                found[int(folder.name)] = name
    return found


@pytest.fixture
def lora_server(vllm_python: str, tmp_path: Path) -> Any:
    server = start_vllm(resolve_model("tiny-qwen2"), run_dir=tmp_path, python=vllm_python, max_model_len=512, threads=1, lora_rank=4)
    yield server
    server.close()


def test_adapters_are_swapped_in_place_and_a_killed_engine_ends_all(
    lora_server: DoorServer, reference: Any, rows: list[Int32], tmp_path: Path
) -> None:
    """Two adapters one after the other are exact; then the engine is killed: an error with log lines, and no process is left."""
    import torch
    from safetensors.torch import save_file

    base = {name: tensor.clone() for name, tensor in reference.tensors.items()}
    targets = [name for name in base if name.endswith(("q_proj.weight", "down_proj.weight"))]
    alpha, rank = 8.0, 4
    old = reference.logprobs(rows)
    for version in (1, 2):
        torch.manual_seed(version)
        adapter: dict[str, Any] = {}
        merged = dict(base)
        for name in targets:
            out_size, in_size = base[name].shape
            a, b = 0.2 * torch.randn(rank, in_size), 0.2 * torch.randn(out_size, rank)
            layer = f"base_model.model.{name.removesuffix('.weight')}"
            adapter |= {f"{layer}.lora_A.weight": a, f"{layer}.lora_B.weight": b}
            merged[name] = base[name] + alpha / rank * (b @ a)
        reference.model.load_state_dict(merged, strict=False)
        reference.model.tie_weights()
        new = reference.logprobs(rows)
        path = tmp_path / f"adapter-{version}.safetensors"
        save_file(adapter, path, {"r": str(rank), "lora_alpha": str(alpha)})
        file = WeightsFile(path=path, version=version, digest="", tensors=len(adapter), num_bytes=1, lora=True)
        report = lora_server.swap(file, probe=Probe(rows=rows, old=old, new=new))
        assert (report.version, report.proof) == (version, "logprobs")
        asked = {"model": lora_server.model, "prompt": [5, 6, 7], "max_tokens": 8, "logprobs": 0, "return_token_ids": True}
        headers = {"authorization": f"Bearer {lora_server.api_key}"}
        answer = httpx.post(lora_server.base_url + "/completions", json=asked, headers=headers, timeout=60, trust_env=False).json()
        choice = answer["choices"][0]
        expected = reference.logprobs([np.array([5, 6, 7, *choice["token_ids"]], np.int32)])[0][3:]
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected.tolist(), abs=1e-4)
        assert answer["metadata"]["weight_version"] == str(version)
        old = new

    group = processes(lora_server.pid)
    assert len(group) >= 3
    engine = next(pid for pid, name in group.items() if "EngineCore" in name)
    handles = [os.pidfd_open(pid) for pid in group]
    os.kill(engine, signal.SIGKILL)
    assert all(select.select([handle], [], [], 60.0)[0] for handle in handles)
    with pytest.raises(ServerError, match=r"(?s)vLLM ended .*EngineCore"):
        lora_server.stats()
    assert processes(lora_server.pid) == {}
