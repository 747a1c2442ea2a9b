"""Rows on literal ids: which tokens each row holds, which of them it trains, and what is set aside for which reason."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from rllm_trace.types import ErrorInfo, Logprobs, TokenIds, Usage
from rllm_trainer.exceptions import SettingError
from rllm_trainer.samples import Counters, SampleSet, build_samples, reconstruct
from rllm_trainer.testing import make_call, make_choice, make_episode
from rllm_trainer.types import Sample

MODES = ("tree", "prefix", "call")


def rows(samples: SampleSet) -> list[tuple[list[int], list[int]]]:
    """(token ids, mask) of each row."""
    return [(row.token_ids.tolist(), row.trained_mask.astype(int).tolist()) for row in samples.samples]


def spans(row: Sample) -> list[tuple[str, int, int, int, bool]]:
    return [(span.span_id, span.choice, span.start, span.stop, span.trained) for span in row.spans]


def test_a_single_chain_is_one_row() -> None:
    """Two turns whose ids continue each other: one row with two spans, the observation between them not trained."""
    samples = build_samples(make_episode(make_call("1", [5, 6], [7, 2]), make_call("2", [5, 6, 7, 2, 8], [9, 2])))
    assert rows(samples) == [([5, 6, 7, 2, 8, 9, 2], [0, 0, 1, 1, 0, 1, 1])]
    (row,) = samples.samples
    assert spans(row) == [("1", 0, 2, 4, True), ("2", 0, 5, 7, True)]
    assert (row.id, row.cause, row.temperature) == ("episode:2:0", None, 1.0)
    assert samples.counters.one_row_episodes == samples.counters.multi_call_episodes == 1
    assert samples.breaks == []


def test_the_example_in_the_module_holds() -> None:
    """The second half of the docstring's example: a row of its own, and a break at token 3."""
    samples = build_samples(make_episode(make_call("1", [5, 6], [7, 2]), make_call("2", [5, 6, 7, 8], [9, 2])))
    assert rows(samples) == [([5, 6, 7, 2], [0, 0, 1, 1]), ([5, 6, 7, 8, 9, 2], [0, 0, 0, 0, 1, 1])]
    assert [(broken.span_id, broken.position, broken.cause) for broken in samples.breaks] == [("2", 3, "unknown")]


def test_logprobs_and_versions_stand_on_sampled_tokens_only() -> None:
    """NaN and -1 where nothing was sampled; elsewhere the server's own values."""
    first = make_call("1", [5], make_choice([7, 2], logprobs=Logprobs([-0.25, -0.5])), policy_version_start=3, policy_version_end=3)
    second = make_call("2", [5, 7, 2, 8], make_choice([9], logprobs=Logprobs([-1.0])), policy_version_start=4, policy_version_end=4)
    (row,) = build_samples(make_episode(first, second)).samples
    np.testing.assert_array_equal(row.logprobs, np.asarray([np.nan, -0.25, -0.5, np.nan, -1.0], np.float32))
    assert row.versions.tolist() == [-1, 3, 3, -1, 4]
    assert (row.token_ids.dtype, row.trained_mask.dtype, row.logprobs.dtype, row.versions.dtype) == (
        np.int32,
        np.bool_,
        np.float32,
        np.int32,
    )


def test_tool_results_are_context() -> None:
    """A reply with two tool calls, both results in the next prompt: one row, four result tokens not trained."""
    samples = build_samples(make_episode(make_call("1", [1], [40, 41, 2]), make_call("2", [1, 40, 41, 2, 60, 61, 62, 63], [50, 2])))
    assert rows(samples) == [([1, 40, 41, 2, 60, 61, 62, 63, 50, 2], [0, 1, 1, 1, 0, 0, 0, 0, 1, 1])]


