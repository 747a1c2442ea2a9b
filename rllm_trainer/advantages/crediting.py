"""Groups and rows in, rows with advantages out: units are scored by the rule, then each trained token gets its units' word.

A token whose call has a reward of its own (or a return to go) gets that call's advantage. Any other gets the mean over the trajectories
that contain it, weighted by how many ends each has below it: its own alone in the usual case. What was decided is kept with the row.

Worked example, rule ``grpo`` without division by the deviation: rewards 1, 0, 0, 1 have the mean 0.5, so every trained token of the
first and last episode has advantage 0.5, of the others -0.5, be it in one row or in five.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec
import numpy as np

from rllm_trainer.advantages.base import Estimates, Estimator, Rule, Units
from rllm_trainer.advantages.greedy import greedy_rule
from rllm_trainer.advantages.rules import rule_named
from rllm_trainer.advantages.units import Comparison, Reply, ReplyKey, Unit, find_replies, find_units
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
    groups_left_out: int = 0
    """Tasks whose rollouts gave no signal, and which ``refill`` left out for that; part of no number above."""
    groups_of_several_roles: int = 0
    """Groups that compare one role with another, because ``group_by`` is ``task``."""
    groups_with_other_prompts: int = 0
    """Groups whose units do not all start with the same prompt: normal for a judge, worth knowing for a solver."""
    units_by_level: dict[str, int] = {}
    shared_replies: int = 0
    """Replies whose credit is a mean over several trajectories."""
    uncredited_replies: int = 0
    """Trained replies that no scored unit contains: advantage 0, in the denominator."""
    other: dict[str, int] = {}
    """Rollouts left out, trajectories without a score, by name."""

    @property
    def groups_without_signal(self) -> int:
        """Of ``groups`` and ``groups_left_out`` together."""
        return self.groups_of_one + self.groups_without_spread + self.groups_left_out

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
) -> Credited:
    """Rows with advantages, in the order of groups, rollouts and rows.

    Args:
        samples: episode id -> its rows; episodes that are not here are not trained, and their scores count in their groups.
        estimator: runs verl's rules; the engine.
        algorithm: overrides ``settings.algorithm``; may name a rule for each role.

    Raises:
        SettingError: an unknown or refused rule; a role without one; a group that mixes tasks.
    """
    asked = settings.algorithm if algorithm is None else algorithm
    _require_greedy_rollouts(groups, asked)
    sample_sets = [samples[r.episode.id] for g in groups for r in g.rollouts if r.episode is not None and r.episode.id in samples]
    rows = [sample for sample_set in sample_sets for sample in sample_set.samples]
    replies = find_replies(sample_sets, rows)
    counts: Counter[str] = Counter()
    comparison = Comparison(group_by=settings.group_by, returns=settings.returns, discount=settings.discount, faults=settings.faults)
    units = find_units(groups, replies, counts, comparison=comparison, sample_sets=samples)
    case = _Case(
        settings=settings,
        estimator=estimator,
        algorithm=asked,
        samples=rows,
        tasks={r.episode.id: g.task_id for g in groups for r in g.rollouts if r.episode is not None},
        replies=replies,
        units=_penalised(units, replies, settings, counts),
        reference=_reference_logprobs(rows, settings, estimator),
    )
    estimates = case.estimates()
    credited = Credited(case.rows(estimates.advantages))
    left_out = {s.task_id for s in sample_sets if any(aside.reason == "group without signal" for aside in s.set_aside)}
    credited.counters = msgspec.structs.replace(case.counters(estimates, counts), groups_left_out=len(left_out))
    return credited


class _Estimated(msgspec.Struct, frozen=True, kw_only=True):
    advantages: list[Float32]
    """For each unit, one entry a token of its line."""
    totals: dict[str, list[float]]
    """Group -> scores of its units, KL penalties included; groups of one are not here where the rule compares."""


@dataclass(frozen=True, kw_only=True)
class _Case:
    """One batch to be credited."""

    settings: Settings
    estimator: Estimator
    algorithm: Algorithm
    samples: Sequence[Sample]
    tasks: Mapping[str, str]
    """Episode id -> task id."""
    replies: Mapping[ReplyKey, Reply]
    units: Sequence[Unit]
    reference: Sequence[Float32] | None
    """For each row, if there is a KL term."""

    def estimates(self) -> _Estimated:
        """Every unit's advantages: one run of an estimator for each rule and level."""
        found = _Estimated(advantages=[np.zeros(self._length(unit), np.float32) for unit in self.units], totals={})
        sizes = Counter(unit.group for unit in self.units)
        runs: dict[tuple[str, str], list[int]] = {}
        across = self.settings.group_by == "task"
        for number, unit in enumerate(self.units):
            level = "agents" if across and unit.level in ("episode", "trajectory") else unit.level
            runs.setdefault((self._rule_of(unit.role), level), []).append(number)
        for (name, _), numbers in runs.items():
            rule = rule_named(name)
            compared = [number for number in numbers if not rule.grouped or sizes[self.units[number].group] > 1]
            if "greedy" in rule.needs:
                compared = [number for number in compared if _with_baseline(rule, self.units[number])]
            if compared:
                self._run(rule, compared, found)
        return found

    def _run(self, rule: Rule, numbers: Sequence[int], found: _Estimated) -> None:
        units = [self.units[number] for number in numbers]
        given = self._given(rule, units)
        if _says_nothing(rule, given):
            estimates = Estimates(advantages=np.zeros(int(given.lengths.sum()), np.float32), totals=given.scores)
        else:
            estimates = _own_rule(rule, given) if rule.function is not None else self.estimator.estimate(rule.name, given)
        for unit, total in zip(units, estimates.totals.tolist(), strict=True):
            found.totals.setdefault(unit.group, []).append(total)
        parts = np.split(estimates.advantages, np.cumsum(given.lengths)[:-1])
        for number, unit, part in zip(numbers, units, parts, strict=True):
            if not (rule.inert_without_spread and _all_equal(found.totals[unit.group])):
                found.advantages[number] = part

    def _given(self, rule: Rule, units: Sequence[Unit]) -> Units:
        penalised = self.reference is not None and self.settings.kl_in == "reward"
        squares: Float32 | None = None
        if "sum_pi_squared" in rule.needs:
            ids, temperatures = [s.token_ids for s in self.samples], [s.temperature for s in self.samples]
            squares = self._line(units, self.estimator.sum_pi_squared(ids, temperatures=temperatures))
        return Units(
            lengths=np.array([self._length(unit) for unit in units], np.int32),
            scores=np.array([unit.score for unit in units], np.float32),
            groups=[unit.group for unit in units],
            old_logprobs=self._line(units, [sample.logprobs for sample in self.samples]),
            ref_logprobs=self._line(units, self.reference) if penalised and self.reference is not None else None,
            sum_pi_squared=squares,
            baselines=np.array([unit.baseline for unit in units], np.float32) if "greedy" in rule.needs else None,
            components=_components(units) if "components" in rule.needs else {},
        )

    def rows(self, advantages: Sequence[Float32]) -> list[Row]:
        """The samples with their tokens' advantages, and what gave them."""
        tokens = [np.zeros(len(sample.token_ids), np.float32) for sample in self.samples]
        records: list[list[SpanCredit]] = [[] for _ in self.samples]
        for key, reply in self.replies.items():
            values, record = self._word(key, reply, advantages)
            begin = 0
            for place in reply.places:
                end = begin + place.stop - place.start
                tokens[place.row][place.start : place.stop] = values[begin:end]
                records[place.row].append(record)
                begin = end
        in_loss = self.reference is not None and self.settings.kl_in == "loss"
        return [
            Row(
                sample=sample,
                advantages=tokens[number],
                weights=sample.trained_mask.astype(np.float32),
                old_logprobs=sample.logprobs,
                ref_logprobs=self.reference[number] if in_loss and self.reference is not None else None,
                group=self.tasks[sample.episode_id],
                credit=records[number],
            )
            for number, sample in enumerate(self.samples)
        ]

    def _word(self, key: ReplyKey, reply: Reply, advantages: Sequence[Float32]) -> tuple[Float32, SpanCredit]:
        """A reply's advantages: its call's own, or the mean over the trajectories that contain it.

        Its tokens stand in its own trajectory's line; another that continues from it has its word at its first token.
        """
        by_call, by_trajectory = self._holders
        number = by_call.get(key)
        if number is not None:
            values, shares = advantages[number][self._lines[number][key]], {self.units[number].target: 1.0}
        else:
            number = by_trajectory.get((key[0], reply.trajectory_id))
            parts: dict[str, tuple[float, Float32]] = {}
            for trajectory_id, share in reply.shares.items():
                holder = by_trajectory.get((key[0], trajectory_id))
                if holder is not None and len(advantages[holder]):
                    parts[trajectory_id] = (share, advantages[holder][self._lines[holder].get(key, slice(0, 1))])
            whole = sum(share for share, _ in parts.values())
            values = np.zeros(reply.tokens, np.float32)
            for share, word in parts.values():
                values += np.float32(share / whole) * word
            shares = {trajectory_id: share / whole for trajectory_id, (share, _) in parts.items()}
        return values, SpanCredit(
            span_id=key[1],
            choice=key[2],
            level="none" if number is None else self.units[number].level,
            rule=self._rule_of(reply.role),
            score=None if number is None else self.units[number].score,
            shares=shares,
        )

    @cached_property
    def _holders(self) -> tuple[dict[ReplyKey, int], dict[tuple[str, str], int]]:
        """Reply -> the unit of its call; (episode id, trajectory id) -> the unit that holds that trajectory's replies."""
        by_call: dict[ReplyKey, int] = {}
        by_trajectory: dict[tuple[str, str], int] = {}
        for number, unit in enumerate(self.units):
            for key in unit.replies:
                if unit.level in ("call", "to_go"):
                    by_call[key] = number
                else:
                    by_trajectory[key[0], self.replies[key].trajectory_id] = number
        return by_call, by_trajectory

    @cached_property
    def _lines(self) -> list[dict[ReplyKey, slice]]:
        """For each unit, where its replies stand in its line."""
        lines: list[dict[ReplyKey, slice]] = []
        for unit in self.units:
            line: dict[ReplyKey, slice] = {}
            end = 0
            for key in unit.replies:
                begin, end = end, end + self.replies[key].tokens
                line[key] = slice(begin, end)
            lines.append(line)
        return lines

    def _line(self, units: Sequence[Unit], per_row: Sequence[Float32]) -> Float32:
        parts = [per_row[p.row][p.start : p.stop] for unit in units for key in unit.replies for p in self.replies[key].places]
        return np.concatenate(parts) if parts else np.zeros(0, np.float32)

    def _length(self, unit: Unit) -> int:
        return sum(self.replies[key].tokens for key in unit.replies)

    def _rule_of(self, role: str) -> str:
        if isinstance(self.algorithm, str):
            return self.algorithm
        if role not in self.algorithm:
            raise SettingError(
                f"algorithm names no rule for role {role!r}; it has {', '.join(sorted(self.algorithm))}; add one for every trained role"
            )
        return self.algorithm[role]

    def counters(self, found: _Estimated, counts: Counter[str]) -> CreditCounters:
        """What the batch's groups were like; ``counts`` is what was found while the units were made."""
        sizes = Counter(unit.group for unit in self.units)
        lost = sum(unit.baseline is None for unit in self.units if "greedy" in rule_named(self._rule_of(unit.role)).needs)
        covered = {key for unit in self.units for key in unit.replies}
        prompts: dict[str, set[bytes]] = {}
        for unit in self.units:
            if unit.replies:
                place = self.replies[unit.replies[0]].places[0]
                prompts.setdefault(unit.group, set()).add(self.samples[place.row].token_ids[: place.start].tobytes())
        return CreditCounters(
            units=len(self.units),
            groups=len(sizes),
            groups_of_one=sum(size == 1 for size in sizes.values()),
            groups_without_spread=sum(len(totals) > 1 and _all_equal(totals) for totals in found.totals.values()),
            groups_of_several_roles=_of_several_roles(self.units),
            groups_with_other_prompts=sum(len(beginnings) > 1 for beginnings in prompts.values()),
            units_by_level=dict(Counter(unit.level for unit in self.units)),
            shared_replies=sum(len(reply.shares) > 1 for reply in self.replies.values()),
            uncredited_replies=sum(key not in covered for key in self.replies),
            other=dict(counts) | ({"units_without_greedy": lost} if lost else {}),
        )


