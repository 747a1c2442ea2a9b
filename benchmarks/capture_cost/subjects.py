"""What is measured beside the bare client: ours, and each peer as its documentation says to set it up, with content on.

Every one exports its spans by OTLP over HTTP to the same sink, in batches of OpenTelemetry's default size and delay. Some cannot be
switched off again: who measures keeps what the client's classes were before and after, and puts back the one or the other.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator
from typing import Any, Final, TypeVar

__all__ = ["BATCHES", "PEERS", "SUBJECTS", "Subject"]

BATCHES: Final = {"OTEL_BSP_SCHEDULE_DELAY": "5000", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "512", "OTEL_BSP_MAX_QUEUE_SIZE": "8192"}
"""The standard's own defaults; the queue is longer, so that nobody drops spans."""

F = TypeVar("F", bound=Callable[..., Any])

PEERS: Final[dict[str, tuple[str, ...]]] = {
    "openinference": ("openinference-instrumentation-openai", "opentelemetry-exporter-otlp-proto-http"),
    "openllmetry": ("opentelemetry-instrumentation-openai", "opentelemetry-exporter-otlp-proto-http"),
    "openai-v2": (
        "opentelemetry-instrumentation-openai-v2",
        "opentelemetry-util-genai==0.4b0",
        "opentelemetry-exporter-otlp-proto-http",
        "httpx",
    ),
    "langfuse": ("langfuse",),
    "logfire": ("logfire", "opentelemetry-exporter-otlp-proto-http"),
}
"""Name to the packages that it is made of, beside openai. A newer opentelemetry-util-genai breaks openai-v2's own import,
which also needs httpx without saying so."""


class Subject:
    """Something that records an app's calls."""

    asks: bool = True
    """Whether the app has to ask for ids and logprobs itself."""

    def __init__(self, sink: str, folder: str) -> None:
        """Sets it up for good; the client's classes may be patched from here on."""

    def wrapped(self, app: F) -> F:
        """The app as its user decorates it."""
        return app

    @contextlib.contextmanager
    def recording(self) -> Generator[list[Any]]:
        """Around a block of calls."""
        yield []

    def drain(self) -> None:
        """Returns once everything has left."""


class Ours(Subject):
    """``collect()``, a store, and OTLP with content."""

    asks = False

    def __init__(self, sink: str, folder: str) -> None:
        import rllm_trace as rllm
        from rllm_trace.exporters import OTLPExporter

        self._rllm = rllm
        exporter = OTLPExporter(f"{sink}/v1/traces", capture_content=True)
        rllm.configure(service_name="benchmark", exporters=[exporter], store=folder, capture_content=True)
        rllm.instrument("openai")

    def wrapped(self, app: F) -> F:
        return self._rllm.workflow(app)

    @contextlib.contextmanager
    def recording(self) -> Generator[list[Any]]:
        with self._rllm.collect() as episodes:
            yield episodes

    def drain(self) -> None:
        if not self._rllm.flush(60):
            raise RuntimeError(f"something was lost: {self._rllm.stats()}")


def _provider(sink: str) -> Any:
    from opentelemetry import trace
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(f"{sink}/v1/traces")))
    trace.set_tracer_provider(provider)
    return provider


class _OnProvider(Subject):
    """An instrumentation of OpenTelemetry."""

    def __init__(self, sink: str, folder: str) -> None:
        self._provider = _provider(sink)
        self._instrument()

    def _instrument(self) -> None:
        raise NotImplementedError

    def drain(self) -> None:
        self._provider.force_flush()


class OpenInference(_OnProvider):
    def _instrument(self) -> None:
        from openinference.instrumentation.openai import OpenAIInstrumentor

        OpenAIInstrumentor().instrument(tracer_provider=self._provider)


class OpenLLMetry(_OnProvider):
    def _instrument(self) -> None:
        os.environ["TRACELOOP_TRACE_CONTENT"] = "true"
        from opentelemetry.instrumentation.openai import OpenAIInstrumentor

        OpenAIInstrumentor().instrument(tracer_provider=self._provider)


class OpenAIv2(_OnProvider):
    def _instrument(self) -> None:
        os.environ["OTEL_SEMCONV_STABILITY_OPT_IN"] = "gen_ai_latest_experimental"
        os.environ["OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"] = "span_only"
        from opentelemetry.instrumentation.openai_v2 import OpenAIInstrumentor

        OpenAIInstrumentor().instrument(tracer_provider=self._provider)


class Langfuse(Subject):
    def __init__(self, sink: str, folder: str) -> None:
        from langfuse import Langfuse as Client

        self._client = Client(public_key="pk-lf-1", secret_key="sk-lf-1", base_url=sink)
        import langfuse.openai

        assert langfuse.openai

    def drain(self) -> None:
        self._client.flush()


class Logfire(Subject):
    def __init__(self, sink: str, folder: str) -> None:
        import logfire
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        logfire.configure(
            send_to_logfire=False,
            console=False,
            additional_span_processors=[BatchSpanProcessor(OTLPSpanExporter(f"{sink}/v1/traces"))],
            inspect_arguments=False,
        )
        logfire.instrument_openai()
        self._logfire = logfire

    def drain(self) -> None:
        self._logfire.force_flush()


SUBJECTS: Final[dict[str, type[Subject]]] = {
    "ours": Ours,
    "openinference": OpenInference,
    "openllmetry": OpenLLMetry,
    "openai-v2": OpenAIv2,
    "langfuse": Langfuse,
    "logfire": Logfire,
}
