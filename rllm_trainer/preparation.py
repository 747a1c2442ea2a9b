"""A step's rollouts in, the batch that its update sees out, with what was counted on the way.

Samples, credit, correction, batch: each is a function of the record before it, and none knows whether the rollouts were made now or
are read back. The same rollouts, settings and weights give the same batch, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from rllm_trainer.advantages import CreditCounters, Estimator, credit
from rllm_trainer.batching import make_batch
from rllm_trainer.breaks import Decode
from rllm_trainer.config import Settings
from rllm_trainer.correction import Corrector, correct_stale
from rllm_trainer.placing import Reason
from rllm_trainer.rollout.faults import leaves_gradient
from rllm_trainer.rollout.record import groups_of
from rllm_trainer.rollout.signal import split_by_signal
from rllm_trainer.samples import SampleSet, build_samples, leave_out
from rllm_trainer.trainability import training_view
from rllm_trainer.types import Batch, Group, Rollout

__all__ = ["BatchEngine", "Prepared", "make_samples", "prepare"]


class BatchEngine(Estimator, Corrector, Protocol):
    """What making a batch asks of the engine: the rules of credit, logprobs, and verl's corrections."""

    vocab_size: int
    """Ids at or above it are no tokens of the model."""


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """One step, ready to be learnt from."""

    batch: Batch
    credit: CreditCounters
    correction: dict[str, float] = {}
    """verl's metrics of the correction; empty where none was needed."""


def make_samples(
    rollouts: Sequence[Rollout], *, settings: Settings, vocab_size: int | None, decode: Decode | None = None
) -> dict[str, SampleSet]:
    """Episode id -> its rows, of every rollout that is in the gradient; without rows where a setting leaves them out, and counted so.

    Args:
        vocab_size: of the model; None: not known yet.
        decode: token ids to text, for the examples of breaks.

    Raises:
        SettingError: a row is longer than ``max_model_len``, and ``overlong`` says to refuse that.
    """
    episodes = [r.episode for r in rollouts if r.episode is not None and not leaves_gradient(r.fault, settings.faults)]
    out = _left_out(rollouts, settings)
    found = {
        episode.id: build_samples(
            episode,
            mode=settings.sample_mode,
            max_len=settings.max_model_len,
            overlong=settings.overlong,
            mask_truncated=settings.mask_truncated,
            vocab_size=vocab_size,
            decode=decode,
        )
        for episode in training_view(episodes)
    }
    return {id: leave_out(sample_set, *out[id]) if id in out else sample_set for id, sample_set in found.items()}


def prepare(
    groups: Sequence[Group],
    samples: Mapping[str, SampleSet],
    *,
    step: int,
    version: int,
    settings: Settings,
    engine: BatchEngine,
    trusted: bool = True,
) -> Prepared:
    """The batch of one step.

    Args:
        version: of the weights that the step updates.
        trusted: a token that was recorded under this version was sampled by these weights. False: that is measured.
    """
    credited = credit(groups, samples, settings=settings, estimator=engine)
    rows, correction = correct_stale(credited, version=version, engine=engine, correction=settings.correction, trusted=trusted)
    batch = make_batch(rows, settings=settings, step=step, policy_version=version)
    return Prepared(batch=batch, credit=credited.counters, correction=correction)


def _left_out(rollouts: Sequence[Rollout], settings: Settings) -> dict[str, tuple[Reason, str]]:
    """Episode id -> why none of it is trained, though it could be: rejection sampling and dynamic sampling."""
    found: dict[str, tuple[Reason, str]] = {}
    if settings.reject_below is not None:
        words = f"its reward is below reject_below={settings.reject_below:g}"
        low = [r.episode.id for r in rollouts if r.episode is not None and r.reward is not None and r.reward < settings.reject_below]
        found |= dict.fromkeys(low, ("rejected", words))
    if settings.refill:
        flat = [r.episode.id for g in split_by_signal(groups_of(rollouts), settings.faults)[1] for r in g.rollouts if r.episode is not None]
        found |= dict.fromkeys(flat, ("group without signal", "every score of its group is the same, and refill is set"))
    return found
