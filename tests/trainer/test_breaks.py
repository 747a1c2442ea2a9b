"""Every cause of a break, on literal ids and messages, with and without a decoder; and what is no break."""

from __future__ import annotations

from typing import Any

import pytest

from rllm_trace.types import Choice, ModelCall
from rllm_trainer.breaks import Break
from rllm_trainer.samples import SampleSet, build_samples
from rllm_trainer.testing import make_call, make_choice, make_episode

SYSTEM = {"role": "system", "content": "You help."}
ASK = {"role": "user", "content": "How many?"}
MORE = {"role": "user", "content": "And now?"}

# 1 opens a message, 2 closes it; 3, 4, 5, 6 are the roles system, user, assistant, tool.
VOCABULARY = {
    1: "<|",
    2: "|>",
    3: "system ",
    4: "user ",
    5: "assistant ",
    6: "tool ",
    10: "You help.",
    11: "Be brief.",
    20: "How many?",
    21: "And now?",
    30: "<think>",
    31: "so",
    32: "</think>",
    40: "sev",
    41: "en",
    42: "seven",
    43: " ",
    44: "\n",
    50: "</code>",
    51: "x",
    52: "x|",
    60: '{"a":1}',
    61: '{"a": 1}',
    62: "<|end|>",
}
HEAD = [1, 3, 10, 2, 1, 4, 20, 2, 1, 5]
"""<|system You help.|><|user How many?|><|assistant"""
NEXT = [1, 4, 21, 2, 1, 5]
"""<|user And now?|><|assistant"""


def decode(ids: list[int]) -> str:
    return "".join(VOCABULARY[token] for token in ids)


def assistant(content: str | None, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


def tool_calls(arguments: str) -> list[dict[str, Any]]:
    return [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}]


def first(reply: Choice, **fields: Any) -> ModelCall:
    return make_call("1", HEAD, reply, messages=[SYSTEM, ASK], **fields)


def second(echo: list[int], message: dict[str, Any], **fields: Any) -> ModelCall:
    return make_call("2", [*HEAD, *echo, *NEXT], [42, 2], **{"messages": [SYSTEM, ASK, message, MORE], **fields})


def the_break(*calls: ModelCall, decoded: bool = False, **agents: Any) -> Break:
    samples = build_samples(make_episode(*calls, **agents), decode=decode if decoded else None)
    assert samples.counters.share_trained == 1.0
    (found,) = samples.breaks
    assert samples.counters.breaks == {found.cause: 1}
    return found


def no_break(*calls: ModelCall, **agents: Any) -> SampleSet:
    samples = build_samples(make_episode(*calls, **agents))
    assert samples.breaks == []
    return samples


both = pytest.mark.parametrize("decoded", [False, True])


@both
def test_thinking_stripped(decoded: bool) -> None:
    """The reply's reasoning is no longer in the history."""
    reply = make_choice([30, 31, 32, 42, 2], "<think>so</think>seven")
    found = the_break(first(reply), second([42, 2], assistant("seven")), decoded=decoded)
    assert (found.cause, found.position, found.message) == ("thinking stripped", 10, 2)
    assert (found.recorded_ids, found.prompt_ids) == ([30, 31, 32, 42, 2], [42, 2, *NEXT])
    assert found.sampled_after == 5
    if decoded:
        assert (found.recorded_text, found.prompt_text) == ("<think>so</think>seven|>", "seven|><|user And now?|><|assistant ")
    else:
        assert (found.recorded_text, found.prompt_text) == ("<think>so</think>seven", "seven")


@both
def test_thinking_that_the_server_sent_apart_is_stripped(decoded: bool) -> None:
    """The reply's text never had the reasoning; its ids have."""
    reply = make_choice([30, 31, 32, 42, 2], "seven", reasoning="so")
    assert the_break(first(reply), second([42, 2], assistant("seven")), decoded=decoded).cause == "thinking stripped"


@both
def test_thinking_stripped_by_the_template(decoded: bool) -> None:
    """The app sends the reasoning back, and the template drops it."""
    text = "<think>so</think>seven"
    reply = make_choice([30, 31, 32, 42, 2], text)
    assert the_break(first(reply), second([42, 2], assistant(text)), decoded=decoded).cause == "thinking stripped"


