"""OTLP in, Episodes out: collects the episodes of apps that run in other processes.

    with EpisodeReceiver(on_episode=store.append) as receiver:
        subprocess.run(command, env=os.environ | receiver.environ())

The other process calls ``configure(exporters=[OTLPExporter(tokens=True)], capture_content=True, tokens=True)``; the standard variables
that it needs come from ``environ``. An episode whose workflow runs in this process takes the spans of others in while it is open. All
others are put together here: complete ones after a settle time, incomplete ones at a deadline, with what is missing named.
"""

from __future__ import annotations

import base64
import contextvars
import threading
import time
from collections.abc import Callable
from typing import Any, Final, Self

import msgspec

from rllm_trace import attributes as names
from rllm_trace._assembly import Assembly
from rllm_trace._calldata import CallData
from rllm_trace._guard import counters, guard
from rllm_trace._open import OpenEpisode
from rllm_trace._recorder import recorder
from rllm_trace._spans import Span
from rllm_trace.otlp_receiver import OTLPReceiver, ReceivedSpan
from rllm_trace.routing import settings_of
from rllm_trace.types import Episode

__all__ = ["EpisodeReceiver"]

_SETTLE: Final = 2.0
_DEADLINE: Final = 300.0
_MAX_KEPT: Final = 100_000
_CLOSE: Final = 10.0


class EpisodeReceiver:
    """Listens from its construction until ``close``; a context manager. Options beside these are those of ``OTLPReceiver``.

    ``settle``: seconds without a new span after which a complete episode is delivered. ``deadline``: seconds from its first span after
    which an incomplete one is. ``on_episode`` is called on a thread of the receiver, once for each; without it they are kept in
    ``episodes``. Leaving delivers what is open as it is.
    """

    def __init__(
        self,
        *,
        on_episode: Callable[[Episode], None] | None = None,
        settle: float = _SETTLE,
        deadline: float = _DEADLINE,
        **options: Any,
    ) -> None:
        self.episodes: list[Episode] = []
        """Delivered so far; stays empty with ``on_episode``."""
        self.on_receipt: Callable[[str, int, list[str]], None] | None = None
        """(id, spans that were lost there, ids of what it had handed on and seen end): something handed over has ended."""
        self.on_record: Callable[[Episode], None] = self._deliver
        """Takes an episode that another process of ours has recorded as a whole."""
        self._on_episode = on_episode
        self._assembly = Assembly(settle=settle, deadline=deadline)
        self._changed = threading.Condition()
        self._closed = False
        self._delivered = 0
        self._receiver = OTLPReceiver(on_spans=self._take, **options)
        self._thread = threading.Thread(target=self._run, name="rllm-episode-receiver", daemon=True)
        contextvars.Context().run(self._thread.start)

    def environ(self, protocol: str = "http/protobuf") -> dict[str, str]:
        """Variables that make OTLP exporters of a child process send their spans here."""
        return self._receiver.environ(protocol)

    @property
    def headers(self) -> dict[str, str]:
        """What a sender must send along."""
        return self._receiver.headers

    @property
    def http_endpoint(self) -> str:
        """Base URL; senders add ``/v1/traces``."""
        return self._receiver.http_endpoint

    @property
    def grpc_endpoint(self) -> str:
        """URL for gRPC senders, if it was made with ``grpc=True``."""
        return self._receiver.grpc_endpoint

    def wait(self, count: int, timeout: float) -> bool:
        """Blocks until ``count`` episodes have been delivered since the start. False: the deadline came first."""
        with self._changed:
            return self._changed.wait_for(lambda: self._delivered >= count, max(0.0, timeout))

    def close(self) -> None:
        """Stops listening and delivers what is open as it is."""
        self._receiver.close()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(_CLOSE)

    @property
    def token(self) -> str:
        """What a sender shows as a bearer token."""
        return self._receiver.token

    def abandon(self) -> None:
        """In a forked child: lets go of the parent's sockets, and touches nothing else."""
        self._receiver.abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _take(self, received: list[ReceivedSpan]) -> None:
        self._receiver.take()
        mine: list[Span] = []
        for span in received:
            if names.RECEIPT in span.attributes:
                self._receive_receipt(span)
                continue
            if names.RECORD in span.attributes:
                self._receive_record(span)
                continue
            with guard("received span"):
                ours = span.ours()
                if ours is None:
                    counters.add("dropped", "span of another library")
                elif ours.episode_id in recorder.delivered:
                    counters.add("late", ours.kind)
                elif not _taken_by_open_episode(ours):
                    mine.append(ours)
        with self._changed:
            self._assembly.add(mine, time.monotonic())
            self._changed.notify_all()

    def _receive_receipt(self, span: ReceivedSpan) -> None:
        """A word between two processes of ours, no part of a record."""
        if self.on_receipt is not None:
            with guard("receipt"):
                found = span.attributes
                ended = str(found.get(names.RECEIPT_ENDED) or "").split()
                self.on_receipt(str(found[names.RECEIPT]), int(found.get(names.RECEIPT_LOST) or 0), ended)

    def _receive_record(self, span: ReceivedSpan) -> None:
        from rllm_trace._store_log import row_of_frame
        from rllm_trace._store_rows import episode_of

        with guard("record"):
            self.on_record(episode_of(row_of_frame(base64.b64decode(span.attributes[names.RECORD]))))

    def _run(self) -> None:
        while True:
            with self._changed:
                due = self._assembly.next_due()
                now = time.monotonic()
                if not self._closed and (due is None or due > now):
                    self._changed.wait(None if due is None else due - now)
                closed = self._closed
                ready = self._assembly.rest() if closed else self._assembly.due(time.monotonic())
            for episode in ready:
                self._deliver(episode)
            if closed:
                return

    def _deliver(self, episode: Episode) -> None:
        if episode.id in recorder.delivered:  # its workflow ran here, and had just ended when these spans came
            counters.add("late", "span of another process")
            return
        if self._on_episode is not None:
            with guard("on_episode"):
                self._on_episode(episode)
        with self._changed:
            if self._on_episode is None:
                self.episodes.append(episode)
                if len(self.episodes) > _MAX_KEPT:
                    del self.episodes[0]
                    counters.add("dropped", "received episode")
            self._delivered += 1
            self._changed.notify_all()


def _taken_by_open_episode(span: Span) -> bool:
    """Whether the span belongs to a workflow that runs in this process."""
    episode = recorder.open_episodes.get(span.episode_id)
    if episode is None or episode.remote:
        return False
    if episode.take_in(span) and span.call is not None:
        with guard("call site"):
            _see_site(episode, span.call)
    return True


def _see_site(episode: OpenEpisode, call: CallData) -> None:
    """A rollout counts its call sites where its calls are made; those of other processes it counts where they arrive."""
    route = None if episode.rollout is None else episode.rollout.route
    if route is None or route.sites is None:
        return
    sent = msgspec.json.decode(call.request, type=dict[str, Any])
    given = {**sent, **(call.requested or {})}
    is_policy = call.endpoint == "policy"
    route.sites.saw(model=call.requested_model, endpoint=call.endpoint, trained=is_policy, settings=settings_of(given, sent))
