"""Rows into batches: shares and denominators by hand, mini-batches between groups."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rllm_trainer.batching import make_batch, make_batches
from rllm_trainer.config import Settings, make_settings
from rllm_trainer.exceptions import SettingError
from rllm_trainer.types import Row, Sample, SampledSpan


def row(length: int, *spans: tuple[int, int, str], episode: str = "e", group: str = "g") -> Row:
    mask = np.zeros(length, np.bool_)
    for start, stop, _ in spans:
        mask[start:stop] = True
    logprobs = np.where(mask, -1.0, np.nan).astype(np.float32)
    sample = Sample(
        id=episode,
        episode_id=episode,
        task_id=group,
        token_ids=np.arange(length, dtype=np.int32),
        trained_mask=mask,
        logprobs=logprobs,
        versions=np.zeros(length, np.int32),
        temperature=1.0,
        spans=[
            SampledSpan(span_id=f"s{start}", choice=0, trajectory_id=name, role="r", start=start, stop=stop) for start, stop, name in spans
        ],
    )
    return Row(sample=sample, advantages=np.zeros(length, np.float32), weights=mask.astype(np.float32), old_logprobs=logprobs, group=group)


def settings(loss_agg: str, **given: Any) -> Settings:
    return make_settings({"loss_agg": loss_agg, **given})


ROWS = [row(6, (1, 3, "t1"), (4, 6, "t1")), row(8, (4, 8, "t1")), row(5, (3, 5, "t2"))]
"""Trajectory t1: 8 trained tokens in two rows; t2: 2 in one."""


@pytest.mark.parametrize(
    "loss_agg, denominator, first_row, last_row",
    [
        ("token-mean", 10.0, [0, 1, 1, 0, 1, 1], [0, 0, 0, 1, 1]),
        ("token-sum", 1.0, [0, 1, 1, 0, 1, 1], [0, 0, 0, 1, 1]),
        ("seq-mean-token-sum", 2.0, [0, 1, 1, 0, 1, 1], [0, 0, 0, 1, 1]),
        ("seq-mean-token-mean", 2.0, [0, 0.125, 0.125, 0, 0.125, 0.125], [0, 0, 0, 0.5, 0.5]),
    ],
)
def test_shares_and_denominator(loss_agg: str, denominator: float, first_row: list[float], last_row: list[float]) -> None:
    """A sequence is a trajectory, whatever the number of its rows."""
    batch = make_batch(ROWS, settings=settings(loss_agg), step=3, policy_version=2)
    assert batch.denominator == denominator
    assert batch.rows[0].weights.tolist() == first_row
    assert batch.rows[2].weights.tolist() == last_row
    assert (batch.step, batch.policy_version) == (3, 2)


def test_norm_divides_by_a_constant_that_must_be_given() -> None:
    """``seq-mean-token-sum-norm`` needs verl's loss_scale_factor; without one it is refused."""
    scaled = settings("seq-mean-token-sum-norm", verl={"actor": {"loss_scale_factor": 100}})
    assert make_batch(ROWS, settings=scaled, step=1, policy_version=0).denominator == 200.0
    with pytest.raises(SettingError, match="loss_scale_factor"):
        make_batch(ROWS, settings=settings("seq-mean-token-sum-norm"), step=1, policy_version=0)


def test_rows_that_train_nothing_are_not_in_the_batch() -> None:
    """A row of context only has no weight anywhere."""
    batch = make_batch([*ROWS, row(9)], settings=settings("token-mean"), step=1, policy_version=0)
    assert (len(batch.rows), batch.denominator) == (3, 10.0)


def test_trajectories_of_one_name_in_two_episodes_are_two() -> None:
    """A trajectory is known by its episode and its id."""
    rows = [row(4, (2, 4, "t"), episode="e1"), row(4, (2, 4, "t"), episode="e2")]
    assert make_batch(rows, settings=settings("seq-mean-token-sum"), step=1, policy_version=0).denominator == 2.0


def test_mini_batches_never_cut_a_group() -> None:
    """Groups are dealt to the mini-batch with the fewest trained tokens; each has its own denominator."""
    rows = [row(9, (1, 9, "t"), episode="a1", group="a"), row(5, (3, 5, "t"), episode="b1", group="b")]
    rows += [row(9, (1, 9, "t"), episode="a2", group="a"), row(5, (3, 5, "t"), episode="c1", group="c")]
    batches = make_batches(rows, settings=settings("token-mean"), step=1, policy_version=0, mini_batches=2)
    assert [[r.group for r in batch.rows] for batch in batches] == [["a", "a"], ["b", "c"]]
    assert [batch.denominator for batch in batches] == [16.0, 4.0]
    with pytest.raises(SettingError, match="at most that many"):
        make_batches(rows, settings=settings("token-mean"), step=1, policy_version=0, mini_batches=4)


def test_an_empty_batch_divides_by_one() -> None:
    """No rows: no division by zero."""
    assert make_batch([], settings=settings("token-mean"), step=1, policy_version=0).denominator == 1.0
