"""Spans of many episodes, from many processes, late and in any order, in; whole Episodes out, and those that a deadline ends as they are.

An episode is complete when its workflow's span is there, every span's parent is there, and nothing has come for a settle time. At the
deadline it is made of what there is, and says under ``rllm.missing`` in its metadata what is not. What comes after that is late and
counted. Knows no clock: the time is given.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from rllm_trace import attributes as names
from rllm_trace._guard import counters, guard
from rllm_trace._spans import Span
from rllm_trace.episodes import build_episode
from rllm_trace.types import Episode, ErrorInfo

__all__ = ["INCOMPLETE", "Assembly"]

INCOMPLETE: Final = "rllm_trace.IncompleteEpisode"
"""``Episode.error.type`` where the workflow's own span never came."""
_MAX_OPEN: Final = 10_000
_MAX_REMEMBERED: Final = 100_000


class _Draft:
    """The spans of one episode so far."""

    def __init__(self, now: float) -> None:
        self.spans: dict[str, Span] = {}
        self.first = now
        self.last = now

    def root(self) -> Span | None:
        return next((span for span in self.spans.values() if names.TERMINATION in span.facts), None)

    def missing(self) -> list[str]:
        """Ids of parents that are not there."""
        parents = {span.parent_id for span in self.spans.values() if names.TERMINATION not in span.facts}
        return sorted(parent for parent in parents if parent is not None and parent not in self.spans)


class Assembly:
    """Takes spans in and gives episodes out. ``settle`` and ``deadline`` in seconds, the latter from an episode's first span on."""

    def __init__(self, *, settle: float, deadline: float) -> None:
        self._settle = settle
        self._deadline = deadline
        self._open: collections.OrderedDict[str, _Draft] = collections.OrderedDict()
        self._done: collections.OrderedDict[str, None] = collections.OrderedDict()

    def add(self, spans: Iterable[Span], now: float) -> None:
        """Spans have arrived. One that comes twice counts once."""
        for span in spans:
            if span.episode_id in self._done:
                counters.add("late", span.kind)
                continue
            draft = self._open.get(span.episode_id)
            if draft is None:
                draft = self._open[span.episode_id] = _Draft(now)
            draft.spans.setdefault(span.span_id, span)
            draft.last = now

    def due(self, now: float) -> list[Episode]:
        """The episodes that are complete, or at their deadline, or in the way of newer ones; each is given once."""
        ready = [name for name, draft in self._open.items() if now >= self._when(draft)]
        ready += [name for name in list(self._open)[: max(0, len(self._open) - _MAX_OPEN)] if name not in ready]
        return self._made(ready)

    def rest(self) -> list[Episode]:
        """Everything that is open, as it is."""
        return self._made(list(self._open))

    def next_due(self) -> float | None:
        """When ``due`` will have something, as far as is known; None if nothing is open."""
        return min(map(self._when, self._open.values()), default=None)

    def __len__(self) -> int:
        return len(self._open)

    def _when(self, draft: _Draft) -> float:
        end = draft.first + self._deadline
        return end if draft.missing() or draft.root() is None else min(end, draft.last + self._settle)

    def _made(self, ready: Iterable[str]) -> list[Episode]:
        made: list[Episode] = []
        for name in ready:
            draft = self._open.pop(name)
            self._done[name] = None
            if len(self._done) > _MAX_REMEMBERED:
                self._done.popitem(last=False)
            before = len(made)
            with guard("assembled episode"):
                made.append(_episode(draft))
            counters.add("recorded" if len(made) > before else "failed", "assembled episode")
        return made


def _episode(draft: _Draft) -> Episode:
    root, missing = draft.root(), draft.missing()
    spans = list(draft.spans.values())
    if root is None:
        episode = build_episode([*spans, _stand_in(spans)])
    else:
        episode = build_episode(spans)
    if root is not None and not missing:
        return episode
    note: dict[str, Any] = {"workflow": root is None, "spans": missing}
    return msgspec.structs.replace(episode, metadata={**episode.metadata, names.MISSING: note})


def _stand_in(spans: list[Span]) -> Span:
    """A workflow's span in place of the one that never came."""
    first = min(spans, key=lambda span: span.started)
    known = {span.span_id for span in spans}
    top = next((span.parent_id for span in spans if span.parent_id is not None and span.parent_id not in known), f"root-{first.episode_id}")
    return Span(
        kind="workflow",
        name=first.trajectory_name or "unknown",
        trace_id=first.trace_id,
        span_id=top,
        parent_id=None,
        episode_id=first.episode_id,
        trajectory_id=top,
        trajectory_name=first.trajectory_name,
        started=first.started,
        ended=max(span.ended for span in spans),
        error=ErrorInfo(type=INCOMPLETE, message="the workflow's own span did not arrive before the deadline"),
        facts={
            names.TERMINATION: "timeout",
            **{key: span.facts[key] for span in spans for key in (names.TASK_ID, names.SESSION_ID) if key in span.facts},
        },
    )
