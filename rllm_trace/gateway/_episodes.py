"""Episodes that the gateway itself holds: for apps whose workflow no ``rllm_trace`` runs.

One is opened by the control path or by the first call that names it, and ends when it is told to, after a time without calls, or with the
gateway. An id that has ended stays ended: what comes later for it is late. A call that names no episode gets one of its own, marked
``unassigned`` and never trained.
"""

from __future__ import annotations

import collections
import time
from typing import Any, Final

from rllm_trace import attributes as A
from rllm_trace._context import Scope
from rllm_trace._guard import counters
from rllm_trace._open import OpenEpisode
from rllm_trace._recorder import recorder
from rllm_trace._spans import sources
from rllm_trace.gateway._refusal import Refusal
from rllm_trace.types import ErrorInfo

__all__ = ["Episodes", "is_episode_id"]

_MAX_OPEN: Final = 10_000
_MAX_ENDED: Final = 100_000
_MAX_ID: Final = 200
_WORKFLOW: Final = "gateway"
_UNASSIGNED: Final = "unassigned"
_GIVEN: Final = frozenset({"id", "metadata", "session_id", "task_id", "workflow", "input"})
_ENDING: Final = frozenset({"error", "output"})


def is_episode_id(text: str) -> bool:
    """Whether it can name an episode in a URL, a header and a file."""
    return 0 < len(text) <= _MAX_ID and text.isprintable() and "/" not in text


class _Held:
    __slots__ = ("scope", "used")

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.used = time.monotonic()


class Episodes:
    """Those that are open, by id."""

    def __init__(self, *, idle: float) -> None:
        self._idle = idle
        self._open: dict[str, _Held] = {}
        self._ended: collections.OrderedDict[str, None] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def has_ended(self, id: str) -> bool:
        """Whether it was one of these and is over."""
        return id in self._ended

    def find(self, id: str) -> Scope | None:
        """The open episode ``id``, if it is one of these."""
        held = self._open.get(id)
        if held is None or held.scope.episode.closed:
            return None
        held.used = time.monotonic()
        return held.scope

    def open(self, id: str | None = None, *, trace_id: str | None = None, given: dict[str, Any] | None = None) -> Scope | None:
        """Opens one; ``given`` says ``task_id``, ``session_id``, ``metadata``, ``workflow``, ``input``.

        None: nothing records it. Raises Refusal.
        """
        given = given or {}
        unknown = sorted(set(given) - _GIVEN)
        if unknown:
            raise Refusal(400, f"got the fields {unknown}; expected some of {sorted(_GIVEN)}", code="unknown_field")
        metadata: Any = given.get("metadata") or {}
        if not isinstance(metadata, dict):
            raise Refusal(400, f"got metadata of type {type(metadata).__name__}; expected an object", code="bad_metadata")
        trace_id = trace_id or sources.trace_id()
        id = id or trace_id
        if not is_episode_id(id):
            raise Refusal(400, f"got the episode id {id[:40]!r}; expected up to {_MAX_ID} printable characters without '/'", code="bad_id")
        if id in self._open or id in self._ended or id in recorder.open_episodes:
            raise Refusal(409, f"there is an episode {id!r} already; give another id, or none", code="episode_exists")
        if len(self._open) >= _MAX_OPEN:
            raise Refusal(503, f"{_MAX_OPEN} episodes are open; end some of them", code="too_many_episodes")
        scope = _begin(id, trace_id, str(given.get("workflow") or _WORKFLOW), given)
        if scope is not None:
            self._open[id] = _Held(scope)
        return scope

    def end(self, id: str, given: dict[str, Any] | None = None) -> bool:
        """Ends it; False if it is not open. ``given``: ``output``, and ``error``, a message, if the app failed. Raises Refusal."""
        given = given or {}
        unknown = sorted(set(given) - _ENDING)
        if unknown:
            raise Refusal(400, f"got the fields {unknown}; expected some of {sorted(_ENDING)}", code="unknown_field")
        held = self._open.pop(id, None)
        if held is None:
            return False
        self._ended[id] = None
        if len(self._ended) > _MAX_ENDED:
            self._ended.popitem(last=False)
        episode = held.scope.episode
        if "output" in given and episode.keeps_content:
            episode.root.facts[A.EPISODE_OUTPUT] = given["output"]
        error = given.get("error")
        if error:
            episode.finish("failed", ErrorInfo(type="rllm_trace.gateway.AppError", message=str(error)[:2_000]))
        else:
            episode.finish("completed", None)
        return True

    def end_idle(self) -> None:
        """Ends those without a call under way or for a while."""
        now = time.monotonic()
        for id, held in list(self._open.items()):
            if held.scope.episode.open_spans:
                held.used = now
            elif now - held.used >= self._idle:
                self.end(id)

    def end_all(self) -> None:
        """The gateway closes."""
        for id in list(self._open):
            self.end(id)

    @staticmethod
    def unassigned() -> Scope | None:
        """An episode for one call that named none; to be ended with ``finish`` once the call has ended. None: nothing records it."""
        counters.add("orphan", "unassigned gateway call")
        trace_id = sources.trace_id()
        scope = _begin(trace_id, trace_id, _UNASSIGNED, {"metadata": {_UNASSIGNED: True}})
        return None if scope is None else scope.inside(no_train=True)


def _begin(id: str, trace_id: str, workflow: str, given: dict[str, Any]) -> Scope | None:
    recorder.check_environment()
    plan = recorder.plan(None) if recorder.on else None
    if plan is None:
        return None
    episode = OpenEpisode(
        recorder,
        id=id,
        trace_id=trace_id,
        span_id=sources.span_id(),
        workflow=workflow,
        exported=plan.exported,
        stored=plan.stored,
        wants_tokens=plan.tokens,
        keeps_content=plan.keeps_content,
        task_id=_text(given.get("task_id")),
        session_id=_text(given.get("session_id")),
        metadata=given.get("metadata") or {},
        inboxes=plan.inboxes,
    )
    if "input" in given and plan.keeps_content:
        episode.root.facts[A.EPISODE_INPUT] = given["input"]
    recorder.track(episode)
    return Scope(episode, episode.trajectory, episode.root.span_id, no_train=False, in_reward=False, parent=None)


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
