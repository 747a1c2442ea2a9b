"""``reward`` and ``add_reward``: scores for an episode, a trajectory or a call, given while it runs or at any time after.

A reward function scores what it is called in: the innermost agent, else the episode. What it returns and raises is the app's and passes
through unchanged; a value that is no reward is counted, warned of, and kept with the rollout as its fault. LLM calls that it makes are
recorded under its span and never trained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar, overload

import msgspec

from rllm_trace import attributes as A
from rllm_trace._activity import UNTOUCHED, Activity
from rllm_trace._context import Scope, current
from rllm_trace._decorators import checked_name, name_of
from rllm_trace._episode import child_span, recording_scope
from rllm_trace._given import text
from rllm_trace._guard import counters, guard, warn_once
from rllm_trace._inbox import replace_delivered
from rllm_trace._open import OpenEpisode
from rllm_trace._recorder import RewardSink, recorder
from rllm_trace._shapes import wrap
from rllm_trace._spans import Span, error_info, sources
from rllm_trace._values import number, rewards_of
from rllm_trace.episodes import with_rewards
from rllm_trace.exceptions import RewardError, UnknownEpisodeError
from rllm_trace.rollouts import RewardFault
from rllm_trace.types import ErrorInfo, Reward

__all__ = ["add_reward", "facts_of", "reward"]

_HANDOVER: Final = 1.0
"""Seconds that an episode which has just ended may take to be delivered."""

F = TypeVar("F", bound=Callable[..., Any])


class RewardActivity(Activity):
    """A reward function inside an episode: one span, whose rewards are known when it returns."""

    __slots__ = ("kind", "name", "span", "target")

    def __init__(self, scope: Scope, span: Span, name: str, kind: RewardKind, target: str | None) -> None:
        super().__init__(scope)
        self.span = span
        self.name = name
        self.kind = kind
        self.target = target
        """Id of the agent's trajectory that it scores; None: the episode."""

    def succeed(self, result: Any) -> None:
        with guard("reward"):
            try:
                given = rewards_of(result, self.name, self.kind.weight, target=self.target, span_id=self.span.span_id)
            except RewardError as error:
                self._refuse(error_info(error))
                warn_once(f"reward:{self.name}", f"{error}. It was not recorded", stacklevel=5)
            else:
                self.span.facts = facts_of(given)
        self._end()

    def fail(self, error: BaseException) -> None:
        with guard("reward"):
            self._refuse(error_info(error))
        self._end()

    def _refuse(self, error: ErrorInfo) -> None:
        self.span.error = error
        counters.add("failed", "reward")
        episode = self._episode()
        if episode.rollout is not None:
            episode.rollout.reward_faults.append(RewardFault(name=self.name, episode_id=episode.id, error=error))

    def _end(self) -> None:
        with guard("reward"):
            self.span.ended = sources.now()
            self._episode().end(self.span)

    def _episode(self) -> OpenEpisode:
        assert self.scope is not None
        return self.scope.episode


