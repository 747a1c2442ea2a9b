"""An episode while it runs: takes in the spans that start and end inside it, and hands itself over, once, when it has ended.

It has ended when its workflow has returned and no span started inside is open any more, or when it is expired from outside. What ends
later is late. Every change is a few steps under one re-entrant lock (a garbage collection may end a span inside another change),
so that threads, tasks and finalizers may all work on it; the hand-over itself happens outside the lock.
"""

from __future__ import annotations

import itertools
import threading
from typing import TYPE_CHECKING, Any, Protocol

from rllm_trace import attributes as A
from rllm_trace._spans import Span, sources
from rllm_trace.types import ErrorInfo, Termination

if TYPE_CHECKING:
    from rllm_trace._inbox import Inbox
    from rllm_trace.rollouts import Rollout

__all__ = ["Keeper", "OpenEpisode", "OpenTrajectory"]


class OpenTrajectory:
    """One entry of ``agent(...)``, or the default trajectory of an episode (``explicit`` False)."""

    __slots__ = ("_numbers", "entry", "explicit", "id", "name")

    def __init__(self, id: str, name: str, *, explicit: bool, entry: int = 0) -> None:
        self.id = id
        self.name = name
        self.explicit = explicit
        self.entry = entry
        """How many of its name had begun in the episode before it: two agents of one name are not to sample the same."""
        self._numbers = itertools.count()

    def next_call_number(self) -> int:
        """0 for the first call of this trajectory, then 1, ..."""
        return next(self._numbers)

    def number_from(self, first: int) -> None:
        """In another process than the one that began it: the next call here has this number."""
        self._numbers = itertools.count(first)


class Keeper(Protocol):
    """Who is told what becomes of an episode: the recorder."""

    def ended(self, episode: OpenEpisode, span: Span) -> None:
        """A span other than the root has ended in time."""
        ...

    def came_late(self, episode: OpenEpisode, span: Span) -> None:
        """A span has ended after the episode."""
        ...

    def returned(self, episode: OpenEpisode) -> None:
        """The workflow has returned and spans are still open: settle."""
        ...

    def done(self, episode: OpenEpisode) -> None:
        """The episode has ended; told once."""
        ...

    def hurry(self) -> None:
        """Somebody waits for what has ended."""
        ...


