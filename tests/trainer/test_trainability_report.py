"""The trainability report on literal episodes: shares, causes with an example, sums over steps, and limits."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rllm_trainer.limits import Limits
from rllm_trainer.samples import Counters, SampleSet, build_samples
from rllm_trainer.testing import make_call, make_choice, make_episode
from rllm_trainer.trainability_report import Ratio, TrainabilityReport, exceeded, logprob_ratio, trainability_report

ASK = {"role": "user", "content": "a"}
SEVEN = {"role": "assistant", "content": "seven"}


def broken_episode() -> SampleSet:
    """Three replies of 2, 2 and 4 tokens; the second prompt breaks the first's last token; the third call is inexact."""
    return build_samples(
        make_episode(
            make_call("1", [1, 5], make_choice([7, 2], "seven "), messages=[ASK], policy_version_start=2),
            make_call("2", [1, 5, 8, 2, 6], [9, 2], messages=[ASK, SEVEN, ASK], policy_version_start=3),
            make_call("3", [4], [9, 9, 9, 2], exact=False, trainable=False, inexact_reason="usage says 12 tokens, ids are 4"),
            make_call("4", [4], [9, 9, 9], no_train=True, trainable=False),
            episode_id="e1",
        )
    )


def whole_episode() -> SampleSet:
    """Two replies of 2 tokens in one row."""
    return build_samples(make_episode(make_call("1", [1], [7, 2]), make_call("2", [1, 7, 2, 5], [8, 2]), episode_id="e2"))


def test_every_sampled_token_is_accounted_for() -> None:
    """8 sampled, 4 trained, 4 lost to one inexact call; what is under no_train stands apart."""
    report = trainability_report([broken_episode()])
    counters = report.counters
    assert (counters.sampled_tokens, counters.trained_tokens, counters.no_train_tokens) == (8, 4, 3)
    assert counters.share_trained == 0.5
    assert report.table() == [
        ("lost", "inexact", 1, 4, "episode e1, main, call 3: usage says 12 tokens, ids are 4"),
        ("inexact", "usage says N tokens, ids are N", 1, 4, "episode e1, main, call 3: usage says 12 tokens, ids are 4"),
        ("break", "whitespace", 1, 2, "episode e1, main, call 2: token 2 of the prompt begins [8, 2, 6], where call 1 has ' '"),
    ]


def test_steps_add_up_to_a_run() -> None:
    """Counts and tokens are summed; the example is the first one's."""
    step = trainability_report([broken_episode()], groups=2, groups_without_signal=1)
    run = step + trainability_report([broken_episode(), whole_episode()], groups=2) + TrainabilityReport()
    assert run.counters.episodes == 3
    assert (run.counters.multi_call_episodes, run.counters.one_row_episodes) == (3, 1)
    assert [(entry.name, entry.count, entry.tokens) for entry in run.breaks] == [("whitespace", 2, 4)]
    assert run.breaks[0].example == step.breaks[0].example
    assert (run.groups, run.groups_without_signal) == (4, 1)


def test_staleness_counts_versions_per_token() -> None:
    """Two tokens of version 2 and two of version 3, trained at version 5: mean 2.5, oldest 3."""
    staleness = trainability_report([broken_episode()], policy_version=5).staleness
    assert (staleness.tokens, staleness.mean, staleness.most, staleness.unknown) == (4, 2.5, 3, 0)
    untold = build_samples(make_episode(make_call("1", [1], [7, 2], policy_version_start=None)))
    both = staleness + trainability_report([untold], policy_version=5).staleness
    assert (both.tokens, both.mean, both.most, both.unknown) == (4, 2.5, 3, 2)


def test_the_ratio_is_over_trained_tokens() -> None:
    """The trainer gives one of four tokens twice the server's probability; prompt tokens do not count."""
    (row,) = whole_episode().samples
    ours = np.where(np.isnan(row.logprobs), -9, row.logprobs).astype(np.float32)
    assert logprob_ratio([row], [ours]) == Ratio(tokens=4, total=4.0, p99=1.0)
    ours[1] += math.log(2)
    ratio = logprob_ratio([row], [ours])
    assert ratio.mean == pytest.approx(1.25)
    assert ratio.p99 == pytest.approx(2.0)
    assert logprob_ratio([], []).mean == 1.0
    assert (ratio + Ratio(tokens=4, total=4.0)).mean == pytest.approx(1.125)
    assert (ratio + Ratio(tokens=4, total=4.0)).p99 == ratio.p99


def test_metrics_are_flat_numbers() -> None:
    """Each cause has a name of its own; what was not measured is left out."""
    metrics = trainability_report([broken_episode()], policy_version=3).metrics()
    assert metrics["trainability/share_trained"] == 0.5
    assert metrics["trainability/lost/inexact"] == 4
    assert metrics["trainability/breaks/whitespace"] == 1
    assert metrics["trainability/staleness_max"] == 1
    assert not {"trainability/ratio_p99", "trainability/groups_without_signal"} & set(metrics)
    assert trainability_report([], groups=4, groups_without_signal=1).metrics()["trainability/groups_without_signal"] == 0.25


def test_a_report_beyond_its_limits_says_what_was_got_and_expected() -> None:
    """One sentence a limit; none within them."""
    report = trainability_report(
        [broken_episode()], policy_version=5, groups=4, groups_without_signal=3, ratio=Ratio(tokens=9, total=9.0, p99=20.0)
    )
    strict = Limits(share_trained=0.9, groups_without_signal=0.5, staleness=2, ratio_p99=10.0)
    assert exceeded(report, strict) == [
        "4 of 8 sampled tokens are trained (50%); at least 90% must be. Lost to inexact: 4 tokens, such as episode e1, main, call 3: usage "
        "says 12 tokens, ids are 4",
        "3 of 4 groups have no signal; at most 50% may have none. Their rollouts all earn the same: use harder or easier rows, a finer "
        "reward, or larger groups",
        "a trained token is 3 versions old; at most 2 are allowed",
        "trainer and server differ by a factor of 20 at the 99th percentile of 9 tokens; at most 10 is allowed. They do not hold the same "
        "weights, or do not report the same kind of logprobs",
    ]
    assert exceeded(report, Limits(ratio_p99=None)) == []
    assert exceeded(TrainabilityReport(), strict) == []


def test_what_a_setting_leaves_out_is_no_loss() -> None:
    """Rejected and truncated tokens are no reason to stop; of the others, enough must be trained."""
    asked = TrainabilityReport(counters=Counters(sampled_tokens=100, trained_tokens=10, lost_tokens={"rejected": 60, "truncated": 30}))
    assert exceeded(asked, Limits()) == []
    lost = TrainabilityReport(counters=Counters(sampled_tokens=100, trained_tokens=10, lost_tokens={"rejected": 60, "inexact": 30}))
    assert exceeded(lost, Limits()) == ["10 of 40 sampled tokens are trained (25%); at least 50% must be. Lost to "]
