"""Two ranks are one engine: the same loss, gradient, step, weights file and checkpoint as one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from rllm_trainer.batching import make_batch
from rllm_trainer.config import make_settings
from rllm_trainer.engine.verl import VerlEngine
from rllm_trainer.types import Row

pytestmark = pytest.mark.slow


def ids(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(5, 250, length).tolist()


@pytest.fixture(scope="module")
def pair(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VerlEngine]:
    with VerlEngine.start(tiny, make_settings({"threads": 1}), tmp_path_factory.mktemp("pair"), device="cpu", ranks=2) as engine:
        yield engine


@pytest.fixture
def rows(make_row: Any) -> list[Row]:
    """Five rows, so that the ranks' shares differ; one trajectory in two rows; lengths and temperatures differ."""
    whole = [make_row(ids(n, 12 + 7 * n), [(5, 12 + 7 * n, (-1.0) ** n)], episode=f"e{n}", temperature=1.0 if n else 0.7) for n in range(3)]
    first = make_row(ids(7, 30)[:11], [(5, 11, 1.5)], episode="cut", name="first")
    return [*whole, first, make_row(ids(7, 30), [(20, 30, 1.5)], episode="cut", name="second")]


@pytest.mark.parametrize(
    "given",
    [{}, {"policy_loss": "gspo", "loss_agg": "seq-mean-token-mean"}, {"entropy_coef": 0.01, "micro_batch_tokens": 32}, {"lora": {"r": 4}}],
    ids=["token-mean", "gspo", "entropy", "lora"],
)
def test_two_ranks_give_the_gradient_of_one(fresh: Any, pair: VerlEngine, tiny: Path, rows: list[Row], given: dict[str, Any]) -> None:
    """Loss and gradient within 1e-5; where a rank has fewer micro-batches, its stand-ins weigh nothing."""
    settings = make_settings({"threads": 1, **given})
    batch = make_batch(rows, settings=settings, step=1, policy_version=0)
    loss, gradients = fresh(**given).gradient(batch)
    pair.restart(settings)
    found, others = pair.gradient(batch)
    assert found == pytest.approx(loss, abs=1e-5)
    assert max(float(np.abs(value).max()) for value in gradients.values()) > 1e-3
    assert others.keys() == gradients.keys()
    for name, value in gradients.items():
        np.testing.assert_allclose(others[name], value, rtol=0, atol=1e-5, err_msg=name)


def test_two_ranks_step_read_export_and_resume_as_one(fresh: Any, pair: VerlEngine, rows: list[Row], tmp_path: Path) -> None:
    """After two updates the weights are those of one rank within 1e-6; a checkpoint made by two is read by one."""
    settings = make_settings({"threads": 1})
    batch = make_batch(rows, settings=settings, step=1, policy_version=0)
    one = fresh()
    pair.restart(settings)
    reports = [[engine.update(batch, lr=1e-3) for _ in range(2)] for engine in (one, pair)]
    assert reports[1][1].loss == pytest.approx(reports[0][1].loss, abs=1e-5)
    assert reports[1][1].grad_norm == pytest.approx(reports[0][1].grad_norm, rel=1e-4)
    assert reports[1][1].tokens == reports[0][1].tokens
    left, right = (load_file(engine.export_weights(1).path) for engine in (one, pair))
    assert left.keys() == right.keys()
    for name, value in left.items():
        np.testing.assert_allclose(right[name], value, rtol=0, atol=2e-6, err_msg=name)
    ones = [1.0] * len(rows)
    read = [engine.logprobs([row.sample.token_ids for row in rows], temperatures=ones) for engine in (one, pair)]
    for mine, theirs in zip(*read, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-4)
    pair.save(tmp_path / "checkpoint")
    one = fresh()
    one.load(tmp_path / "checkpoint")
    again = load_file(one.export_weights(2).path)
    for name, value in right.items():
        np.testing.assert_array_equal(again[name], value)
    pair.restart(settings)
    pair.load(tmp_path / "checkpoint")
    pair.update(batch, lr=1e-3)
    one.update(batch, lr=1e-3)
    moved = [load_file(engine.export_weights(3).path) for engine in (one, pair)]
    for name, value in moved[0].items():
        np.testing.assert_allclose(moved[1][name], value, rtol=0, atol=2e-6, err_msg=name)
