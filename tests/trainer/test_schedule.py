"""The learning rate follows from the step."""

import pytest

from rllm_trainer.schedule import learning_rate


def rates(schedule, steps=4, warmup=0):
    return [learning_rate(s, peak=1.0, schedule=schedule, warmup_steps=warmup, steps=steps) for s in range(1, steps + 1)]


def test_constant():
    """Constant is the peak at every step, without a known end too."""
    assert rates("constant") == [1.0, 1.0, 1.0, 1.0]
    assert learning_rate(1000, peak=0.5, schedule="constant", warmup_steps=0, steps=None) == 0.5


def test_linear_falls_to_zero_after_the_last_step():
    """Linear takes equal steps down; the last step still learns."""
    assert rates("linear") == [1.0, 0.75, 0.5, 0.25]


def test_cosine():
    """Cosine starts at the peak and is halved in the middle."""
    assert rates("cosine") == pytest.approx([1.0, 0.8535533905932737, 0.5, 0.14644660940672627])


def test_warm_up():
    """The warm-up reaches the peak in its last step, and the schedule follows."""
    assert rates("constant", warmup=2) == [0.5, 1.0, 1.0, 1.0]
    assert rates("linear", warmup=2) == [0.5, 1.0, 1.0, 0.5]
