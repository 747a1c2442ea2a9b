"""A batch in, new weights behind the server out: the update, how far trainer and server were apart, the export, and the proven swap.

A swap is proven on tokens of the batch itself: those that should move most, whose logprobs under the old weights the update has computed.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from rllm_trainer.config import Settings
from rllm_trainer.correction import WIDE_GAP
from rllm_trainer.engine.base import Engine, MostOff, UpdateReport
from rllm_trainer.exceptions import BeyondLimits
from rllm_trainer.limits import Limits
from rllm_trainer.measures import Measures, swap_measures, update_measures
from rllm_trainer.metrics import GAP_MEAN
from rllm_trainer.report import Report
from rllm_trainer.schedule import learning_rate
from rllm_trainer.serving.base import Probe, Server
from rllm_trainer.serving.proof import telling_rows
from rllm_trainer.trainability_report import Ratio, TrainabilityReport, exceeded, logprob_ratio
from rllm_trainer.types import Batch, Float32, Int32, Mask

__all__ = ["Learnt", "learn", "learns"]


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


def learn(batch: Batch, *, steps: int | None, settings: Settings, engine: Engine, server: Server | None, report: Report) -> Learnt:
    """Update the weights, and have the server prove that it serves them, under the version after the batch's.

    Args:
        steps: of the run in all, for the schedule; None: nobody knows.

    Raises:
        BeyondLimits: trainer and server are too far apart; nothing was learnt.
    """
    assert settings.lr is not None
    lr = learning_rate(batch.step, peak=settings.lr, schedule=settings.schedule, warmup_steps=settings.warmup_steps, steps=steps)
    shown = _Shown(batch, engine) if server is not None else None
    current = [_sampled_by(batch.policy_version, row.sample.trained_mask, row.sample.versions) for row in batch.rows]
    most = settings.limits.ratio_p99 if server is not None else None
    update = engine.update(batch, lr=lr, most_off=None if most is None else MostOff(factor=most, at=current))
    ratio = logprob_ratio([row.sample for row in batch.rows], update.logprobs, current) if server is not None else Ratio()
    if not update.applied:
        beyond = exceeded(TrainabilityReport(ratio=ratio), Limits(ratio_p99=most))
        raise BeyondLimits(f"step {batch.step}: {'; '.join(beyond)}. limits={{...}} says where a run stops")
    line = update_measures(update)
    if line.get(GAP_MEAN, 0.0) > WIDE_GAP and batch.rows[0].is_weights is None:
        report.warn(
            f"step {batch.step}: the server's logprobs differ from the trainer's by {line[GAP_MEAN]:.2g} nats on average; {WIDE_GAP:g} "
            "is much: is the server's precision lower, or does it report logprobs of another temperature?"
        )
    if server is not None and shown is not None:
        line |= _swapped(batch.policy_version + 1, engine, server, shown, shown.before(update), lora=settings.lora is not None)
    return Learnt(measures=line, ratio=ratio)


class _Shown:
    """Tokens of a batch, each in the context that it was sampled in, that trainer and server are both asked for."""

    def __init__(self, batch: Batch, engine: Engine) -> None:
        self._which = telling_rows(batch.rows)
        self.rows: list[Int32] = [batch.rows[number].sample.token_ids[:stop] for number, stop in self._which]
        self.trained: list[Mask] = [batch.rows[number].sample.trained_mask[:stop] for number, stop in self._which]
        self._own: list[Float32] | None = None
        if any(batch.rows[number].sample.temperature != 1.0 for number, _ in self._which):
            self._own = self.at_one(engine, self.trained)

    def at_one(self, engine: Engine, at: Sequence[Mask]) -> list[Float32]:
        """Logprobs at temperature 1, which every server can give of tokens that it is shown."""
        return engine.logprobs(self.rows, temperatures=[1.0] * len(self.rows), at=at)

    def before(self, update: UpdateReport) -> list[Float32]:
        """Under the weights that the update began with."""
        if self._own is not None:
            return self._own
        return [update.logprobs[number][:stop] for number, stop in self._which]


def _swapped(version: int, engine: Engine, server: Server, shown: _Shown, before: list[Float32], *, lora: bool) -> Measures:
    """Hand the weights over. One after the other: two programs that share the cores take longer side by side."""
    known = [np.isfinite(values) for values in before]
    weights = engine.export_weights(version, digest_later=not lora)
    if not any(mask.any() for mask in known):
        return swap_measures(server.swap(weights))
    probe = Probe(rows=shown.rows, old=before, new=shown.at_one(engine, known))
    return swap_measures(server.swap(weights, probe=probe))


def _sampled_by(version: int, trained: Mask, versions: Int32) -> Mask:
    return trained & (versions == version)
