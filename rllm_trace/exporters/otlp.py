"""Spans to any OTLP receiver, such as Jaeger: over HTTP or gRPC, as the standard ``OTEL_*`` variables say.

No request is larger than a receiver takes by default: a batch is sent in parts that fit, a span that does not fit alone leaves its largest
attributes behind and names them, those that only repeat others for display first. What a receiver may take later is tried again until
the timeout of the batch, with waits whose jitter comes from the system's generator, never from the app's. What is given up is counted; the
first time for each reason it is also logged, without a key. This runs on an exporting thread (``_batch``), never on the app's.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from rllm_trace import attributes as names
from rllm_trace._guard import counters
from rllm_trace.exceptions import ConfigurationError
from rllm_trace.exporters._otlp_encode import request_bytes, span_bytes
from rllm_trace.exporters._otlp_http import HTTPTransport
from rllm_trace.exporters._otlp_outcome import Transport
from rllm_trace.exporters._otlp_settings import OTLPSettings, otlp_settings
from rllm_trace.exporters.base import Wishes

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExportResult

__all__ = ["OTLPExporter"]

_BATCH_BYTES: Final = 4_000_000
"""Below the 4 MiB that gRPC receivers take."""
_SPAN_BYTES: Final = {"grpc": _BATCH_BYTES, "http/protobuf": 16_000_000}
"""A single span may be this large; the collector's HTTP receiver takes 20 MiB."""
_MARGIN: Final = 1_000
_FIRST_WAIT: Final = 0.5
_LARGE: Final = 1_000
"""Bytes from which on an attribute may be left out."""
_INSTALL: Final = "needs a package that is not installed ({}): pip install 'rllm-trace[otlp]'"

_log = logging.getLogger("rllm_trace")