def test_a_thinking_block_opened_by_the_generation_prompt_is_stripped() -> None:
    """The prompt opened the block, the reply closed it, the history has neither."""
    opened = make_call("1", [*HEAD, 30], make_choice([31, 32, 42, 2], "seven", reasoning="so"), messages=[SYSTEM, ASK])
    for decoded in (False, True):
        found = the_break(opened, second([42, 2], assistant("seven")), decoded=decoded)
        assert (found.cause, found.position) == ("thinking stripped", 10)


def test_an_empty_thinking_block_in_the_generation_prompt_needs_a_decoder() -> None:
    """Nothing in the record tells of it but the prompt's own text."""
    opened = make_call("1", [*HEAD, 30, 32], make_choice([42, 2], "seven"), messages=[SYSTEM, ASK])
    assert the_break(opened, second([42, 2], assistant("seven")), decoded=True).cause == "thinking stripped"


@both
def test_retokenised(decoded: bool) -> None:
    """The same text came back as other ids."""
    found = the_break(first(make_choice([40, 41, 2], "seven")), second([42, 2], assistant("seven")), decoded=decoded)
    assert (found.cause, found.position) == ("retokenised", 10)


@both
def test_a_reply_of_one_token_is_retokenised(decoded: bool) -> None:
    """Where the server leaves the end of turn out of the ids, the only token is the text's."""
    found = the_break(first(make_choice([42], "seven")), second([40, 41, 2], assistant("seven")), decoded=decoded)
    assert (found.cause, found.position) == ("retokenised", 10)


@both
def test_whitespace_in_the_message(decoded: bool) -> None:
    """The app stripped the reply before it sent it back."""
    found = the_break(first(make_choice([43, 42, 44, 2], " seven\n")), second([42, 2], assistant("seven")), decoded=decoded)
    assert (found.cause, found.position) == ("whitespace", 10)


@both
def test_whitespace_trimmed_by_the_template(decoded: bool) -> None:
    """The message is unchanged; its rendering lost the newline before the end of turn."""
    found = the_break(first(make_choice([42, 44, 2], "seven\n")), second([42, 2], assistant("seven\n")), decoded=decoded)
    assert (found.cause, found.position) == ("whitespace", 11)


@both
def test_an_empty_text_that_became_none(decoded: bool) -> None:
    """``""`` and ``None`` are rendered differently."""
    calls = tool_calls('{"a":1}')
    reply = make_choice([60, 2], "", tool_calls=calls)
    found = the_break(first(reply), second([43, 60, 2], assistant(None, tool_calls=calls)), decoded=decoded)
    assert (found.cause, found.position) == ('""/None', 10)


@both
def test_tool_arguments_re_serialised_by_the_app(decoded: bool) -> None:
    """The arguments mean the same and are written differently."""
    reply = make_choice([60, 2], None, tool_calls=tool_calls('{"a":1}'), finish_reason="tool_calls")
    found = the_break(first(reply), second([61, 2], assistant(None, tool_calls=tool_calls('{"a": 1}'))), decoded=decoded)
    assert (found.cause, found.position) == ("tool arguments re-serialised", 10)


@both
def test_tool_arguments_re_serialised_by_the_template(decoded: bool) -> None:
    """The message is unchanged; the template parses the arguments and writes them its own way."""
    calls = tool_calls('{"a":1}')
    reply = make_choice([60, 2], None, tool_calls=calls, finish_reason="tool_calls")
    assert (
        the_break(first(reply), second([61, 2], assistant(None, tool_calls=calls)), decoded=decoded).cause == "tool arguments re-serialised"
    )


@pytest.mark.parametrize(
    "drifted, echo, cause",
    [
        (assistant("seven"), [42, 2], "whitespace"),
        (assistant("seven\n", tool_calls=tool_calls('{"a": 1}')), [42, 44, 61, 2], "tool arguments re-serialised"),
    ],
)
@pytest.mark.parametrize("late", [False, True])
def test_drift_early_and_late(drifted: dict[str, Any], echo: list[int], cause: str, late: bool) -> None:
    """A reply that drifts at once and one that drifts two turns later have the same cause, at the same token."""
    kept = assistant("seven\n", tool_calls=tool_calls('{"a":1}')) if cause.startswith("tool") else assistant("seven\n")
    ids = [42, 44, 60, 2] if cause.startswith("tool") else [42, 44, 2]
    calls = [first(make_choice(ids, "seven\n", tool_calls=kept.get("tool_calls")))]
    prompt, messages = [*HEAD, *ids], [SYSTEM, ASK, kept]
    if late:
        for span in ("1a", "1b"):
            prompt, messages = [*prompt, *NEXT], [*messages, MORE]
            calls.append(make_call(span, prompt, make_choice([42, 2], "seven"), messages=messages))
            prompt, messages = [*prompt, 42, 2], [*messages, assistant("seven")]
    broken = make_call(
        "2", [*HEAD, *echo, *prompt[len(HEAD) + len(ids) :], *NEXT], [42, 2], messages=[SYSTEM, ASK, drifted, *messages[3:], MORE]
    )
    found = the_break(*calls, broken)
    assert (found.cause, found.message) == (cause, 2)
    assert found.position == (11 if cause == "whitespace" else 12)
    assert found.recorded_span_id == ("1b" if late else "1")
    assert found.sampled_after == 2 + (4 if late else 0)