def test_two_tools_answered_in_parallel_share_the_reply_that_called_them() -> None:
    """Each result goes into a prompt of its own: two rows, and the shared reply is trained in the first."""
    samples = build_samples(
        make_episode(make_call("1", [1], [40, 2]), make_call("2", [1, 40, 2, 60], [50]), make_call("3", [1, 40, 2, 61], [51]))
    )
    assert rows(samples) == [([1, 40, 2, 60, 50], [0, 1, 1, 0, 1]), ([1, 40, 2, 61, 51], [0, 0, 0, 0, 1])]
    assert spans(samples.samples[1]) == [("1", 0, 1, 3, False), ("3", 0, 4, 5, True)]
    assert samples.counters.forks == 1
    assert samples.breaks == []


def test_a_user_fork_loses_nothing() -> None:
    """Two questions after the same reply, each with a turn of its own after that: two rows, no break."""
    samples = build_samples(
        make_episode(
            make_call("1", [1], [7, 2]),
            make_call("2", [1, 7, 2, 11], [8, 2]),
            make_call("3", [1, 7, 2, 12], [9, 2]),
            make_call("4", [1, 7, 2, 12, 9, 2, 13], [10, 2]),
        )
    )
    assert rows(samples) == [
        ([1, 7, 2, 11, 8, 2], [0, 1, 1, 0, 1, 1]),
        ([1, 7, 2, 12, 9, 2, 13, 10, 2], [0, 0, 0, 0, 1, 1, 0, 1, 1]),
    ]
    assert [row.cause for row in samples.samples] == [None, None]


def test_an_assistant_fork_is_two_lineages() -> None:
    """The same prompt asked twice, each answer continued: two rows that share the prompt only."""
    samples = build_samples(
        make_episode(
            make_call("1", [1], [7, 2]), make_call("2", [1], [8, 2]), make_call("3", [1, 7, 2, 5], [3]), make_call("4", [1, 8, 2, 5], [4])
        )
    )
    assert rows(samples) == [([1, 7, 2, 5, 3], [0, 1, 1, 0, 1]), ([1, 8, 2, 5, 4], [0, 1, 1, 0, 1])]
    assert samples.breaks == []


def test_an_empty_reply_is_no_row_and_no_break() -> None:
    """A reply without tokens trains nothing; what comes after continues its prompt."""
    history = [{"role": "user", "content": "a"}]
    samples = build_samples(
        make_episode(
            make_call("1", [1, 5], [], messages=history),
            make_call(
                "2", [1, 5, 2, 6], [7, 2], messages=[*history, {"role": "assistant", "content": ""}, {"role": "user", "content": "b"}]
            ),
        )
    )
    assert rows(samples) == [([1, 5, 2, 6, 7, 2], [0, 0, 0, 0, 1, 1])]
    assert samples.counters.empty_replies == 1
    assert samples.breaks == []


def test_a_reply_of_nothing_but_the_end_of_turn_is_trained() -> None:
    """The end-of-turn token was sampled, so it is trained."""
    assert rows(build_samples(make_episode(make_call("1", [1, 5], [2])))) == [([1, 5, 2], [0, 0, 1])]


def test_a_sub_agent_inside_a_turn_does_not_break_the_main_one() -> None:
    """The main agent's two calls are one row although another agent's call lies between them."""
    samples = build_samples(
        make_episode(
            make_call("1", [1, 5], [7, 2], started=1),
            make_call("3", [1, 5, 7, 2, 8], [9, 2], started=3),
            agents=[("helper", [make_call("2", [3, 6], [4, 2], started=2, messages=[{"role": "user", "content": "help"}])])],
        )
    )
    assert rows(samples) == [([1, 5, 7, 2, 8, 9, 2], [0, 0, 1, 1, 0, 1, 1]), ([3, 6, 4, 2], [0, 0, 1, 1])]
    assert [(broken.span_id, broken.cause) for broken in samples.breaks] == [("2", "other agent")]


