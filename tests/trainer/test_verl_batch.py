"""Columns, wanted tokens and plans of micro-batches, as lists of ints."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rllm_trainer.engine.shared_prefix import Trie
from rllm_trainer.engine.verl_batch import Columns, Plan, plan_micro_batches, rows_of_sequences, wanted_for_update


def columns(lengths: list[int], trained: list[int], advantages: list[float], sequences: list[int], **more: Any) -> Columns:
    size = sum(lengths)
    return Columns(
        lengths=np.array(lengths, np.int32),
        temperatures=np.ones(len(lengths), np.float32),
        token_ids=np.arange(size, dtype=np.int32),
        trained=np.array(trained, np.bool_),
        advantages=np.array(advantages, np.float32),
        weights=np.array(more.pop("weights", trained), np.float32),
        old_logprobs=np.zeros(size, np.float32),
        recorded_logprobs=np.zeros(size, np.float32),
        sequences=np.array(sequences, np.int32),
        **more,
    )


TWO = columns([3, 4], [0, 1, 1, 0, 1, 1, 1], [0, 1, 0, 0, 0, 0, 0], [-1, 0, 0, -1, 1, 1, 1])


@pytest.mark.parametrize(
    "inert, whole, expected",
    [(True, False, [0, 1, 0, 0, 0, 0, 0]), (True, True, [0, 1, 1, 0, 0, 0, 0]), (False, False, [0, 1, 1, 0, 1, 1, 1])],
)
def test_wanted_are_the_tokens_that_can_have_a_gradient(inert: bool, whole: bool, expected: list[int]) -> None:
    """Without advantage and other terms: none; a loss over sequences wants a trajectory whole or not at all."""
    assert wanted_for_update(TWO, zero_is_inert=inert, whole_sequences=whole).astype(int).tolist() == expected


def test_tokens_without_weight_are_not_wanted() -> None:
    """A share of 0 is left out even where a KL term is on; an importance weight of 0 only where nothing else has a gradient."""
    some = columns([3], [0, 1, 1], [0, 1, 1], [-1, 0, 0], weights=[0, 0, 1], is_weights=np.array([1, 1, 0], np.float32))
    assert wanted_for_update(some, zero_is_inert=False, whole_sequences=False).tolist() == [False, False, True]
    assert wanted_for_update(some, zero_is_inert=True, whole_sequences=False).tolist() == [False, False, False]


def trie(row: int, tokens: int, wanted: int = 1) -> Trie:
    flat = np.arange(tokens, dtype=np.int64)
    return Trie(rows=[row], token_ids=flat, depths=flat, ends=flat + 1, predict_at=flat[:wanted], places=flat[:wanted])


def rows_of(plan: Plan) -> list[list[int]]:
    return [[row for one in micro_batch for row in one.rows] for micro_batch in plan.micro_batches]


def test_plan_puts_rows_of_like_length_together() -> None:
    """Longest first; padding is counted; one over-long row stands alone."""
    tries = [trie(0, 10), trie(1, 200, 5), trie(2, 60, 2), trie(4, 9), trie(5, 58, 2)]
    assert rows_of(plan_micro_batches(tries, max_tokens=120, max_wanted=100)) == [[1], [2, 5], [0, 4]]
    assert rows_of(plan_micro_batches(tries, max_tokens=120, max_wanted=3)) == [[1], [2], [5, 0], [4]]


def test_plan_gives_every_rank_as_many_micro_batches() -> None:
    """Each row once over all ranks; a rank that has one fewer repeats a micro-batch, marked idle."""
    tries = [trie(row, 5) for row in range(3)]
    plans = [plan_micro_batches(tries, max_tokens=5, max_wanted=9, rank=rank, ranks=2) for rank in (0, 1)]
    assert [rows_of(plan) for plan in plans] == [[[0], [2]], [[1], [0]]]
    assert [plan.idle for plan in plans] == [0, 1]
    assert plan_micro_batches([], max_tokens=5, max_wanted=9, rank=1, ranks=2).micro_batches == []


def test_rows_of_one_trajectory_stay_together_where_a_loss_needs_it() -> None:
    """Rows 0 and 2 share a trajectory, 2 and 3 another: one unit; row 1 stands alone."""
    some = columns([2, 2, 3, 2], [0, 1, 0, 1, 0, 1, 1, 0, 1], [0, 1, 0, 1, 0, 1, 1, 0, 1], [-1, 0, -1, 1, -1, 0, 2, -1, 2])
    together = rows_of_sequences(some, some.trained)
    assert together == [[0, 2, 3], [1]]
    assert rows_of(plan_micro_batches([trie(row, 3) for row in range(4)], max_tokens=3, max_wanted=99, together=together)) == [
        [0, 2, 3],
        [1],
    ]
