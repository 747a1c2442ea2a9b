"""Groups of rollouts and their rows in, units of credit out: what a group's baseline counts once. Pure.

A role whose agents were given rewards of their own is credited by trajectory, every other role by episode; a call that was given a
reward is a unit of its own besides; with returns to go, every reply is one. The key of a group is (task, role), so a group mixes neither
tasks nor roles unless ``group_by`` asks for it, and two agents of one name are two units. Nothing depends on how a trajectory was cut
into rows: a unit's tokens are its replies', in the order of calls.

Example: two rollouts of one task, rewards 1 and 0, one role: two units "episode", one group, whatever the number of rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, cast

import msgspec

from rllm_trace.types import Episode, Trajectory
from rllm_trainer.advantages.returns import returns_to_go
from rllm_trainer.exceptions import SettingError
from rllm_trainer.rollout.faults import leaves_gradient
from rllm_trainer.samples import SampleSet
from rllm_trainer.types import Group, Rollout, Sample

__all__ = ["Comparison", "Level", "Place", "Reply", "Unit", "find_replies", "find_units"]

Level = Literal["episode", "trajectory", "call", "to_go"]

ReplyKey = tuple[str, str, int]
"""Episode id, span id of the call, choice."""


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Trained tokens of a reply, where they lie in a row."""

    row: int
    """Number of the row in the batch."""
    start: int
    stop: int


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """One trained reply of a call."""

    key: ReplyKey
    trajectory_id: str
    role: str
    places: list[Place]
    """In the order of its tokens; several where an over-long row was split inside it."""
    shares: dict[str, float]
    """Trajectory id -> its share in the reply's credit: 1 for its own, unless other trajectories continue from it."""

    @property
    def tokens(self) -> int:
        return sum(place.stop - place.start for place in self.places)


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """What of the settings decides which units there are, and who is compared with whom."""

    group_by: Literal["role", "step", "task"] = "role"
    returns: Literal["whole", "to_go"] = "whole"
    discount: float = 1.0
    faults: Mapping[Any, str] = {}
    """Overrides of ``leaves_gradient``."""

    def key(self, task_id: str, role: str, *, kind: str = "", step: int | None = None) -> str:
        """Of a group."""
        parts = [task_id, "" if self.group_by == "task" else role]
        if kind:
            parts += [kind, str(step) if self.group_by == "step" else ""]
        return "\x1f".join(parts)


class Unit(msgspec.Struct, frozen=True, kw_only=True):
    """What a baseline counts once."""

    level: Level
    group: str
    """Key of its group."""
    role: str
    episode_id: str
    target: str
    """Id of the episode, of the trajectory, or span id of the call."""
    score: float
    baseline: float | None = None
    """What a greedy rollout of the same row was worth to this role; None: there is none, it was lost, or the unit is a call."""
    components: dict[str, float] = {}
    """Rewards of the rollout by name."""
    replies: list[ReplyKey]
    """Its trained replies, in order of the calls."""


def find_replies(sample_sets: Sequence[SampleSet], samples: Sequence[Sample]) -> dict[ReplyKey, Reply]:
    """Every trained reply of the rows, in the order of their calls.

    Args:
        samples: the rows of all sets, one set after another; their numbers are those of ``Place.row``.
    """
    places: dict[ReplyKey, list[tuple[int, Place]]] = {}
    owners: dict[ReplyKey, tuple[str, str]] = {}
    for number, sample in enumerate(samples):
        for span in sample.spans:
            if span.trained and span.stop > span.start:
                key = (sample.episode_id, span.span_id, span.choice)
                places.setdefault(key, []).append((span.offset, Place(row=number, start=span.start, stop=span.stop)))
                owners[key] = (span.trajectory_id, span.role)
    order: dict[ReplyKey, int] = {}
    shares: dict[ReplyKey, dict[str, float]] = {}
    for sample_set in sample_sets:
        found = _shares(sample_set)
        shares.update(found)
        for key in found:
            order[key] = len(order)
    return {
        key: Reply(
            key=key,
            trajectory_id=owners[key][0],
            role=owners[key][1],
            places=[place for _, place in sorted(parts, key=lambda part: part[0])],
            shares=shares.get(key, {owners[key][0]: 1.0}),
        )
        for key, parts in sorted(places.items(), key=lambda item: order.get(item[0], len(order)))
    }


