"""The rows of a step in; out, what became of every sampled token: trained once, or lost to which cause, with an example of each.

Reports of steps add up to the report of a run. Every share has what it stands over beside it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from rllm_trainer.breaks import Break
from rllm_trainer.limits import Limits
from rllm_trainer.placing import Reason, SetAside
from rllm_trainer.samples import Counters, SampleSet
from rllm_trainer.types import Float32, Mask, Sample

__all__ = ["Entry", "Ratio", "Staleness", "TrainabilityReport", "exceeded", "logprob_ratio", "trainability_report"]

_NEVER_MEANT = "no_train"
_AS_ASKED: frozenset[Reason] = frozenset({"truncated", "over-long", "rejected", "group without signal"})
"""What a setting of the run leaves out: no loss that should stop it."""
_INEXACT = "inexact"
_NUMBER = re.compile(r"\d+")
_TAIL = 99
"""Percentile of the ratio that is reported."""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One cause, how often, and one case of it."""

    name: str
    count: int
    """Prompts of a break cause; calls, or single replies, of a reason."""
    tokens: int
    """Sampled tokens concerned."""
    example: str
    """One sentence that names the episode and the call."""


class Staleness(msgspec.Struct, frozen=True, kw_only=True):
    """How many versions old the trained tokens are."""

    tokens: int = 0
    """Trained tokens whose version is known; the mean is over them."""
    versions_behind: int = 0
    """Summed over those tokens."""
    most: int = 0
    """Of the oldest token."""
    unknown: int = 0
    """Trained tokens whose version the server did not tell."""

    @property
    def mean(self) -> float:
        return self.versions_behind / self.tokens if self.tokens else 0.0

    def __add__(self, other: Staleness) -> Staleness:
        return Staleness(
            tokens=self.tokens + other.tokens,
            versions_behind=self.versions_behind + other.versions_behind,
            most=max(self.most, other.most),
            unknown=self.unknown + other.unknown,
        )


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """Trainer's over server's probability of the same sampled tokens, under the weights that sampled them; 1 where they agree."""

    tokens: int = 0
    """Trained tokens measured."""
    total: float = 0.0
    """Of exp(trainer - server), over those tokens."""
    p99: float = 1.0
    """99 % of the tokens are off by at most this factor, either way; of several steps together, the largest step's."""

    @property
    def mean(self) -> float:
        return self.total / self.tokens if self.tokens else 1.0

    def __add__(self, other: Ratio) -> Ratio:
        return Ratio(tokens=self.tokens + other.tokens, total=self.total + other.total, p99=max(self.p99, other.p99))


