"""What an exporter is: anything that takes finished spans, finished episodes, or both.

A span exporter is any OpenTelemetry ``SpanExporter``. An episode exporter has ``export_episode`` and ``shutdown``. An exporter of ours
also says, as attributes, what it wants to be given (``Wishes``); of a foreign one it is assumed that what it gets leaves the machine.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import msgspec

from rllm_trace._disclosure import Disclosure, Redact, content_wanted
from rllm_trace._guard import counters
from rllm_trace.exceptions import ConfigurationError
from rllm_trace.types import Episode

__all__ = ["EpisodeExporter", "EpisodeOutlet", "Wishes", "disclosure_for"]


@runtime_checkable
class EpisodeExporter(Protocol):
    """Takes finished episodes, one by one, on the writer's thread."""

    def export_episode(self, episode: Episode) -> None:
        """Delivers it, or raises."""
        ...

    def shutdown(self) -> None:
        """Closes what is open. No episode comes after it."""
        ...


class Wishes(msgspec.Struct, frozen=True, kw_only=True):
    """What an exporter wants to be given."""

    capture_content: bool | None = None
    """None: as configured, and without a configuration as ``content_default`` says."""
    content_default: bool | None = None
    """What nothing configured means: True for a file or memory of the user's own; None asks OpenTelemetry's GenAI variable."""
    tokens: bool | None = False
    """Ids and logprobs. None: wherever content goes."""
    inline: bool = False
    """Whether it only remembers, and so may run on the thread that ended the span."""


def disclosure_for(exporter: Any, *, capture_content: bool | None, redact: Redact | None) -> Disclosure:
    """What this exporter is given. Raises ConfigurationError if it asks for tokens where content may not go."""
    wishes: Wishes = getattr(exporter, "wishes", Wishes())
    own = wishes.capture_content if wishes.capture_content is not None else capture_content
    content = content_wanted(own, default=wishes.content_default) and capture_content is not False
    tokens = content if wishes.tokens is None else wishes.tokens
    if tokens and not content:
        raise ConfigurationError(
            f"{type(exporter).__name__}(tokens=True) without content: token ids spell the text. "
            "Pass capture_content=True to the exporter too, or leave tokens out"
        )
    return Disclosure(content=content, tokens=tokens, redact=redact)


class EpisodeOutlet:
    """An episode exporter, given only what may leave."""

    def __init__(self, exporter: EpisodeExporter, disclosure: Disclosure) -> None:
        self._exporter = exporter
        self._disclosure = disclosure
        self._lost = 0

    def write(self, episode: Episode) -> None:
        """Exports it at once; what the exporter raises is counted and passed on to the caller."""
        from rllm_trace._disclosure import disclose_episode

        try:
            self._exporter.export_episode(disclose_episode(episode, self._disclosure))
        except Exception:
            self._lost += 1
            counters.add("failed", "exported episode")
            raise
        counters.add("exported", "episode")

    def flush(self, timeout: float) -> bool:
        """True if nothing was lost since the last flush: nothing ever waits here."""
        lost, self._lost = self._lost, 0
        return lost == 0

    def close(self) -> None:
        """Shuts the exporter down."""
        self._exporter.shutdown()