def test_two_agents_of_one_name_keep_their_tokens_apart() -> None:
    """Two solvers in parallel, calls interleaved, equal prompts: each row names the trajectory that sampled it."""
    samples = build_samples(
        make_episode(
            agents=[
                ("solver", [make_call("1", [1, 5], [7, 2], started=1), make_call("3", [1, 5, 7, 2, 6], [8], started=3)]),
                ("solver", [make_call("2", [1, 5], [9, 2], started=2), make_call("4", [1, 5, 9, 2, 6], [8], started=4)]),
            ]
        )
    )
    assert rows(samples) == [([1, 5, 7, 2, 6, 8], [0, 0, 1, 1, 0, 1]), ([1, 5, 9, 2, 6, 8], [0, 0, 1, 1, 0, 1])]
    assert [{span.trajectory_id for span in row.spans} for row in samples.samples] == [{"solver-0"}, {"solver-1"}]
    assert {span.role for row in samples.samples for span in row.spans} == {"solver"}


def test_equal_replies_of_two_agents_are_each_continued_by_their_own() -> None:
    """Both solvers sample the same reply to the same prompt; each goes on from its own, not from the other's."""
    samples = build_samples(
        make_episode(
            agents=[
                ("solver", [make_call("1", [1, 5], [7, 2], started=1), make_call("3", [1, 5, 7, 2, 6], [8], started=3)]),
                ("solver", [make_call("2", [1, 5], [7, 2], started=2), make_call("4", [1, 5, 7, 2, 6], [9], started=4)]),
            ]
        )
    )
    assert [spans(row) for row in samples.samples] == [
        [("1", 0, 2, 4, True), ("3", 0, 5, 6, True)],
        [("2", 0, 2, 4, True), ("4", 0, 5, 6, True)],
    ]


def test_a_deep_tree_with_several_leaves_trains_each_reply_once() -> None:
    """Three leaves under one reply, one of them under two: every reply is trained in one row and context in the others."""
    samples = build_samples(
        make_episode(
            make_call("1", [1], [10, 2]),
            make_call("2", [1, 10, 2, 5], [20, 2]),
            make_call("3", [1, 10, 2, 5, 20, 2, 6], [30, 2]),
            make_call("4", [1, 10, 2, 5, 20, 2, 7], [40, 2]),
            make_call("5", [1, 10, 2, 8], [50, 2]),
        )
    )
    assert rows(samples) == [
        ([1, 10, 2, 5, 20, 2, 6, 30, 2], [0, 1, 1, 0, 1, 1, 0, 1, 1]),
        ([1, 10, 2, 5, 20, 2, 7, 40, 2], [0, 0, 0, 0, 0, 0, 0, 1, 1]),
        ([1, 10, 2, 8, 50, 2], [0, 0, 0, 0, 1, 1]),
    ]
    assert spans(samples.samples[1]) == [("1", 0, 1, 3, False), ("2", 0, 4, 6, False), ("4", 0, 7, 9, True)]
    counters = samples.counters
    assert (counters.trained_tokens, counters.row_tokens, counters.distinct_tokens) == (10, 24, 15)


def test_four_samples_then_one_continued() -> None:
    """n=4: every choice is a sample of its own, and the continued one shares its row with what follows."""
    samples = build_samples(make_episode(make_call("1", [1], [10, 2], [11, 2], [12, 2], [10, 2]), make_call("2", [1, 12, 2, 5], [9])))
    assert rows(samples) == [
        ([1, 10, 2], [0, 1, 1]),
        ([1, 11, 2], [0, 1, 1]),
        ([1, 12, 2, 5, 9], [0, 1, 1, 0, 1]),
        ([1, 10, 2], [0, 1, 1]),
    ]
    assert [row.id for row in samples.samples] == ["episode:1:0", "episode:1:1", "episode:2:0", "episode:1:3"]


