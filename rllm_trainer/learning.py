"""A batch in, new weights behind the server out: the update, how far trainer and server were apart, the export, and the proven swap.

A swap is proven on a few tokens that stay fixed: taken from a batch, those that should move most, for as long as they do move. What the
trainer says of them after one update is what it said before the next.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rllm_trainer.config import Settings
from rllm_trainer.correction import WIDE_GAP
from rllm_trainer.engine.base import Engine, MostOff
from rllm_trainer.exceptions import BeyondLimits
from rllm_trainer.limits import Limits
from rllm_trainer.measures import Measures, swap_measures, update_measures
from rllm_trainer.metrics import GAP_MEAN
from rllm_trainer.report import Report
from rllm_trainer.schedule import learning_rate
from rllm_trainer.serving.base import PROVEN_BY_LOGPROBS, Probe, Server
from rllm_trainer.serving.proof import telling_windows
from rllm_trainer.trainability_report import Ratio, TrainabilityReport, exceeded, logprob_ratio
from rllm_trainer.types import Batch, Float32, Int32, Mask

__all__ = ["Learner", "Learnt", "learns"]


class Learnt(msgspec.Struct, frozen=True, kw_only=True):
    """What a step made of its batch."""

    measures: Measures
    ratio: Ratio
    """Trainer's over server's probability of the tokens that the weights before the update sampled, where the update computed it."""


def learns(batch: Batch, settings: Settings) -> bool:
    """Whether the update can move the weights: some advantage, or a term that needs none."""
    if not batch.rows:
        return False
    return bool(settings.kl_coef or settings.entropy_coef) or any(row.advantages.any() for row in batch.rows)


class Learner:
    """Takes the steps of a run. Between two of them nothing else changes the engine's weights."""

    def __init__(self, *, settings: Settings, engine: Engine, server: Server | None, report: Report) -> None:
        self._settings = settings
        self._engine = engine
        self._server = server
        self._report = report
        self._fixed: _Fixed | None = None

    def learn(self, batch: Batch, *, steps: int | None) -> Learnt:
        """Update the weights, and have the server prove that it serves them, under the version after the batch's.

        Args:
            steps: of the run in all, for the schedule; None: nobody knows.

        Raises:
            BeyondLimits: trainer and server are too far apart; nothing was learnt.
        """
        settings, server = self._settings, self._server
        assert settings.lr is not None
        lr = learning_rate(batch.step, peak=settings.lr, schedule=settings.schedule, warmup_steps=settings.warmup_steps, steps=steps)
        fixed = self._fix(batch) if server is not None else None
        current = [_sampled_by(batch.policy_version, row.sample.trained_mask, row.sample.versions) for row in batch.rows]
        most = settings.limits.ratio_p99 if server is not None else None
        update = self._engine.update(batch, lr=lr, most_off=None if most is None else MostOff(factor=most, at=current))
        ratio = logprob_ratio([row.sample for row in batch.rows], update.logprobs, current) if server is not None else Ratio()
        if not update.applied:
            beyond = exceeded(TrainabilityReport(ratio=ratio), Limits(ratio_p99=most))
            raise BeyondLimits(f"step {batch.step}: {'; '.join(beyond)}. limits={{...}} says where a run stops")
        line = update_measures(update)
        if line.get(GAP_MEAN, 0.0) > WIDE_GAP and batch.rows[0].is_weights is None:
            self._report.warn(
                f"step {batch.step}: the server's logprobs differ from the trainer's by {line[GAP_MEAN]:.2g} nats on average; {WIDE_GAP:g} "
                "is much: is the server's precision lower, or does it report logprobs of another temperature?"
            )
        if server is not None:
            line |= self._swapped(batch.policy_version + 1, server, fixed)
        return Learnt(measures=line, ratio=ratio)

    def _fix(self, batch: Batch) -> _Fixed | None:
        """What the next swap is proven with; None where the batch has no token for it."""
        fixed = self._fixed
        if fixed is not None and fixed.version == batch.policy_version:
            return fixed
        windows = telling_windows(batch.rows)
        if not windows:
            return None
        rows = [batch.rows[number].sample.token_ids[start:stop] for number, start, stop in windows]
        at = [batch.rows[number].sample.trained_mask[start:stop] for number, start, stop in windows]
        return _Fixed(rows=rows, at=at, logprobs=self._logprobs(rows, at), version=batch.policy_version)

    def _swapped(self, version: int, server: Server, fixed: _Fixed | None) -> Measures:
        """Hand the weights over. One after the other: two programs that share the cores take as long side by side."""
        weights = self._engine.export_weights(version, digest_later=self._settings.lora is None)
        if fixed is None:
            return swap_measures(server.swap(weights))
        after = msgspec.structs.replace(fixed, logprobs=self._logprobs(fixed.rows, fixed.at), version=version)
        report = server.swap(weights, probe=Probe(rows=fixed.rows, old=fixed.logprobs, new=after.logprobs))
        self._fixed = after if report.proof == PROVEN_BY_LOGPROBS else None
        return swap_measures(report)

    def _logprobs(self, rows: list[Int32], at: Sequence[Mask]) -> list[Float32]:
        """At temperature 1, which every server can give of tokens that it is shown."""
        return self._engine.logprobs(rows, temperatures=[1.0] * len(rows), at=at)


class _Fixed(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that trainer and server are both asked for, at every swap until the update moves them too little to tell."""

    rows: list[Int32]
    at: list[Mask]
    """For each row (T) the tokens that are asked for."""
    logprobs: list[Float32]
    """The trainer's, for each row (T), NaN elsewhere."""
    version: int
    """Of the weights that these are the logprobs of."""


def _sampled_by(version: int, trained: Mask, versions: Int32) -> Mask:
    return trained & (versions == version)
