"""The bytes of an OTLP request say exactly what OpenTelemetry's own encoder would have said."""

from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from rllm_trace.exporters._otlp_encode import request_bytes, span_bytes


def context(span_id: int, **fields: Any) -> SpanContext:
    return SpanContext(**{"trace_id": 2**127 + 5, "span_id": span_id, "is_remote": False, "trace_flags": TraceFlags(1), **fields})


def span(**fields: Any) -> ReadableSpan:
    usual: dict[str, Any] = {
        "name": "chat m",
        "context": context(7),
        "resource": Resource({"service.name": "shop"}),
        "attributes": {"a": "b"},
        "kind": SpanKind.CLIENT,
        "status": Status(StatusCode.UNSET),
        "start_time": 1_700_000_000_000_000_000,
        "end_time": 1_700_000_000_000_000_001,
        "instrumentation_scope": InstrumentationScope("rllm_trace"),
    }
    return ReadableSpan(**{**usual, **fields})


def written(spans: list[ReadableSpan]) -> bytes | None:
    encoded = span_bytes(spans)
    return None if encoded is None else request_bytes(spans, encoded)


ALIKE = [
    [span()],
    [
        span(
            attributes={
                "text": "ä" * 70_000,
                "empty": "",
                "yes": True,
                "no": False,
                "int": 300,
                "minus": -1,
                "big": 2**63 - 1,
                "least": -(2**63),
            }
        )
    ],
    [span(attributes={"float": -0.5, "zero": 0, "nan_free": 1e308, "names": ["a", "b"], "numbers": [1, 2], "none": []})],
    [span(parent=context(9)), span(parent=context(9, is_remote=True)), span(links=[Link(context(11)), Link(context(12, is_remote=True))])],
    [
        span(attributes=said)
        for said in ({"a": "b"}, {"a": True}, {"a": 1}, {"a": "b", "b": "b"}, {"a": "True"}, {"a": False})
        for _ in range(2)
    ],
    [span(status=Status(StatusCode.ERROR, "it broke")), span(kind=SpanKind.INTERNAL, name="")],
    [
        span(resource=Resource({"service.name": "other"}, "https://schema")),
        span(),
        span(instrumentation_scope=InstrumentationScope("x", "1.2")),
    ],
]


@pytest.mark.parametrize("spans", ALIKE)
def test_a_request_says_what_opentelemetrys_encoder_says(spans: list[ReadableSpan]) -> None:
    """Every attribute type, parents, links, states, resources and scopes come out the same."""
    request = written(spans)
    assert request is not None
    assert ExportTraceServiceRequest.FromString(request) == encode_spans(spans)


@pytest.mark.parametrize(
    "unusual",
    [
        span(events=[Event("e")]),
        span(attributes={"bytes": b"x"}),
        span(attributes={"lone": "\ud800"}),
        span(context=context(7, trace_state=TraceState([("k", "v")]))),
        span(links=[Link(context(11), {"k": "v"})]),
    ],
)
def test_what_it_does_not_write_is_left_to_opentelemetrys_encoder(unusual: ReadableSpan) -> None:
    """A batch with a span that says something else is refused whole, never written in part."""
    assert written([span(), unusual]) is None
