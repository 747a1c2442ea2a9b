"""Groups and rows in, rows with advantages out: units are scored by the rule, then each trained token gets its units' word.

A token whose call has a reward of its own gets that call's advantage. Any other gets the mean over the trajectories that contain it,
weighted by how many ends each has below it: its own alone in the usual case. What was decided is kept with the row.

Worked example, rule ``grpo`` without division by the deviation: rewards 1, 0, 0, 1 have the mean 0.5, so every trained token of the
first and last episode has advantage 0.5, of the others -0.5, be it in one row or in five.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from rllm_trainer.advantages.base import Estimates, Estimator, Rule, Units
from rllm_trainer.advantages.rules import rule_named
from rllm_trainer.advantages.units import Level, Reply, ReplyKey, Unit, find_replies, find_units
from rllm_trainer.config import Settings
from rllm_trainer.exceptions import SettingError
from rllm_trainer.samples import SampleSet
from rllm_trainer.types import Float32, Group, Row, Sample, SpanCredit

__all__ = ["CreditCounters", "Credited", "credit"]

Algorithm = str | Mapping[str, str]
"""verl's name of a rule, or one for each role."""


class CreditCounters(msgspec.Struct, frozen=True, kw_only=True):
    """What the groups of a batch were like."""

    units: int = 0
    groups: int = 0
    groups_of_one: int = 0
    """Groups with one unit: no baseline, advantage 0."""
    groups_without_spread: int = 0
    """Groups of two or more whose scores are all equal: nothing to learn from."""
    groups_with_other_prompts: int = 0
    """Groups whose units do not all start with the same prompt: normal for a judge, worth knowing for a solver."""
    units_by_level: dict[str, int] = {}
    shared_replies: int = 0
    """Replies whose credit is a mean over several trajectories."""
    uncredited_replies: int = 0
    """Trained replies that no scored unit contains: advantage 0, in the denominator."""
    other: dict[str, int] = {}
    """Rollouts left out, trajectories without a score, by name."""

    def measures(self) -> dict[str, float]:
        """As flat metrics."""
        flat = {name: float(value) for name, value in msgspec.structs.asdict(self).items() if isinstance(value, int)}
        nested = {**{f"units_{level}": count for level, count in self.units_by_level.items()}, **self.other}
        return {f"credit/{name}": float(value) for name, value in {**flat, **nested}.items()}


class Credited(list[Row]):
    """The rows, and what was counted on the way."""

    counters: CreditCounters = CreditCounters()


def credit(
    groups: Sequence[Group],
    samples: Mapping[str, SampleSet],
    *,
    settings: Settings,
    estimator: Estimator,
    algorithm: Algorithm | None = None,
    by_step: bool = False,
) -> Credited:
    """Rows with advantages, in the order of groups, rollouts and rows.

    Args:
        samples: episode id -> its rows; episodes that are not here are not trained, and their scores count in their groups.
        estimator: runs verl's rules; the engine.
        algorithm: overrides ``settings.algorithm``; may name a rule for each role.
        by_step: calls with rewards of their own are compared only with calls of the same number.

    Raises:
        SettingError: an unknown or refused rule; a role without one; a group that mixes tasks.
    """
    algorithm = settings.algorithm if algorithm is None else algorithm
    sample_sets = [samples[r.episode.id] for g in groups for r in g.rollouts if r.episode is not None and r.episode.id in samples]
    task_of = {r.episode.id: g.task_id for g in groups for r in g.rollouts if r.episode is not None}
    rows = [sample for sample_set in sample_sets for sample in sample_set.samples]
    replies = find_replies(sample_sets, rows)
    counts: Counter[str] = Counter()
    units = find_units(groups, replies, counts, by_step=by_step)
    reference = _reference_logprobs(rows, settings, estimator)
    advantages: dict[int, Float32] = {}
    sizes = Counter(unit.group for unit in units)
    spread: dict[str, list[float]] = {}
    for (name, _), numbers in _batches(units, algorithm).items():
        rule = rule_named(name)
        alone = [number for number in numbers if rule.grouped and sizes[units[number].group] == 1]
        compared = [number for number in numbers if number not in set(alone)]
        advantages.update({number: np.zeros(_length(units[number], replies), np.float32) for number in alone})
        advantages.update(_estimated(rule, compared, units, replies, rows, reference, estimator, settings, spread))
    credited = Credited(_rows(rows, task_of, units, advantages, replies, algorithm, reference, settings))
    credited.counters = _counters(units, replies, rows, sizes, spread, counts)
    return credited


