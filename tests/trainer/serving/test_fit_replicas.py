"""``fit`` over several servers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import rllm_trace as rllm
from rllm_trainer import fit
from rllm_trainer.serving.replicas import Replicas


@pytest.mark.slow
def test_a_run_over_two_servers_uses_and_swaps_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Episodes are spread over both, every call is of its step's version, and both serve the last weights at the end."""
    from openai import OpenAI

    client = OpenAI(base_url="http://127.0.0.1:9/v1", api_key="unused", max_retries=0)
    seen: dict[str, Any] = {}
    close = Replicas.close

    def last_look(self: Replicas) -> None:
        seen["sampled"] = [server.stats()["sampled_tokens"] for server in self.servers]  # type: ignore[attr-defined]
        seen["versions"] = [server.version for server in self.servers]
        close(self)

    monkeypatch.setattr(Replicas, "close", last_look)

    @rllm.workflow
    def say(word: str) -> str:
        reply = client.chat.completions.create(model="any", messages=[{"role": "user", "content": word}], max_tokens=6)
        return reply.choices[0].message.content or ""

    def lower(output: str) -> float:
        return float(sum(character.islower() for character in output))

    result = fit(
        say,
        [{"word": "one"}, {"word": "two"}],
        model="tiny-qwen2",
        reward=lower,
        replicas=2,
        steps=2,
        batch_tasks=2,
        group_size=4,
        lr=1e-2,
        max_model_len=128,
        threads=1,
        output_dir=tmp_path / "run",
        progress=False,
    )
    assert [line["version"] for line in result.metrics if "swap/seconds" in line] == [1, 2]
    assert all(line["tokens/stale"] == 0 for line in result.metrics if "tokens/stale" in line)
    assert seen["versions"] == [2, 2]
    assert all(tokens > 0 for tokens in seen["sampled"])
    assert sorted(path.name for path in (tmp_path / "run" / "logs").glob("replica-*")) == ["replica-0", "replica-1"]
