"""One exporter behind a bounded queue and a thread of its own: the app's thread only appends a reference.

The queue has a size in spans and one in bytes. What does not fit, what cannot be turned into a span, and what the exporter refuses is
counted and gone; nothing waits for a back end except ``flush`` and ``close``, and those have a deadline. The thread starts with the first
span, and again in a forked child, which begins with an empty queue: the parent's spans are the parent's to send.
"""

from __future__ import annotations

import collections
import contextvars
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from rllm_trace import attributes as names
from rllm_trace._disclosure import Disclosure
from rllm_trace._guard import counters, guard
from rllm_trace._spans import Span
from rllm_trace.exporters._readable import Convert

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

__all__ = ["BatchSink", "InlineSink"]

_QUEUE_SPANS: Final = 8_192
_QUEUE_BYTES: Final = 256 * 2**20
_BATCH_SPANS: Final = 64
_DELAY: Final = 1.0
"""Seconds that a span may wait for others to fill its batch."""
_SPAN_BYTES: Final = 1_000
"""What a span without a call is taken to weigh."""

_all: weakref.WeakSet[BatchSink] = weakref.WeakSet()
_watching: list[int] = []


class BatchSink:
    """Takes spans from any thread, exports them in batches on one of its own."""

    later: Final = True
    """The writer's thread may bring them."""

    def __init__(
        self,
        exporter: SpanExporter,
        disclosure: Disclosure,
        convert: Convert,
        *,
        queue_spans: int = _QUEUE_SPANS,
        queue_bytes: int = _QUEUE_BYTES,
        batch_spans: int = _BATCH_SPANS,
        delay: float = _DELAY,
    ) -> None:
        self._exporter = exporter
        self._disclosure = disclosure
        self._convert = convert
        self._queue_spans = queue_spans
        self._queue_bytes = queue_bytes
        self._batch_spans = min(batch_spans, queue_spans)
        self._delay = delay
        self._closed = False
        self._begin()
        _all.add(self)
        _watch_forks()

    @staticmethod
    def limits(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
        """The keyword arguments that the ``OTEL_BSP_*`` variables ask for; what is no positive number is an error that names it."""
        found = os.environ if environ is None else environ
        given = {"queue_spans": names.ENV_BSP_QUEUE_SIZE, "batch_spans": names.ENV_BSP_BATCH_SIZE, "delay": names.ENV_BSP_DELAY}
        limits: dict[str, Any] = {}
        for field, variable in given.items():
            text = found.get(variable, "").strip()
            if not text:
                continue
            if not text.isdecimal() or int(text) == 0:
                raise ValueError(f"{variable}={text!r}: expected a whole number above 0; correct it or unset it")
            limits[field] = int(text) / 1000 if field == "delay" else int(text)
        return limits

    def _begin(self) -> None:
        self._changed = threading.Condition(threading.RLock())
        self._waiting: collections.deque[tuple[Span, int]] = collections.deque()
        self._bytes = 0
        self._taken = 0
        self._settled = 0
        """Spans whose fate is known, in the order in which they were taken."""
        self._lost = 0
        self._hurry = False
        self._thread: threading.Thread | None = None

    def put(self, span: Span) -> None:
        """Keeps the reference. Never blocks, never raises."""
        size = _weight(span)
        with self._changed:
            if self._closed or len(self._waiting) >= self._queue_spans or self._bytes + size > self._queue_bytes:
                self._lost += 1
                counters.add("dropped", "span")
                return
            self._waiting.append((span, size))
            self._bytes += size
            self._taken += 1
            if self._thread is None:
                with guard("exporter thread"):  # an interpreter that is ending starts no more threads
                    self._thread = _started(self._run, "rllm-trace-export")
            elif len(self._waiting) >= self._batch_spans:
                self._changed.notify_all()

    def flush(self, timeout: float) -> bool:
        """Waits until what was put before has been exported. True only if all of it was, and nothing was lost since the last flush."""
        with self._changed:
            goal = self._taken
            self._hurry = True
            self._changed.notify_all()
            reached = self._changed.wait_for(lambda: self._settled >= goal, max(0.0, timeout))
            lost, self._lost = self._lost, 0
            return reached and lost == 0

    def close(self, timeout: float) -> None:
        """Exports what is waiting, at most ``timeout`` seconds, and shuts the exporter down. What is left is dropped and counted."""
        self.flush(timeout)
        with self._changed:
            self._closed = True
            counters.add("dropped", "span", len(self._waiting))
            self._waiting.clear()
            self._changed.notify_all()
            thread = self._thread
        with guard("exporter thread"):
            _started(self._shut_down, "rllm-trace-close").join(_DELAY)
        if thread is not None:
            thread.join(_DELAY)

    def _shut_down(self) -> None:
        with guard("exporter"):
            self._exporter.shutdown()

    def _run(self) -> None:
        while True:
            batch = self._next()
            if batch is None:
                return
            taken, sent = len(batch), self._export(batch)
            batch = None  # a waiting exporter keeps no span alive
            with self._changed:
                self._settled += taken
                self._lost += taken - sent
                self._changed.notify_all()

    def _next(self) -> list[Span] | None:
        """The next batch, as soon as it is full, due or asked for; None once closed."""
        with self._changed:
            due = None
            while not self._closed:
                if self._waiting and due is None:
                    due = time.monotonic() + self._delay
                left = None if due is None else due - time.monotonic()
                full = len(self._waiting) >= self._batch_spans
                if self._waiting and (full or self._hurry or (left is not None and left <= 0)):
                    return self._take()
                self._hurry = False
                self._changed.wait(left)
            return None

    def _take(self) -> list[Span]:
        batch: list[Span] = []
        while self._waiting and len(batch) < self._batch_spans:
            span, size = self._waiting.popleft()
            self._bytes -= size
            batch.append(span)
        return batch

    def _export(self, batch: Sequence[Span]) -> int:
        return _export(self._exporter, _converted(batch, self._convert, self._disclosure))


class InlineSink:
    """An exporter that only remembers: called at once, on the thread that ended the span."""

    def __init__(self, exporter: SpanExporter, disclosure: Disclosure, convert: Convert) -> None:
        self._exporter = exporter
        self._disclosure = disclosure
        self._convert = convert

    def put(self, span: Span) -> None:
        """Exports it."""
        _export(self._exporter, _converted([span], self._convert, self._disclosure))

    def flush(self, timeout: float) -> bool:
        """Nothing is ever waiting."""
        return True

    def close(self, timeout: float) -> None:
        """Shuts the exporter down."""
        with guard("exporter"):
            self._exporter.shutdown()


def _converted(batch: Sequence[Span], convert: Convert, disclosure: Disclosure) -> list[ReadableSpan]:
    made: list[ReadableSpan] = []
    for span in batch:
        with guard("span"):
            made.append(convert(span, disclosure))
    return made


def _export(exporter: SpanExporter, spans: Sequence[ReadableSpan]) -> int:
    """How many of the spans were exported; the others are counted as failed."""
    if not spans:
        return 0
    sent = 0
    with guard("exporter"):
        sent = _deliver(exporter, spans)
    if sent:
        counters.add("exported", "span", sent)
    if sent < len(spans):
        counters.add("failed", "span", len(spans) - sent)
    return sent


def _deliver(exporter: SpanExporter, spans: Sequence[ReadableSpan]) -> int:
    from opentelemetry.sdk.trace.export import SpanExportResult

    deliver = getattr(exporter, "deliver", None)
    if deliver is not None:
        return deliver(spans)
    return len(spans) if exporter.export(spans) is SpanExportResult.SUCCESS else 0


def _started(work: Callable[[], None], name: str) -> threading.Thread:
    """A daemon thread in an empty context, so that it holds on to nothing of the app's."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    contextvars.Context().run(thread.start)
    return thread


def _weight(span: Span) -> int:
    call = span.call
    if call is None:
        return _SPAN_BYTES
    arrays = [call.prompt_token_ids, *(array for choice in call.choices for array in (choice.token_ids, choice.logprobs))]
    return _SPAN_BYTES + len(call.request) + sum(4 * len(array) for array in arrays if array is not None)


def _watch_forks() -> None:
    if not _watching and hasattr(os, "register_at_fork"):
        _watching.append(os.getpid())
        os.register_at_fork(after_in_child=_after_fork)


def _after_fork() -> None:
    for sink in list(_all):
        sink._begin()
