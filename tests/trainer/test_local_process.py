"""The embedded server as a process, and the families that it leaves to transformers."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from rllm_trainer._digest import file_digest
from rllm_trainer.engine.base import WeightsFile
from rllm_trainer.exceptions import ServerError
from rllm_trainer.models import resolve_model
from rllm_trainer.serving.local import LocalServer


def test_the_server_ends_with_a_killed_parent(tmp_path: Path) -> None:
    """A parent that is killed leaves no server behind, whatever proxy its environment names."""
    parent = textwrap.dedent(f"""
        import os, pathlib, signal
        from rllm_trainer.serving.local import LocalServer
        folder = pathlib.Path({str(tmp_path)!r})
        server = LocalServer.start({str(resolve_model("tiny-qwen2"))!r}, run_dir=folder, threads=1, max_model_len=64)
        server.check()
        print(server.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    root = str(Path(__file__).resolve().parents[2])
    env = {**os.environ, "PYTHONPATH": root, "http_proxy": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9"}
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, env=env) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        assert process.wait(30) == -signal.SIGKILL
    assert select.select([handle], [], [], 10.0)[0]
    os.close(handle)


def test_a_dead_server_says_its_last_words(tmp_path: Path) -> None:
    """Once the process is gone, every call raises with what the log ends with."""
    server = LocalServer.start(resolve_model("tiny-qwen2"), run_dir=tmp_path, threads=1, max_model_len=64)
    (tmp_path / "server.log").write_text("out of luck\n")
    os.kill(server.pid, signal.SIGKILL)
    with pytest.raises(ServerError, match=r"(?s)local server .*out of luck"):
        server.prompt_logprobs([np.arange(4, dtype=np.int32)])
    server.close()
    with pytest.raises(ServerError, match="the local server has ended"):
        server.check()


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of a family with learned positions and another activation."""
    from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

    folder = tmp_path_factory.mktemp("gpt2")
    torch.manual_seed(0)
    config: Any = GPT2Config(vocab_size=261, n_embd=32, n_layer=2, n_head=2, n_positions=128, eos_token_id=258, initializer_range=0.2)
    model: Any = GPT2LMHeadModel(config)
    model.save_pretrained(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(resolve_model("tiny-qwen2"))
    tokenizer.save_pretrained(folder)
    return folder


def test_other_families_are_served_through_transformers(gpt2: Path, tmp_path: Path) -> None:
    """A GPT-2 is served with exact logprobs, batched requests and swaps, by transformers' own forward."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(gpt2)
    server = LocalServer.start(gpt2, run_dir=tmp_path, threads=1, name="policy")
    try:
        for version in (0, 1):
            if version:
                changed = {name: t * 1.1 for name, t in load_file(gpt2 / "model.safetensors").items()}
                save_file(changed, tmp_path / "new.safetensors")
                digest = file_digest(tmp_path / "new.safetensors")
                file = WeightsFile(path=tmp_path / "new.safetensors", version=1, digest=digest, tensors=len(changed), num_bytes=1)
                assert server.swap(file).proof == "digest"
                model.load_state_dict(changed, strict=False)
                model.tie_weights()
            asked = {"prompt": [5, 6, 7], "n": 3, "max_tokens": 5, "logprobs": 0, "return_token_ids": True, "seed": 1, "temperature": 0.7}
            headers = {"authorization": f"Bearer {server.api_key}"}
            body = httpx.post(server.base_url + "/completions", json=asked, headers=headers, timeout=60, trust_env=False).json()
            for choice in body["choices"]:
                ids = [5, 6, 7, *choice["token_ids"]]
                with torch.inference_mode():
                    expected = torch.log_softmax(model(torch.tensor([ids])).logits[0, 2:-1] / 0.7, -1)
                served = choice["logprobs"]["token_logprobs"]
                assert served == pytest.approx(expected.gather(1, torch.tensor(ids[3:]).unsqueeze(1)).squeeze(1).tolist(), abs=1e-4)
                assert body["metadata"]["weight_version"] == str(version)
    finally:
        server.close()