@both
def test_a_later_reply_drifts_while_the_first_one_is_kept(decoded: bool) -> None:
    """The prompt continues the first reply, and still breaks the second."""
    kept = [SYSTEM, ASK, assistant("seven"), MORE]
    one = first(make_choice([42, 2], "seven"))
    two = make_call("2", [*HEAD, 42, 2, *NEXT], make_choice([40, 41, 2], "seven"), messages=kept)
    three = make_call("3", [*HEAD, 42, 2, *NEXT, 42, 2, *NEXT], [51], messages=[*kept, assistant("seven"), MORE])
    found = the_break(one, two, three, decoded=decoded)
    assert (found.cause, found.recorded_span_id, found.position, found.message, found.sampled_after) == ("retokenised", "2", 18, 4, 3)
    samples = build_samples(make_episode(one, two, three))
    assert [row.cause for row in samples.samples] == [None, "retokenised"]
    assert [span.span_id for row in samples.samples for span in row.spans if span.trained] == ["1", "2", "3"]


def test_an_observation_drifts_while_the_replies_around_it_are_kept() -> None:
    """The tool's result lost a space; that the tools changed too has nothing to do with it, since the first turn is shared."""
    result, stripped = {"role": "tool", "content": " x"}, {"role": "tool", "content": "x"}
    kept = [SYSTEM, ASK, assistant("seven")]
    one = first(make_choice([42, 2], "seven"), tools=[{"type": "function"}])
    two = make_call("2", [*HEAD, 42, 2, 43, 51, 2], make_choice([42, 2], "seven"), messages=[*kept, result], tools=[{"type": "function"}])
    three = make_call("3", [*HEAD, 42, 2, 51, 2, 42, 2, *NEXT], [51], messages=[*kept, stripped, assistant("seven"), MORE], tools=[])
    found = the_break(one, two, three)
    assert (found.cause, found.recorded_span_id, found.position, found.message) == ("whitespace", "2", 12, 3)


def test_none_early_and_late() -> None:
    """A reply without text that is echoed as None for one turn, then as an empty text."""
    calls = tool_calls('{"a":1}')
    one = first(make_choice([60, 2], None, tool_calls=calls))
    two = make_call(
        "2", [*HEAD, 60, 2, *NEXT], make_choice([42, 2], "seven"), messages=[SYSTEM, ASK, assistant(None, tool_calls=calls), MORE]
    )
    three = make_call(
        "3",
        [*HEAD, 43, 60, 2, *NEXT, 42, 2, *NEXT],
        [42, 2],
        messages=[SYSTEM, ASK, assistant("", tool_calls=calls), MORE, assistant("seven"), MORE],
    )
    found = the_break(one, two, three)
    assert (found.cause, found.message, found.position, found.sampled_after) == ('""/None', 2, 10, 4)


@both
def test_stop_string_trimmed(decoded: bool) -> None:
    """The server cut the stop string from the text and left it in the ids."""
    reply = make_choice([42, 50], "seven", stop_reason="</code>")
    found = the_break(first(reply), second([42, 2], assistant("seven")), decoded=decoded)
    assert (found.cause, found.position) == ("stop string trimmed", 11)


def test_a_stop_string_that_the_server_does_not_name_is_found_by_the_decoder() -> None:
    """The request's own ``stop`` and the reply's ids tell it."""
    call = first(make_choice([42, 50], "seven"), sampling={"stop": ["Observation:", "</code>"]})
    assert the_break(call, second([42, 2], assistant("seven")), decoded=True).cause == "stop string trimmed"


@both
def test_a_stop_string_added_back_as_other_ids(decoded: bool) -> None:
    """The framework appends the tag again, and it is tokenised together with what follows."""
    reply = make_choice([42, 50], "seven", stop_reason="</code>")
    call = first(reply, sampling={"stop": "</code>"})
    assert the_break(call, second([42, 51, 2], assistant("seven</code>")), decoded=decoded).cause == "stop string trimmed"


