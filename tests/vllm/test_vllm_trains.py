"""``fit`` with a real vLLM: the same run as with the embedded server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import rllm_trace as rllm
from rllm_trainer import fit
from rllm_trainer.metrics import GAP_MEAN


@pytest.fixture
def app() -> Any:
    from openai import OpenAI

    client = OpenAI(base_url="http://127.0.0.1:9/v1", api_key="unused", max_retries=0)

    @rllm.workflow
    def say(word: str) -> str:
        reply = client.chat.completions.create(model="any", messages=[{"role": "user", "content": word}], max_tokens=8)
        return reply.choices[0].message.content or ""

    return say


def test_fit_trains_on_vllm(app: Any, vllm_python: str, tmp_path: Path) -> None:
    """Each step's weights are swapped in and proven by logprobs; every call is exact and of its step's version."""
    result = fit(
        app,
        [{"word": word} for word in ("one", "two", "three", "four")],
        model="tiny-qwen2",
        reward=lambda output: float(sum(character.islower() for character in output)),
        serving="vllm",
        vllm={"python": vllm_python},
        steps=3,
        batch_tasks=2,
        group_size=4,
        lr=1e-2,
        max_model_len=256,
        threads=1,
        output_dir=tmp_path / "run",
        progress=False,
    )
    steps = [line for line in result.metrics if "swap/seconds" in line]
    assert [line["version"] for line in steps] == [1, 2, 3]
    assert all(line["swap/proved_by_logprobs"] == 1.0 for line in steps)
    assert all(line["tokens/stale"] == 0 for line in steps)
    assert all(line[GAP_MEAN] < 1e-4 for line in steps)
    assert result.trainability.share_trained == 1.0
    assert (result.model_path / "model.safetensors").exists()
