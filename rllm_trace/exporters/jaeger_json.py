"""Spans as files for the Jaeger UI: one ``<trace id>.jaeger.json`` for each trace, to be dropped on its upload page, no server needed.

The shape is that of ``GET /api/traces/{id}``. Values that JSON or a browser cannot hold are written as text: NaN and infinities, integers
beyond 2^53. Lists and maps are JSON text, a link is a ``FOLLOWS_FROM`` reference. A file is written aside and renamed, so a reader never
sees half of one; spans that come later, from this process or another, are merged into it by their id.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import math
import os
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from rllm_trace import _given as given
from rllm_trace import attributes as names
from rllm_trace._plain import dumps, to_plain
from rllm_trace.exporters.base import Wishes

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExportResult
    from opentelemetry.trace import SpanContext

__all__ = ["JaegerJSONExporter", "to_jaeger"]

Json = dict[str, Any]

_SAFE_INT: Final = 2**53
_LOCK_TIMEOUT: Final = 10.0
_SUFFIX: Final = ".jaeger.json"


class JaegerJSONExporter:
    """Writes into ``folder``, which is made as needed."""

    def __init__(self, folder: str | os.PathLike[str], *, capture_content: bool | None = None, tokens: bool = False) -> None:
        self.wishes = Wishes(capture_content=capture_content, content_default=True, tokens=tokens)
        self.folder = given.path(folder, "folder")
        self._lock = threading.Lock()
        self._owner = os.getpid()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Writes or extends the file of each trace. Raises OSError if the disk refuses."""
        from opentelemetry.sdk.trace.export import SpanExportResult

        if self._owner != os.getpid():  # a forked child: the lock may be held by a thread that is not here
            self._lock, self._owner = threading.Lock(), os.getpid()
        with self._lock, _alone(self.folder):
            for trace in cast("list[Json]", to_jaeger(spans)["data"]):
                path = self.folder / f"{trace['traceID']}{_SUFFIX}"
                _replace(path, _document([_merged(_read(path), trace)]))
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Nothing is open between two exports."""

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Nothing is ever waiting."""
        return True


def to_jaeger(spans: Sequence[ReadableSpan]) -> Json:
    """The document that holds ``spans``, grouped by trace in the order of their first span."""
    traces: dict[str, Json] = {}
    for span in spans:
        trace_id = format(_context(span).trace_id, "032x")
        trace = traces.setdefault(trace_id, {"traceID": trace_id, "spans": [], "processes": {}, "warnings": None})
        process_id, process = _process(span)
        trace["processes"].setdefault(process_id, process)
        trace["spans"].append(_span(span, trace_id, process_id))
    return _document(list(traces.values()))


def _context(span: ReadableSpan) -> SpanContext:
    context = span.get_span_context()
    assert context is not None, "a finished span has a context"
    return context


def _document(traces: list[Json]) -> Json:
    return {"data": traces, "total": 0, "limit": 0, "offset": 0, "errors": None}


def _process(span: ReadableSpan) -> tuple[str, Json]:
    attributes = dict(span.resource.attributes)
    service = str(attributes.pop(names.SERVICE_NAME, names.DEFAULT_SERVICE_NAME))
    process = {"serviceName": service, "tags": _tags(attributes)}
    return "p" + hashlib.sha256(json.dumps(process, sort_keys=True).encode()).hexdigest()[:8], process


def _span(span: ReadableSpan, trace_id: str, process_id: str) -> Json:
    started, ended = span.start_time or 0, span.end_time or span.start_time or 0
    return {
        "traceID": trace_id,
        "spanID": format(_context(span).span_id, "016x"),
        "flags": 1,
        "operationName": span.name,
        "references": _references(span),
        "startTime": started // 1_000,
        "duration": max(0, (ended - started) // 1_000),
        "tags": _tags(span.attributes or {}) + _own_tags(span),
        "logs": [
            {"timestamp": event.timestamp // 1_000, "fields": [_tag("event", event.name), *_tags(event.attributes or {})]}
            for event in span.events
        ],
        "processID": process_id,
        "warnings": None,
    }


def _references(span: ReadableSpan) -> list[Json]:
    parents = [("CHILD_OF", span.parent)] if span.parent is not None else []
    return [
        {"refType": kind, "traceID": format(context.trace_id, "032x"), "spanID": format(context.span_id, "016x")}
        for kind, context in [*parents, *(("FOLLOWS_FROM", link.context) for link in span.links)]
    ]


def _own_tags(span: ReadableSpan) -> list[Json]:
    """What Jaeger keeps as tags though it is no attribute: scope, kind and status."""
    found: Json = {}
    scope = span.instrumentation_scope
    if scope is not None and scope.name:
        found["otel.scope.name"] = scope.name
    if scope is not None and scope.version:
        found["otel.scope.version"] = scope.version
    found["span.kind"] = span.kind.name.lower()
    if span.status.status_code.name != "UNSET":
        found["otel.status_code"] = span.status.status_code.name
    if span.status.status_code.name == "ERROR":
        found["error"] = True
        if span.status.description:
            found["otel.status_description"] = span.status.description
    return _tags(found)


def _tags(attributes: Mapping[str, Any]) -> list[Json]:
    return [_tag(key, value) for key, value in attributes.items()]


def _tag(key: str, value: Any) -> Json:
    kind, shown = _typed(value)
    return {"key": key, "type": kind, "value": shown}


def _typed(value: Any) -> tuple[str, Any]:
    if isinstance(value, bool):
        return "bool", value
    if isinstance(value, int):
        return "int64", value if abs(value) <= _SAFE_INT else str(value)
    if isinstance(value, float):
        return ("float64", value) if math.isfinite(value) else ("string", repr(value))
    if isinstance(value, (bytes, bytearray)):
        return "binary", base64.b64encode(value).decode("ascii")
    if isinstance(value, str):
        return "string", value
    return "string", dumps(to_plain(list(cast("tuple[Any, ...]", value)) if isinstance(value, tuple) else value))


def _read(path: Path) -> Json | None:
    """The trace of an earlier file; None if there is none, or it is not one of ours."""
    try:
        return json.loads(path.read_bytes())["data"][0]
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _merged(earlier: Json | None, trace: Json) -> Json:
    if earlier is None:
        return trace
    fresh = {span["spanID"] for span in trace["spans"]}
    kept = [span for span in earlier["spans"] if span["spanID"] not in fresh]
    return {**trace, "spans": kept + trace["spans"], "processes": earlier["processes"] | trace["processes"]}


def _replace(path: Path, document: Json) -> None:
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_text(json.dumps(document, allow_nan=False, separators=(",", ":")), encoding="ascii")
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _alone(folder: Path) -> Generator[None]:
    """Keeps other processes from merging into the same files at the same time, where the system can. Raises TimeoutError."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:
        yield
        return
    deadline = time.monotonic() + _LOCK_TIMEOUT
    with open(folder / ".lock", "ab") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{folder} was locked by another process for {_LOCK_TIMEOUT:g} s") from None
                time.sleep(0.01)
        yield