def _require_greedy_rollouts(groups: Sequence[Group], algorithm: Algorithm) -> None:
    """One that was made and lost is counted; where none was made, there is nothing to count."""
    name = greedy_rule(algorithm)
    missing = sum(group.greedy is None for group in groups)
    if name is not None and missing:
        raise SettingError(
            f"algorithm={name!r} takes the reward of a greedy rollout of each row as its baseline, and {missing} of {len(groups)} groups "
            f"have none; fit(algorithm={name!r}) makes them; use 'rloo' or 'grpo' else"
        )


def _with_baseline(rule: Rule, unit: Unit) -> bool:
    """Whether there is something to take off its score. Raises ``SettingError`` for a call's own: a greedy rollout has other calls."""
    if unit.level in ("call", "to_go"):
        raise SettingError(
            f"algorithm={rule.name!r} takes the reward of a greedy rollout as its baseline, and call {unit.target} of role {unit.role!r} "
            "has a reward of its own, which no greedy rollout compares with; reward agents or episodes, or use 'rloo' or 'grpo'"
        )
    return unit.baseline is not None


def _penalised(units: Sequence[Unit], replies: Mapping[ReplyKey, Reply], settings: Settings, counts: Counter[str]) -> list[Unit]:
    """The units; of one whose longest reply reaches into the last tokens before ``max_tokens``, the score is lowered."""
    shaping = settings.overlong_penalty
    if shaping is None:
        return list(units)
    assert settings.max_tokens is not None, "make_settings refuses one without the other"
    shaped: list[Unit] = []
    for unit in units:
        longest = max((replies[key].tokens for key in unit.replies), default=0)
        share = min(1.0, max(0.0, (longest - (settings.max_tokens - shaping.buffer)) / shaping.buffer))
        counts["units_penalised_for_length"] += share > 0
        shaped.append(msgspec.structs.replace(unit, score=unit.score - shaping.factor * share))
    return shaped


def _of_several_roles(units: Sequence[Unit]) -> int:
    roles: dict[str, set[str]] = {}
    for unit in units:
        roles.setdefault(unit.group, set()).add(unit.role)
    return sum(len(names) > 1 for names in roles.values())


def _says_nothing(rule: Rule, units: Units) -> bool:
    """Whether verl's function has no answer: one token has no deviation, and failures that nobody scored have no named reward."""
    unnamed = "components" in rule.needs and not units.components
    return unnamed or (rule.whitens and int(units.lengths.sum()) <= 1)


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


def _components(units: Sequence[Unit]) -> dict[str, Float32]:
    names = sorted({name for unit in units for name in unit.components})
    return {name: np.array([unit.components.get(name, 0.0) for unit in units], np.float32) for name in names}


def _reference_logprobs(rows: Sequence[Sample], settings: Settings, estimator: Estimator) -> list[Float32] | None:
    if settings.kl_coef == 0 or not rows:
        return None
    return estimator.logprobs([row.token_ids for row in rows], temperatures=[row.temperature for row in rows], reference=True)


def _all_equal(values: Sequence[float]) -> bool:
    return max(values) == min(values)