class RewardKind(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one ``@reward``."""

    name: str | None
    weight: float

    def begin(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Activity:
        scope = current()
        inside = recording_scope(scope)
        begun: Activity | None = None
        with guard("reward"):
            name = self.name or name_of(function)
            if inside is None:
                _unattached(scope, name)
            else:
                begun = self._begin(inside, name)
        return begun or UNTOUCHED

    def _begin(self, scope: Scope, name: str) -> Activity | None:
        target = scope.trajectory.id if scope.trajectory.explicit else None
        span = child_span(scope, "reward", name)
        span.in_reward = True
        if not scope.episode.start(span):
            return None
        inner = scope.inside(span_id=span.span_id, no_train=True, in_reward=True)
        return RewardActivity(inner, span, name, self, target)


def _unattached(scope: Scope | None, name: str) -> None:
    """A reward that no open episode takes in: said once, unless the workflow around it is simply not recorded."""
    if scope is not None and not scope.episode.recorded:
        return
    if scope is None:
        recorder.check_environment()
        if recorder.disabled:
            return
    where = "outside a workflow" if scope is None else "after its workflow had ended"
    counters.add("orphan" if scope is None else "late", "reward")
    warn_once(
        f"reward outside:{name}",
        f"the reward {name!r} was called {where}: it returns its value and scores nothing. "
        "Call it inside the workflow, or give the value to rllm.add_reward(value, name=..., episode_id=...)",
        stacklevel=6,
    )


@overload
def reward(function: F, /) -> F: ...


@overload
def reward(*, name: str | None = None, weight: float = 1.0) -> Callable[[F], F]: ...


def reward(function: F | None = None, /, *, name: str | None = None, weight: float = 1.0) -> F | Callable[[F], F]:
    """Marks a function, plain or async, whose result scores the innermost agent that it is called in, else the episode.

    It returns a finite number, a bool, a dict of them by name, or ``rllm.Reward``. The total of a scope is the sum of weight * value; of
    two rewards of one name in one scope the later counts. Rewards that call one another each score. Raises ConfigurationError for what
    cannot be decorated, RewardError for a weight that is no finite number.
    """
    kind = RewardKind(name=checked_name("reward", name), weight=number(weight, f"{name or 'reward'} (its weight)"))
    if function is None:
        return lambda wrapped: wrap(wrapped, kind)
    return wrap(function, kind)


def add_reward(value: Any, *, name: str = "reward", weight: float = 1.0, episode_id: str | None = None, span_id: str | None = None) -> None:
    """Scores an episode of this process or of its store, running or ended. ``value`` is what a reward function may return.

    ``episode_id``: None is the running one. ``span_id``: of the trajectory or call that is scored; None: the episode. An episode that has
    been delivered is replaced, in the lists of ``collect`` and of rollouts that hold it, by a copy with the reward; the store keeps it with
    the episode, also with one of another process; exporters get it as a span of the trace. Raises RewardError for what is no reward,
    UnknownEpisodeError where nothing holds the episode (any more), ConfigurationError for a name or an id that is no text.
    """
    text(name, "name")
    text(episode_id, "episode_id", or_none=True)
    text(span_id, "span_id", or_none=True)
    scope = current()
    episode = scope.episode if episode_id is None and scope is not None else recorder.open_episodes.get(episode_id or "")
    given = rewards_of(value, name, number(weight, name), target=span_id, span_id=None)
    if episode is not None and not episode.recorded:
        return
    if episode is not None and _give(episode, given):
        return
    known = episode.id if episode is not None else episode_id
    if known is None:
        raise UnknownEpisodeError("add_reward was called outside a workflow without an episode; give episode_id=, such as episodes[0].id")
    _give_late(known, given)


def _give(episode: OpenEpisode, given: list[Reward]) -> bool:
    """Takes the rewards into an episode that is still open."""
    root = episode.root
    span = _span(episode.id, root.trace_id, root.span_id, root.name, given)
    if not episode.start(span):
        return False
    episode.end(span)
    return True


def _give_late(episode_id: str, given: list[Reward]) -> None:
    """Gives the rewards to an episode that has ended."""
    known = recorder.delivered.get(episode_id)
    if known is None and recorder.writer.wait_idle(_HANDOVER):
        known = recorder.delivered.get(episode_id)
    held = replace_delivered(episode_id, lambda episode: with_rewards(episode, given)) > 0
    held |= give_to_stores(episode_id, given)
    if known is not None:
        for sink in recorder.span_sinks:
            sink.put(_span(episode_id, *known, given))
            held = True
    if not held:
        raise UnknownEpisodeError(
            f"no episode {episode_id!r} is held in this process any more; keep the list of collect(), or configure a store or an exporter"
        )
    counters.add("recorded", "late reward", len(given))


def give_to_stores(episode_id: str, given: Sequence[Reward]) -> bool:
    """Whether a store of this process has the episode, which now has the rewards there."""
    stores = [sink for sink in recorder.episode_sinks if isinstance(sink, RewardSink)]
    held = [sink.give(episode_id, given) for sink in stores]
    return any(held)


def _span(episode_id: str, trace_id: str, root_id: str, workflow: str, given: list[Reward]) -> Span:
    """The span of rewards that no function of the app gave: it has no duration."""
    now = sources.now()
    return Span(
        kind="reward",
        name=given[0].name,
        trace_id=trace_id,
        span_id=sources.span_id(),
        parent_id=given[0].target or root_id,
        episode_id=episode_id,
        trajectory_id=root_id,
        trajectory_name=workflow,
        started=now,
        ended=now,
        in_reward=True,
        facts=facts_of(given),
    )


def facts_of(given: list[Reward]) -> dict[str, Any]:
    """What a reward span says: every reward, and the first one's fields for whoever shows one."""
    first = given[0]
    facts: dict[str, Any] = {
        A.REWARD_VALUES: given,
        A.REWARD_NAME: first.name,
        A.REWARD_VALUE: first.value,
        A.REWARD_WEIGHT: first.weight,
    }
    if first.target is not None:
        facts[A.REWARD_TARGET] = first.target
    return facts
