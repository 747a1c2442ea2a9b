"""The way home of a process that another one of ours has started: spans, receipts and whole episodes in, OTLP to its receiver out.

Nothing blocks but ``flush_home``, which has a deadline; what did not arrive in time is counted.
"""

from __future__ import annotations

import base64
import sys
import threading
from typing import Any, Final

import msgspec

from rllm_trace import attributes as A
from rllm_trace._guard import counters, guard
from rllm_trace._inbox import Inbox
from rllm_trace._recorder import recorder
from rllm_trace._spans import Span, sources
from rllm_trace.types import Episode

__all__ = ["FLUSH", "PATIENCE", "Address", "Homeward", "Link", "flush_home", "preload", "send_receipt"]

FLUSH: Final = 30.0
"""Seconds that a process waits, before it gives a result or ends, for its spans to be home."""
PATIENCE: Final = 1.0
"""The same once that has failed: home is gone, most likely."""
_MAX_RECORD: Final = 12_000_000
"""Characters; an exporter takes less than 16 MB a span."""
_SEND: Final = FLUSH
"""Seconds for one request, with its retries: as long as a process waits for it, so that a busy machine loses nothing."""
_DELAY: Final = 0.05


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """Where spans are to be sent."""

    endpoint: str
    """Base URL: on loopback, or where ``configure(reachable_at=...)`` says."""
    token: str

    def __repr__(self) -> str:
        return f"Address(endpoint={self.endpoint!r})"


class Link:
    """The way home of this process: an OTLP exporter with a queue, made with the first span."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.tokens = False
        """Whether the last scope that was taken over wants them; for those that come by HTTP, which do not say."""
        self._lock = threading.Lock()
        self.patience = FLUSH
        """How long it may take before a result is given."""
        self._sink: Any = None
        self._told = _lost()

    def newly_lost(self) -> int:
        """Spans lost here since this was last asked."""
        with self._lock:
            told, self._told = self._told, _lost()
            return self._told - told

    def put(self, span: Span) -> None:
        """Takes a span that has ended; never blocks on the network."""
        self._opened().put(span)

    def flush(self, timeout: float) -> bool:
        """Waits until all that was put has arrived. False: not all, or not in time."""
        return self._sink is None or self._sink.flush(timeout)

    def close(self, timeout: float) -> None:
        if self._sink is not None:
            self._sink.close(timeout)

    def renew_lock(self) -> None:
        """In a forked child; the queue starts anew by itself."""
        self._lock = threading.Lock()

    def _opened(self) -> Any:
        with self._lock:
            if self._sink is None:
                from rllm_trace._disclosure import Disclosure
                from rllm_trace.exporters._batch import BatchSink
                from rllm_trace.exporters._readable import converter
                from rllm_trace.exporters.otlp import OTLPExporter

                headers = {A.HEADER_AUTHORIZATION: f"Bearer {self.address.token}"}
                exporter: Any = OTLPExporter(
                    f"{self.address.endpoint}/v1/traces", protocol="http/protobuf", headers=headers, timeout=_SEND, tokens=True, environ={}
                )
                disclosure = Disclosure(content=True, tokens=True)  # it stays with the user: what may leave is decided where the record is
                self._sink = BatchSink(exporter, disclosure, converter(A.DEFAULT_SERVICE_NAME), delay=_DELAY)
            return self._sink


def preload() -> None:
    """Loads what a way home needs, so that forked children do not each load it."""
    from rllm_trace.exporters._readable import converter
    from rllm_trace.exporters.otlp import OTLPExporter

    converter(A.DEFAULT_SERVICE_NAME)
    OTLPExporter("http://127.0.0.1:9/v1/traces", protocol="http/protobuf", environ={}).shutdown()


class Homeward(Inbox):
    """Stands here for the ``collect`` of another process: each episode that ends goes there."""

    def __init__(self, link: Link, *, wants_tokens: bool) -> None:
        super().__init__()
        self._link = link
        self.wants_tokens = wants_tokens

    def deliver(self, episode_id: str, record: Episode | None) -> None:
        """Sends the record, and keeps none."""
        if record is not None:
            with guard("record"):
                self._send(record)
        super().deliver(episode_id, None)

    def _send(self, record: Episode) -> None:
        from rllm_trace._store_log import frame_of
        from rllm_trace._store_rows import row_of

        frame = base64.b64encode(frame_of(row_of(record))).decode("ascii")
        if len(frame) > _MAX_RECORD:
            counters.add("dropped", "episode too large to send home")
            return
        self._link.put(_word(A.SPAN_RECORD, sources.span_id(), {A.RECORD: frame}, trace_id=record.trace_id, episode_id=record.id))


def _word(name: str, span_id: str, facts: dict[str, Any], *, trace_id: str, episode_id: str) -> Span:
    """A span that is only a word between two processes of ours."""
    now = sources.now()
    return Span(
        kind="other",
        name=name,
        trace_id=trace_id,
        span_id=span_id,
        parent_id=None,
        episode_id=episode_id,
        trajectory_id=span_id,
        trajectory_name="",
        started=now,
        ended=now,
        facts=facts,
    )


def send_receipt(receipt: str | None, trace_id: str, episode_id: str) -> None:
    """Says at home that what was handed over has run to its end, and how many spans were lost here."""
    if receipt is None or recorder.home is None:
        return
    with guard("receipt"):
        lost = recorder.home.newly_lost()
        home: Any = sys.modules.get("rllm_trace._home")  # where it was never loaded, nothing was handed on
        ended: list[str] = [] if home is None else home.ended_here()
        facts: dict[str, Any] = {A.RECEIPT: receipt, A.RECEIPT_LOST: lost, **({A.RECEIPT_ENDED: " ".join(ended)} if ended else {})}
        recorder.home.put(_word(A.SPAN_RECEIPT, receipt, facts, trace_id=trace_id, episode_id=episode_id))


def _lost() -> int:
    return counters.get("dropped", "span") + counters.get("failed", "span")


def flush_home(timeout: float) -> bool:
    """Waits until what was recorded for another process is there; counts where it is not."""
    sent = False
    with guard("home"):
        link: Link | None = recorder.home
        sent = link is None or link.flush(min(timeout, link.patience))
        if link is not None:
            link.patience = FLUSH if sent else PATIENCE
    if not sent:
        counters.add("failed", "flush to the process that keeps the record")
    return sent