def _batches(units: Sequence[Unit], algorithm: Algorithm) -> dict[tuple[str, Level], list[int]]:
    """Units that one call of an estimator sees: one rule, one level (rewards of calls and of episodes are different things)."""
    found: dict[tuple[str, Level], list[int]] = {}
    for number, unit in enumerate(units):
        found.setdefault((_rule_of(unit.role, algorithm), unit.level), []).append(number)
    return found


def _rule_of(role: str, algorithm: Algorithm) -> str:
    if isinstance(algorithm, str):
        return algorithm
    if role not in algorithm:
        raise SettingError(
            f"algorithm names no rule for role {role!r}; it has {', '.join(sorted(algorithm))}: add one for every role that is trained"
        )
    return algorithm[role]


def _estimated(
    rule: Rule,
    numbers: Sequence[int],
    units: Sequence[Unit],
    replies: Mapping[ReplyKey, Reply],
    rows: Sequence[Sample],
    reference: Sequence[Float32] | None,
    estimator: Estimator,
    settings: Settings,
    spread: dict[str, list[float]],
) -> dict[int, Float32]:
    if not numbers:
        return {}
    chosen = [units[number] for number in numbers]
    lengths = [_length(unit, replies) for unit in chosen]
    given = Units(
        lengths=np.array(lengths, np.int32),
        scores=np.array([unit.score for unit in chosen], np.float32),
        groups=[unit.group for unit in chosen],
        old_logprobs=_gather(chosen, replies, [row.logprobs for row in rows]),
        ref_logprobs=None if reference is None or settings.kl_in == "loss" else _gather(chosen, replies, reference),
        sum_pi_squared=_sum_pi_squared(rule, chosen, replies, rows, estimator),
        components=_components(chosen) if "components" in rule.needs else {},
    )
    found = _own_rule(rule, given) if rule.function is not None else estimator.estimate(rule.name, given)
    parts = np.split(found.advantages, np.cumsum(lengths)[:-1])
    by_group: dict[str, list[float]] = {}
    for unit, total in zip(chosen, found.totals.tolist(), strict=True):
        by_group.setdefault(unit.group, []).append(total)
    spread.update(by_group)
    still = {group for group, totals in by_group.items() if max(totals) == min(totals)} if rule.inert_without_spread else set[str]()
    return {number: np.zeros_like(part) if units[number].group in still else part for number, part in zip(numbers, parts, strict=True)}


def _own_rule(rule: Rule, units: Units) -> Estimates:
    assert rule.function is not None
    advantages = np.asarray(rule.function(units), np.float32)
    expected = int(units.lengths.sum())
    if advantages.shape != (expected,) or not np.isfinite(advantages).all():
        raise SettingError(
            f"algorithm={rule.name!r} gave {advantages.shape} advantages, or not all finite; expected ({expected},), one for each "
            "trained token, units one after another"
        )
    return Estimates(advantages=advantages, totals=units.scores)


def _rows(
    samples: Sequence[Sample],
    task_of: Mapping[str, str],
    units: Sequence[Unit],
    advantages: Mapping[int, Float32],
    replies: Mapping[ReplyKey, Reply],
    algorithm: Algorithm,
    reference: Sequence[Float32] | None,
    settings: Settings,
) -> list[Row]:
    tokens = [np.zeros(len(sample.token_ids), np.float32) for sample in samples]
    credits: list[list[SpanCredit]] = [[] for _ in samples]
    own = _own_advantages(units, advantages, replies)
    by_call = {key: number for number, unit in enumerate(units) if unit.level == "call" for key in unit.replies}
    by_trajectory = {
        (key[0], replies[key].trajectory_id): number for number, unit in enumerate(units) if unit.level != "call" for key in unit.replies
    }
    for key, reply in replies.items():
        number = by_call.get(key)
        if number is not None:
            values, shares = own[number][key], {units[number].target: 1.0}
        else:
            values, shares = _mean_over_trajectories(key, reply, by_trajectory, advantages, own)
        chosen = number if number is not None else by_trajectory.get((key[0], reply.trajectory_id))
        record = SpanCredit(
            span_id=key[1],
            choice=key[2],
            level="none" if chosen is None else units[chosen].level,
            rule=_rule_of(reply.role, algorithm),
            score=None if chosen is None else units[chosen].score,
            shares=shares,
        )
        begin = 0
        for place in reply.places:
            size = place.stop - place.start
            tokens[place.row][place.start : place.stop] = values[begin : begin + size]
            credits[place.row].append(record)
            begin += size
    return [
        Row(
            sample=sample,
            advantages=tokens[number],
            weights=sample.trained_mask.astype(np.float32),
            old_logprobs=sample.logprobs,
            ref_logprobs=None if reference is None or settings.kl_in == "reward" else reference[number],
            group=task_of[sample.episode_id],
            credit=credits[number],
        )
        for number, sample in enumerate(samples)
    ]


