"""Phoenix's spans in, Episodes out: the JSON of its REST interface, or of a data frame of spans that was saved as JSON or JSON lines."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, cast

from rllm_trace.importers._attributes import call_of, input_of, kind_of, name_of, nested, output_of, session_of
from rllm_trace.importers._files import documents
from rllm_trace.importers._times import nanoseconds
from rllm_trace.importers.base import Imported, episodes_of
from rllm_trace.types import Episode, ErrorInfo

__all__ = ["SOURCE", "is_document", "phoenix_episodes"]

Json = dict[str, Any]

SOURCE: Final = "Phoenix"


def is_document(document: Any) -> bool:
    """Whether a JSON document holds spans as Phoenix writes them."""
    return any("trace_id" in _mapping(nested(record).get("context")) for record in _records(document)[:1])


def phoenix_episodes(path: str | os.PathLike[str]) -> Iterator[Episode]:
    """The episodes of a file or folder. Raises ValueError that names a file that holds something else."""
    spans = [_span(file, record) for file, document in documents(path) for record in _records(document)]
    return episodes_of(spans, {}, source=SOURCE)


def _records(document: Any) -> list[Json]:
    """The span objects of a document: a list, one object, ``{"data": [...]}``, or a data frame's columns."""
    if isinstance(document, list):
        return [cast("Json", record) for record in cast("list[Any]", document) if isinstance(record, dict)]
    found = cast("Json", document) if isinstance(document, dict) else {}
    if isinstance(found.get("data"), list):
        return _records(found["data"])
    columns = [cast("Json", column) for column in found.values() if isinstance(column, dict)]
    if "name" in found and len(columns) == len(found):
        return [{key: column.get(row) for key, column in found.items()} for row in cast("Json", found["name"])]
    return [found] if found else []


def _span(file: Path, record: Mapping[str, Any]) -> Imported:
    found = nested({key: value for key, value in record.items() if value is not None})
    context, attributes = _mapping(found.get("context")), _mapping(found.get("attributes"))
    try:
        trace_id, span_id = context["trace_id"], context["span_id"]
        started = nanoseconds(found["start_time"])
        ended = nanoseconds(found.get("end_time", found["start_time"]))
    except (LookupError, ValueError) as error:
        raise ValueError(f"{file}: a record is no span of Phoenix ({type(error).__name__}: {error})") from error
    if "span_kind" in found:
        attributes = {"openinference": {"span": {"kind": found["span_kind"]}}, **attributes}
    kind = kind_of(attributes)
    error = None
    if str(found.get("status_code", "")).upper() == "ERROR":
        error = ErrorInfo(type="Error", message=str(found.get("status_message", ""))[:2_000])
    return Imported(
        kind=kind,
        name=name_of(attributes, str(found.get("name", ""))),
        trace_id=str(trace_id),
        span_id=str(span_id),
        parent_id=_parent(found),
        started=started,
        ended=ended,
        input=input_of(attributes),
        output=output_of(attributes),
        call=call_of(attributes) if kind == "chat" else None,
        error=error,
        session_id=session_of(attributes),
    )


def _parent(found: Json) -> str | None:
    parent = found.get("parent_id")
    return parent if isinstance(parent, str) and parent else None


def _mapping(value: Any) -> Json:
    return cast("Json", value) if isinstance(value, dict) else {}
