"""A real vLLM: the interpreter that ``RLLM_TEST_VLLM_PYTHON`` names, or the one that ``make vllm`` made."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rllm_trainer._digest import file_digest
from rllm_trainer.engine.base import WeightsFile
from rllm_trainer.models import resolve_model
from rllm_trainer.serving.remote import DoorServer
from rllm_trainer.serving.vllm import DEFAULT_PYTHON, start_vllm
from rllm_trainer.types import Float32, Int32

MODEL = "tiny-qwen2"
MAX_MODEL_LEN = 1024
STARTS_WITHIN = 1200
"""Seconds for a test, the start of its server included: half a minute on a free machine."""


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.timeout(STARTS_WITHIN))


@pytest.fixture(scope="session")
def vllm_python() -> str:
    python = os.environ.get("RLLM_TEST_VLLM_PYTHON", str(Path(__file__).parents[2] / DEFAULT_PYTHON))
    assert os.access(python, os.X_OK), f"there is no {python}: `make test-vllm` makes it, RLLM_TEST_VLLM_PYTHON names another"
    return python


@pytest.fixture(scope="session")
def vllm(vllm_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DoorServer]:
    """One server for the tests that leave it well; its weights are what the last of them made them."""
    run_dir = tmp_path_factory.mktemp("vllm")
    server = start_vllm(resolve_model(MODEL), run_dir=run_dir, python=vllm_python, max_model_len=MAX_MODEL_LEN, threads=1, continues=True)
    yield server
    server.close()


class Reference:
    """The same model in transformers, float32: what served logprobs are compared with."""

    def __init__(self, folder: Path) -> None:
        import torch
        from safetensors.torch import load_file
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tensors: dict[str, Any] = load_file(folder / "model.safetensors")

    def logprobs(self, rows: Sequence[Int32], temperature: float = 1.0) -> list[Float32]:
        """As a server's ``prompt_logprobs``."""
        import torch

        found: list[Float32] = []
        for row in rows:
            ids = torch.tensor(row.tolist())
            with torch.inference_mode():
                logits = self.model(ids[None]).logits[0, :-1].float() / temperature
            told = torch.log_softmax(logits, -1).gather(1, ids[1:, None])[:, 0].numpy()
            found.append(np.concatenate([[np.nan], told]).astype(np.float32))
        return found

    def change(self, seed: int, size: float = 0.05) -> dict[str, Any]:
        """Other weights, from here on this model's."""
        import torch

        torch.manual_seed(seed)
        self.tensors = {name: tensor + size * torch.randn_like(tensor) for name, tensor in self.tensors.items()}
        self.model.load_state_dict(self.tensors, strict=False)
        self.model.tie_weights()
        return self.tensors


@pytest.fixture
def reference() -> Reference:
    return Reference(resolve_model(MODEL))


@pytest.fixture
def write(tmp_path: Path) -> Callable[[dict[str, Any], int], WeightsFile]:
    """Tensors and a version -> their file."""
    from safetensors.torch import save_file

    def written(tensors: dict[str, Any], version: int) -> WeightsFile:
        path = tmp_path / f"weights-{version}.safetensors"
        save_file(tensors, path)
        return WeightsFile(path=path, version=version, digest=file_digest(path), tensors=len(tensors), num_bytes=path.stat().st_size)

    return written


@pytest.fixture
def rows() -> list[Int32]:
    """Rows of several lengths, one of them longer than a block of vLLM's cache."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, length).astype(np.int32) for length in (9, 40, 300)]