class TrainabilityReport(msgspec.Struct, frozen=True, kw_only=True):
    """One step, or the steps of a run together."""

    counters: Counters = Counters()
    lost: list[Entry] = []
    """Sampled tokens that are not trained, by reason, most tokens first."""
    inexact: list[Entry] = []
    """Inexact calls by the reason in their record, numbers in it written as N."""
    breaks: list[Entry] = []
    """Prompts that continue nothing recorded, by cause. Their tokens are trained all the same, in rows of their own; ``tokens`` counts
    what the prompts show as other ids or not at all."""
    groups: int = 0
    groups_without_signal: int = 0
    """Of ``groups``: those in which every advantage is 0."""
    staleness: Staleness = Staleness()
    ratio: Ratio = Ratio()

    def __add__(self, other: TrainabilityReport) -> TrainabilityReport:
        return TrainabilityReport(
            counters=self.counters + other.counters,
            lost=_together([*self.lost, *other.lost]),
            inexact=_together([*self.inexact, *other.inexact]),
            breaks=_together([*self.breaks, *other.breaks]),
            groups=self.groups + other.groups,
            groups_without_signal=self.groups_without_signal + other.groups_without_signal,
            staleness=self.staleness + other.staleness,
            ratio=self.ratio + other.ratio,
        )

    def metrics(self) -> dict[str, float]:
        """Flat numbers, for a line of metrics."""
        counters = self.counters
        found: dict[str, float] = {
            "trainability/share_trained": counters.share_trained,
            "trainability/sampled_tokens": counters.sampled_tokens,
            "trainability/trained_tokens": counters.trained_tokens,
            "trainability/no_train_tokens": counters.no_train_tokens,
            "trainability/multi_call_episodes": counters.multi_call_episodes,
            "trainability/one_row_episodes": counters.one_row_episodes,
            "trainability/forks": counters.forks,
            "trainability/cut_context_tokens": counters.cut_context_tokens,
            "trainability/staleness_mean": self.staleness.mean,
            "trainability/staleness_max": self.staleness.most,
            "trainability/unversioned_tokens": self.staleness.unknown,
        }
        if self.groups:
            found["trainability/groups_without_signal"] = self.groups_without_signal / self.groups
        if self.ratio.tokens:
            found |= {"trainability/ratio_mean": self.ratio.mean, "trainability/ratio_p99": self.ratio.p99}
        found |= {f"trainability/lost/{entry.name}": entry.tokens for entry in self.lost}
        return found | {f"trainability/breaks/{entry.name}": entry.count for entry in self.breaks}

    def table(self) -> list[tuple[str, str, int, int, str]]:
        """(what, cause, count, tokens, example) of every entry, for a table on a screen or in a file."""
        named = (("lost", self.lost), ("inexact", self.inexact), ("break", self.breaks))
        return [(what, entry.name, entry.count, entry.tokens, entry.example) for what, entries in named for entry in entries]


def trainability_report(
    sample_sets: Iterable[SampleSet],
    *,
    policy_version: int | None = None,
    groups: int = 0,
    groups_without_signal: int = 0,
    ratio: Ratio | None = None,
) -> TrainabilityReport:
    """The report of one step.

    Args:
        policy_version: the weights that the step updates; None: staleness is not measured.
        groups, groups_without_signal: as the credit counted them.
        ratio: from ``logprob_ratio``, where the trainer's logprobs were computed.
    """
    counters, staleness = Counters(), Staleness()
    lost: list[Entry] = []
    inexact: list[Entry] = []
    breaks: list[Entry] = []
    for samples in sample_sets:
        counters += samples.counters
        asides = [aside for aside in samples.set_aside if aside.reason != _NEVER_MEANT]
        lost += [_lost(samples.episode_id, aside, aside.reason) for aside in asides]
        inexact += [_lost(samples.episode_id, aside, _NUMBER.sub("N", aside.detail)) for aside in asides if aside.reason == _INEXACT]
        breaks += [_broken(samples.episode_id, broken) for broken in samples.breaks]
        if policy_version is not None:
            staleness += _staleness(samples, policy_version)
    return TrainabilityReport(
        counters=counters,
        lost=_together(lost),
        inexact=_together(inexact),
        breaks=_together(breaks),
        groups=groups,
        groups_without_signal=groups_without_signal,
        staleness=staleness,
        ratio=ratio or Ratio(),
    )


def logprob_ratio(samples: Sequence[Sample], trainer_logprobs: Sequence[Float32], at: Sequence[Mask] | None = None) -> Ratio:
    """Compare the trainer's logprobs, (T) for each row, with the server's.

    Args:
        at: (T) for each row, the tokens that count, where the trainer's are known; None: the trained ones.
    """
    masks = [row.trained_mask for row in samples] if at is None else at
    gaps = [(ours - row.logprobs)[mask].astype(np.float64) for row, ours, mask in zip(samples, trainer_logprobs, masks, strict=True)]
    gap = np.concatenate(gaps) if gaps else np.empty(0)
    gap = gap[~np.isnan(gap)]
    if not len(gap):
        return Ratio()
    # the least factor that 99 % of the tokens keep to: what the engine counts by, too
    tail = float(np.percentile(np.abs(gap), _TAIL, method="inverted_cdf"))
    return Ratio(tokens=len(gap), total=float(np.exp(gap).sum()), p99=float(np.exp(tail)))