def test_a_stop_string_added_back_as_the_same_ids_is_no_break() -> None:
    """The reply is in the prompt with all its tokens; the end of turn after it was not sampled and is not trained."""
    reply = make_choice([42, 50], "seven", stop_reason="</code>")
    samples = no_break(first(reply), second([42, 50, 2], assistant("seven</code>")))
    (row,) = samples.samples
    assert row.trained_mask[10:14].tolist() == [True, True, False, False]


@both
def test_end_of_turn_not_sampled_because_the_reply_was_cut(decoded: bool) -> None:
    """The turn's last token came back merged with the end of turn that the template wrote."""
    reply = make_choice([42, 51], "sevenx", finish_reason="length")
    found = the_break(first(reply), second([42, 52], assistant("sevenx")), decoded=decoded)
    assert (found.cause, found.position) == ("end of turn not sampled", 11)


@both
def test_end_of_turn_not_sampled_because_another_was(decoded: bool) -> None:
    """The policy ended its reply with an end token that the template does not write."""
    found = the_break(first(make_choice([42, 62], "seven")), second([42, 2], assistant("seven")), decoded=decoded)
    assert (found.cause, found.position) == ("end of turn not sampled", 11)


def test_an_end_of_turn_that_the_template_adds_is_no_break() -> None:
    """Cut by max_tokens, continued by the template's end of turn: one row, the end of turn not trained."""
    reply = make_choice([42], "seven", finish_reason="length")
    (row,) = no_break(first(reply), second([42, 2], assistant("seven"))).samples
    assert row.trained_mask[10:12].tolist() == [True, False]


@both
def test_system_changed(decoded: bool) -> None:
    """The same conversation under another system prompt."""
    changed = {"role": "system", "content": "Be brief."}
    call = make_call("2", [1, 3, 11, *HEAD[3:], 42, 2, *NEXT], [42, 2], messages=[changed, ASK, assistant("seven"), MORE])
    found = the_break(first(make_choice([42, 2], "seven")), call, decoded=decoded)
    assert (found.cause, found.position, found.message, found.sampled_after) == ("system changed", 2, 0, 2)


def test_tools_changed() -> None:
    """The same conversation with another list of tools, which the template writes first."""
    one = first(make_choice([42, 2], "seven"), tools=[{"type": "function", "function": {"name": "f"}}])
    other = make_call("2", [1, 6, *HEAD[2:], 42, 2, *NEXT], [42], messages=[SYSTEM, ASK, assistant("seven"), MORE], tools=[])
    found = the_break(one, other)
    assert (found.cause, found.position) == ("tools changed", 1)


LONG = [SYSTEM, ASK, assistant("seven"), MORE, assistant("seven of them, as counted"), MORE]


def long_chain() -> list[ModelCall]:
    """Three turns that continue each other."""
    turn = [42, 2, *NEXT]
    return [
        make_call("1", HEAD, make_choice([42, 2], "seven"), messages=LONG[:2]),
        make_call("1a", [*HEAD, *turn], make_choice([42, 2], "seven of them, as counted"), messages=LONG[:4]),
        make_call("1b", [*HEAD, *turn, *turn], make_choice([42, 2], "nine"), messages=LONG),
    ]


@pytest.mark.parametrize(
    "kept",
    [
        [SYSTEM, MORE, assistant("nine"), MORE],
        [SYSTEM, ASK, {"role": "user", "content": "Summary: it is seven."}],
        [SYSTEM, {"role": "user", "content": "So far: seven of them, as counted. Go on."}],
        [SYSTEM, {"role": "user", "content": "Earlier turns left out."}, assistant("nine"), MORE],
    ],
    ids=["window", "summary after the question", "summary quotes a reply", "last turn kept"],
)
def test_compaction(kept: list[dict[str, Any]]) -> None:
    """Recorded turns were dropped or replaced, and what is left shows it."""
    found = the_break(*long_chain(), make_call("2", [1, 3, 10, 2, 1, 4, 21, 21, 2, 1, 5], [42, 2], messages=kept))
    assert (found.cause, found.position) == ("compaction", 6)


