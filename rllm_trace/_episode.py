"""What starts: an episode, or a span inside one. Decides nothing about what is recorded (the recorder does), only where it belongs."""

from __future__ import annotations

import sys
from typing import Any, Final

from rllm_trace._context import Scope
from rllm_trace._instruments import ensure_instrumented
from rllm_trace._open import OpenEpisode
from rllm_trace._recorder import recorder
from rllm_trace._spans import Span, SpanKind, sources
from rllm_trace.rollouts import current_rollout

__all__ = ["IDLE", "begin_episode", "child_span", "recording_scope"]


def _unrecorded(name: str) -> Scope:
    episode = OpenEpisode(recorder, id="", trace_id="", span_id="", workflow=name, recorded=False)
    return Scope(episode, episode.trajectory, "", no_train=False, in_reward=False, parent=None)


IDLE: Final = _unrecorded("")
"""The scope of every workflow that runs while nothing is recorded: tells a reward that it is inside one."""


def recording_scope(scope: Scope | None) -> Scope | None:
    """Where what starts in ``scope`` belongs, if that is an open, recorded episode, else None."""
    if scope is None or not scope.episode.recorded:
        return None
    if scope.episode.closed:
        return None
    if scope.episode.foreign:
        from rllm_trace._foreign import foreign_scope

        return foreign_scope(scope)
    return scope


def begin_episode(scope: Scope | None, name: str, *, parent: Scope | None) -> Scope | None:
    """Starts an episode; gives the scope of its workflow. Its episode is unrecorded if it was sampled out; None: inside such a one."""
    rollout = current_rollout()
    if _is_inside_unrecorded(scope) and rollout is None and not recorder.inboxes:
        return None
    ensure_instrumented()
    plan = recorder.plan(None if rollout is None else rollout.inbox)
    if plan is None:
        return _unrecorded(name)
    trace_id = sources.trace_id()
    episode = OpenEpisode(
        recorder,
        id=trace_id,
        trace_id=trace_id,
        span_id=sources.span_id(),
        workflow=name,
        exported=plan.exported,
        stored=plan.stored,
        wants_tokens=plan.tokens,
        keeps_content=plan.keeps_content,
        task_id=None if rollout is None else rollout.task_id,
        seed=None if rollout is None else rollout.seed,
        metadata=None if rollout is None else rollout.metadata,
        parent_episode_id=None if parent is None else parent.episode.id,
        inboxes=plan.inboxes,
        rollout=rollout,
    )
    episode.root.links = _links(parent)
    recorder.track(episode)
    no_train, in_reward = (False, False) if parent is None else (parent.no_train, parent.in_reward)
    return Scope(episode, episode.trajectory, episode.root.span_id, no_train=no_train, in_reward=in_reward, parent=scope)


def _is_inside_unrecorded(scope: Scope | None) -> bool:
    return scope is not None and scope is not IDLE and not scope.episode.recorded and not scope.episode.closed


def child_span(scope: Scope, kind: SpanKind, name: str) -> Span:
    """A span that starts in ``scope``; not yet taken in by its episode."""
    return Span(
        kind=kind,
        name=name,
        trace_id=scope.episode.trace_id,
        span_id=sources.span_id(),
        parent_id=scope.span_id,
        episode_id=scope.episode.id,
        trajectory_id=scope.trajectory.id,
        trajectory_name=scope.trajectory.name,
        started=sources.now(),
        no_train=scope.no_train,
        in_reward=scope.in_reward,
    )


def _links(parent: Scope | None) -> tuple[tuple[str, str], ...]:
    """To the span that an episode started in: ours of the outer episode, and the user's own, if there are such."""
    links: list[tuple[str, str]] = [] if parent is None else [(parent.episode.trace_id, parent.span_id)]
    trace = sys.modules.get("opentelemetry.trace")
    if trace is not None:
        user: Any = trace.get_current_span().get_span_context()
        if user.is_valid:
            links.append((f"{user.trace_id:032x}", f"{user.span_id:016x}"))
    return tuple(links)
