"""A patched client asks here when a call begins, and says here, once, how it ended. Between the two lies the span of the call.

``open_call`` costs a few dictionary steps and gives None wherever there is nothing to record: outside a workflow, after its episode has
ended, where it was sampled out or tracing is off. What the client then does is exactly what it would do without us.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from rllm_trace._calldata import CallData
from rllm_trace._context import Scope, current
from rllm_trace._guard import counters, guard
from rllm_trace._recorder import recorder
from rllm_trace._spans import Span, sources

__all__ = ["OpenCall", "Operation", "open_call"]

Operation = Literal["chat", "text_completion", "responses"]


class OpenCall:
    """A call that has begun."""

    __slots__ = ("_ended", "operation", "scope", "span", "wants_tokens")

    def __init__(self, scope: Scope, span: Span, operation: Operation) -> None:
        self.operation = operation
        self.scope = scope
        """Where the call was made; its episode, trajectory, ``no_train`` and ``in_reward`` hold for the call."""
        self.span = span
        self.wants_tokens = scope.episode.wants_tokens
        """Whether token ids and logprobs are to be asked for."""
        self._ended = False

    @property
    def span_id(self) -> str:
        """16 hex digits: the identity of the call."""
        return self.span.span_id

    @property
    def started(self) -> int:
        """Unix time, nanoseconds."""
        return self.span.started

    @property
    def number(self) -> int:
        """The call's number in its trajectory, from 0."""
        return self.span.number

    def end(self, data: CallData) -> None:
        """The call has ended, well or badly. Exactly once; a second time is counted and changes nothing. Never raises."""
        self._end(data, None)

    def end_later(self, make: Callable[[], CallData]) -> None:
        """The same, with a record that is made beside the app; ``make`` never raises, and sees nothing that the app may change."""
        self._end(None, make)

    def _end(self, data: CallData | None, make: Callable[[], CallData] | None) -> None:
        try:
            if self._ended:
                counters.add("dropped", "second end of a call")
                return
            self._ended = True
            span = self.span
            span.ended = sources.now()
            span.call = data
            span.pending = make
            span.whole = None
            self.scope.episode.end(span)
        except Exception as error:  # noqa: BLE001 - as in ``guard``, a step cheaper
            guard.count("call", error)


@guard("call")
def open_call(*, operation: Operation, requested_model: str) -> OpenCall | None:
    """Begins a call in the running scope. None: nothing to record, leave the call alone."""
    scope = current()
    if scope is None:
        if recorder.open_episodes:
            counters.add("orphan", "call")
        return None
    episode = scope.episode
    if not episode.recorded:
        if episode.remote:
            counters.add("orphan", "call for another process")
        return None
    if episode.closed:
        counters.add("late", "start of a call")
        return None
    if episode.foreign:
        from rllm_trace._foreign import foreign_scope

        scope = foreign_scope(scope)
    span = Span(
        kind="chat",
        name=requested_model,
        trace_id=episode.trace_id,
        span_id=sources.span_id(),
        parent_id=scope.span_id,
        episode_id=episode.id,
        trajectory_id=scope.trajectory.id,
        trajectory_name=scope.trajectory.name,
        started=sources.now(),
        no_train=scope.no_train,
        in_reward=scope.in_reward,
        number=scope.trajectory.next_call_number(),
    )
    return OpenCall(scope, span, operation) if episode.start(span) else None
