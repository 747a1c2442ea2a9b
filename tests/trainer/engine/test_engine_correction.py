"""verl's rollout corrections over trajectories: by hand where that is easy, and whatever the cut."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from rllm_trainer.correction import correct
from rllm_trainer.exceptions import EngineError
from rllm_trainer.types import Row


def ids(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(5, 250, length).tolist()


@pytest.fixture
def engine(fresh: Any) -> Any:
    return fresh()


def recorded_off_by(engine: Any, row: Row, off: float) -> Row:
    """The row as if the server's policy had given each trained token ``off`` nats less than the trainer's gives it now."""
    now = engine.logprobs([row.sample.token_ids], temperatures=[row.sample.temperature])[0]
    logprobs = np.where(row.sample.trained_mask, now - off, np.nan).astype(np.float32)
    return msgspec.structs.replace(row, sample=msgspec.structs.replace(row.sample, logprobs=logprobs), old_logprobs=logprobs)


def test_token_weights_are_truncated_ratios(engine: Any, make_row: Any) -> None:
    """exp(0.5) stays, exp(1.5) is cut at 2; old logprobs are recomputed, the recorded ones kept."""
    rows = [recorded_off_by(engine, make_row(ids(n, 12), [(4, 12, 1.0)], episode=f"e{n}"), off) for n, off in enumerate([0.5, 1.5])]
    corrected, metrics = correct(rows, engine=engine, correction="decoupled_token_is")
    np.testing.assert_allclose(corrected[0].is_weights[4:], np.exp(0.5), rtol=1e-4)
    np.testing.assert_allclose(corrected[1].is_weights[4:], 2.0, rtol=1e-4)
    np.testing.assert_allclose(corrected[0].old_logprobs[4:] - rows[0].sample.logprobs[4:], 0.5, atol=1e-4)
    assert not corrected[0].is_weights[:4].any()
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx((np.exp(0.5) + 2) / 2, rel=1e-3)


def test_sequence_weights_are_over_the_trajectory(engine: Any, make_row: Any) -> None:
    """A trajectory in two rows has one weight: exp of the summed difference, whatever the cut."""
    whole = recorded_off_by(engine, make_row(ids(7, 30), [(5, 8, 1.0), (20, 24, 1.0)], episode="e"), 0.05)
    first = make_row(ids(7, 30)[:8], [(5, 8, 1.0)], episode="e", name="first")
    second = make_row(ids(7, 30)[:24], [(20, 24, 1.0)], episode="e", name="second")
    one, _ = correct([whole], engine=engine, correction="decoupled_seq_is")
    two, _ = correct([recorded_off_by(engine, row, 0.05) for row in (first, second)], engine=engine, correction="decoupled_seq_is")
    np.testing.assert_allclose(one[0].is_weights[5:8], np.exp(0.35), rtol=1e-4)
    np.testing.assert_allclose(two[0].is_weights[5:8], np.exp(0.35), rtol=1e-4)
    np.testing.assert_allclose(two[1].is_weights[20:24], np.exp(0.35), rtol=1e-4)


def test_rejected_tokens_have_weight_zero(engine: Any, make_row: Any) -> None:
    """Rejection by verl's fields: the row far off is left out, the near one kept with weight 1."""
    rows = [recorded_off_by(engine, make_row(ids(n, 12), [(4, 12, 1.0)], episode=f"e{n}"), off) for n, off in enumerate([0.01, 3.0])]
    fields = {"rollout_is": None, "rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2.0"}
    corrected, _ = correct(rows, engine=engine, correction=fields)
    assert corrected[0].is_weights[4:].tolist() == [1.0] * 8
    assert corrected[1].is_weights[4:].tolist() == [0.0] * 8


@pytest.mark.parametrize("asked", ["bypass_ppo_clip", "nonsense", {"rollout_is_batch_normalize": True}])
def test_what_is_no_decoupled_correction_is_refused(engine: Any, make_row: Any, asked: Any) -> None:
    """Unknown names and modes that would change the loss are one sentence."""
    with pytest.raises(EngineError, match="decoupled"):
        correct([make_row(ids(1, 12), [(4, 12, 1.0)])], engine=engine, correction=asked)