def test_a_first_prompt_of_another_agent() -> None:
    """A sub-agent's conversation continues nothing and loses nothing."""
    helper = make_call("2", [1, 3, 11, 2, 1, 4, 20, 2, 1, 5], [42], messages=[{"role": "system", "content": "Be brief."}, ASK])
    found = the_break(first(make_choice([42, 2], "seven")), agents=[("helper", [helper])])
    assert (found.cause, found.role, found.recorded_span_id) == ("other agent", "helper", "1")


def test_an_agent_that_was_never_named_is_found_by_its_conversation() -> None:
    """In one trajectory: nothing in the prompt is of the recorded conversation."""
    other = make_call("2", [1, 3, 11, 2, 1, 4, 21, 2, 1, 5], [42], messages=[{"role": "system", "content": "Be brief."}, MORE])
    assert the_break(first(make_choice([42, 2], "seven")), other).cause == "other agent"


def test_a_new_question_under_the_same_system_prompt_carries_no_turn() -> None:
    """A conversation of its own, named like another agent's."""
    other = make_call("2", [1, 3, 10, 2, *NEXT], [42], messages=[SYSTEM, MORE])
    assert the_break(first(make_choice([42, 2], "seven")), other).cause == "other agent"


def test_a_short_reply_that_stands_in_a_new_question_is_no_compaction() -> None:
    """A few characters may stand anywhere."""
    other = make_call("2", [1, 3, 10, 2, *NEXT], [42], messages=[SYSTEM, {"role": "user", "content": "Is seven odd?"}])
    assert the_break(first(make_choice([42, 2], "seven")), other).cause == "other agent"


def test_a_handover_with_another_system_prompt_is_another_agent() -> None:
    """Another role carries the conversation on under its own instructions."""
    brief = {"role": "system", "content": "Be brief."}
    other = make_call("2", [1, 3, 11, *HEAD[3:], 42, 2, *NEXT], [42], messages=[brief, ASK, assistant("seven"), MORE])
    assert the_break(first(make_choice([42, 2], "seven")), agents=[("closer", [other])]).cause == "other agent"


def test_a_role_entered_again_carries_its_own_turns() -> None:
    """Two entries of one role: what the second brings along is compared, not called another agent's."""
    one = first(make_choice([40, 41, 2], "seven"))
    found = the_break(agents=[("solver", [one]), ("solver", [second([42, 2], assistant("seven"))])])
    assert (found.cause, found.trajectory_id) == ("retokenised", "solver-1")


@both
def test_what_nothing_shows_is_unknown(decoded: bool) -> None:
    """The reply was replaced by another text."""
    found = the_break(first(make_choice([40, 41, 2], "seven")), second([51, 2], assistant("x")), decoded=decoded)
    assert found.cause == "unknown"


def test_the_choice_that_came_back_is_the_one_compared() -> None:
    """n=2, the second choice is echoed with a drift."""
    call = make_call("1", HEAD, make_choice([51, 2], "x"), make_choice([43, 42, 2], " seven"), messages=[SYSTEM, ASK])
    found = the_break(call, second([42, 2], assistant("seven")))
    assert (found.cause, found.recorded_choice) == ("whitespace", 1)


def test_the_nearest_lineage_is_of_the_calls_own_trajectory() -> None:
    """Two solvers with one prompt: each broken turn is compared with its own solver's reply."""
    one = make_call("1", HEAD, make_choice([43, 42, 2], " seven"), messages=[SYSTEM, ASK], started=1)
    two = make_call("2", HEAD, make_choice([40, 41, 2], "seven"), messages=[SYSTEM, ASK], started=2)
    prompt, messages = [*HEAD, 42, 2, *NEXT], [SYSTEM, ASK, assistant("seven"), MORE]
    three = make_call("3", prompt, [42], messages=messages, started=3)
    four = make_call("4", [*prompt, 21], [42], messages=[*messages, MORE], started=4)
    samples = build_samples(make_episode(agents=[("solver", [one, three]), ("solver", [two, four])]))
    assert [(found.span_id, found.recorded_span_id, found.cause) for found in samples.breaks] == [
        ("3", "1", "whitespace"),
        ("4", "2", "retokenised"),
    ]


def test_a_break_late_in_a_tree_names_the_row() -> None:
    """The row that does not continue an earlier one carries the cause."""
    samples = build_samples(make_episode(first(make_choice([40, 41, 2], "seven")), second([42, 2], assistant("seven"))))
    assert [row.cause for row in samples.samples] == [None, "retokenised"]


