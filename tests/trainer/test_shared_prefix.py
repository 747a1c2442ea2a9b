"""Rows into tries: literal tries, and the property that every row's tokens see exactly their own past."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rllm_trainer.engine.shared_prefix import Trie, build_tries

MANY = {"max_tokens": 1000, "max_wanted": 1000, "pairs_per_token": 1e9}


def tries_of(rows: list[list[int]], wanted: list[list[int]] | None = None, **given: Any) -> list[Trie]:
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
    mask = np.zeros(int(offsets[-1]), np.bool_)
    for number, row in enumerate(rows):
        at = [len(row) - 1] if wanted is None else wanted[number]
        mask[[int(offsets[number]) + place for place in at]] = True
    return build_tries(np.array([token for row in rows for token in row]), offsets, mask, **{**MANY, **given})


def test_two_rows_with_one_beginning() -> None:
    """[1 2 3 9] and [1 2 4 5 9]: the last token is only a label; 1 and 2 stand once; depths are positions."""
    (trie,) = tries_of([[1, 2, 3, 9], [1, 2, 4, 5, 9]])
    assert trie.rows == [0, 1]
    assert trie.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert trie.depths.tolist() == [0, 1, 2, 2, 3]
    assert trie.ends.tolist() == [5, 5, 3, 5, 5]
    assert trie.predict_at.tolist() == [2, 4]
    assert trie.places.tolist() == [3, 8]


def test_the_first_token_of_a_branch_is_predicted_at_the_last_shared_one() -> None:
    """Both replies begin after [1 2]: token 1 of the trie predicts both."""
    (trie,) = tries_of([[1, 2, 3, 4], [1, 2, 5, 6]], [[2, 3], [2, 3]])
    assert trie.token_ids.tolist() == [1, 2, 3, 5]
    assert trie.predict_at.tolist() == [1, 2, 1, 3]


def test_rows_without_a_common_beginning_stay_apart() -> None:
    """Nothing is shared, so nothing is joined; a row without wanted tokens is in no trie."""
    tries = tries_of([[7, 8, 9], [1, 2, 3], [1, 2, 3]], [[2], [2], []])
    assert [trie.rows for trie in tries] == [[1], [0]]


def test_equal_rows_stand_once() -> None:
    """Two equal replies are one path, predicted twice."""
    (trie,) = tries_of([[1, 2, 3, 4], [1, 2, 3, 4]], [[2, 3], [2, 3]])
    assert trie.token_ids.tolist() == [1, 2, 3]
    assert trie.predict_at.tolist() == [1, 2, 1, 2]
    distinct, which = trie.distinct(np.array([1, 2, 3, 4] * 2), np.ones(8, np.float32))
    assert distinct.predict_at.tolist() == [1, 2]
    assert which.tolist() == [0, 1, 0, 1]
    other, _ = trie.distinct(np.array([1, 2, 3, 4] * 2), np.array([1] * 4 + [0.5] * 4, np.float32))
    assert len(other.predict_at) == 4


@pytest.mark.parametrize(
    "given, expected",
    [({"share": False}, 3), ({"max_tokens": 5}, 2), ({"max_wanted": 1}, 3), ({}, 1)],
)
def test_limits(given: dict[str, Any], expected: int) -> None:
    """Tokens and wanted tokens bound a trie."""
    assert len(tries_of([[1, 2, 3, 4, 0], [1, 2, 3, 5, 0], [1, 2, 3, 6, 0]], **given)) == expected


def test_a_row_joins_only_if_it_saves_more_than_attention_costs() -> None:
    """One shared token of 11 makes the square 20 x 20 instead of two of 11 x 11: 2 * 11 * 10 + 10 ** 2 - 11 ** 2 = 199 pairs more."""
    rows = [[1, *range(10, 20), 0], [1, *range(20, 30), 0]]
    assert len(tries_of(rows, pairs_per_token=199.0)) == 2
    assert len(tries_of(rows, pairs_per_token=200.0)) == 1


def test_every_token_sees_exactly_its_own_past() -> None:
    """For 200 random rows over 3 symbols: the tokens that a wanted token's position sees are the row before it, in order."""
    random = np.random.default_rng(0)
    rows = [random.integers(0, 3, random.integers(2, 12)).tolist() for _ in range(200)]
    wanted = [sorted(random.choice(np.arange(1, len(row)), random.integers(1, len(row)), replace=False).tolist()) for row in rows]
    flat = np.array([token for row in rows for token in row])
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
    tries = tries_of(rows, wanted)
    assert sorted(row for trie in tries for row in trie.rows) == list(range(200))
    assert sum(trie.tokens for trie in tries) < len(flat) / 2
    for trie in tries:
        for at, place in zip(trie.predict_at.tolist(), trie.places.tolist(), strict=True):
            seen = [key for key in range(trie.tokens) if key <= at < trie.ends[key]]
            begin = int(offsets[np.searchsorted(offsets, place, side="right") - 1])
            assert trie.token_ids[seen].tolist() == flat[begin:place].tolist()
            assert trie.depths[seen].tolist() == list(range(place - begin))
