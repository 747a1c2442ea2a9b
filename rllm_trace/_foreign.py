"""Spans that other libraries make with OpenTelemetry become spans of the running episode, beside what they are to their own provider.

An ``invoke_agent`` span of theirs is a trajectory, an ``execute_tool`` span a tool call, another one a plain span; their ``chat`` spans are
left out, because our own client records those calls. A call belongs to the innermost of their spans and our own scopes, found by span id.
Nothing of theirs is changed: the span keeps its trace, ours has a link to it.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, Final, cast

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace import Span as SDKSpan
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

from rllm_trace import attributes as A
from rllm_trace._context import Scope, current
from rllm_trace._episode import child_span, recording_scope
from rllm_trace._guard import guard
from rllm_trace._spans import Span, SpanKind, sources
from rllm_trace.exceptions import ConfigurationError
from rllm_trace.types import ErrorInfo

__all__ = ["attach_to", "foreign_scope", "tracer_provider"]

_KINDS: Final[dict[str, SpanKind]] = {A.OP_AGENT: "agent", A.OP_TOOL: "tool"}
_NAMES: Final = {"agent": A.AGENT_NAME, "tool": A.TOOL_NAME}
_CALLS: Final = frozenset({A.OP_CHAT, A.OP_COMPLETION, "generate_content", "responses"})
_PLAIN: Final = ("gen_ai.", "error.")
"""Attributes that may be kept where content is not: the conventions say which of them are content."""


class _Entry:
    """An open span of theirs: the scope that it was started in, and the one inside it."""

    __slots__ = ("base", "inner", "span")

    def __init__(self, base: Scope, inner: Scope, span: Span | None) -> None:
        self.base = base
        self.inner = inner
        self.span = span
        """None for a chat span, which is not taken in."""


class _Intake(SpanProcessor):
    """Watches one provider. Called on the app's thread; never raises."""

    def __init__(self) -> None:
        self._open: dict[tuple[int, int], _Entry] = {}

    def on_start(self, span: SDKSpan, parent_context: Context | None = None) -> None:
        with guard("foreign span"):
            self._start(span)

    def on_end(self, span: ReadableSpan) -> None:
        with guard("foreign span"):
            self._end(span)

    def shutdown(self) -> None:
        self._open.clear()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return True

    def _start(self, span: SDKSpan) -> None:
        base = current()
        scope = recording_scope(base)
        context = span.get_span_context()
        if scope is None or base is None:
            return
        operation = _operation(span.name, span.attributes or {})
        if operation in _CALLS:
            entry = _Entry(base, scope, None)
        else:
            kind = _KINDS.get(operation, "other")
            ours = child_span(scope, kind, _name(span, kind))
            ours.span_id = f"{context.span_id:016x}"
            ours.links = ((f"{context.trace_id:032x}", ours.span_id),)
            trajectory = None
            if kind == "agent":
                ours.trajectory_id, ours.trajectory_name = ours.span_id, ours.name
                trajectory = scope.episode.trajectory_of(ours.span_id, ours.name)
            if not scope.episode.start(ours):
                return
            entry = _Entry(base, scope.inside(span_id=ours.span_id, trajectory=trajectory), ours)
        self._open[context.trace_id, context.span_id] = entry
        scope.episode.foreign[context.span_id] = entry

    def _end(self, span: ReadableSpan) -> None:
        context = span.get_span_context()
        entry = None if context is None else self._open.pop((context.trace_id, context.span_id), None)
        if entry is None or context is None:
            return
        episode = entry.inner.episode
        episode.foreign.pop(context.span_id, None)
        ours = entry.span
        if ours is None:
            return
        if ours.kind != "other":
            ours.name = _name(span, ours.kind)
            if ours.kind == "agent":
                ours.trajectory_name = ours.name
        ours.facts = _facts(span.attributes or {}, content=episode.keeps_content)
        ours.error = _error(span)
        ours.ended = sources.now()
        episode.end(ours)


def foreign_scope(scope: Scope) -> Scope:
    """The scope inside the user's current span, if that was taken in and started in ``scope`` itself; else ``scope``."""
    context = trace.get_current_span().get_span_context()
    entry: _Entry | None = scope.episode.foreign.get(context.span_id)
    return entry.inner if entry is not None and entry.base is scope else scope


_attached: Final[weakref.WeakSet[Any]] = weakref.WeakSet()


def attach_to(provider: trace.TracerProvider) -> None:
    """Has spans of ``provider`` that start inside a workflow taken into its episode; asking twice changes nothing.

    What the provider samples out is not seen. Raises ConfigurationError for one that takes no span processors, such as the placeholder
    that OpenTelemetry has before one is set.
    """
    add = getattr(provider, "add_span_processor", None)
    if not callable(add):
        raise ConfigurationError(
            f"got a {type(provider).__name__}, which takes no span processors; set up a TracerProvider of the OpenTelemetry SDK first"
        )
    if provider not in _attached:
        add(_Intake())
        _attached.add(provider)


class _SystemIds(IdGenerator):
    """Ids that no ``random.seed`` repeats, and that advance nobody's random numbers."""

    def generate_span_id(self) -> int:
        return int(sources.span_id(), 16) or 1

    def generate_trace_id(self) -> int:
        return int(sources.trace_id(), 16) or 1

    def is_trace_id_random(self) -> bool:
        return True


def tracer_provider() -> TracerProvider:
    """A new provider for libraries that take one: whatever they trace inside a workflow is part of its episode.

    It samples nothing out, cuts nothing, obeys no ``OTEL_*`` variable, and is never made the global one.
    """
    unset = SpanLimits.UNSET
    limits = SpanLimits(
        max_attributes=unset,
        max_events=unset,
        max_links=unset,
        max_span_attributes=unset,
        max_event_attributes=unset,
        max_link_attributes=unset,
        max_attribute_length=unset,
        max_span_attribute_length=unset,
    )
    provider = TracerProvider(sampler=ALWAYS_ON, id_generator=_SystemIds(), span_limits=limits, shutdown_on_exit=False)
    provider._disabled = False  # OTEL_SDK_DISABLED would turn even a provider of one's own into a no-op
    attach_to(provider)
    return provider


def _operation(name: str, attributes: Mapping[str, Any]) -> str:
    return str(attributes.get(A.OPERATION_NAME) or name.partition(" ")[0])


def _name(span: ReadableSpan, kind: SpanKind) -> str:
    key = _NAMES.get(kind)
    given = None if key is None else (span.attributes or {}).get(key)
    if isinstance(given, str) and given:
        return given
    _, separator, rest = span.name.partition(" ")
    return rest if key is not None and separator else span.name


def _facts(attributes: Mapping[str, Any], *, content: bool) -> dict[str, Any]:
    kept = {key: value for key, value in attributes.items() if content or key.startswith(_PLAIN)}
    return {key: list(cast("tuple[Any, ...]", value)) if isinstance(value, tuple) else value for key, value in kept.items()}


def _error(span: ReadableSpan) -> ErrorInfo | None:
    if span.status.status_code is not trace.StatusCode.ERROR:
        return None
    kind = (span.attributes or {}).get(A.ERROR_TYPE, "Error")
    return ErrorInfo(type=str(kind), message=span.status.description or "")
