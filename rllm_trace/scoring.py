"""An ended episode and code that scores it in; the episode with what that code called, recorded under a span of its own, out.

    scoring = Scoring(episode, "judge")
    with scoring.running():
        value = judge(episode.output)
    episode = scoring.ended([Reward(name="judge", value=value, span_id=scoring.span_id)])

Calls inside keep their own endpoint and are never trained, as those of a reward that is called while the app runs. The span and its
calls go to the exporters, into the trace of the episode, and the rewards to the app's own store; what ends after ``ended`` is counted as
late.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from typing import Final

import msgspec

from rllm_trace import attributes as A
from rllm_trace._context import Scope, enter, leave
from rllm_trace._episode import child_span
from rllm_trace._guard import counters, guard, warn_once
from rllm_trace._instruments import ensure_instrumented
from rllm_trace._open import OpenEpisode
from rllm_trace._recorder import recorder
from rllm_trace._rewards import facts_of, give_to_stores
from rllm_trace._spans import Span, error_info, made, sources
from rllm_trace.episodes import build_episode, with_rewards
from rllm_trace.types import Episode, Reward, Trajectory

__all__ = ["Scoring"]


class _Keeper:
    """Sends spans on to the exporters; the record is made by whoever scores."""

    def ended(self, episode: OpenEpisode, span: Span) -> None:
        if episode.exported:
            for sink in recorder.span_sinks:
                with guard("exporter"):
                    sink.put(made(span))

    def came_late(self, episode: OpenEpisode, span: Span) -> None:
        counters.add("late", span.kind)
        self.ended(episode, span)

    def hurry(self) -> None: ...

    def returned(self, episode: OpenEpisode) -> None: ...

    def done(self, episode: OpenEpisode) -> None: ...


_keeper: Final = _Keeper()


class Scoring:
    """One reward function at work on one episode that has ended."""

    def __init__(self, episode: Episode, name: str) -> None:
        ensure_instrumented()
        self._episode = episode
        self._open = OpenEpisode(
            _keeper,
            id=episode.id,
            trace_id=episode.trace_id,
            span_id=episode.span_id,
            workflow=episode.workflow,
            exported=bool(recorder.span_sinks),
            keeps_content=True,
            task_id=episode.task_id,
            session_id=episode.session_id,
        )
        outer = Scope(self._open, self._open.trajectory, episode.span_id, no_train=True, in_reward=False, parent=None)
        self._span = child_span(outer, "reward", name)
        self._span.in_reward = True
        self._scope = outer.inside(span_id=self._span.span_id, in_reward=True)
        self._open.start(self._span)

    @property
    def span_id(self) -> str:
        """Of the reward: parent of the calls that are made in it."""
        return self._span.span_id

    @contextlib.contextmanager
    def running(self) -> Generator[None]:
        """The function's code runs; around ``await`` too, and more than once where it runs in parts."""
        before = enter(self._scope)
        try:
            yield
        except BaseException as error:
            self._span.error = error_info(error)
            raise
        finally:
            leave(self._scope, before)

    def ended(self, given: Sequence[Reward] = ()) -> Episode:
        """The episode with these rewards and with the calls that were made. Raises UnknownEpisodeError for a reward of a span it lacks."""
        self._span.facts = facts_of(list(given)) if given else {}
        self._span.ended = sources.now()
        self._open.end(self._span)
        root = self._open.root.copy()
        root.ended, root.facts[A.TERMINATION] = sources.now(), "completed"
        spans = [made(span) for span in self._open.close()]
        nested = [span for span in spans if span.kind == "reward" and span is not self._span]
        if nested:
            counters.add("orphan", "reward", len(nested))
            warn_once(
                f"reward inside:{self._span.name}",
                f"the reward {self._span.name!r} called {nested[0].name!r}, which is a reward too: after the app, only what the outer one "
                "returns scores the episode. Return a dict to give several by name",
            )
        found = build_episode([*(span for span in spans if span.kind != "reward"), root])
        scored = with_rewards(_with_calls(self._episode, found.trajectories), given)
        if given:
            with guard("exporter"):
                give_to_stores(scored.id, given)
        return scored


def _with_calls(episode: Episode, found: Sequence[Trajectory]) -> Episode:
    """The episode with the calls and tools of ``found``, each in its trajectory, after those that were there."""
    found = [trajectory for trajectory in found if trajectory.calls or trajectory.tools]
    if not found:
        return episode
    more = {trajectory.id: trajectory for trajectory in found}
    joined = [
        trajectory
        if (added := more.pop(trajectory.id, None)) is None
        else msgspec.structs.replace(trajectory, calls=[*trajectory.calls, *added.calls], tools=[*trajectory.tools, *added.tools])
        for trajectory in episode.trajectories
    ]
    return msgspec.structs.replace(episode, trajectories=[*joined, *more.values()])
