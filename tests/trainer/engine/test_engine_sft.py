"""The loss of fine-tuning is the cross-entropy that transformers computes, and its gradient does not depend on how rows are cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rllm_trainer.batching import make_batch
from rllm_trainer.config import make_settings
from rllm_trainer.sft_rows import _unit


def restarted(process: Any, tiny: Any, **given: Any) -> Any:
    process.restart(make_settings({"threads": 1, **given}), model_path=tiny, objective="sft")
    return process


def rows_of(make_row: Any) -> list[Any]:
    random = np.random.default_rng(5)
    samples: list[Any] = []
    for number, spans in enumerate([[(6, 14)], [(3, 5), (9, 12)], [(10, 30)]]):
        ids = random.integers(5, 250, 32).tolist()
        row = make_row(ids, [(start, stop, 0.0) for start, stop in spans], episode=f"e{number}", temperature=0.7)
        samples.append(row.sample)
    return _unit(samples).rows


@pytest.mark.filterwarnings("ignore")
def test_the_loss_is_transformers_cross_entropy(process: Any, tiny: Any, make_row: Any) -> None:
    """Mean over the trained tokens of all rows, at temperature 1, within 1e-5; so is the gradient's direction of descent."""
    import torch
    from transformers import AutoModelForCausalLM

    rows = rows_of(make_row)
    settings = make_settings({"threads": 1})
    batch = make_batch(rows, settings=settings, step=1, policy_version=0)
    loss, gradient = restarted(process, tiny).gradient(batch)
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    ids = torch.tensor(np.stack([row.sample.token_ids for row in rows]), dtype=torch.int64)
    labels = torch.where(torch.tensor(np.stack([row.sample.trained_mask for row in rows])), ids, torch.tensor(-100))
    theirs = model(input_ids=ids, labels=labels).loss
    assert batch.denominator == 8 + 5 + 20
    assert loss == pytest.approx(theirs.item(), abs=1e-5)
    theirs.backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            np.testing.assert_allclose(gradient[name], parameter.grad.numpy(), atol=1e-5)


def test_micro_batches_change_neither_loss_nor_gradient(process: Any, tiny: Any, make_row: Any) -> None:
    """Rows one by one give what they give together."""
    batch = make_batch(rows_of(make_row), settings=make_settings({"threads": 1}), step=1, policy_version=0)
    together, ours = restarted(process, tiny).gradient(batch)
    apart, theirs = restarted(process, tiny, micro_batch_tokens=32).gradient(batch)
    assert together == pytest.approx(apart, abs=1e-6)
    for name, values in ours.items():
        np.testing.assert_allclose(values, theirs[name], atol=1e-6)


def test_the_loss_falls(process: Any, tiny: Any, make_row: Any) -> None:
    """Ten steps on one batch lower its loss at each."""
    engine = restarted(process, tiny, lr=2e-3)
    batch = make_batch(rows_of(make_row), settings=make_settings({"threads": 1}), step=1, policy_version=0)
    losses = [engine.update(batch, lr=2e-3).loss for _ in range(10)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 0.3