def find_units(
    groups: Iterable[Group],
    replies: Mapping[ReplyKey, Reply],
    counts: Counter[str],
    *,
    comparison: Comparison | None = None,
    sample_sets: Mapping[str, SampleSet] | None = None,
) -> list[Unit]:
    """The units of all groups.

    Args:
        counts: what was found on the way is added here, by name.
        sample_sets: episode id -> its set; needed for returns to go.

    Raises:
        SettingError: a group mixes tasks, or rows of different content under one task id.
    """
    by_trajectory: dict[tuple[str, str], list[ReplyKey]] = {}
    for key, reply in replies.items():
        by_trajectory.setdefault((key[0], reply.trajectory_id), []).append(key)
    comparison = comparison or Comparison()
    units: list[Unit] = []
    for group in groups:
        _require_one_task(group)
        scored = [rollout for rollout in group.rollouts if _is_scored(rollout, counts, comparison.faults)]
        roles = dict.fromkeys(t.name for r in scored for t in _episode(r).trajectories if t.calls)
        for role in roles:
            members = [(r, [t for t in _episode(r).trajectories if t.name == role and t.calls]) for r in scored]
            members = [(rollout, trajectories) for rollout, trajectories in members if trajectories]
            if not any(by_trajectory.get((_episode(r).id, t.id)) for r, trajectories in members for t in trajectories):
                continue  # another model's role, or one of which nothing can be trained
            if comparison.returns == "to_go":
                units += _to_go_units(group.task_id, role, members, by_trajectory, sample_sets or {}, comparison)
                continue
            by_agent = any(t.reward is not None for _, trajectories in members for t in trajectories)
            make = _trajectory_units if by_agent else _episode_units
            made = make(comparison.key(group.task_id, role), role, members, by_trajectory, counts)
            baseline = _greedy_score(group.greedy, role, by_agent, comparison.faults)
            units += [msgspec.structs.replace(unit, baseline=baseline) for unit in made]
            units += _call_units(group.task_id, role, members, by_trajectory, comparison)
    return units


def _trajectory_units(
    group: str,
    role: str,
    members: Sequence[tuple[Rollout, list[Trajectory]]],
    by_trajectory: Mapping[tuple[str, str], list[ReplyKey]],
    counts: Counter[str],
) -> list[Unit]:
    units: list[Unit] = []
    for rollout, trajectories in members:
        episode = _episode(rollout)
        for trajectory in trajectories:
            score = trajectory.reward
            if score is None:
                score = _total(rollout)
                counts["trajectories_scored_by_episode"] += 1
            if score is None:
                counts["trajectories_unscored"] += 1
                continue
            units.append(
                Unit(
                    level="trajectory",
                    group=group,
                    role=role,
                    episode_id=episode.id,
                    target=trajectory.id,
                    score=score,
                    components=rollout.rewards,
                    replies=by_trajectory.get((episode.id, trajectory.id), []),
                )
            )
    return units


def _episode_units(
    group: str,
    role: str,
    members: Sequence[tuple[Rollout, list[Trajectory]]],
    by_trajectory: Mapping[tuple[str, str], list[ReplyKey]],
    counts: Counter[str],
) -> list[Unit]:
    units: list[Unit] = []
    for rollout, trajectories in members:
        episode, score = _episode(rollout), _total(rollout)
        if score is None:
            counts["episodes_unscored"] += 1
            continue
        units.append(
            Unit(
                level="episode",
                group=group,
                role=role,
                episode_id=episode.id,
                target=episode.id,
                score=score,
                components=rollout.rewards,
                replies=[key for t in trajectories for key in by_trajectory.get((episode.id, t.id), [])],
            )
        )
    return units


def _call_units(
    task_id: str,
    role: str,
    members: Sequence[tuple[Rollout, list[Trajectory]]],
    by_trajectory: Mapping[tuple[str, str], list[ReplyKey]],
    comparison: Comparison,
) -> list[Unit]:
    units: list[Unit] = []
    for rollout, trajectories in members:
        episode = _episode(rollout)
        scores = _call_scores(episode)
        for trajectory in trajectories:
            for step, call in enumerate(trajectory.calls):
                score = scores.pop(call.span_id, None)  # a call that stands in the record twice is compared once
                if score is not None:
                    units.append(
                        Unit(
                            level="call",
                            group=comparison.key(task_id, role, kind="call", step=step),
                            role=role,
                            episode_id=episode.id,
                            target=call.span_id,
                            score=score,
                            replies=[key for key in by_trajectory.get((episode.id, trajectory.id), []) if key[1] == call.span_id],
                        )
                    )
    return units