def test_a_retry_that_sampled_the_same_is_a_sample_of_its_own() -> None:
    """Equal prompts and equal replies are not merged: both are trained, the later one is the one that is continued."""
    samples = build_samples(make_episode(make_call("1", [1], [7, 2]), make_call("2", [1], [7, 2]), make_call("3", [1, 7, 2, 5], [9])))
    assert rows(samples) == [([1, 7, 2], [0, 1, 1]), ([1, 7, 2, 5, 9], [0, 1, 1, 0, 1])]
    assert [spans(row)[0][0] for row in samples.samples] == ["1", "2"]
    assert samples.counters.distinct_tokens == 5


def test_a_retry_made_later_is_not_what_was_continued() -> None:
    """Of two equal replies the one that began before the call is its parent."""
    samples = build_samples(
        make_episode(
            make_call("1", [1], [7, 2], started=1), make_call("2", [1, 7, 2, 5], [9], started=2), make_call("3", [1], [7, 2], started=3)
        )
    )
    assert [[name for name, *_ in spans(row)] for row in samples.samples] == [["1", "2"], ["3"]]


def test_a_retry_that_was_cut_shorter_is_a_sample_of_its_own() -> None:
    """A reply that is a beginning of another reply is no part of that one's row."""
    samples = build_samples(make_episode(make_call("1", [1], [7]), make_call("2", [1], [7, 8, 2])))
    assert rows(samples) == [([1, 7], [0, 1]), ([1, 7, 8, 2], [0, 1, 1, 1])]


def test_a_call_that_spans_a_swap_says_so_per_token() -> None:
    """Tokens carry the version that sampled them; where the server does not tell it, the older of the two."""
    told = make_call("1", [1], [7, 8, 2], policy_version_start=3, policy_version_end=4, version_spans=[(3, 0, 2), (4, 2, 3)])
    untold = make_call("2", [9], [7, 8], [5, 6], policy_version_start=3, policy_version_end=4, version_spans=[(4, 1, 2)])
    samples = build_samples(make_episode(told, untold))
    assert [row.versions.tolist() for row in samples.samples] == [[-1, 3, 3, 4], [-1, 3, 4], [-1, 3, 3]]
    assert samples.counters.unversioned_tokens == 0


def test_each_choice_of_a_call_that_spans_a_swap_has_its_own_versions() -> None:
    """With n=2 the second reply may have got further than the first when the weights were swapped."""
    second = make_choice([7, 8, 2], index=1, version_spans=[(3, 0, 1), (4, 1, 3)])
    call = make_call("1", [1], [7, 8, 2], second, policy_version_start=3, policy_version_end=4, version_spans=[(3, 0, 2), (4, 2, 3)])
    samples = build_samples(make_episode(call)).samples
    assert [row.versions.tolist() for row in samples] == [[-1, 3, 3, 4], [-1, 3, 4, 4]]


def test_a_server_that_tells_no_version_is_counted() -> None:
    """Version -1 on trained tokens is counted, not guessed."""
    samples = build_samples(make_episode(make_call("1", [1], [7, 2], policy_version_start=None, policy_version_end=None)))
    assert samples.samples[0].versions.tolist() == [-1, -1, -1]
    assert samples.counters.unversioned_tokens == 2


def test_a_lineage_that_changes_its_temperature_is_cut() -> None:
    """Two temperatures, two rows; each token is still trained once."""
    samples = build_samples(
        make_episode(
            make_call("1", [1], [7, 2], sampling={"temperature": 0.7}),
            make_call("2", [1, 7, 2, 5], [8, 2], sampling={"temperature": 1.0}),
            make_call("3", [1, 7, 2, 5, 8, 2, 6], [9, 2], sampling={"temperature": 0.7}),
        )
    )
    assert rows(samples) == [
        ([1, 7, 2, 5, 8, 2, 6, 9, 2], [0, 1, 1, 0, 0, 0, 0, 1, 1]),
        ([1, 7, 2, 5, 8, 2], [0, 0, 0, 0, 1, 1]),
    ]
    assert [row.temperature for row in samples.samples] == [0.7, 1.0]


