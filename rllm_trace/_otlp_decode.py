"""OTLP requests in, received spans out, from protobuf and from its JSON form alike. Pure.

The two spell the same message differently: protobuf has bytes and numbers, JSON has hex ids, 64-bit integers as text and enums as names
or numbers. What is received is kept as it came; ``ReceivedSpan.ours`` makes one of our spans of it where it is one.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, cast

import msgspec

from rllm_trace._plain import loads
from rllm_trace._span_attributes import span_from_attributes
from rllm_trace._spans import Span

__all__ = ["ReceivedSpan", "spans_of_document", "spans_of_json", "spans_of_protobuf"]

Json = Mapping[str, Any]

_KINDS: Final = ("unspecified", "internal", "server", "client", "producer", "consumer")
_STATUS: Final = ("unset", "ok", "error")


class ReceivedSpan(msgspec.Struct, frozen=True, kw_only=True):
    """A span as another process sent it."""

    name: str
    trace_id: str
    """32 hex digits."""
    span_id: str
    """16 hex digits."""
    parent_id: str | None
    kind: str
    """internal, client, server, producer, consumer or unspecified."""
    started: int
    """Unix time, nanoseconds."""
    ended: int
    """Unix time, nanoseconds."""
    attributes: dict[str, Any]
    resource: dict[str, Any]
    scope: str
    status: str
    """unset, ok or error."""
    status_message: str
    links: tuple[tuple[str, str], ...]
    """(trace id, span id)."""
    events: tuple[tuple[str, int, dict[str, Any]], ...]
    """(name, Unix time in nanoseconds, attributes)."""
    dropped_attributes: int
    """How many the sender says it left out."""

    def ours(self) -> Span | None:
        """The span of ours that was exported as this one; None if it is another's. Raises ValueError if it is malformed."""
        return span_from_attributes(
            self.attributes,
            name=self.name,
            trace_id=self.trace_id,
            span_id=self.span_id,
            parent_id=self.parent_id,
            started=self.started,
            ended=self.ended,
            links=self.links,
        )


def spans_of_protobuf(body: bytes) -> list[ReceivedSpan]:
    """The spans of a serialized ExportTraceServiceRequest. Raises ValueError if it is none."""
    from google.protobuf.message import DecodeError
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    try:
        request = ExportTraceServiceRequest.FromString(body)
    except DecodeError as error:
        raise ValueError(f"the body is no OTLP request in protobuf: {error}") from error
    return spans_of_message(request)


def spans_of_message(request: Any) -> list[ReceivedSpan]:
    """The same for a parsed request."""
    made: list[ReceivedSpan] = []
    for of_resource in request.resource_spans:
        resource = _attributes(of_resource.resource.attributes)
        for of_scope in of_resource.scope_spans:
            made += [_of_message(span, resource, of_scope.scope.name) for span in of_scope.spans]
    return made


def _of_message(span: Any, resource: dict[str, Any], scope: str) -> ReceivedSpan:
    return ReceivedSpan(
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex() or None,
        kind=_named(_KINDS, span.kind),
        started=span.start_time_unix_nano,
        ended=span.end_time_unix_nano,
        attributes=_attributes(span.attributes),
        resource=resource,
        scope=scope,
        status=_named(_STATUS, span.status.code),
        status_message=span.status.message,
        links=tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
        events=tuple((event.name, event.time_unix_nano, _attributes(event.attributes)) for event in span.events),
        dropped_attributes=span.dropped_attributes_count,
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind is None:
        return None
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    if kind == "kvlist_value":
        return _attributes(value.kvlist_value.values)
    return getattr(value, kind)


def spans_of_json(body: bytes | str) -> list[ReceivedSpan]:
    """The spans of an OTLP request in JSON. Raises ValueError if it is none."""
    return spans_of_document(loads(body))


def spans_of_document(document: Any) -> list[ReceivedSpan]:
    """The same for one that has been parsed, or for an exported TracesData document."""
    if not isinstance(document, dict) or "resourceSpans" not in document:
        raise ValueError("the body is no OTLP request in JSON: it has no resourceSpans")
    try:
        return list(_of_json(cast("Json", document)))
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"the body is no OTLP request in JSON: {type(error).__name__}: {error}") from error


def _of_json(document: Json) -> Iterator[ReceivedSpan]:
    for of_resource in _list(document, "resourceSpans"):
        resource = _json_attributes(_list(of_resource.get("resource") or {}, "attributes"))
        for of_scope in _list(of_resource, "scopeSpans"):
            described: Json = of_scope.get("scope") or {}
            for span in _list(of_scope, "spans"):
                yield _of_json_span(span, resource, described.get("name", ""))


def _of_json_span(span: Json, resource: dict[str, Any], scope: str) -> ReceivedSpan:
    status: Json = span.get("status") or {}
    return ReceivedSpan(
        name=span["name"],
        trace_id=_hex(span["traceId"], 16),
        span_id=_hex(span["spanId"], 8),
        parent_id=_hex(span["parentSpanId"], 8) if span.get("parentSpanId") else None,
        kind=_named(_KINDS, span.get("kind", 0), "SPAN_KIND_"),
        started=int(span.get("startTimeUnixNano", 0)),
        ended=int(span.get("endTimeUnixNano", 0)),
        attributes=_json_attributes(_list(span, "attributes")),
        resource=resource,
        scope=scope,
        status=_named(_STATUS, status.get("code", 0), "STATUS_CODE_"),
        status_message=status.get("message", ""),
        links=tuple((_hex(link["traceId"], 16), _hex(link["spanId"], 8)) for link in _list(span, "links")),
        events=tuple(
            (event.get("name", ""), int(event.get("timeUnixNano", 0)), _json_attributes(_list(event, "attributes")))
            for event in _list(span, "events")
        ),
        dropped_attributes=int(span.get("droppedAttributesCount", 0)),
    )


def _list(value: Json, key: str) -> list[Json]:
    found = value.get(key)
    return cast("list[Json]", found) if isinstance(found, list) else []


def _json_attributes(pairs: Sequence[Json]) -> dict[str, Any]:
    return {pair["key"]: _json_value(pair.get("value") or {}) for pair in pairs}


def _json_value(value: Json) -> Any:
    for kind, content in value.items():
        if kind == "intValue":
            return int(content)
        if kind == "doubleValue":
            return float(content)
        if kind == "bytesValue":
            return base64.b64decode(content)
        if kind == "arrayValue":
            return [_json_value(item) for item in _list(content, "values")]
        if kind == "kvlistValue":
            return _json_attributes(_list(content, "values"))
        return content
    return None


def _hex(text: str, length: int) -> str:
    """An id as hex; exporters that print protobuf's own JSON write base64."""
    if len(text) == 2 * length:
        return bytes.fromhex(text).hex()
    raw = base64.b64decode(text)
    if len(raw) != length:
        raise ValueError(f"the body is no OTLP request in JSON: {text!r} is no id of {length} bytes")
    return raw.hex()


def _named(names: tuple[str, ...], value: str | int, prefix: str = "") -> str:
    if isinstance(value, str):
        return value.removeprefix(prefix).lower()
    return names[value] if 0 <= value < len(names) else names[0]
