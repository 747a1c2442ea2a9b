"""The process's one recorder: decides whether a workflow is recorded, and turns ended episodes into delivered records.

On the app's thread an ended episode is put on a queue, nothing more; the writer thread makes the record and hands it to the inboxes that
were there when the episode started, to exporters and store. Where the queue is full, an episode that somebody waits for is made by the
thread that ended it; others are dropped whole and counted.
"""

from __future__ import annotations

import collections
import os
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, runtime_checkable

from rllm_trace import attributes as A
from rllm_trace._context import current
from rllm_trace._guard import counters, guard
from rllm_trace._inbox import Inbox, reset_lists
from rllm_trace._open import OpenEpisode
from rllm_trace._spans import Span, begin_making, made
from rllm_trace._writer import Writer
from rllm_trace.episodes import build_episode
from rllm_trace.types import Episode, Reward

__all__ = ["EpisodeSink", "Plan", "Recorder", "RewardSink", "SpanSink", "recorder"]

_MAX_QUEUED: Final = 4_096
_MAX_REMEMBERED: Final = 10_000
_OFF_WORDS: Final = frozenset({"", "0", "false", "no", "off"})


class EpisodeSink(Protocol):
    """Takes finished episodes: the store, the JSON-lines file."""

    def write(self, episode: Episode) -> None:
        """Called on the writer thread; what it raises is counted as a failed delivery."""
        ...

    def flush(self, timeout: float) -> bool:
        """True once all that was written is safe."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class RewardSink(Protocol):
    """An episode sink that also takes rewards for what it was given before: the store."""

    def give(self, episode_id: str, given: Sequence[Reward]) -> bool:
        """False if it does not hold the episode."""
        ...


class SpanSink(Protocol):
    """Takes finished spans one by one: a batch processor before an exporter."""

    def put(self, span: Span) -> None:
        """Called on the app's thread, or, if the sink has an attribute ``later`` that is true, on the writer's: keeps the reference."""
        ...

    def flush(self, timeout: float) -> bool: ...

    def close(self, timeout: float) -> None: ...


class Plan:
    """How a root episode is to be recorded, decided once at its start."""

    __slots__ = ("exported", "inboxes", "keeps_content", "rollout", "stored", "tokens")

    def __init__(
        self, *, inboxes: tuple[Inbox, ...], rollout: Inbox | None, exported: bool, stored: bool, tokens: bool, content: bool
    ) -> None:
        self.inboxes = inboxes
        self.rollout = rollout
        self.exported = exported
        self.stored = stored
        self.tokens = tokens
        self.keeps_content = content


class Recorder:
    """Sinks, open episodes and the writer thread of this process. ``on`` is False while nothing at all is to be recorded."""

    def __init__(self) -> None:
        self.on = False
        self.disabled = False
        self._watches_forks = False
        self._reset()
        self._sinks_at_once: tuple[SpanSink, ...] = ()
        self._sinks_later: tuple[SpanSink, ...] = ()
        self.episode_sinks: tuple[EpisodeSink, ...] = ()
        self.sample = 1.0
        self.tokens: bool | None = None
        """None: as the rule says."""
        self.store_tokens = False
        """Whether one of the episode sinks is a store, which has tokens asked for."""
        self.content = False
        """Whether a sink may be given content."""
        self.settle = 5.0
        self.child_hooks: list[Callable[[], None]] = []
        """What else a forked child has to do."""
        self.home: Any = None
        """The ``Home`` of a process that was started from a workflow of another one; None in all others."""
        self.stat_hooks: list[Callable[[], None]] = []
        """Called before the counters are shown."""
        self.processes_lost: Callable[[str], int] = _none_lost
        """How many processes of an episode, by its id, ended without a word."""
        self.rollouts = 0
        """Rollouts that are open."""
        self._random = random.SystemRandom()
        self.delivered: collections.OrderedDict[str, tuple[str, str, str]] = collections.OrderedDict()
        """(trace id, span id and name of the workflow) of the last episodes, for rewards that come later."""

    def _reset(self) -> None:
        self.inboxes: tuple[Inbox, ...] = ()
        self.open_episodes: dict[str, OpenEpisode] = {}
        self._lock = threading.RLock()
        self._dropped = 0
        self.writer = Writer(self._take, self._deliver, _MAX_QUEUED)

    # what is recorded

    @property
    def span_sinks(self) -> tuple[SpanSink, ...]:
        """Where spans go."""
        return self._sinks_at_once + self._sinks_later

    @span_sinks.setter
    def span_sinks(self, sinks: tuple[SpanSink, ...]) -> None:
        self._sinks_later = tuple(sink for sink in sinks if getattr(sink, "later", False))
        self._sinks_at_once = tuple(sink for sink in sinks if sink not in self._sinks_later)

    def check_environment(self) -> None:
        """Reads RLLM_DISABLED, and looks out for forks; done whenever recording is asked for, never at import."""
        if not self._watches_forks and hasattr(os, "register_at_fork"):
            self._watches_forks = True
            os.register_at_fork(after_in_child=self._after_fork)
        self.disabled = os.environ.get(A.ENV_DISABLED, "").strip().lower() not in _OFF_WORDS
        self.refresh()

    def refresh(self) -> None:
        """To be called after any change of what there is to record for."""
        self.on = not self.disabled and bool(self.inboxes or self.rollouts or self.span_sinks or self.episode_sinks or self.home)

    def open_inbox(self, inbox: Inbox) -> None:
        with self._lock:
            self.inboxes = (*self.inboxes, inbox)
            self.refresh()

    def close_inbox(self, inbox: Inbox) -> None:
        with self._lock:
            self.inboxes = tuple(other for other in self.inboxes if other is not inbox)
            self.refresh()

    def count_rollout(self, change: int) -> None:
        with self._lock:
            self.rollouts += change
            self.refresh()

    def plan(self, rollout: Inbox | None) -> Plan | None:
        """How an episode that starts now is recorded; None: it is not."""
        inboxes = self.inboxes if rollout is None else (*self.inboxes, rollout)
        exported, stored = bool(self.span_sinks), bool(self.episode_sinks)
        if (exported or stored) and self.sample < 1.0 and self._random.random() >= self.sample:
            exported = stored = False
        if not (inboxes or exported or stored):
            return None
        tokens = self.tokens
        if tokens is None:
            tokens = any(inbox.wants_tokens for inbox in inboxes) or (stored and self.store_tokens)
        return Plan(
            inboxes=inboxes,
            rollout=rollout,
            exported=exported,
            stored=stored,
            tokens=tokens or rollout is not None,
            content=bool(inboxes) or self.content,
        )

    def track(self, episode: OpenEpisode) -> None:
        """An episode has started."""
        self.open_episodes[episode.id] = episode
        for inbox in episode.inboxes:
            inbox.add(episode)

    def _after_fork(self) -> None:
        """A forked child starts from nothing: the parent's episodes are the parent's. What runs in one of them is only exported."""
        self._reset()
        begin_making()
        self.rollouts = 0
        counters.clear()
        reset_lists()
        scope = current()
        while scope is not None:
            scope.episode.move_to_child(exported=bool(self.span_sinks))
            scope = scope.parent
        self.refresh()
        for hook in self.child_hooks:
            hook()

    # what becomes of an episode (the Keeper of OpenEpisode)

    def ended(self, episode: OpenEpisode, span: Span) -> None:
        if episode.remote and self.home is not None:
            _add_identity(span, episode)
            with guard("home"):
                self.home.put(made(span))
            return
        sinks: tuple[SpanSink, ...] = ()
        if episode.exported:
            _add_identity(span, episode)
            sinks = self._sinks_later
            for sink in self._sinks_at_once:
                with guard("exporter"):
                    sink.put(made(span))
        if sinks or span.pending is not None:
            self.writer.take(span, sinks)

    def _take(self, span: Span, sinks: tuple[SpanSink, ...]) -> None:
        made(span)
        for sink in sinks:
            with guard("exporter"):
                sink.put(span)

    def came_late(self, episode: OpenEpisode, span: Span) -> None:
        counters.add("late", "episode" if span.span_id == episode.root.span_id else span.kind)
        self.ended(episode, span)

    def returned(self, episode: OpenEpisode) -> None:
        self.writer.settle(episode, self.settle)

    def hurry(self) -> None:
        self.writer.hurry()

    def done(self, episode: OpenEpisode) -> None:
        self.open_episodes.pop(episode.id, None)
        if self.writer.put(episode, now=any(inbox.is_awaited for inbox in episode.inboxes)):
            return
        if episode.inboxes:
            self._deliver(episode)
        else:
            counters.add("dropped", "episode")
            with self._lock:
                self._dropped += 1

    # the delivery, on the writer thread

    def _deliver(self, episode: OpenEpisode) -> None:
        record: Episode | None = None
        with guard("episode"):
            _add_identity(episode.root, episode)
            lost = self.processes_lost(episode.id)
            if episode.metadata or lost:
                missing = {A.MISSING: {"processes": lost}} if lost else {}
                episode.root.facts[A.EPISODE_METADATA] = {**episode.metadata, **missing}
            if episode.parent_episode_id is not None:
                episode.root.facts[A.PARENT_EPISODE_ID] = episode.parent_episode_id
            record = build_episode([*map(made, episode.spans), episode.root])
        if record is None:
            counters.add("failed", "episode")
        else:
            _count(record)
            if episode.exported or episode.stored:
                self._export(episode, record)
        for inbox in episode.inboxes:
            with guard("inbox"):
                inbox.deliver(episode.id, record)
        self._remember(episode.id, episode.trace_id, episode.root.span_id, episode.root.name)
        episode.let_go()

    def adopt(self, record: Episode) -> None:
        """An episode that began and ended in another process of ours: whoever collects here gets it, once."""
        if record.id in self.delivered:
            return
        inboxes = self.inboxes
        if not inboxes:
            counters.add("late", "episode of another process")
            return
        _count(record)
        self._remember(record.id, record.trace_id, record.span_id, record.workflow)
        for inbox in inboxes:
            inbox.deliver(record.id, record)

    def _remember(self, episode_id: str, trace_id: str, span_id: str, name: str) -> None:
        self.delivered[episode_id] = (trace_id, span_id, name)
        if len(self.delivered) > _MAX_REMEMBERED:
            self.delivered.popitem(last=False)

    def _export(self, episode: OpenEpisode, record: Episode) -> None:
        if episode.exported:
            root = episode.root.copy()
            root.facts[A.REWARD_VALUE] = record.reward
            for sink in self.span_sinks:
                with guard("exporter"):
                    sink.put(root)
        if episode.stored:
            for sink in self.episode_sinks:
                try:
                    sink.write(record)
                except Exception:  # noqa: BLE001 - a full disk must not end the writer
                    counters.add("failed", "episode delivery")

    def forget_dropped(self) -> int:
        """How many episodes were dropped since it was last asked."""
        with self._lock:
            dropped, self._dropped = self._dropped, 0
            return dropped


def _none_lost(_: str) -> int:
    return 0


def _add_identity(span: Span, episode: OpenEpisode) -> None:
    if episode.task_id is not None:
        span.facts[A.TASK_ID] = episode.task_id
    if episode.session_id is not None:
        span.facts[A.SESSION_ID] = episode.session_id


def _count(record: Episode) -> None:
    counters.add("recorded", "episode")
    for trajectory in record.trajectories:
        counters.add("recorded", "call", len(trajectory.calls))
        counters.add("recorded", "tool", len(trajectory.tools))
        counters.add("recorded", "reward", len(trajectory.rewards))
        counters.add("failed", "call", sum(call.error is not None for call in trajectory.calls))
    counters.add("recorded", "reward", len(record.rewards))
    if record.termination != "completed":
        counters.add("failed", f"episode {record.termination}")


recorder: Final = Recorder()