def test_a_forked_question_is_no_break() -> None:
    """Another message after a recorded reply."""
    other = make_call("3", [*HEAD, 42, 2, 1, 4, 20, 2, 1, 5], [51], messages=[SYSTEM, ASK, assistant("seven"), ASK])
    no_break(first(make_choice([42, 2], "seven")), second([42, 2], assistant("seven")), other)


def test_the_same_prompt_again_is_no_break() -> None:
    """A retry, and a conversation taken back to its beginning."""
    retry = make_call("3", HEAD, [51], messages=[SYSTEM, ASK])
    no_break(first(make_choice([42, 2], "seven")), second([42, 2], assistant("seven")), retry)


def test_a_fork_with_turns_of_its_own_is_no_break() -> None:
    """After a recorded reply two conversations go on; the second has a turn that was never recorded, and breaks nothing of the first."""
    kept = [SYSTEM, ASK, assistant("seven")]
    one = first(make_choice([42, 2], "seven"))
    two = make_call("2", [*HEAD, 42, 2, *NEXT], make_choice([42, 2], "nine"), messages=[*kept, MORE])
    three = make_call(
        "3", [*HEAD, 42, 2, *NEXT, 42, 2, *NEXT], make_choice([42, 2], "ten"), messages=[*kept, MORE, assistant("nine"), MORE]
    )
    fork = make_call(
        "4", [*HEAD, 42, 2, 1, 4, 51, 2, 1, 5, 51, 2, *NEXT], [51], messages=[*kept, {"role": "user", "content": "x"}, assistant("x"), MORE]
    )
    short = make_call("5", [*HEAD, 42, 2, 1, 4, 52, 51], [51], messages=[*kept, {"role": "user", "content": "x|"}, assistant("y")])
    no_break(one, two, three, fork, short)


def test_a_reply_that_was_never_recorded_is_no_break() -> None:
    """After a recorded reply the app went on with a model that sent no ids."""
    blind = make_call("1a", [], exact=False, trainable=False, messages=[SYSTEM, ASK, assistant("seven"), MORE])
    call = make_call("2", [*HEAD, 42, 2, *NEXT, 51, 2, *NEXT], [42], messages=[SYSTEM, ASK, assistant("seven"), MORE, assistant("x"), MORE])
    no_break(first(make_choice([42, 2], "seven")), blind, call)


def completion(span: str, prompt: list[int], text: str, reply: Choice) -> ModelCall:
    return make_call(span, prompt, reply, operation="text_completion", messages=[{"role": "prompt", "content": text}])


@pytest.mark.parametrize(
    "reply, echo, text, cause",
    [
        (make_choice([40, 41, 2], "seven"), [42, 2], "seven|>", "retokenised"),
        (make_choice([43, 42, 2], " seven"), [42, 2], "seven|>", "whitespace"),
        (make_choice([30, 31, 32, 42, 2], "<think>so</think>seven"), [42, 2], "seven|>", "thinking stripped"),
        (make_choice([42, 50], "seven", stop_reason="</code>"), [42, 2], "seven|>", "stop string trimmed"),
        (make_choice([42, 51], "sevenx", finish_reason="length"), [42, 52], "sevenx|", "end of turn not sampled"),
        (make_choice([42, 2], "seven"), [51, 2], "x|>", "unknown"),
    ],
)
@both
def test_completions_are_compared_as_text(reply: Choice, echo: list[int], text: str, cause: str, decoded: bool) -> None:
    """A completion's request is one string; the same causes are found in it."""
    begun = decode(HEAD)
    found = the_break(
        completion("1", HEAD, begun, reply),
        completion("2", [*HEAD, *echo, *NEXT], begun + text + decode(NEXT), make_choice([42])),
        decoded=decoded,
    )
    assert found.cause == cause


def test_a_completion_that_goes_on_is_no_break() -> None:
    """Prompt and reply, then more."""
    begun = decode(HEAD)
    no_break(
        completion("1", HEAD, begun, make_choice([42, 2], "seven|>")),
        completion("2", [*HEAD, 42, 2, *NEXT], begun + "seven|>" + decode(NEXT), make_choice([42])),
    )


def test_parts_of_a_message_are_its_text() -> None:
    """A list of text parts is the same message as their text."""
    parts = [{"role": "user", "content": [{"type": "text", "text": "How "}, {"type": "text", "text": "many?"}]}]
    call = make_call("2", [*HEAD, 42, 2, *NEXT], [42], messages=[SYSTEM, *parts, assistant("seven"), MORE])
    assert the_break(first(make_choice([40, 41, 2], "seven")), call).cause == "retokenised"
