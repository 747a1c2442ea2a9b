"""What of a record may leave: content withheld, tokens withheld, the user's redaction."""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import pytest

from rllm_trace import attributes
from rllm_trace._disclosure import Disclosure, content_wanted, disclose_episode, redact_span
from rllm_trace._guard import counters
from rllm_trace._span_attributes import span_attributes
from rllm_trace._spans import Span
from rllm_trace.types import Episode, ErrorInfo


def everything(redact: Any = None) -> Disclosure:
    return Disclosure(content=True, tokens=True, redact=redact)


def test_an_episode_that_may_leave_whole_is_the_same_object(full_episode: Episode) -> None:
    """Nothing is copied where nothing is withheld."""
    assert disclose_episode(full_episode, everything()) is full_episode


def test_without_content_an_episode_keeps_what_says_nothing(full_episode: Episode) -> None:
    """Input, output, messages, tools, texts, ids, logprobs, arguments, results, error messages and sampling texts go; the rest stays."""
    found = disclose_episode(full_episode, Disclosure(content=False, tokens=False))
    assert (found.input, found.output) == (None, None)
    assert found.error == ErrorInfo(type="openai.APIError", message="", status_code=500)
    (call,) = found.calls
    assert (call.messages, call.tools, call.sampling, call.requested_sampling) == ([], None, {"temperature": 0.7}, {})
    assert (call.prompt_token_ids, call.exact, call.trainable) == (None, False, False)
    assert call.choices[0] == msgspec.structs.replace(
        full_episode.calls[0].choices[0],
        token_ids=None,
        logprobs=None,
        text=None,
        tool_calls=None,
        reasoning=None,
        refusal=None,
        stop_reason=None,
    )
    (tool,) = found.trajectories[0].tools
    assert (tool.name, tool.arguments, tool.result) == ("add", None, None)
    kept = ("id", "trace_id", "task_id", "workflow", "termination", "reward", "rewards", "started", "ended", "session_id", "metadata")
    assert [getattr(found, name) for name in kept] == [getattr(full_episode, name) for name in kept]


def test_an_exact_call_says_why_it_no_longer_is(full_episode: Episode) -> None:
    """The reason is ours where it was exact before, the old one where it was not."""
    exact = msgspec.structs.replace(full_episode.calls[0], exact=True, inexact_reason=None)
    both = msgspec.structs.replace(full_episode.trajectories[0], calls=[exact, *full_episode.trajectories[0].calls])
    found = disclose_episode(msgspec.structs.replace(full_episode, trajectories=[both]), Disclosure(content=False, tokens=False))
    assert [call.inexact_reason for call in found.trajectories[0].calls] == ["content is not captured", "test"]


def test_without_tokens_only_ids_and_logprobs_go(full_episode: Episode) -> None:
    """Texts stay as they are."""
    found = disclose_episode(full_episode, Disclosure(content=True, tokens=False))
    (call,) = found.calls
    assert (call.prompt_token_ids, call.choices[0].token_ids, call.choices[0].logprobs) == (None, None, None)
    assert call.choices[0].text == "4"
    assert call.messages == full_episode.calls[0].messages
    assert found.input == full_episode.input


def test_redaction_sees_each_record_as_plain_data(full_episode: Episode) -> None:
    """Kind, name and content of the workflow, each call and each tool: what a function can walk through."""
    seen: list[dict[str, Any]] = []

    def redact(record: dict[str, Any]) -> dict[str, Any]:
        seen.append(copy.deepcopy(record))
        return record

    assert disclose_episode(full_episode, everything(redact)) == full_episode
    assert [(record["kind"], record["name"]) for record in seen] == [("workflow", "solve"), ("call", "policy"), ("tool", "add")]
    workflow, call, tool = seen
    assert workflow["metadata"]["index"] == 3
    assert workflow["error"] == "ümlaut"
    assert call["request"]["messages"] == [{"role": "user", "content": [{"type": "text", "text": "2+2?"}]}]
    assert call["request"]["temperature"] == 0.7
    assert call["choices"][0]["text"] == "4"
    assert set(call["choices"][0]) == {"text", "tool_calls", "reasoning", "refusal"}
    assert tool["arguments"] == {"a": {"$": "tuple", "v": [1, 2]}}


def masked(value: Any) -> Any:
    if isinstance(value, str):
        return value.replace("2+2?", "***").replace("What is ***", "***")
    if isinstance(value, list):
        return [masked(item) for item in value]
    if isinstance(value, dict):
        return {key: masked(item) for key, item in value.items()}
    return value


