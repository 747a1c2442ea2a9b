"""Which of the process's methods are wrapped: the clients' by name, and those of threads and executors.

Nothing is wrapped before the first episode, or before ``instrument`` is called. What the user has turned off stays off.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rllm_trace._guard import guard

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider as SDKTracerProvider
    from opentelemetry.trace import TracerProvider

__all__ = ["attach_to", "ensure_instrumented", "instrument", "remove_all", "tracer_provider", "uninstrument"]


def ensure_instrumented() -> None:
    """At each start of an episode: a few attribute reads once everything is in its place."""
    from rllm_trace import _propagation, clients

    with guard("threads"):
        _propagation.install()
    with guard("instrument"):
        clients.ensure()


def instrument(name: str = "openai") -> bool:
    """Has the calls of a client library recorded; done for you at the first workflow, and asking twice changes nothing.

    False: the library is not installed. Raises UnknownInstrumentError for a name that is not known.
    """
    from rllm_trace import clients

    return clients.instrument(name)


def uninstrument(name: str = "openai") -> None:
    """Has the calls of a client library left alone, from now on. Our wrapper is taken out only where it is the outermost."""
    from rllm_trace import clients

    clients.uninstrument(name)


def attach_to(provider: TracerProvider) -> None:
    """Has spans of an OpenTelemetry provider that start inside a workflow taken into its episode; asking twice changes nothing.

    Agents of other libraries become trajectories, their tools tool calls; what the provider samples out is not seen. Raises
    ConfigurationError for one that takes no span processors, such as OpenTelemetry's placeholder before one is set.
    """
    from rllm_trace import _foreign

    _foreign.attach_to(provider)


def tracer_provider() -> SDKTracerProvider:
    """A new provider for libraries that take one: whatever they trace inside a workflow is part of its episode.

    It samples nothing out, cuts nothing, obeys no ``OTEL_*`` variable, and is never made the global one.
    """
    from rllm_trace import _foreign

    return _foreign.tracer_provider()


def remove_all() -> None:
    """Takes out, or makes inert, the wrappers of threads and executors."""
    from rllm_trace import _propagation

    _propagation.uninstall()
