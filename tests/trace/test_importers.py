"""Traces that other tools kept, as episodes."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from rllm_trace._span_attributes import span_attributes, span_name
from rllm_trace._spans import Span
from rllm_trace.episodes import build_episode
from rllm_trace.exceptions import ConfigurationError
from rllm_trace.importers import import_episodes
from rllm_trace.importers._attributes import nested
from rllm_trace.importers._times import nanoseconds
from rllm_trace.types import Episode, Usage

TRACE = "0123456789abcdef0123456789abcdef"
SECOND = 1_700_000_000
NS = SECOND * 10**9


def value(found: Any) -> dict[str, Any]:
    if isinstance(found, bool):
        return {"boolValue": found}
    if isinstance(found, int):
        return {"intValue": str(found)}
    if isinstance(found, float):
        return {"doubleValue": found}
    if isinstance(found, list):
        return {"arrayValue": {"values": [value(item) for item in found]}}
    return {"stringValue": found}


def otlp_span(
    name: str, span_id: str, parent: str = "", *, start: int = 0, end: int = 9, error: str = "", **attributes: Any
) -> dict[str, Any]:
    return {
        "traceId": TRACE,
        "spanId": span_id,
        "parentSpanId": parent,
        "name": name,
        "kind": 1,
        "startTimeUnixNano": str(NS + start),
        "endTimeUnixNano": str(NS + end),
        "attributes": [{"key": key, "value": value(found)} for key, found in attributes.items()],
        "status": {"code": 2, "message": error} if error else {},
    }


def otlp(*spans: dict[str, Any]) -> dict[str, Any]:
    return {"resourceSpans": [{"resource": {"attributes": []}, "scopeSpans": [{"scope": {"name": "x"}, "spans": list(spans)}]}]}


def write(path: Path, document: Any) -> Path:
    path.write_text(json.dumps(document))
    return path


def only(path: Path, **options: Any) -> Episode:
    (episode,) = import_episodes(path, **options)
    return episode


def test_our_own_spans_come_back_exact(spans: dict[str, Span], tmp_path: Path) -> None:
    """What was exported with tokens, in files of a collector, one request a line and out of order, is the episode that it was."""
    spans["tool"].facts["gen_ai.tool.call.result"] = "a result"
    lines = [
        otlp(
            {
                **otlp_span(span_name(span), span.span_id, span.parent_id or "", **span_attributes(span, content=True, tokens=True)),
                "traceId": span.trace_id,
                "startTimeUnixNano": str(span.started),
                "endTimeUnixNano": str(span.ended),
            }
        )
        for span in reversed(spans.values())
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(line) for line in lines[:2]))
    (tmp_path / "b.json.gz").write_bytes(gzip.compress("\n".join(json.dumps(line) for line in lines[2:]).encode()))
    assert only(tmp_path) == build_episode(list(spans.values()))


def test_a_trace_of_the_genai_conventions(tmp_path: Path) -> None:
    """Agent, call and tool of another instrumentation: messages in the OpenAI shape, and no call exact."""
    messages = [
        {"role": "system", "parts": [{"type": "text", "content": "be good"}]},
        {"role": "assistant", "parts": [{"type": "tool_call", "id": "c1", "name": "add", "arguments": {"a": 2}}]},
        {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c1", "response": "4"}]},
    ]
    replies = [
        {"role": "assistant", "parts": [{"type": "reasoning", "content": "hm"}, {"type": "text", "content": "4"}], "finish_reason": "stop"}
    ]
    document = otlp(
        otlp_span("run", "00000000000000aa", start=0, end=90, **{"input.value": '{"q": 1}', "output.value": "4", "session.id": "s1"}),
        otlp_span(
            "invoke_agent solver",
            "00000000000000bb",
            "00000000000000aa",
            start=10,
            end=80,
            **{"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "solver"},
        ),
        otlp_span(
            "chat gpt",
            "00000000000000cc",
            "00000000000000bb",
            start=20,
            end=30,
            **{
                "gen_ai.operation.name": "chat",
                "gen_ai.request.model": "gpt",
                "gen_ai.request.temperature": 0.5,
                "gen_ai.request.stop_sequences": ["x"],
                "gen_ai.response.id": "r1",
                "gen_ai.usage.input_tokens": 7,
                "gen_ai.usage.output_tokens": 2,
                "gen_ai.input.messages": json.dumps(messages),
                "gen_ai.output.messages": json.dumps(replies),
                "gen_ai.tool.definitions": json.dumps([{"type": "function", "name": "add", "parameters": {"type": "object"}}]),
            },
        ),
        otlp_span(
            "execute_tool add",
            "00000000000000dd",
            "00000000000000bb",
            start=40,
            end=50,
            error="no",
            **{
                "gen_ai.operation.name": "execute_tool",
                "gen_ai.tool.name": "add",
                "gen_ai.tool.call.arguments": '{"a": 2}',
                "gen_ai.tool.call.result": "4",
                "error.type": "ValueError",
            },
        ),
    )
    episode = only(write(tmp_path / "trace.json", document))
    assert (episode.id, episode.workflow, episode.input, episode.output, episode.session_id) == (TRACE, "run", {"q": 1}, "4", "s1")
    assert (episode.termination, episode.metadata) == ("completed", {"imported_from": "OTLP JSON"})
    (solver,) = episode.trajectories
    assert (solver.id, solver.name) == ("00000000000000bb", "solver")
    (call,) = solver.calls
    assert call.messages == [
        {"role": "system", "content": "be good"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":2}'}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "4"},
    ]
    assert call.tools == [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    assert call.sampling == {"temperature": 0.5, "stop": ["x"]}
    assert call.usage == Usage(prompt_tokens=7, completion_tokens=2)
    assert (call.choices[0].text, call.choices[0].reasoning, call.choices[0].finish_reason) == ("4", "hm", "stop")
    assert (call.exact, call.trainable, call.inexact_reason) == (False, False, "imported from OTLP JSON: it keeps no token ids")
    (tool,) = solver.tools
    assert (tool.name, tool.arguments, tool.result, tool.error.type, tool.error.message) == ("add", {"a": 2}, "4", "ValueError", "no")


def test_a_trace_of_openllmetry(tmp_path: Path) -> None:
    """Numbered attributes, and names of its own for workflow, agent and tool."""
    document = otlp(
        otlp_span("w", "00000000000000aa", **{"traceloop.span.kind": "workflow", "traceloop.entity.name": "flow"}),
        otlp_span(
            "openai.chat",
            "00000000000000bb",
            "00000000000000aa",
            **{
                "llm.request.type": "chat",
                "gen_ai.request.model": "gpt",
                "gen_ai.prompt.0.role": "user",
                "gen_ai.prompt.0.content": "2+2?",
                "gen_ai.completion.0.role": "assistant",
                "gen_ai.completion.0.content": "4",
                "gen_ai.completion.0.finish_reason": "stop",
                "gen_ai.usage.prompt_tokens": 7,
                "gen_ai.usage.completion_tokens": 2,
            },
        ),
    )
    episode = only(write(tmp_path / "trace.json", document))
    assert episode.workflow == "flow"
    (call,) = episode.calls
    assert (call.messages, call.choices[0].text, call.usage.prompt_tokens) == ([{"role": "user", "content": "2+2?"}], "4", 7)


def test_a_trace_with_a_lone_call_gets_a_root(tmp_path: Path) -> None:
    """A call is no workflow: an episode is made around it, and around several spans that have no parent."""
    document = otlp(
        otlp_span("chat m", "00000000000000aa", start=5, **{"gen_ai.operation.name": "chat", "gen_ai.request.model": "m"}),
        otlp_span("lost", "00000000000000bb", "00000000000000ff", start=1, end=20, error="boom"),
    )
    episode = only(write(tmp_path / "trace.json", document))
    assert (episode.workflow, episode.termination, episode.error.message) == ("imported", "failed", "boom")
    assert (episode.started, episode.ended) == (NS + 1, NS + 20)
    assert [call.model for call in episode.calls] == ["m"]
    assert episode.calls[0].complete is False


def test_a_document_of_jaegers_and_phoenixs_download_is_unwrapped(tmp_path: Path) -> None:
    """``{"result": ...}`` and ``{"data": ...}`` around the same document."""
    document = otlp(otlp_span("run", "00000000000000aa"))
    assert only(write(tmp_path / "a.json", {"result": document})).workflow == "run"
    assert only(write(tmp_path / "b.json", {"data": document})).workflow == "run"


LANGFUSE = {
    "id": "trace-1",
    "timestamp": "2023-11-14T22:13:20.000Z",
    "name": "solve",
    "input": {"question": "2+2?"},
    "output": "4",
    "sessionId": "s1",
    "userId": "u1",
    "tags": ["a"],
    "metadata": {"row": 3},
    "observations": [
        {
            "id": "o-agent",
            "traceId": "trace-1",
            "type": "AGENT",
            "name": "solver",
            "startTime": "2023-11-14T22:13:20.100Z",
            "endTime": "2023-11-14T22:13:21.900Z",
            "parentObservationId": None,
        },
        {
            "id": "o-gen",
            "traceId": "trace-1",
            "type": "GENERATION",
            "name": "openai",
            "startTime": "2023-11-14T22:13:20.200Z",
            "endTime": "2023-11-14T22:13:20.700Z",
            "parentObservationId": "o-agent",
            "model": "gpt-4o-mini",
            "modelParameters": {"temperature": 0.7, "max_tokens": 20},
            "input": {"messages": [{"role": "user", "content": "2+2?"}], "tools": [{"type": "function", "function": {"name": "add"}}]},
            "output": {"role": "assistant", "content": "4", "tool_calls": None},
            "usageDetails": {"input": 12, "output": 1, "total": 13},
        },
        {
            "id": "o-tool",
            "traceId": "trace-1",
            "type": "TOOL",
            "name": "add",
            "startTime": "2023-11-14T22:13:21Z",
            "endTime": "2023-11-14T22:13:21.5Z",
            "parentObservationId": "o-agent",
            "input": '{"a": 2}',
            "output": 4,
            "level": "ERROR",
            "statusMessage": "bad",
        },
    ],
    "scores": [
        {"id": "s-1", "traceId": "trace-1", "name": "correct", "value": 1, "dataType": "BOOLEAN"},
        {"id": "s-2", "traceId": "trace-1", "name": "style", "value": 0.5, "dataType": "NUMERIC", "observationId": "o-gen"},
        {"id": "s-3", "traceId": "trace-1", "name": "tone", "stringValue": "nice", "value": None, "dataType": "CATEGORICAL"},
    ],
}


def check_langfuse(episode: Episode) -> None:
    assert (episode.id, episode.workflow, episode.input, episode.output) == ("trace-1", "solve", {"question": "2+2?"}, "4")
    assert episode.session_id == "s1"
    assert episode.metadata == {
        "row": 3,
        "user_id": "u1",
        "tags": ["a"],
        "scores": {"tone": "nice"},
        "imported_from": "Langfuse",
    }
    assert [(reward.name, reward.value) for reward in episode.rewards] == [("correct", 1.0)]
    (solver,) = episode.trajectories
    assert [(reward.name, reward.value, reward.target) for reward in solver.rewards] == [("style", 0.5, "o-gen")]
    (call,) = solver.calls
    assert (call.model, call.sampling) == ("gpt-4o-mini", {"temperature": 0.7, "max_tokens": 20})
    assert call.messages == [{"role": "user", "content": "2+2?"}]
    assert call.tools == [{"type": "function", "function": {"name": "add"}}]
    assert (call.choices[0].text, call.choices[0].tool_calls) == ("4", None)
    assert call.usage == Usage(prompt_tokens=12, completion_tokens=1)
    assert call.started == NS + 200_000_000
    assert call.inexact_reason == "imported from Langfuse: it keeps no token ids"
    (tool,) = solver.tools
    assert (tool.arguments, tool.result, tool.error.message) == ({"a": 2}, 4, "bad")


def test_a_trace_of_langfuse(tmp_path: Path) -> None:
    """A trace with its observations and scores: agent, call, tool, rewards by what they score, words as metadata."""
    check_langfuse(only(write(tmp_path / "trace.json", LANGFUSE)))


def test_files_of_langfuses_scheduled_export(tmp_path: Path) -> None:
    """Traces, observations and scores in files of their own, a line each, in the other spelling, joined by id."""
    spell = {
        "traceId": "trace_id",
        "parentObservationId": "parent_observation_id",
        "startTime": "start_time",
        "endTime": "end_time",
        "sessionId": "session_id",
        "userId": "user_id",
        "statusMessage": "status_message",
        "modelParameters": "model_parameters",
        "usageDetails": "usage_details",
        "model": "provided_model_name",
        "observationId": "observation_id",
        "dataType": "data_type",
        "stringValue": "string_value",
    }

    def lines(records: list[dict[str, Any]]) -> str:
        return "\n".join(json.dumps({spell.get(key, key): found for key, found in record.items()}) for record in records)

    trace = {key: found for key, found in LANGFUSE.items() if key not in ("observations", "scores")}
    (tmp_path / "observations.jsonl").write_text(lines(LANGFUSE["observations"]))
    (tmp_path / "scores.jsonl").write_text(lines(LANGFUSE["scores"]))
    (tmp_path / "traces.jsonl").write_text(lines([trace]))
    check_langfuse(only(tmp_path))


def phoenix_span(name: str, span_id: str, parent: str | None, kind: str, **attributes: Any) -> dict[str, Any]:
    return {
        "id": "x",
        "name": name,
        "context": {"trace_id": TRACE, "span_id": span_id},
        "span_kind": kind,
        "parent_id": parent,
        "start_time": "2023-11-14T22:13:20.000000+00:00",
        "end_time": "2023-11-14T22:13:21.000001+00:00",
        "status_code": "OK",
        "status_message": "",
        "attributes": attributes,
        "events": [],
    }


LLM = {
    "llm.model_name": "gpt",
    "llm.invocation_parameters": '{"temperature": 0.5, "model": "gpt"}',
    "llm.input_messages.0.message.role": "user",
    "llm.input_messages.0.message.contents.0.message_content.type": "text",
    "llm.input_messages.0.message.contents.0.message_content.text": "2+2?",
    "llm.input_messages.1.message.role": "tool",
    "llm.input_messages.1.message.content": "4",
    "llm.input_messages.1.message.tool_call_id": "c1",
    "llm.output_messages.0.message.role": "assistant",
    "llm.output_messages.0.message.tool_calls.0.tool_call.id": "c2",
    "llm.output_messages.0.message.tool_calls.0.tool_call.function.name": "add",
    "llm.output_messages.0.message.tool_calls.0.tool_call.function.arguments": '{"a": 1}',
    "llm.tools.0.tool.json_schema": '{"type": "function", "function": {"name": "add"}}',
    "llm.token_count.prompt": 7,
    "llm.token_count.prompt_details.cache_read": 0,
    "llm.token_count.completion": 2,
}


def check_phoenix(episode: Episode) -> None:
    assert (episode.workflow, episode.input, episode.output) == ("run", {"q": 1}, "4")
    (solver,) = episode.trajectories
    assert solver.name == "solver"
    (call,) = solver.calls
    assert call.messages == [
        {"role": "user", "content": [{"type": "text", "text": "2+2?"}]},
        {"role": "tool", "content": "4", "tool_call_id": "c1"},
    ]
    assert call.choices[0].tool_calls == [{"id": "c2", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]
    assert call.tools == [{"type": "function", "function": {"name": "add"}}]
    assert (call.sampling, call.usage) == ({"temperature": 0.5}, Usage(prompt_tokens=7, completion_tokens=2))
    assert (call.started, call.ended) == (NS, NS + 1_000_001_000)
    assert call.exact is False


def phoenix_spans() -> list[dict[str, Any]]:
    return [
        phoenix_span("run", "a", None, "CHAIN", **{"input.value": '{"q": 1}', "output.value": "4"}),
        phoenix_span("solver", "b", "a", "AGENT"),
        phoenix_span("llm", "c", "b", "LLM", **LLM),
    ]


def test_spans_of_phoenixs_interface(tmp_path: Path) -> None:
    """What ``GET /v1/projects/{project}/spans`` answers."""
    check_phoenix(only(write(tmp_path / "spans.json", {"data": phoenix_spans(), "next_cursor": None})))


def test_a_data_frame_of_phoenixs_spans(tmp_path: Path) -> None:
    """Saved as JSON by columns, as JSON lines, or as Parquet: the same columns in three files."""
    import pandas

    rows = []
    for span in phoenix_spans():
        plain = {
            f"attributes.{key}": found for key, found in span["attributes"].items() if not key.startswith(("llm.input_m", "llm.output_m"))
        }
        messages = nested(span["attributes"]).get("llm", {})
        for key in ("input_messages", "output_messages"):
            if key in messages:
                plain[f"attributes.llm.{key}"] = list(messages[key].values())
        rows.append(
            {
                "name": span["name"],
                "span_kind": span["span_kind"],
                "parent_id": span["parent_id"],
                "start_time": pandas.Timestamp(span["start_time"]),
                "end_time": pandas.Timestamp(span["end_time"]),
                "status_code": "OK",
                "context.span_id": span["context"]["span_id"],
                "context.trace_id": TRACE,
                **plain,
            }
        )
    frame = pandas.DataFrame(rows)
    frame.to_parquet(tmp_path / "spans.parquet")
    check_phoenix(only(tmp_path / "spans.parquet"))
    text = frame.assign(
        start_time=[span["start_time"] for span in phoenix_spans()], end_time=[span["end_time"] for span in phoenix_spans()]
    )
    text.to_json(tmp_path / "columns.json")
    check_phoenix(only(tmp_path / "columns.json"))
    text.to_json(tmp_path / "rows.jsonl", orient="records", lines=True)
    check_phoenix(only(tmp_path / "rows.jsonl"))


def test_what_cannot_be_imported_is_said(tmp_path: Path) -> None:
    """No file, no JSON, nothing known, a document among others that does not fit: each names the file."""
    with pytest.raises(ConfigurationError, match="has no file to import"):
        list(import_episodes(tmp_path))
    with pytest.raises(ConfigurationError, match="has no file to import"):
        list(import_episodes(tmp_path / "missing.json"))
    with pytest.raises(ConfigurationError, match=r"x\.json is of no known kind; say which with source="):
        list(import_episodes(write(tmp_path / "x.json", {"hello": 1})))
    with pytest.raises(ValueError, match=r"x\.json: the body is no OTLP request in JSON"):
        list(import_episodes(tmp_path / "x.json", source="otlp"))
    with pytest.raises(ValueError, match=r"x\.json: a record is no span of Phoenix"):
        list(import_episodes(tmp_path / "x.json", source="phoenix"))
    with pytest.raises(ValueError, match=r"x\.json: a record is none of Langfuse's"):
        list(import_episodes(tmp_path / "x.json", source="langfuse"))
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(ValueError, match=r"x\.json is no JSON"):
        list(import_episodes(tmp_path / "x.json"))
    with pytest.raises(ConfigurationError, match="got source='zipkin'"):
        list(import_episodes(tmp_path / "x.json", source="zipkin"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "when, expected",
    [
        ("2023-11-14T22:13:20Z", NS),
        ("2023-11-14T22:13:20.123456789Z", NS + 123_456_789),
        ("2023-11-14T22:13:20.5+00:00", NS + 500_000_000),
        ("2023-11-14 23:13:20.000001+01:00", NS + 1_000),
        ("2023-11-14T22:13:20", NS),
        (SECOND, NS),
        (SECOND + 0.5, NS + 500_000_000),
        (SECOND * 1_000, NS),
        (SECOND * 10**6, NS),
        (NS + 7, NS + 7),
    ],
)
def test_times_are_read_as_they_are_written(when: Any, expected: int) -> None:
    """To the nanosecond where the text has them; numbers by their size."""
    assert nanoseconds(when) == expected


def test_times_that_are_none_are_refused() -> None:
    """Half a date, or nothing, is no time."""
    for wrong in ("soon", "", None, True):
        with pytest.raises(ValueError, match=r".+"):
            nanoseconds(wrong)
