"""What a server says before and after a swap, against the trainer's old and new logprobs: lists of floats."""

from __future__ import annotations

import numpy as np
import pytest

from rllm_trainer.serving.base import Probe
from rllm_trainer.serving.proof import SwapNotProven, judge, telling_windows
from rllm_trainer.types import Float32, Int32, Row, Sample, SampledSpan

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


def row(prompt: int, *replies: tuple[list[float], float], temperature: float = 1.0) -> Row:
    """A prompt of so many tokens, then replies of these logprobs and this advantage, with three tokens between two of them."""
    logprobs: list[float] = [NAN] * prompt
    advantages: list[float] = [0.0] * prompt
    spans: list[SampledSpan] = []
    for number, (values, advantage) in enumerate(replies):
        if number:
            logprobs += [NAN] * 3
            advantages += [0.0] * 3
        start, stop = len(logprobs), len(logprobs) + len(values)
        spans.append(SampledSpan(span_id=f"c{number}", choice=0, trajectory_id="t", role="r", start=start, stop=stop))
        logprobs += values
        advantages += [advantage] * len(values)
    sampled = ~np.isnan(floats(*logprobs))
    sample = Sample(
        id="s",
        episode_id="e",
        task_id="q",
        token_ids=ids(len(logprobs)),
        trained_mask=sampled,
        logprobs=floats(*logprobs),
        versions=np.where(sampled, 0, -1).astype(np.int32),
        temperature=temperature,
        spans=spans,
    )
    return Row(sample=sample, advantages=floats(*advantages), weights=sampled.astype(np.float32), old_logprobs=floats(*logprobs), group="g")


def test_the_tokens_that_should_move_most_are_looked_at() -> None:
    """By advantage and how unlikely they were, in the stretch of a row that has the most of it; of one row one stretch, none twice."""
    sure, torn = [-0.01] * 3, [-2.0] * 3
    assert telling_windows([row(20, (sure, 1.0)), row(21, (torn, 1.0)), row(22, (torn, 0.1))]) == [(1, 16, 24), (2, 17, 25)]
    assert telling_windows([row(20, (torn, 0.1)), row(21, (torn, 1.0)), row(22, (torn, -2.0))]) == [(1, 16, 24), (2, 17, 25)]
    assert telling_windows([row(20, (torn, 0.5), (sure * 9, 0.1), (torn, -1.0))]) == [(0, 51, 59)]
    assert telling_windows([row(20, (torn, 0.5), ([-2.0] * 7, -1.0), (sure * 9, 0.1))]) == [(0, 25, 33)]
    assert telling_windows([row(4, (torn, 0.5)), row(4, (torn, 1.0)), row(4, (torn, 1.0), temperature=0.5)]) == [(1, 0, 7)]
    assert telling_windows([row(4, (torn, 0.0))]) == [(0, 0, 7)]
    assert telling_windows([row(4), row(0, ([-1.0], 1.0))]) == []


def test_half_precision_has_a_noise_of_its_own() -> None:
    """A token that happens to agree in bfloat16 does not make the next one's usual difference a fault."""
    was, now = [floats(NAN, -1.0, -2.0, -3.0)], [floats(NAN, -1.5, -2.0, -2.46)]
    assert judge(MOVED, was, now, most_noise=0.5).noise == pytest.approx(0.01)
    with pytest.raises(SwapNotProven):
        judge(MOVED, was, now)
