"""What a server says before and after a swap, against the trainer's old and new logprobs: lists of floats."""

from __future__ import annotations

import numpy as np
import pytest

from rllm_trainer.serving.base import Probe
from rllm_trainer.serving.proof import SwapNotProven, judge, pick_probe
from rllm_trainer.types import Float32, Int32

NAN = float("nan")


def floats(*values: float) -> Float32:
    return np.array(values, np.float32)


def ids(count: int) -> Int32:
    return np.arange(count, dtype=np.int32)


def probe(old: list[float], new: list[float]) -> Probe:
    return Probe(rows=[ids(len(old) + 1)], old=[floats(NAN, *old)], new=[floats(NAN, *new)])


MOVED = probe([-1.0, -2.0, -3.0], [-1.5, -2.0, -2.5])


def test_a_server_that_moved_with_the_trainer_is_proven() -> None:
    """Two of three tokens moved far beyond the noise, and the server is within it on all three."""
    verdict = judge(MOVED, [floats(NAN, -1.0001, -2.0, -3.0)], [floats(NAN, -1.5, -2.0002, -2.5)])
    assert (verdict.proof, verdict.telling_tokens) == ("logprobs", 2)
    assert verdict.noise == pytest.approx(1e-4, rel=1e-2)
    assert verdict.max_difference == pytest.approx(2e-4, rel=1e-2)


@pytest.mark.parametrize(
    "after, words",
    [
        ([-1.0, -2.0, -3.0], "still serves the old weights"),
        ([-1.5, -2.0, -2.7], r"the worst token went from -3\.0000 to -2\.5000, the server says -2\.7000"),
        ([-1.5, -2.0, NAN], None),
    ],
)
def test_a_server_that_did_not_is_named(after: list[float], words: str | None) -> None:
    """Old weights and half-swapped ones are told apart; a token that the server was not asked for proves nothing and refutes nothing."""
    before = [floats(NAN, -1.0, -2.0, -3.0)]
    if words is None:
        assert judge(MOVED, before, [floats(NAN, *after)]).telling_tokens == 1
        return
    with pytest.raises(SwapNotProven, match=words):
        judge(MOVED, before, [floats(NAN, *after)])


def test_a_change_within_the_noise_asks_for_the_digest() -> None:
    """Where no token moves by ten times the noise, logprobs cannot tell, and say so."""
    small = probe([-1.0, -2.0], [-1.0005, -2.0005])
    verdict = judge(small, [floats(NAN, -1.0001, -2.0)], [floats(NAN, -1.0005, -2.0005)])
    assert (verdict.proof, verdict.telling_tokens) == ("digest", 0)


def test_a_server_that_served_something_else_before_is_named() -> None:
    """Noise beyond what two programs of one precision show means other weights before the swap."""
    with pytest.raises(SwapNotProven, match=r"before the swap .* by up to 0\.5 nats"):
        judge(MOVED, [floats(NAN, -1.0, -2.5, -3.0)], [floats(NAN, -1.5, -2.0, -2.5)])
    assert judge(MOVED, [floats(NAN, -1.0, -2.04, -3.0)], [floats(NAN, -1.5, -2.0, -2.5)], most_noise=0.5).proof == "logprobs"


def test_a_probe_that_says_nothing_is_refused() -> None:
    """Without a token that all sides know, and with rows that do not fit, there is no verdict."""
    with pytest.raises(ValueError, match="got a probe without a single token"):
        judge(probe([-1.0], [-1.0]), [floats(NAN, NAN)], [floats(NAN, -1.0)])
    with pytest.raises(AssertionError, match="new has rows of"):
        Probe(rows=[ids(2)], old=[floats(NAN, -1.0)], new=[floats(NAN)])


def test_the_rows_that_moved_most_are_picked() -> None:
    """At most so many rows, those with the largest single move, in their order; a row of one token never."""
    rows = [ids(2), ids(2), ids(1), ids(2)]
    old = [floats(NAN, -1.0), floats(NAN, -1.0), floats(NAN), floats(NAN, -1.0)]
    new = [floats(NAN, -1.2), floats(NAN, -1.1), floats(NAN), floats(NAN, -2.0)]
    assert [values[1] for values in pick_probe(rows, old, new, max_rows=2).new] == pytest.approx([-1.2, -2.0])