def test_rows_are_in_order_of_their_first_trained_reply() -> None:
    """Also where a lineage was cut by its temperature and another began meanwhile."""
    samples = build_samples(
        make_episode(
            make_call("1", [1], [7], sampling={"temperature": 0.7}),
            make_call("2", [2], [8], sampling={"temperature": 0.7}),
            make_call("3", [1, 7, 5], [9]),
        )
    )
    assert [row.id for row in samples.samples] == ["episode:1:0", "episode:2:0", "episode:3:0"]


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_changes_rows_and_not_what_is_trained(mode: Any) -> None:
    """In every mode the same (span, token, context) is trained."""
    episode = make_episode(
        make_call("1", [1], [10, 2]), make_call("2", [1, 10, 2, 5], [20, 2]), make_call("3", [1, 10, 2, 6], [30, 2], [31])
    )
    samples = build_samples(episode, mode=mode)
    trained = [(row.token_ids[: at + 1].tolist()) for row in samples.samples for at in np.flatnonzero(row.trained_mask)]
    assert sorted(trained) == [
        [1, 10],
        [1, 10, 2],
        [1, 10, 2, 5, 20],
        [1, 10, 2, 5, 20, 2],
        [1, 10, 2, 6, 30],
        [1, 10, 2, 6, 30, 2],
        [1, 10, 2, 6, 31],
    ]
    assert len(samples.samples) == {"tree": 3, "prefix": 3, "call": 4}[mode]


def test_prefix_mode_names_the_replies_of_its_own_lineage_only() -> None:
    """What another row trains is prompt here."""
    samples = build_samples(
        make_episode(make_call("1", [1], [10, 2]), make_call("2", [1, 10, 2, 5], [20]), make_call("3", [1, 10, 2, 6], [30])), mode="prefix"
    )
    assert [spans(row) for row in samples.samples] == [[("1", 0, 1, 3, True), ("2", 0, 4, 5, True)], [("3", 0, 4, 5, True)]]
    assert samples.samples[1].versions.tolist() == [-1, -1, -1, -1, 0]


@pytest.mark.parametrize(
    "fields, reason, detail",
    [
        ({"exact": False, "inexact_reason": "no ids", "trainable": False}, "inexact", "no ids"),
        ({"error": ErrorInfo(type="openai.APITimeoutError", message="slow"), "trainable": False}, "failed", "openai.APITimeoutError: slow"),
        ({"complete": False, "trainable": False}, "incomplete", "the reply was not received to its end"),
        ({"late": True, "trainable": False}, "late", "ended after its episode had been delivered"),
        ({"multimodal": True}, "multimodal", "the prompt has parts that are not text"),
        ({"trainable": False}, "untrainable", "the record says so and gives no reason"),
        ({"prompt_token_ids": None}, "no prompt ids", "got no prompt token ids; a reply needs at least one token before it"),
        ({"prompt_token_ids": TokenIds()}, "no prompt ids", "got no prompt token ids; a reply needs at least one token before it"),
        ({"sampling": {"temperature": 0}}, "inexact", "temperature 0"),
        ({"choices": []}, "logprobs do not match ids", "the call has no choices"),
    ],
)
def test_what_cannot_be_trained_is_set_aside_with_its_reason(fields: dict[str, Any], reason: str, detail: str) -> None:
    """The call leaves the rows; its reason and its tokens do not leave the counters."""
    samples = build_samples(make_episode(make_call("1", [1], [7, 2], **fields), make_call("2", [9], [8])))
    assert rows(samples) == [([9, 8], [0, 1])]
    (aside,) = samples.set_aside
    assert (aside.span_id, aside.choice, aside.reason, aside.detail) == ("1", None, reason, detail)
    assert samples.counters.set_aside_calls == {reason: 1}
    assert samples.counters.sampled_tokens == samples.counters.trained_tokens + sum(samples.counters.lost_tokens.values())


