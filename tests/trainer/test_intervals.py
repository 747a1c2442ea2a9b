"""Intervals by bootstrap over tasks."""

import numpy as np
import pytest

from rllm_trainer.intervals import Interval, mean_interval, rise_interval


def test_one_task_has_no_width():
    """Of one task every resample is that task."""
    assert mean_interval([0.25]) == Interval(mean=0.25, low=0.25, high=0.25)


def test_interval_matches_the_normal_one():
    """Of many tasks the interval is close to mean ± 1.96 standard errors."""
    scores = list(np.random.default_rng(0).normal(0.5, 1.0, size=400))
    interval = mean_interval(scores)
    error = np.std(scores) / 20
    assert interval.mean == pytest.approx(np.mean(scores))
    assert interval.low == pytest.approx(np.mean(scores) - 1.96 * error, abs=0.1 * error)
    assert interval.high == pytest.approx(np.mean(scores) + 1.96 * error, abs=0.1 * error)


def test_a_rise_is_paired():
    """Tasks that differ a lot but all rise by the same have an interval without width."""
    before = {"a": 0.0, "b": 0.5, "c": 0.9}
    after = {"c": 1.0, "a": 0.1, "b": 0.6}
    interval = rise_interval(before, after)
    assert [round(x, 9) for x in (interval.mean, interval.low, interval.high)] == [0.1, 0.1, 0.1]


def test_no_rise_has_an_interval_around_zero():
    """Where half of the tasks rise and half fall, 0 lies in the interval."""
    before = {str(i): 0.5 for i in range(100)}
    after = {str(i): float(i % 2) for i in range(100)}
    interval = rise_interval(before, after)
    assert interval.low < 0 < interval.high


def test_a_seed_fixes_the_interval():
    """Same scores and seed, same interval."""
    scores = [0.0, 1.0, 0.0, 1.0, 1.0]
    assert mean_interval(scores, seed=3) == mean_interval(scores, seed=3)


def test_unpaired_tasks_are_refused():
    """A task that was scored once has no rise."""
    with pytest.raises(ValueError, match="got 1 tasks scored only once, such as b"):
        rise_interval({"a": 1.0}, {"a": 1.0, "b": 0.0})
    with pytest.raises(ValueError, match="got no scores"):
        mean_interval([])