def _to_go_units(
    task_id: str,
    role: str,
    members: Sequence[tuple[Rollout, list[Trajectory]]],
    by_trajectory: Mapping[tuple[str, str], list[ReplyKey]],
    sample_sets: Mapping[str, SampleSet],
    comparison: Comparison,
) -> list[Unit]:
    """One for each reply that is trained, or would be if its rollout had not been rejected: that one is compared all the same."""
    units: list[Unit] = []
    for rollout, trajectories in members:
        episode = _episode(rollout)
        if episode.id not in sample_sets:
            continue
        final = {t.id: t.reward if t.reward is not None else _total(rollout) for t in episode.trajectories}
        found = returns_to_go(sample_sets[episode.id], own=_call_scores(episode), final=final, discount=comparison.discount)
        for trajectory in trajectories:
            steps = {call.span_id: step for step, call in enumerate(trajectory.calls)}
            trained = set(by_trajectory.get((episode.id, trajectory.id), []))
            for span in sample_sets[episode.id].spans:
                key = (episode.id, span.span_id, span.choice)
                if span.trajectory_id == trajectory.id and span.trains and key[1:] in found:
                    units.append(
                        Unit(
                            level="to_go",
                            group=comparison.key(task_id, role, kind="to_go", step=steps[key[1]]),
                            role=role,
                            episode_id=episode.id,
                            target=key[1],
                            score=found[key[1:]],
                            replies=[key] if key in trained else [],
                        )
                    )
    return units


def _call_scores(episode: Episode) -> dict[str, float]:
    """Span id of each call with rewards of its own -> their weighted sum."""
    calls = {call.span_id for trajectory in episode.trajectories for call in trajectory.calls}
    scores: Counter[str] = Counter()
    seen: set[str] = set()
    for reward in [*episode.rewards, *(reward for trajectory in episode.trajectories for reward in trajectory.rewards)]:
        if reward.target in calls and not reward.superseded:
            scores[reward.target] += cast("int", reward.weight * reward.value)
            seen.add(reward.target)
    return {span_id: float(scores[span_id]) for span_id in seen}


def _shares(sample_set: SampleSet) -> dict[ReplyKey, dict[str, float]]:
    """Each reply's credit, split over the trajectories that end below it: a token's worth is the mean over what came of it.

    A trajectory has as many parts as it has ends (replies that nothing continues) below the token; the reply's own has at least one.
    """
    spans = sample_set.spans
    parts: list[Counter[str]] = [Counter() for _ in spans]
    children = [0] * len(spans)
    for span in spans:
        if span.parent >= 0:
            children[span.parent] += 1
    waiting = [index for index, count in enumerate(children) if count == 0]
    while waiting:
        index = waiting.pop()
        span = spans[index]
        parts[index][span.trajectory_id] = max(1, parts[index][span.trajectory_id])
        if span.parent >= 0:
            parts[span.parent].update(parts[index])
            children[span.parent] -= 1
            if children[span.parent] == 0:
                waiting.append(span.parent)
    return {
        (sample_set.episode_id, span.span_id, span.choice): {name: count / own.total() for name, count in sorted(own.items())}
        for span, own in zip(spans, parts, strict=True)
    }


def _greedy_score(greedy: Rollout | None, role: str, by_agent: bool, faults: Mapping[Any, str]) -> float | None:
    """What the greedy rollout was worth, as the role's units are scored: the mean of its agents' rewards, or the episode's."""
    if greedy is None or leaves_gradient(greedy.fault, faults):
        return None
    if by_agent and greedy.episode is not None:
        own = [t.reward for t in greedy.episode.trajectories if t.name == role and t.reward is not None]
        if own:
            return sum(own) / len(own)
    return _total(greedy)


def _is_scored(rollout: Rollout, counts: Counter[str], faults: Mapping[Any, str]) -> bool:
    if rollout.episode is None or leaves_gradient(rollout.fault, faults):
        counts["rollouts_left_out"] += 1
        return False
    return True


def _total(rollout: Rollout) -> float | None:
    """The episode's score; a failure that is trained and that nobody scored is 0."""
    return 0.0 if rollout.reward is None and rollout.fault is not None else rollout.reward


def _episode(rollout: Rollout) -> Episode:
    assert rollout.episode is not None
    return rollout.episode


def _require_one_task(group: Group) -> None:
    for rollout in group.rollouts:
        if rollout.task_id != group.task_id:
            raise SettingError(f"group {group.task_id!r} holds a rollout of task {rollout.task_id!r}; a baseline is taken over one task")
        if not _same(rollout.row, group.rollouts[0].row):
            raise SettingError(
                f"task {group.task_id!r} stands for rows of different content; equal ids must mean equal rows: give each row its own id"
            )


def _same(left: object, right: object) -> bool:
    if left is right:
        return True
    try:
        return bool(left == right)
    except Exception:  # noqa: BLE001 - arrays in a row have no single truth value; compare what they show
        return repr(left) == repr(right)
