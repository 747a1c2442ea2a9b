"""Which of the process's methods are wrapped: the clients' by name, and those of threads and executors.

Nothing is wrapped before the first episode, or before ``instrument`` is called. What the user has turned off stays off.
"""

from __future__ import annotations

from rllm_trace._guard import guard

__all__ = ["ensure_instrumented", "instrument", "remove_all", "uninstrument"]


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


def remove_all() -> None:
    """Takes out, or makes inert, the wrappers of threads and executors."""
    from rllm_trace import _propagation

    _propagation.uninstall()
