"""A finished span of ours in, OpenTelemetry's ``ReadableSpan`` out, with what may leave of it and nothing else.

Runs on an exporting thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rllm_trace import attributes as names
from rllm_trace._disclosure import Disclosure, redact_span
from rllm_trace._span_attributes import span_attributes, span_name
from rllm_trace._spans import Span

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan

__all__ = ["Convert", "converter"]

Convert = Callable[[Span, Disclosure], "ReadableSpan"]


def converter(service_name: str | None = None) -> Convert:
    """A function that makes ReadableSpans of this service. Without a name the standard variables decide, else ``rllm``."""
    from opentelemetry.sdk.resources import Resource

    given: dict[str, Any] = {} if service_name is None else {names.SERVICE_NAME: service_name}
    resource = Resource.create(given)
    if service_name is None and str(resource.attributes.get(names.SERVICE_NAME, "")).startswith("unknown_service"):
        resource = resource.merge(Resource({names.SERVICE_NAME: names.DEFAULT_SERVICE_NAME}))
    return lambda span, disclosure: _readable(span, disclosure, resource)


def _readable(span: Span, disclosure: Disclosure, resource: Resource) -> ReadableSpan:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

    def context(trace_id: str, span_id: str) -> SpanContext:
        return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))

    shown = redact_span(span, disclosure.redact) if disclosure.content else span
    error = shown.error if shown.call is None else shown.call.error or shown.error
    said = error is not None and disclosure.content and error.message
    return ReadableSpan(
        name=span_name(shown),
        context=context(shown.trace_id, shown.span_id),
        parent=None if shown.parent_id is None else context(shown.trace_id, shown.parent_id),
        resource=resource,
        attributes=span_attributes(shown, content=disclosure.content, tokens=disclosure.tokens),
        links=[Link(context(*link)) for link in shown.links],
        kind=SpanKind.CLIENT if shown.kind == "chat" else SpanKind.INTERNAL,
        status=Status(StatusCode.UNSET) if error is None else Status(StatusCode.ERROR, said or error.type),
        start_time=shown.started,
        end_time=max(shown.ended, shown.started),
        instrumentation_scope=InstrumentationScope(names.SCOPE_NAME),
    )
