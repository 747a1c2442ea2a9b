"""Where finished spans and episodes go: memory, JSON lines, OTLP (Jaeger and others), Jaeger UI files, any OpenTelemetry exporter.

``open_sinks`` turns what a user configures into what the recorder feeds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from rllm_trace._disclosure import Redact
from rllm_trace.exceptions import ConfigurationError
from rllm_trace.exporters._batch import BatchSink, InlineSink
from rllm_trace.exporters._readable import converter
from rllm_trace.exporters.base import EpisodeExporter, EpisodeOutlet, Wishes, disclosure_for
from rllm_trace.exporters.jaeger_json import JaegerJSONExporter, to_jaeger
from rllm_trace.exporters.jsonl import JSONLExporter, iter_episodes, read_episodes, write_episodes
from rllm_trace.exporters.memory import MemoryExporter
from rllm_trace.exporters.otlp import OTLPExporter

__all__ = [
    "EpisodeExporter",
    "JSONLExporter",
    "JaegerJSONExporter",
    "MemoryExporter",
    "OTLPExporter",
    "iter_episodes",
    "open_sinks",
    "read_episodes",
    "to_jaeger",
    "write_episodes",
]

_BY_NAME: Final[dict[str, Callable[[], Any]]] = {"otlp": OTLPExporter}


def open_sinks(
    exporters: Sequence[Any], *, capture_content: bool | None = None, redact: Redact | None = None, service_name: str | None = None
) -> tuple[list[BatchSink | InlineSink], list[EpisodeOutlet]]:
    """(takers of spans, takers of episodes) for ``exporters``: names, exporters of ours, OpenTelemetry SpanExporters.

    An exporter that takes both is in both lists. Raises ConfigurationError for what is none of these.
    """
    spans: list[BatchSink | InlineSink] = []
    episodes: list[EpisodeOutlet] = []
    convert = None
    for given in exporters:
        exporter = _named(given) if isinstance(given, str) else given
        takes_spans, takes_episodes = callable(getattr(exporter, "export", None)), isinstance(exporter, EpisodeExporter)
        if not (takes_spans or takes_episodes) or isinstance(exporter, type):
            raise ConfigurationError(
                f"exporters: got {given!r}; expected one of {sorted(_BY_NAME)}, an exporter of rllm_trace.exporters, "
                "or an OpenTelemetry SpanExporter (an object, not its class)"
            )
        disclosure = disclosure_for(exporter, capture_content=capture_content, redact=redact)
        if takes_spans:
            convert = convert or converter(service_name)
            wishes: Wishes = getattr(exporter, "wishes", Wishes())
            sink = InlineSink(exporter, disclosure, convert) if wishes.inline else _batched(exporter, disclosure, convert)
            spans.append(sink)
        if takes_episodes:
            episodes.append(EpisodeOutlet(exporter, disclosure))
    return spans, episodes


def _named(name: str) -> Any:
    if name not in _BY_NAME:
        raise ConfigurationError(f"exporters: got {name!r}; the names are {sorted(_BY_NAME)}, anything else is given as an object")
    return _BY_NAME[name]()


def _batched(exporter: Any, disclosure: Any, convert: Any) -> BatchSink:
    try:
        return BatchSink(exporter, disclosure, convert, **BatchSink.limits())
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