class OTLPExporter:
    """An OpenTelemetry SpanExporter. Every argument that is not given comes from the environment, then from the standard's default.

    ``protocol`` is ``"http/protobuf"`` or ``"grpc"``. ``endpoint`` is the whole URL, as in OpenTelemetry's own exporters: over HTTP with
    its path, such as ``http://127.0.0.1:4318/v1/traces``. Content goes only with ``capture_content=True`` here or in ``configure``, or if
    ``OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT`` says so; ids and logprobs only with ``tokens=True`` beside that.
    Raises ConfigurationError for a setting that cannot be, and names the extra to install if the protocol's packages are missing.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        protocol: str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
        compression: str | None = None,
        capture_content: bool | None = None,
        tokens: bool = False,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.wishes = Wishes(capture_content=capture_content, tokens=tokens)
        self.settings = otlp_settings(
            os.environ if environ is None else environ,
            protocol=protocol,
            endpoint=endpoint,
            headers=headers,
            timeout=timeout,
            compression=compression,
        )
        self._encode = _encoder()
        self._transport = _transport(self.settings)
        self._stop = threading.Event()
        self._random = random.SystemRandom()

    def deliver(self, spans: Sequence[ReadableSpan]) -> int:
        """Sends the spans; gives how many arrived. Takes at most ``timeout`` seconds a request."""
        encoded = span_bytes(spans)
        if encoded is None:
            return self._deliver(spans, None)
        return sum(self._deliver(spans[start:end], encoded[start:end]) for start, end in _parts(encoded, _BATCH_BYTES - _MARGIN))

    def _deliver(self, spans: Sequence[ReadableSpan], encoded: Sequence[bytes] | None) -> int:
        body = self._encoded(spans, encoded)
        if body is None:
            return 0 if len(spans) == 1 else self._halves(spans)
        limit = _SPAN_BYTES[self.settings.protocol] if len(spans) == 1 else _BATCH_BYTES
        if len(body) > limit:
            return self._smaller(spans, len(body), limit)
        return self._sent(body, spans)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """The same, as OpenTelemetry's SDK asks for it."""
        from opentelemetry.sdk.trace.export import SpanExportResult

        return SpanExportResult.SUCCESS if self.deliver(spans) == len(spans) else SpanExportResult.FAILURE

    def shutdown(self) -> None:
        """Ends waits and connections; a request under way fails."""
        self._stop.set()
        self._transport.close()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Nothing is ever waiting in here."""
        return True

    def _encoded(self, spans: Sequence[ReadableSpan], encoded: Sequence[bytes] | None) -> bytes | None:
        try:
            quickly = None if encoded is None else request_bytes(spans, encoded)
            return self._encode(spans) if quickly is None else quickly
        except Exception as error:  # noqa: BLE001 - one attribute that protobuf cannot hold must not lose its batch
            if len(spans) == 1:
                self._tell("encoding", f"a span cannot be encoded ({type(error).__name__}: {error})")
            return None

    def _halves(self, spans: Sequence[ReadableSpan]) -> int:
        middle = len(spans) // 2
        return self.deliver(spans[:middle]) + self.deliver(spans[middle:])

    def _smaller(self, spans: Sequence[ReadableSpan], size: int, limit: int) -> int:
        """Sends in parts, or without its largest attributes, what is too large as a whole."""
        if len(spans) > 1:
            return self._halves(spans)
        shrunk = _shrunk(spans[0], size - limit + _MARGIN)
        if shrunk is None:
            self._tell("size", f"a span of {size} bytes is too large and has no large attribute to leave out")
            return 0
        return self.deliver([shrunk])

    def _sent(self, body: bytes, spans: Sequence[ReadableSpan]) -> int:
        deadline = time.monotonic() + self.settings.timeout
        wait = _FIRST_WAIT
        while True:
            outcome = self._transport.send(body, max(0.1, deadline - time.monotonic()))
            if outcome.kind == "delivered":
                if outcome.rejected:
                    self._tell("rejected", f"the receiver rejected {outcome.rejected} spans: {outcome.reason}")
                return max(0, len(spans) - outcome.rejected)
            if outcome.kind == "too_large" and (len(spans) > 1 or len(body) > _BATCH_BYTES):
                return self._smaller(spans, len(body), _BATCH_BYTES)
            pause = outcome.after or wait * self._random.uniform(0.8, 1.2)
            if outcome.kind != "retry" or time.monotonic() + pause > deadline or self._stop.wait(pause):
                self._tell(outcome.reason, f"spans could not be delivered: {outcome.reason}")
                return 0
            wait *= 2

    def _tell(self, key: str, message: str) -> None:
        if counters.first(f"otlp:{self.settings.endpoint}:{key}"):
            _log.warning("OTLP %s: %s; further ones are only counted in rllm.stats()", self.settings.endpoint, message)


def _encoder() -> Callable[[Sequence[ReadableSpan]], bytes]:
    try:
        from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
    except ImportError as error:
        raise ConfigurationError(f"OTLP {_INSTALL.format(error)}") from error

    return lambda spans: encode_spans(spans).SerializeToString()


def _parts(encoded: Sequence[bytes], limit: int) -> list[tuple[int, int]]:
    """(start, end) of runs of spans, each of as many as fit together."""
    found: list[tuple[int, int]] = []
    start = size = 0
    for position, data in enumerate(encoded):
        if size + len(data) > limit and position > start:
            found.append((start, position))
            start, size = position, 0
        size += len(data)
    return [*found, (start, len(encoded))] if encoded else found


def _transport(settings: OTLPSettings) -> Transport:
    if settings.protocol == "http/protobuf":
        return HTTPTransport(settings)
    try:
        from rllm_trace.exporters._otlp_grpc import GRPCTransport

        return GRPCTransport(settings)
    except ImportError as error:
        raise ConfigurationError(f"OTLP over gRPC {_INSTALL.format(error)}") from error


def _shrunk(span: ReadableSpan, excess: int) -> ReadableSpan | None:
    """The span without what makes it too large, named under ``rllm.export.omitted_attributes``; None if that is not enough."""
    from opentelemetry.sdk.trace import ReadableSpan

    attributes: dict[str, Any] = dict(span.attributes or {})
    sizes = {
        key: len(value.encode("utf-8", "replace")) for key, value in attributes.items() if isinstance(value, str) and len(value) >= _LARGE
    }
    views = [key for key in names.VIEW_KEYS if key in sizes] if names.REQUEST_BODY in sizes else []
    others = sorted((key for key in sizes if key not in views), key=lambda key: -sizes[key])
    omitted: list[str] = []
    for key in [*views, *others]:
        if excess <= 0:
            break
        del attributes[key]
        omitted.append(key)
        excess -= sizes[key]
    if excess > 0:
        return None
    counters.add("dropped", "large attribute", len(omitted))
    attributes[names.OMITTED_ATTRIBUTES] = [*attributes.get(names.OMITTED_ATTRIBUTES, ()), *omitted]
    return ReadableSpan(
        name=span.name,
        context=span.get_span_context(),
        parent=span.parent,
        resource=span.resource,
        attributes=attributes,
        events=span.events,
        links=span.links,
        kind=span.kind,
        status=span.status,
        start_time=span.start_time,
        end_time=span.end_time,
        instrumentation_scope=span.instrumentation_scope,
    )
