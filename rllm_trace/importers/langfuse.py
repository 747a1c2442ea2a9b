"""Langfuse's exports in, Episodes out: traces with their observations and scores, or files of each, in JSON or JSON lines.

Field names may be in either of its spellings (``parentObservationId`` or ``parent_observation_id``); inputs and outputs may be JSON or JSON
text. Numeric and boolean scores become rewards; a score in words stays in the episode's metadata.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, Final, cast

from rllm_trace._plain import loads
from rllm_trace.importers._files import documents
from rllm_trace.importers._times import nanoseconds
from rllm_trace.importers.base import Call, Imported, ImportedKind, Score, episodes_of
from rllm_trace.types import Episode, ErrorInfo

__all__ = ["SOURCE", "is_document", "langfuse_episodes"]

Json = dict[str, Any]

SOURCE: Final = "Langfuse"

_KINDS: Final[dict[str, ImportedKind]] = {"GENERATION": "chat", "AGENT": "agent", "TOOL": "tool", "CHAIN": "workflow"}
_ROOT: Final = "trace"
"""Prefix of the span that stands for a trace of theirs, which has no span of its own."""


def is_document(document: Any) -> bool:
    """Whether a JSON document holds what Langfuse exports."""
    return any(_what(record) is not None for record in _records(document)[:1])


def langfuse_episodes(path: str | os.PathLike[str]) -> Iterator[Episode]:
    """The episodes of a file or folder. Raises ValueError that names a file that holds something else."""
    found = _Found()
    for file, document in documents(path):
        for record in _records(document):
            try:
                found.add(record)
            except (LookupError, ValueError, TypeError) as error:
                raise ValueError(f"{file}: a record is none of Langfuse's ({type(error).__name__}: {error})") from error
    return found.episodes()


class _Found:
    """Traces, observations and scores as they come, in any order."""

    def __init__(self) -> None:
        self._traces: dict[str, Json] = {}
        self._observations: dict[str, dict[str, Json]] = defaultdict(dict)
        self._scores: dict[str, dict[str, Json]] = defaultdict(dict)

    def add(self, record: Json) -> None:
        what = _what(record)
        if what is None:
            raise ValueError("it is neither a trace nor an observation nor a score")
        if what == "observation":
            self._observations[record["traceId"]][record["id"]] = record
        elif what == "score":
            self._scores[record["traceId"]][record["id"]] = record
        else:
            self._traces[record["id"]] = record
            for kind in ("observations", "scores"):
                for inner in _records(record.get(kind) or []):
                    self.add({"traceId": record["id"], **inner})

    def episodes(self) -> Iterator[Episode]:
        spans: list[Imported] = []
        scores: dict[str, list[Score]] = {}
        for trace_id in dict.fromkeys((*self._traces, *self._observations)):
            inside = [_observation(record) for record in self._observations[trace_id].values()]
            given = list(self._scores[trace_id].values())
            spans += [*_trace(trace_id, self._traces.get(trace_id), inside, given), *inside]
            scores[trace_id] = [score for score in map(_score, given) if score is not None]
        return episodes_of(spans, scores, source=SOURCE)


def _trace(trace_id: str, record: Json | None, inside: list[Imported], scores: list[Json]) -> list[Imported]:
    """The span that stands for the trace; none where there is only what is inside."""
    if record is None:
        return []
    started = min([nanoseconds(record["timestamp"]), *(span.started for span in inside)])
    words = {score["name"]: score.get("stringValue", score.get("value")) for score in scores if _score(score) is None}
    known = {"user_id": record.get("userId"), "tags": record.get("tags") or None, "release": record.get("release"), "scores": words or None}
    metadata = _opened(record.get("metadata"))
    return [
        Imported(
            kind="workflow",
            name=record.get("name") or SOURCE,
            trace_id=trace_id,
            span_id=f"{_ROOT}-{trace_id}",
            parent_id=None,
            started=started,
            ended=max([started, *(span.ended for span in inside)]),
            input=_opened(record.get("input")),
            output=_opened(record.get("output")),
            error=next((span.error for span in inside if span.error is not None and span.parent_id == f"{_ROOT}-{trace_id}"), None),
            session_id=record.get("sessionId"),
            metadata={
                **(cast("Json", metadata) if isinstance(metadata, dict) else {}),
                **{key: value for key, value in known.items() if value is not None},
            },
        )
    ]


def _observation(record: Json) -> Imported:
    kind = _KINDS.get(str(record["type"]).upper(), "other")
    started = nanoseconds(record["startTime"])
    failed = str(record.get("level", "")).upper() == "ERROR"
    return Imported(
        kind=kind,
        name=record.get("name") or kind,
        trace_id=record["traceId"],
        span_id=record["id"],
        parent_id=record.get("parentObservationId") or f"{_ROOT}-{record['traceId']}",
        started=started,
        ended=max(started, nanoseconds(record.get("endTime") or record["startTime"])),
        input=_opened(record.get("input")),
        output=_opened(record.get("output")),
        call=_call(record) if kind == "chat" else None,
        error=ErrorInfo(type="Error", message=str(record.get("statusMessage") or "")[:2_000]) if failed else None,
    )


def _call(record: Json) -> Call:
    given, got = _opened(record.get("input")), _opened(record.get("output"))
    holder = cast("Json", given) if isinstance(given, dict) else {}
    details = _opened(record.get("usageDetails")) or _opened(record.get("usage"))
    usage = cast("Json", details) if isinstance(details, dict) else {}
    sampling = _opened(record.get("modelParameters"))
    return Call(
        model=record.get("model") or record.get("providedModelName") or "",
        messages=_messages(holder.get("messages", given)),
        tools=_records(holder.get("tools")) or None,
        sampling=cast("Json", sampling) if isinstance(sampling, dict) else {},
        replies=[_reply(reply) for reply in (cast("list[Any]", got) if isinstance(got, list) else [got]) if reply is not None],
        prompt_tokens=_count(usage, "input", "prompt_tokens", "promptTokens"),
        completion_tokens=_count(usage, "output", "completion_tokens", "completionTokens"),
    )


def _messages(given: Any) -> list[Json]:
    if isinstance(given, list):
        return _records(cast("list[Any]", given))
    if isinstance(given, dict):
        message = cast("Json", given)
        return [message if "role" in message else {"role": "user", "content": message}]
    return [] if given is None else [{"role": "user", "content": given}]


def _reply(reply: Any) -> Json:
    if not isinstance(reply, dict):
        return {"role": "assistant", "content": reply}
    found = cast("Json", reply)
    message = found.get("message")
    if isinstance(message, dict):
        return {**cast("Json", message), "finish_reason": found.get("finish_reason")}
    return found if "content" in found or "tool_calls" in found else {"role": "assistant", "content": found}


def _score(record: Json) -> Score | None:
    value = record.get("value")
    if not isinstance(value, (int, float)) or str(record.get("dataType", "")).upper() == "CATEGORICAL" or value != value:
        return None
    return Score(name=str(record["name"]), value=float(value), span_id=record.get("observationId"))


def _what(record: Json) -> str | None:
    if "traceId" in record and "type" in record and "startTime" in record:
        return "observation"
    if "traceId" in record and "name" in record and ("value" in record or "stringValue" in record):
        return "score"
    return "trace" if "id" in record and "timestamp" in record else None


def _records(document: Any) -> list[Json]:
    """The objects of a list, of ``{"data": [...]}``, or the one object; their own keys in camel case."""
    if isinstance(document, list):
        return [_camel(cast("Json", record)) for record in cast("list[Any]", document) if isinstance(record, dict)]
    found = cast("Json", document) if isinstance(document, dict) else {}
    return _records(found["data"]) if isinstance(found.get("data"), list) else [_camel(found)] if found else []


_SPELLED: Final = {
    "trace_id": "traceId", "parent_observation_id": "parentObservationId", "start_time": "startTime", "end_time": "endTime",
    "session_id": "sessionId", "user_id": "userId", "status_message": "statusMessage", "model_parameters": "modelParameters",
    "usage_details": "usageDetails", "provided_model_name": "providedModelName", "observation_id": "observationId",
    "data_type": "dataType", "string_value": "stringValue",
}  # fmt: skip


def _camel(record: Mapping[str, Any]) -> Json:
    return {_SPELLED.get(key, key): value for key, value in record.items()}


def _count(usage: Json, *keys: str) -> int | None:
    return next((int(usage[key]) for key in keys if isinstance(usage.get(key), (int, float))), None)


def _opened(value: Any) -> Any:
    """The value of JSON text; other text as it is."""
    if isinstance(value, str) and value[:1] in ("{", "[", '"'):
        try:
            return loads(value)
        except ValueError:
            return value
    return value