@pytest.mark.parametrize(
    "choice, detail",
    [
        (make_choice([7, 8, 2], logprobs=Logprobs([-1.0, -1.0])), "choice 0 has 2 logprobs for 3 ids"),
        (make_choice([7, 8, 2], logprobs=None), "choice 0 has no logprobs"),
        (make_choice([7, 8, 2], logprobs=Logprobs([-1.0, float("nan"), -1.0])), "choice 0 has a logprob that is not finite"),
    ],
)
def test_logprobs_that_do_not_match_their_ids_are_never_trained(choice: Any, detail: str) -> None:
    """A record that claims to be exact and is not is set aside whole."""
    samples = build_samples(make_episode(make_call("1", [1], choice)))
    assert rows(samples) == []
    assert [(aside.reason, aside.detail, aside.tokens) for aside in samples.set_aside] == [("logprobs do not match ids", detail, 3)]
    assert samples.counters.lost_tokens == {"logprobs do not match ids": 3}
    assert samples.counters.share_trained == 0.0


@pytest.mark.parametrize(
    "prompt, reply, detail",
    [
        ([1, 5], [7, 100, 2], "id 100 at token 1 of choice 0; the vocabulary has 100"),
        ([1, 250], [7, 99, 2], "id 250 at token 1 of the prompt; the vocabulary has 100"),
        ([-1, 5], [7, 99, 2], "id -1 at token 0 of the prompt; the vocabulary has 100"),
    ],
)
def test_an_id_outside_the_vocabulary_is_refused_at_its_call(prompt: list[int], reply: list[int], detail: str) -> None:
    """The call is set aside whole and never becomes context; the others are trained."""
    samples = build_samples(make_episode(make_call("1", prompt, reply), make_call("2", [1, 5], [8, 99])), vocab_size=100)
    assert rows(samples) == [([1, 5, 8, 99], [0, 0, 1, 1])]
    assert [(aside.reason, aside.detail, aside.tokens) for aside in samples.set_aside] == [("id outside the vocabulary", detail, 3)]
    with pytest.raises(KeyError, match="span 1 is not on the tree"):
        reconstruct(samples, "1")


def test_a_negative_id_is_refused_without_a_vocabulary_size_too() -> None:
    """No vocabulary has it."""
    (aside,) = build_samples(make_episode(make_call("1", [1], [7, -2]))).set_aside
    assert aside.detail == "id -2 at token 1 of choice 0; the vocabulary has no negative ids"


def test_an_inexact_reply_is_context_for_what_follows() -> None:
    """Its tokens are in the later row, named and not trained, without logprobs; the chain is not broken."""
    inexact = make_call("2", [1, 7, 2, 5], [8, 2], exact=False, trainable=False, inexact_reason="temperature 0")
    samples = build_samples(make_episode(make_call("1", [1], [7, 2]), inexact, make_call("3", [1, 7, 2, 5, 8, 2, 6], [9])))
    assert rows(samples) == [([1, 7, 2, 5, 8, 2, 6, 9], [0, 1, 1, 0, 0, 0, 0, 1])]
    (row,) = samples.samples
    assert spans(row) == [("1", 0, 1, 3, True), ("2", 0, 4, 6, False), ("3", 0, 7, 8, True)]
    assert np.isnan(row.logprobs[4:6]).all()
    assert samples.counters.lost_tokens == {"inexact": 2}
    assert samples.breaks == []


def test_an_inexact_reply_at_the_end_is_no_row() -> None:
    """A row ends with its last trained token."""
    inexact = make_call("2", [1, 7, 2, 5], [8, 2], exact=False, trainable=False)
    assert rows(build_samples(make_episode(make_call("1", [1], [7, 2]), inexact))) == [([1, 7, 2], [0, 1, 1])]