def _own_advantages(
    units: Sequence[Unit], advantages: Mapping[int, Float32], replies: Mapping[ReplyKey, Reply]
) -> dict[int, dict[ReplyKey, Float32]]:
    """Unit -> reply -> the advantages of its tokens in that unit's line."""
    found: dict[int, dict[ReplyKey, Float32]] = {}
    for number, unit in enumerate(units):
        ends = np.cumsum([replies[key].tokens for key in unit.replies])
        found[number] = dict(zip(unit.replies, np.split(advantages[number], ends[:-1]) if unit.replies else [], strict=True))
    return found


def _mean_over_trajectories(
    key: ReplyKey,
    reply: Reply,
    by_trajectory: Mapping[tuple[str, str], int],
    advantages: Mapping[int, Float32],
    own: Mapping[int, Mapping[ReplyKey, Float32]],
) -> tuple[Float32, dict[str, float]]:
    """The reply's tokens stand in its own trajectory's line; another that continues from it has its word at its first token."""
    parts: dict[str, tuple[float, Float32 | float]] = {}
    for trajectory_id, share in reply.shares.items():
        number = by_trajectory.get((key[0], trajectory_id))
        if number is None or not len(advantages[number]):
            continue
        parts[trajectory_id] = (share, own[number].get(key, float(advantages[number][0])))
    whole = sum(share for share, _ in parts.values())
    values = np.zeros(reply.tokens, np.float32)
    for share, value in parts.values():
        values += np.float32(share / whole) * value
    return values, {trajectory_id: share / whole for trajectory_id, (share, _) in parts.items()}


def _length(unit: Unit, replies: Mapping[ReplyKey, Reply]) -> int:
    return sum(replies[key].tokens for key in unit.replies)


def _gather(units: Sequence[Unit], replies: Mapping[ReplyKey, Reply], per_row: Sequence[Float32]) -> Float32:
    parts = [per_row[p.row][p.start : p.stop] for unit in units for key in unit.replies for p in replies[key].places]
    return np.concatenate(parts) if parts else np.zeros(0, np.float32)


def _components(units: Sequence[Unit]) -> dict[str, Float32]:
    names = sorted({name for unit in units for name in unit.components})
    return {name: np.array([unit.components.get(name, 0.0) for unit in units], np.float32) for name in names}


def _reference_logprobs(rows: Sequence[Sample], settings: Settings, estimator: Estimator) -> list[Float32] | None:
    if settings.kl_coef == 0 or not rows:
        return None
    return estimator.logprobs([row.token_ids for row in rows], temperatures=[row.temperature for row in rows], reference=True)


def _sum_pi_squared(
    rule: Rule, units: Sequence[Unit], replies: Mapping[ReplyKey, Reply], rows: Sequence[Sample], estimator: Estimator
) -> Float32 | None:
    if "sum_pi_squared" not in rule.needs:
        return None
    return _gather(units, replies, estimator.sum_pi_squared([r.token_ids for r in rows], temperatures=[r.temperature for r in rows]))


def _counters(
    units: Sequence[Unit],
    replies: Mapping[ReplyKey, Reply],
    rows: Sequence[Sample],
    sizes: Mapping[str, int],
    spread: Mapping[str, Sequence[float]],
    counts: Counter[str],
) -> CreditCounters:
    covered = {key for unit in units for key in unit.replies}
    prompts: dict[str, set[bytes]] = {}
    for unit in units:
        if unit.replies:
            place = replies[unit.replies[0]].places[0]
            prompts.setdefault(unit.group, set()).add(rows[place.row].token_ids[: place.start].tobytes())
    return CreditCounters(
        units=len(units),
        groups=len(sizes),
        groups_of_one=sum(size == 1 for size in sizes.values()),
        groups_without_spread=sum(len(totals) > 1 and max(totals) == min(totals) for totals in spread.values()),
        groups_with_other_prompts=sum(len(found) > 1 for found in prompts.values()),
        units_by_level=dict(Counter(unit.level for unit in units)),
        shared_replies=sum(len(reply.shares) > 1 for reply in replies.values()),
        uncredited_replies=sum(key not in covered for key in replies),
        other=dict(counts),
    )
