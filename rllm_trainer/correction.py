"""Rows sampled by an older or another policy in, rows with verl's rollout correction out.

The decoupled corrections: the recorded logprobs stay the behaviour's, the ratio is taken to logprobs recomputed under the weights as
they are at the start of the batch, and an importance weight per token (or a rejection: weight 0) makes up for the difference. A
sequence is a trajectory, however it was cut into rows. Rejected tokens keep their place in the denominator, as verl has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from rllm_trainer.exceptions import SettingError
from rllm_trainer.types import Float32, Int32, Mask, Row

__all__ = ["WIDE_GAP", "Corrected", "Correction", "Corrector", "correct", "correct_stale", "require_correction"]

Correction = str | dict[str, Any]
"""One of verl's decoupled presets by name, such as ``decoupled_token_is``, or the fields of its RolloutCorrectionConfig."""

WIDE_GAP = 0.02
"""Mean nats a token. Two float32 programs differ by 1e-6, float32 and bfloat16 by about 0.01; more is another model."""


PRESETS = (
    "decoupled_geo_rs",
    "decoupled_geo_rs_seq_tis",
    "decoupled_geo_rs_token_tis",
    "decoupled_k3_rs",
    "decoupled_k3_rs_seq_tis",
    "decoupled_k3_rs_token_tis",
    "decoupled_seq_is",
    "decoupled_seq_is_rs",
    "decoupled_token_icepop",
    "decoupled_token_is",
)
"""verl 0.9's decoupled presets. Its ``bypass_...`` ones take the sampler's logprobs as the old ones and correct nothing."""


def require_correction(correction: Correction) -> None:
    """Raises ``SettingError`` for a preset that verl does not have, or that corrects nothing."""
    if isinstance(correction, str) and correction not in PRESETS:
        raise SettingError(
            f"correction={correction!r}: choose one of {', '.join(PRESETS)}, or give fields of verl's RolloutCorrectionConfig"
        )


class Corrected(msgspec.Struct, frozen=True, kw_only=True):
    """What verl's correction says of the trained tokens, sequences one after another."""

    weights: Float32
    """(L) importance weights, truncated."""
    kept: Mask
    """(L) False where rejection leaves the token out."""
    metrics: dict[str, float]
    """verl's, under ``rollout_corr/``."""


class Corrector(Protocol):
    """The engine."""

    def logprobs(self, rows: Sequence[Int32], *, temperatures: Sequence[float], reference: bool = False) -> list[Float32]: ...

    def correction(self, lengths: Int32, *, old: Float32, recorded: Float32, correction: Correction) -> Corrected: ...


def correct_stale(
    rows: Sequence[Row], *, version: int, engine: Corrector, correction: Correction, trusted: bool = True
) -> tuple[list[Row], dict[str, float]]:
    """``correct`` where any trained token was sampled by other weights than ``version``; else the rows as they are, and no metrics.

    A batch is corrected whole or not at all, so that all of it has one kind of ratio.

    Args:
        trusted: the versions are those of this run. False: they may count another model's, so rows that these weights see otherwise are
            stale whatever their versions say.
    """
    stale = any(bool((row.sample.versions[row.sample.trained_mask] != version).any()) for row in rows)
    if stale or not (trusted or _agrees(rows, engine)):
        return correct(rows, engine=engine, correction=correction)
    return list(rows), {}


def _agrees(rows: Sequence[Row], engine: Corrector) -> bool:
    """Whether the recorded logprobs are what these weights give, up to what two ways of computing them may differ by."""
    samples = [row.sample for row in rows]
    now = engine.logprobs([s.token_ids for s in samples], temperatures=[s.temperature for s in samples])
    gaps = [(ours - s.logprobs)[s.trained_mask] for s, ours in zip(samples, now, strict=True)]
    gap = np.abs(np.concatenate(gaps)) if gaps else np.zeros(0, np.float32)
    return not len(gap) or float(gap.mean()) <= WIDE_GAP


def correct(rows: Sequence[Row], *, engine: Corrector, correction: Correction) -> tuple[list[Row], dict[str, float]]:
    """The rows with recomputed ``old_logprobs`` and ``is_weights``, and verl's metrics of the gap.

    Raises:
        EngineError: verl has no such correction, or refuses its fields.
    """
    if not rows:
        return [], {}
    samples = [row.sample for row in rows]
    now = engine.logprobs([s.token_ids for s in samples], temperatures=[s.temperature for s in samples])
    places: dict[tuple[str, str], list[tuple[int, slice]]] = {}
    for number, sample in enumerate(samples):
        for span in sample.spans:
            if span.trained and span.stop > span.start:
                places.setdefault((sample.episode_id, span.trajectory_id), []).append((number, slice(span.start, span.stop)))
    flat = [place for sequence in places.values() for place in sequence]
    found = engine.correction(
        np.array([sum(part.stop - part.start for _, part in sequence) for sequence in places.values()], np.int32),
        old=np.concatenate([now[number][part] for number, part in flat]),
        recorded=np.concatenate([samples[number].logprobs[part] for number, part in flat]),
        correction=correction,
    )
    weights = [np.zeros(len(sample.token_ids), np.float32) for sample in samples]
    begin = 0
    for number, part in flat:
        end = begin + part.stop - part.start
        weights[number][part] = found.weights[begin:end] * found.kept[begin:end]
        begin = end
    corrected = [
        msgspec.structs.replace(
            row, old_logprobs=np.where(np.isfinite(row.sample.logprobs), logprobs, np.nan).astype(np.float32), is_weights=weight
        )
        for row, logprobs, weight in zip(rows, now, weights, strict=True)
    ]
    return corrected, found.metrics