def test_calls_under_no_train_are_in_no_denominator() -> None:
    """They were never meant for training: counted apart, not lost."""
    samples = build_samples(make_episode(make_call("1", [1], [7, 2]), make_call("2", [3], [8, 8, 2], no_train=True, trainable=False)))
    counters = samples.counters
    assert (counters.sampled_tokens, counters.trained_tokens, counters.no_train_tokens, counters.lost_tokens) == (2, 2, 3, {})
    assert counters.share_trained == 1.0


def test_tokens_of_calls_without_ids_are_counted_from_usage() -> None:
    """What the server counted and did not send is lost, not absent."""
    usage = Usage(prompt_tokens=1, completion_tokens=40)
    blind = make_call("1", [1], exact=False, trainable=False, inexact_reason="no ids", usage=usage)
    samples = build_samples(make_episode(blind, make_call("2", [3], [8])))
    assert samples.counters.lost_tokens == {"inexact": 40}
    assert samples.counters.share_trained == pytest.approx(1 / 41)


def test_a_span_id_that_stands_twice_is_taken_once() -> None:
    """Identity is the span id: a call delivered twice is trained once."""
    samples = build_samples(make_episode(make_call("1", [1], [7, 2]), make_call("1", [1], [7, 2])))
    assert rows(samples) == [([1, 7, 2], [0, 1, 1])]
    assert [(aside.reason, aside.tokens) for aside in samples.set_aside] == [("duplicate span id", 0)]


def test_replies_cut_by_max_tokens_are_trained_unless_masked() -> None:
    """``mask_truncated`` leaves the cut reply out and counts it; its tokens stay context."""
    episode = make_episode(make_call("1", [1], make_choice([7, 8], finish_reason="length")), make_call("2", [1, 7, 8, 5], [9]))
    assert rows(build_samples(episode)) == [([1, 7, 8, 5, 9], [0, 1, 1, 0, 1])]
    masked = build_samples(episode, mask_truncated=True)
    assert rows(masked) == [([1, 7, 8, 5, 9], [0, 0, 0, 0, 1])]
    assert masked.counters.lost_tokens == {"truncated": 2}


OVERLONG = make_episode(make_call("1", [1, 2], [3, 4]), make_call("2", [1, 2, 3, 4, 5], [6, 7, 8, 9]))


def test_an_overlong_row_is_refused_with_what_to_do() -> None:
    """The default never cuts."""
    with pytest.raises(
        SettingError, match=r"call 2: prompt and reply are 9 tokens, max_len is 6\. Raise max_model_len, or choose overlong='mask'"
    ):
        build_samples(OVERLONG, max_len=6)
    assert len(build_samples(OVERLONG, max_len=9).samples) == 1


@pytest.mark.parametrize("mode", MODES)
def test_an_overlong_reply_is_masked_whole_in_every_mode(mode: Any) -> None:
    """The replies that fit are trained as they were; the one that does not is counted."""
    samples = build_samples(OVERLONG, max_len=6, overlong="mask", mode=mode)
    assert rows(samples) == [([1, 2, 3, 4], [0, 0, 1, 1])]
    assert [(aside.span_id, aside.choice, aside.reason, aside.tokens) for aside in samples.set_aside] == [("2", 0, "over-long", 4)]
    assert samples.counters.lost_tokens == {"over-long": 4}
    assert samples.counters.set_aside_calls == {}


def test_an_overlong_row_is_split_at_fixed_places() -> None:
    """Nine tokens at six a row: the first six, then the last three with three of context; each token once, the cut context counted."""
    samples = build_samples(OVERLONG, max_len=6, overlong="split")
    assert rows(samples) == [([1, 2, 3, 4, 5, 6], [0, 0, 1, 1, 0, 1]), ([4, 5, 6, 7, 8, 9], [0, 0, 0, 1, 1, 1])]
    assert [row.id for row in samples.samples] == ["episode:2:0/0", "episode:2:0/1"]
    assert [(span.span_id, span.start, span.stop, span.offset, span.trained) for span in samples.samples[1].spans] == [
        ("1", 0, 1, 1, False),
        ("2", 2, 3, 0, False),
        ("2", 3, 6, 1, True),
    ]
    assert samples.counters.cut_context_tokens == 3