def test_what_redaction_changed_leaves_changed(full_episode: Episode) -> None:
    """And where it changed a call, ids and logprobs stay behind, since they spell the old text; other calls keep theirs."""
    call = full_episode.calls[0]
    clean = msgspec.structs.replace(call, messages=[], exact=True, inexact_reason=None)
    exact = msgspec.structs.replace(call, exact=True, inexact_reason=None)
    trajectory = msgspec.structs.replace(full_episode.trajectories[0], calls=[exact, clean])
    before = msgspec.structs.replace(full_episode, trajectories=[trajectory])
    found = disclose_episode(before, everything(masked))
    assert found.input == {"question": "***", "options": {3: "three"}}
    changed, untouched = found.trajectories[0].calls
    assert changed.messages == [{"role": "user", "content": [{"type": "text", "text": "***"}]}]
    assert (changed.prompt_token_ids, changed.exact, changed.inexact_reason) == (None, False, "redacted")
    assert untouched == clean
    assert before.input == {"question": "2+2?", "options": {3: "three"}}
    assert exact.messages == [{"role": "user", "content": [{"type": "text", "text": "2+2?"}]}]


def broken(record: dict[str, Any]) -> dict[str, Any]:
    raise RuntimeError("no")


@pytest.mark.parametrize("redact", [broken, lambda record: None, lambda record: "text"], ids=["raises", "None", "no dict"])
def test_a_redaction_that_gives_nothing_withholds_everything(redact: Any, full_episode: Episode, spans: dict[str, Span]) -> None:
    """It fails closed: the record leaves without content, and is counted."""
    before = counters.get("dropped", "redacted content")
    found = disclose_episode(full_episode, everything(redact))
    assert (found.input, found.output, found.calls[0].messages, found.calls[0].prompt_token_ids) == (None, None, [], None)
    assert found.trajectories[0].tools[0].result is None
    assert found.metadata == full_episode.metadata
    for span in spans.values():
        shown = span_attributes(redact_span(span, redact), content=True, tokens=True)
        assert "2+2" not in repr(shown)
        assert "BAAA" not in repr(shown)
    assert counters.get("dropped", "redacted content") - before == 3 + len(spans)


def test_a_key_that_redaction_removes_is_withheld(spans: dict[str, Span]) -> None:
    """Whoever returns only part of a record lets only that part leave."""
    shown = redact_span(spans["workflow"], lambda record: {"output": record["output"]})
    assert shown.facts["rllm.episode.output"] == "4"
    assert "rllm.episode.input" not in shown.facts
    assert shown.facts["rllm.task.id"] == "t7"
    call = redact_span(spans["chat"], lambda record: {"request": record["request"]}).call
    assert b"2+2" in call.request
    assert (call.choices[0].text, call.choices[0].token_ids, call.exact) == (None, None, False)


def test_redaction_reaches_every_kind_of_span(spans: dict[str, Span]) -> None:
    """The chat span's request and views, the tool's error, the workflow's input."""
    for span in spans.values():
        assert "2+2" not in repr(span_attributes(redact_span(span, masked), content=True, tokens=True))
    assert spans["chat"].call.request.count(b"2+2") == 1
    assert redact_span(spans["chat"], masked).call.choices[0].text == "4"
    assert redact_span(spans["agent"], masked) == spans["agent"]


def test_redaction_that_changes_nothing_keeps_the_ids(spans: dict[str, Span]) -> None:
    """A call without anything to mask stays exact."""
    assert redact_span(spans["chat"], lambda record: record).call == spans["chat"].call


def test_attributes_of_other_libraries_are_content_unless_known(spans: dict[str, Span]) -> None:
    """Where content may not go, a foreign span keeps the conventions' names and counts, and nothing that is not known to be harmless."""
    foreign = msgspec.structs.replace(
        spans["agent"],
        kind="other",
        facts={
            "gen_ai.usage.input_tokens": 3,
            "gen_ai.prompt.0.content": "SECRET",
            "llm.input_messages.0.message.content": "SECRET",
            "input.value": "SECRET",
            "db.statement": "SECRET",
            "gen_ai.input.messages": "SECRET",
        },
    )
    shown = span_attributes(foreign, content=False, tokens=False)
    assert "SECRET" not in repr(shown)
    assert shown["gen_ai.usage.input_tokens"] == 3
    assert span_attributes(foreign, content=True, tokens=False)["db.statement"] == "SECRET"


@pytest.mark.parametrize(
    "value, expected",
    [
        ("", False),
        ("NO_CONTENT", False),
        ("EVENT_ONLY", False),
        ("false", False),
        ("SPAN_ONLY", True),
        ("span_and_event", True),
        ("true", True),
    ],
)
def test_the_standard_variable_decides_where_nothing_else_does(value: str, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its values of today and its booleans of yesterday; a setting of the user's wins."""
    monkeypatch.setenv(attributes.ENV_CAPTURE_CONTENT, value)
    assert content_wanted(None) is expected
    assert content_wanted(True) is True
    assert content_wanted(False) is False
    assert content_wanted(None, default=True) is True