class OpenEpisode:
    """One run of a workflow, from its start until its record is made."""

    __slots__ = (
        "__weakref__",
        "_entries",
        "_keeper",
        "_lock",
        "_open",
        "_taken_in",
        "_trajectories",
        "closed",
        "exported",
        "foreign",
        "id",
        "inboxes",
        "keeps_content",
        "metadata",
        "parent_episode_id",
        "recorded",
        "remote",
        "returned",
        "rollout",
        "root",
        "seed",
        "session_id",
        "spans",
        "stored",
        "task_id",
        "thread",
        "trace_id",
        "trajectory",
        "wants_tokens",
    )

    def __init__(
        self,
        keeper: Keeper,
        *,
        id: str,
        trace_id: str,
        span_id: str,
        workflow: str,
        recorded: bool = True,
        remote: bool = False,
        exported: bool = False,
        stored: bool = False,
        wants_tokens: bool = False,
        keeps_content: bool = False,
        task_id: str | None = None,
        session_id: str | None = None,
        seed: int | None = None,
        parent_episode_id: str | None = None,
        metadata: dict[str, Any] | None = None,
        inboxes: tuple[Inbox, ...] = (),
        rollout: Rollout | None = None,
    ) -> None:
        self.id = id
        self.trace_id = trace_id
        self.task_id = task_id
        self.session_id = session_id
        self.seed = seed
        """Seed of the rollout, from which the seeds of its calls are made; None outside training."""
        self.parent_episode_id = parent_episode_id
        self.metadata: dict[str, Any] = dict(metadata or {})
        self.inboxes = inboxes
        self.rollout = rollout
        self.recorded = recorded
        """False where the episode was sampled out: what runs inside is left alone."""
        self.remote = remote
        """True where its record is made in another process: spans are only exported."""
        self.exported = exported
        self.stored = stored
        self.wants_tokens = wants_tokens
        self.keeps_content = keeps_content
        self.closed = False
        self.returned = False
        self.thread = threading.get_ident()
        self.spans: list[Span] = []
        self.foreign: dict[int, Any] = {}
        """Open spans of third parties, by their own id (``_otel``)."""
        self.trajectory = OpenTrajectory(span_id, workflow, explicit=False)
        self.root = Span(
            kind="workflow",
            name=workflow,
            trace_id=trace_id,
            span_id=span_id,
            parent_id=None,
            episode_id=id,
            trajectory_id=span_id,
            trajectory_name=workflow,
            started=sources.now(),
        )
        self._keeper = keeper
        self._open: dict[str, Span] = {}
        self._taken_in: set[str] | None = None
        """Ids of spans that came from other processes; None until one has."""
        self._trajectories: dict[str, OpenTrajectory] = {}
        self._entries: dict[str, int] = {}
        """Name -> the last entry of it."""
        self._lock = threading.RLock()

    def move_to_child(self, *, exported: bool) -> None:
        """In a forked child: the record is made in the parent, what runs here is exported or lost."""
        self._lock = threading.RLock()
        self._open.clear()
        self.remote = True
        self.exported = self.recorded = self.exported and exported
        self.inboxes, self.rollout, self.spans = (), None, []

    def trajectory_of(self, id: str, name: str) -> OpenTrajectory:
        """The trajectory with this id; made if it is not known yet."""
        if id == self.trajectory.id:
            return self.trajectory
        with self._lock:
            known = self._trajectories.get(id)
            if known is None:
                entry = self._entries[name] = self._entries.get(name, -1) + 1
                known = self._trajectories[id] = OpenTrajectory(id, name, explicit=True, entry=entry)
            return known

    def start(self, span: Span) -> bool:
        """Takes in a span that starts; False if the episode has ended."""
        with self._lock:
            if self.closed:
                return False
            self._open[span.span_id] = span
            return True

    def end(self, span: Span) -> None:
        """Takes in a span that has ended. The last one of a returned workflow ends the episode."""
        done = False
        with self._lock:
            late = self.closed
            if not late:
                self._open.pop(span.span_id, None)
                if not self.remote:
                    self.spans.append(span)
                    done = self.closed = self.returned and not self._open
        if late:
            span.late = True
            self._keeper.came_late(self, span)
            return
        self._keeper.ended(self, span)
        if done:
            self._keeper.done(self)

    def take_in(self, span: Span) -> bool:
        """A span that has ended in another process. Its sender may not know that it came, and send it again. False: it had come."""
        with self._lock:
            if self._taken_in is None:
                self._taken_in = set()
            if span.span_id in self._taken_in:
                return False
            self._taken_in.add(span.span_id)
        self.end(span)
        return True

    def finish(self, termination: Termination, error: ErrorInfo | None) -> None:
        """The workflow has returned, raised, or its generator has been closed."""
        self._end_whole()
        root = self.root
        with self._lock:
            late = self.closed
            if not late:
                root.ended = sources.now()
                root.error = error
                root.facts[A.TERMINATION] = termination
                self.returned = True
                self.closed = not self._open
                closed = self.closed
            else:
                closed = False
        if late:
            late_root = root.copy()
            late_root.ended, late_root.late = sources.now(), True
            self._keeper.came_late(self, late_root)
        elif closed:
            self._keeper.done(self)
        else:
            self._keeper.returned(self)

    def expire(self, reason: str, error_type: str) -> bool:
        """Ends it now, as it is: ``timeout`` if the workflow still runs, ``unsettled`` if it has returned. False: it had ended."""
        self._end_whole()
        with self._lock:
            if self.closed:
                return False
            self.closed = True
            now = sources.now()
            left = [span.copy() for span in self._open.values()]
            for span in left:
                span.ended = now
            self._open.clear()
            root = self.root
            if not self.returned:
                root = self.root = root.copy()
                root.ended = now
                root.facts[A.TERMINATION] = "timeout"
                root.error = ErrorInfo(type=error_type, message=reason)
            elif root.facts[A.TERMINATION] == "completed":
                root.facts[A.TERMINATION] = "unsettled"
            root.facts[A.EPISODE_OPEN_CALLS] = sum(span.kind == "chat" for span in left)
            self.spans.extend(span for span in left if span.kind == "agent")
        self._keeper.done(self)
        return True

    def _end_whole(self) -> None:
        """Ends the calls whose replies were received whole, and whose streams the app keeps without reading their last events."""
        for span in list(self._open.values()) if self._open else ():
            end = span.whole
            if end is not None:
                end()

    def close(self) -> list[Span]:
        """Takes in nothing more, and gives what it has taken in; for what is not to be handed over."""
        with self._lock:
            self.closed = True
            return list(self.spans)

    def let_go(self) -> None:
        """After the delivery: a context that lives on, in a thread say, keeps none of the records alive."""
        self.spans, self.inboxes, self.rollout = [], (), None

    def hurry(self) -> None:
        """Somebody waits for its record."""
        self._keeper.hurry()

    @property
    def open_spans(self) -> int:
        """How many spans started inside are open now."""
        return len(self._open)
