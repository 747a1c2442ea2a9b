"""One engine process for all tests of this folder, given a fresh tiny model by each, and rows written by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rllm_trainer.config import make_settings
from rllm_trainer.engine.verl import VerlEngine
from rllm_trainer.models import resolve_model
from rllm_trainer.types import Row, Sample, SampledSpan

Fresh = Callable[..., VerlEngine]


@pytest.fixture(scope="session")
def tiny() -> Path:
    return resolve_model("tiny-qwen2")


@pytest.fixture(scope="session")
def process(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VerlEngine]:
    run_dir = tmp_path_factory.mktemp("engine")
    with VerlEngine.start(tiny, make_settings({"threads": 1}), run_dir, device="cpu") as engine:
        yield engine


@pytest.fixture
def fresh(process: VerlEngine, tiny: Path) -> Fresh:
    """``fresh(kl_coef=0.1, ...)``: the initial weights under these settings."""

    def make(model: Path | None = None, **given: Any) -> VerlEngine:
        process.restart(make_settings({"threads": 1, **given}), model_path=model or tiny)
        return process

    return make


@pytest.fixture(scope="session")
def make_row() -> Callable[..., Row]:
    return _make_row


def _make_row(
    ids: Sequence[int],
    spans: Sequence[tuple[int, int, float]],
    *,
    episode: str = "e",
    trajectory: str = "t",
    group: str = "g",
    temperature: float = 1.0,
    old: Sequence[float] | None = None,
    name: str = "row",
) -> Row:
    """``spans``: (start, stop, advantage) of each trained reply. ``old``: logprob of each token of the row, default -3."""
    mask = np.zeros(len(ids), np.bool_)
    advantages = np.zeros(len(ids), np.float32)
    for start, stop, advantage in spans:
        mask[start:stop] = True
        advantages[start:stop] = advantage
    logprobs = np.full(len(ids), -3.0, np.float32) if old is None else np.asarray(old, np.float32)
    logprobs = np.where(mask, logprobs, np.nan).astype(np.float32)
    sample = Sample(
        id=f"{episode}/{name}",
        episode_id=episode,
        task_id=group,
        token_ids=np.asarray(ids, np.int32),
        trained_mask=mask,
        logprobs=logprobs,
        versions=np.where(mask, 0, -1).astype(np.int32),
        temperature=temperature,
        spans=[
            SampledSpan(span_id=f"{name}-{start}", choice=0, trajectory_id=trajectory, role="solver", start=start, stop=stop)
            for start, stop, _ in spans
        ],
    )
    return Row(sample=sample, advantages=advantages, weights=mask.astype(np.float32), old_logprobs=logprobs, group=group)
