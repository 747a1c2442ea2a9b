"""Files for the Jaeger UI."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.trace import SpanContext, TraceFlags

from rllm_trace._disclosure import Disclosure
from rllm_trace._spans import Span
from rllm_trace.exporters import JaegerJSONExporter, open_sinks, to_jaeger
from rllm_trace.exporters._readable import converter

GOLDEN = Path(__file__).parent / "data" / "episode.jaeger.json"
TRACE = "0123456789abcdef0123456789abcdef"


def readable(spans: dict[str, Span], *kinds: str) -> list[ReadableSpan]:
    convert = converter("app")
    disclosure = Disclosure(content=True, tokens=True)
    made = [convert(spans[kind], disclosure) for kind in kinds]
    for span in made:
        span._resource = Resource({"service.name": "app", "host.cpus": 2})
    return made


def one(attributes: dict[str, Any]) -> ReadableSpan:
    return ReadableSpan(
        name="x",
        context=SpanContext(1, 2, is_remote=False, trace_flags=TraceFlags(1)),
        resource=Resource({}),
        attributes=attributes,
        start_time=1_000,
        end_time=2_999,
    )


def test_the_document_of_an_episode_is_this_one(spans: dict[str, Span]) -> None:
    """The whole shape, written out in a file that was looked at: what the UI's upload page takes."""
    found = json.loads(json.dumps(to_jaeger(readable(spans, "workflow", "agent", "chat", "tool", "reward")), allow_nan=False))
    assert found == json.loads(GOLDEN.read_text())


def test_a_span_has_the_fields_that_the_ui_reads(spans: dict[str, Span]) -> None:
    """Ids in hex, microseconds, the parent as CHILD_OF, a link as FOLLOWS_FROM, the process by its id."""
    document = to_jaeger(readable(spans, "workflow", "chat"))
    assert {key: value for key, value in document.items() if key != "data"} == {"total": 0, "limit": 0, "offset": 0, "errors": None}
    (trace,) = document["data"]
    root, chat = trace["spans"]
    assert root["references"] == [{"refType": "FOLLOWS_FROM", "traceID": "fedcba9876543210fedcba9876543210", "spanID": "00000000000000ff"}]
    assert chat["references"] == [{"refType": "CHILD_OF", "traceID": TRACE, "spanID": "00000000000000a1"}]
    assert (chat["traceID"], chat["spanID"], chat["operationName"], chat["flags"]) == (TRACE, "00000000000000c1", "chat policy", 1)
    assert (chat["startTime"], chat["duration"]) == (1_700_000_000_002_000, 2_000)
    assert trace["processes"][chat["processID"]] == {
        "serviceName": "app",
        "tags": [{"key": "host.cpus", "type": "int64", "value": 2}],
    }


def test_values_are_typed_as_jaeger_types_them() -> None:
    """NaN, infinities and large integers become text, lists and maps JSON text, bytes base64: the file is valid JSON whatever comes."""
    document = to_jaeger(
        [
            one(
                {
                    "b": True,
                    "i": 2**53,
                    "big": -(2**53) - 1,
                    "f": 0.5,
                    "nan": math.nan,
                    "inf": -math.inf,
                    "s": "ü",
                    "list": ("a", "b"),
                    "bytes": b"\x00\xff",
                }
            )
        ]
    )
    json.dumps(document, allow_nan=False)
    tags = {tag["key"]: (tag["type"], tag["value"]) for tag in document["data"][0]["spans"][0]["tags"]}
    assert tags == {
        "b": ("bool", True),
        "i": ("int64", 9007199254740992),
        "big": ("int64", "-9007199254740993"),
        "f": ("float64", 0.5),
        "nan": ("string", "nan"),
        "inf": ("string", "-inf"),
        "s": ("string", "ü"),
        "list": ("string", '["a","b"]'),
        "bytes": ("binary", "AP8="),
        "span.kind": ("string", "internal"),
    }


def test_a_failed_span_is_marked(spans: dict[str, Span]) -> None:
    """The UI colours what has error=true, and shows the description."""
    (trace,) = to_jaeger(readable(spans, "tool"))["data"]
    tags = {tag["key"]: tag["value"] for tag in trace["spans"][0]["tags"]}
    assert tags["error"] is True
    assert tags["otel.status_code"] == "ERROR"
    assert tags["otel.status_description"] == "no number in What is 2+2?"
    assert tags["error.type"] == "ValueError"
    assert tags["otel.scope.name"] == "rllm_trace"


def test_events_become_logs() -> None:
    """The event's name is the field that the UI shows first."""
    span = one({})
    span._events = (Event("exception", {"exception.type": "E"}, timestamp=5_000),)
    (trace,) = to_jaeger([span])["data"]
    assert trace["spans"][0]["logs"] == [
        {
            "timestamp": 5,
            "fields": [
                {"key": "event", "type": "string", "value": "exception"},
                {"key": "exception.type", "type": "string", "value": "E"},
            ],
        }
    ]


def test_a_trace_is_one_file_and_grows(spans: dict[str, Span], tmp_path: Path) -> None:
    """Spans of a later batch join those of earlier ones; a span that comes again replaces itself; nothing else lies in the folder."""
    exporter = JaegerJSONExporter(tmp_path / "traces")
    exporter.export(readable(spans, "agent", "chat"))
    exporter.export(readable(spans, "chat", "workflow"))
    path = tmp_path / "traces" / f"{TRACE}.jaeger.json"
    (trace,) = json.loads(path.read_text())["data"]
    assert [span["operationName"] for span in trace["spans"]] == ["invoke_agent solver", "chat policy", "invoke_workflow solve"]
    assert sorted(os.listdir(tmp_path / "traces")) == [".lock", f"{TRACE}.jaeger.json"]


def write(folder: Path, kinds: list[str], spans: dict[str, Span]) -> None:
    exporter = JaegerJSONExporter(folder)
    for kind in kinds:
        exporter.export(readable(spans, kind))


def test_processes_may_write_one_trace(spans: dict[str, Span], tmp_path: Path, forked: Any) -> None:
    """None of them loses what another has just merged."""
    forked(write, (tmp_path, ["workflow", "agent"], spans), (tmp_path, ["chat", "tool", "reward"], spans))
    (trace,) = json.loads((tmp_path / f"{TRACE}.jaeger.json").read_text())["data"]
    assert len(trace["spans"]) == 5


def test_a_disk_that_refuses_leaves_the_old_file(spans: dict[str, Span], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed write neither damages what is there nor leaves half a file beside it."""
    exporter = JaegerJSONExporter(tmp_path)
    exporter.export(readable(spans, "chat"))
    before = (tmp_path / f"{TRACE}.jaeger.json").read_bytes()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        exporter.export(readable(spans, "workflow"))
    assert (tmp_path / f"{TRACE}.jaeger.json").read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == [".lock", f"{TRACE}.jaeger.json"]


def test_files_have_content_and_no_tokens_unless_asked(spans: dict[str, Span], tmp_path: Path) -> None:
    """The folder is the user's own; ids are left out of it for the reader's sake."""
    takers, _ = open_sinks([JaegerJSONExporter(tmp_path / "a"), JaegerJSONExporter(tmp_path / "b", tokens=True)])
    for taker in takers:
        taker.put(spans["chat"])
        assert taker.flush(20)
        taker.close(5)
    without, tokens = ((tmp_path / folder / f"{TRACE}.jaeger.json").read_text() for folder in "ab")
    assert "What is 2+2?" in without
    assert "rllm.prompt.token_ids" not in without
    assert "rllm.prompt.token_ids" in tokens
