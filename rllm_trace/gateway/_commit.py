"""Spans whose episode is another process's: sent there, with their tokens, before the answer is passed on.

The other process listens with an ``EpisodeReceiver``. What it did not take is counted, and the answer is passed on all the same.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from rllm_trace._disclosure import Disclosure
from rllm_trace._guard import counters, guard
from rllm_trace._spans import Span
from rllm_trace.exporters._readable import Convert, converter
from rllm_trace.exporters.base import disclosure_for

__all__ = ["Commit"]

_MAX_WAITING: Final = 10_000


class Commit:
    """A taker of spans that holds each until its call is about to be answered."""

    def __init__(self, exporter: Any) -> None:
        self._exporter = exporter
        self._disclosure: Disclosure = disclosure_for(exporter, capture_content=True, redact=None)
        self._convert: Convert = converter()
        self._waiting: dict[str, Span] = {}

    def put(self, span: Span) -> None:
        """Keeps the span until ``send``."""
        if len(self._waiting) >= _MAX_WAITING:
            self._waiting.pop(next(iter(self._waiting)))
            counters.add("dropped", "commit")
        self._waiting[span.span_id] = span

    async def send(self, span_id: str) -> None:
        """Sends the span if it is waiting; returns once it has arrived, or was given up."""
        span = self._waiting.pop(span_id, None)
        if span is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._deliver, [span])

    def _deliver(self, spans: list[Span]) -> None:
        sent = 0
        with guard("commit"):
            sent = self._exporter.deliver([self._convert(span, self._disclosure) for span in spans])
        counters.add("exported", "span", sent)
        counters.add("failed", "commit", len(spans) - sent)

    def flush(self, timeout: float) -> bool:
        """Sends what is left: calls that were not answered."""
        spans, self._waiting = list(self._waiting.values()), {}
        if spans:
            self._deliver(spans)
        return True

    def close(self, timeout: float) -> None:
        """The same, and ends the connection."""
        self.flush(timeout)
        with guard("commit"):
            self._exporter.shutdown()
