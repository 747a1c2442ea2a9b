"""Spans and episodes kept in lists: for tests, notebooks and looking at what was recorded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rllm_trace.exporters.base import Wishes
from rllm_trace.types import Episode

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExportResult

__all__ = ["MemoryExporter"]


class MemoryExporter:
    """Keeps everything, in the order in which it ended, until ``clear``. Spans are there as soon as they have ended."""

    def __init__(self, *, capture_content: bool | None = None, tokens: bool = False) -> None:
        self.wishes = Wishes(capture_content=capture_content, content_default=True, tokens=tokens, inline=True)
        self.spans: list[ReadableSpan] = []
        """Finished spans, as any other exporter would get them."""
        self.episodes: list[Episode] = []
        """Finished episodes; with ids and logprobs only if ``tokens`` was asked for."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Keeps the spans."""
        from opentelemetry.sdk.trace.export import SpanExportResult

        self.spans.extend(spans)
        return SpanExportResult.SUCCESS

    def export_episode(self, episode: Episode) -> None:
        """Keeps the episode."""
        self.episodes.append(episode)

    def clear(self) -> None:
        """Forgets everything."""
        self.spans.clear()
        self.episodes.clear()

    def shutdown(self) -> None:
        """Keeps what there is."""

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Nothing is ever waiting."""
        return True