def test_a_split_leaves_out_pieces_that_train_nothing() -> None:
    """Of a long prompt only the piece before the reply is a row."""
    (row,) = build_samples(make_episode(make_call("1", [*range(1, 9)], [9])), max_len=4, overlong="split").samples
    assert (row.id, row.token_ids.tolist(), row.trained_mask.astype(int).tolist()) == ("episode:1:0/3", [7, 8, 9], [0, 0, 1])


def test_a_split_gives_a_token_the_same_context_in_every_mode() -> None:
    """Pieces lie at fixed places of the path, so the loss does not depend on the mode."""
    contexts = {
        mode: sorted(
            row.token_ids[: at + 1].tolist()
            for row in build_samples(OVERLONG, max_len=5, overlong="split", mode=mode).samples
            for at in np.flatnonzero(row.trained_mask)
        )
        for mode in MODES
    }
    assert contexts["tree"] == contexts["prefix"] == contexts["call"]
    assert contexts["tree"] == [[1, 2, 3], [1, 2, 3, 4], [3, 4, 5, 6], [3, 4, 5, 6, 7], [5, 6, 7, 8], [5, 6, 7, 8, 9]]


def test_a_row_needs_room_for_a_token_before_the_first_trained_one() -> None:
    """A max_len of 1 is refused."""
    with pytest.raises(SettingError, match="max_len is 1; a row needs at least 2"):
        build_samples(OVERLONG, max_len=1, overlong="split")


def test_every_call_is_read_back_from_the_tree() -> None:
    """Prompt and reply of each choice come back as they were, in every mode, trained or not."""
    episode = make_episode(
        make_call("1", [1], [10, 2], [11, 2]),
        make_call("2", [1, 11, 2, 5], [20, 2], exact=False, trainable=False),
        make_call("3", [1, 11, 9], [3]),
    )
    samples = build_samples(episode)
    assert [[part.tolist() for part in reconstruct(samples, *key)] for key in [("1", 0), ("1", 1), ("2", 0), ("3", 0)]] == [
        [[1], [10, 2]],
        [[1], [11, 2]],
        [[1, 11, 2, 5], [20, 2]],
        [[1, 11, 9], [3]],
    ]
    with pytest.raises(KeyError, match="choice 2 of span 1 is not on the tree of episode episode"):
        reconstruct(samples, "1", 2)


def test_an_episode_without_calls_gives_no_rows() -> None:
    """Nothing sampled, nothing lost."""
    samples = build_samples(make_episode())
    assert rows(samples) == []
    assert samples.counters == Counters(episodes=1)


def test_rows_are_a_sequence_that_pickles() -> None:
    """Rows can be indexed, sliced, iterated again, and sent to another process."""
    samples = build_samples(make_episode(make_call("1", [1], [10, 2], [11, 2], [12, 2])))
    assert [row.id for row in samples.samples[1:]] == ["episode:1:1", "episode:1:2"]
    assert samples.samples[-1].token_ids.tolist() == [1, 12, 2]
    assert len(samples.samples) == len(list(samples.samples)) == 3
    again = pickle.loads(pickle.dumps(samples))
    assert rows(again) == rows(samples)


def test_counters_add_up() -> None:
    """Counters of many episodes are the sum of each one's."""
    one = build_samples(make_episode(make_call("1", [1], [7, 2]), make_call("2", [3], [8, 2], exact=False, trainable=False))).counters
    both = one + build_samples(make_episode(make_call("1", [1], [7]))).counters
    assert (both.episodes, both.calls, both.trained_tokens, both.lost_tokens) == (2, 3, 3, {"inexact": 2})