def exceeded(report: TrainabilityReport, limits: Limits) -> list[str]:
    """One sentence for each limit that the report is beyond."""
    found: list[str] = []
    counters = report.counters
    meant = counters.sampled_tokens - sum(counters.lost_tokens.get(reason, 0) for reason in _AS_ASKED)
    share = counters.trained_tokens / meant if meant else 1.0
    if limits.share_trained is not None and share < limits.share_trained:
        lost = [entry for entry in report.lost if entry.name not in _AS_ASKED]
        why = "; ".join(f"{entry.name}: {entry.tokens} tokens, such as {entry.example}" for entry in lost[:3])
        found.append(
            f"{counters.trained_tokens} of {meant} sampled tokens are trained ({share:.0%}); at least {limits.share_trained:.0%} must be. "
            f"Lost to {why}"
        )
    without = report.groups_without_signal / report.groups if report.groups else 0.0
    if limits.groups_without_signal is not None and without > limits.groups_without_signal:
        found.append(
            f"{report.groups_without_signal} of {report.groups} groups have no signal; at most {limits.groups_without_signal:.0%} may have "
            "none. Their rollouts all earn the same: use harder or easier rows, a finer reward, or larger groups"
        )
    if limits.staleness is not None and report.staleness.most > limits.staleness:
        found.append(f"a trained token is {report.staleness.most} versions old; at most {limits.staleness} are allowed")
    if limits.ratio_p99 is not None and report.ratio.tokens and report.ratio.p99 > limits.ratio_p99:
        found.append(
            f"trainer and server differ by a factor of {report.ratio.p99:.3g} at the 99th percentile of {report.ratio.tokens} tokens; at "
            f"most {limits.ratio_p99:g} is allowed. They do not hold the same weights, or do not report the same kind of logprobs"
        )
    return found


def _lost(episode_id: str, aside: SetAside, name: str) -> Entry:
    which = "" if aside.choice is None else f", choice {aside.choice}"
    example = f"episode {episode_id}, {aside.role}, call {aside.span_id}{which}: {aside.detail}"
    return Entry(name=name, count=1, tokens=aside.tokens, example=example)


def _broken(episode_id: str, broken: Break) -> Entry:
    recorded = repr(broken.recorded_text) if broken.recorded_text else str(broken.recorded_ids)
    prompt = repr(broken.prompt_text) if broken.prompt_text else str(broken.prompt_ids)
    example = (
        f"episode {episode_id}, {broken.role}, call {broken.span_id}: token {broken.position} of the prompt begins {prompt}, "
        f"where call {broken.recorded_span_id} has {recorded}"
    )
    return Entry(name=broken.cause, count=1, tokens=broken.sampled_after, example=example)


def _together(entries: Iterable[Entry]) -> list[Entry]:
    """Entries of one name as one, with the first one's example; most tokens first, then most cases, then by name."""
    by_name: dict[str, Entry] = {}
    for entry in entries:
        first = by_name.get(entry.name)
        if first is not None:
            entry = msgspec.structs.replace(first, count=first.count + entry.count, tokens=first.tokens + entry.tokens)
        by_name[entry.name] = entry
    return sorted(by_name.values(), key=lambda entry: (-entry.tokens, -entry.count, entry.name))


def _staleness(samples: SampleSet, policy_version: int) -> Staleness:
    trained = [span.versions for span in samples.spans if span.trains]
    versions = np.concatenate(trained) if trained else np.empty(0, np.int32)
    behind = policy_version - versions[versions >= 0].astype(np.int64)
    return Staleness(
        tokens=len(behind), versions_behind=int(behind.sum()), most=int(behind.max(initial=0)), unknown=len(versions) - len(behind)
    )
