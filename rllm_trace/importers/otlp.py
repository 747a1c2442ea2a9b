"""OTLP JSON in, Episodes out: files of a collector's file exporter, of Jaeger's or Phoenix's OTLP download, or of our own receiver.

Traces of ours that were exported with tokens become the exact episodes that they were; spans of the GenAI conventions, OpenInference or
OpenLLMetry become episodes that are not exact.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, cast

from rllm_trace._otlp_decode import ReceivedSpan, spans_of_document
from rllm_trace.episodes import build_episode
from rllm_trace.importers._attributes import call_of, input_of, kind_of, name_of, nested, output_of, session_of
from rllm_trace.importers._files import documents
from rllm_trace.importers.base import Imported, episodes_of
from rllm_trace.types import Episode, ErrorInfo

__all__ = ["SOURCE", "imported_span", "is_document", "otlp_episodes"]

SOURCE: Final = "OTLP JSON"


def is_document(document: Any) -> bool:
    """Whether a JSON document is one of OTLP traces."""
    if not isinstance(document, dict):
        return False
    found = cast("dict[str, Any]", document)
    return "resourceSpans" in found or is_document(found.get("result")) or is_document(found.get("data"))


def otlp_episodes(path: str | os.PathLike[str]) -> Iterator[Episode]:
    """The episodes of a file or folder. Raises ValueError that names a file that holds something else."""
    traces: dict[str, dict[str, ReceivedSpan]] = {}
    for file, document in documents(path):
        for span in _spans(file, document):
            traces.setdefault(span.trace_id, {})[span.span_id] = span
    theirs: list[Imported] = []
    for spans in sorted((list(found.values()) for found in traces.values()), key=lambda found: min(span.started for span in found)):
        episode = _own(spans)
        if episode is not None:
            yield episode
        else:
            theirs += [imported_span(span) for span in spans]
    yield from episodes_of(theirs, {}, source=SOURCE)


def _spans(file: Path, document: Any) -> list[ReceivedSpan]:
    while isinstance(document, dict) and "resourceSpans" not in document:
        held = cast("dict[str, Any]", document)
        document = held.get("result", held.get("data"))
    try:
        return spans_of_document(document)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def _own(spans: Sequence[ReceivedSpan]) -> Episode | None:
    """The episode, if the trace is one of ours and whole."""
    ours = [span for span in (received.ours() for received in spans) if span is not None]
    try:
        return build_episode(ours) if ours else None
    except ValueError:  # the workflow's own span is not among them
        return None


def imported_span(span: ReceivedSpan) -> Imported:
    """The span, whichever library made it."""
    found = nested(span.attributes)
    kind = kind_of(found)
    error = None
    if span.status == "error":
        error = ErrorInfo(type=str(span.attributes.get("error.type", "Error")), message=span.status_message[:2_000])
    return Imported(
        kind=kind,
        name=name_of(found, span.name),
        trace_id=span.trace_id,
        span_id=span.span_id,
        parent_id=span.parent_id,
        started=span.started,
        ended=span.ended,
        input=input_of(found),
        output=output_of(found),
        call=call_of(found) if kind == "chat" else None,
        error=error,
        session_id=session_of(found),
    )
