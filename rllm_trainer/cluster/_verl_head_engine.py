"""What making a batch asks of an engine, answered in the head: verl's estimators, and logprobs that verl's ranks have computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rllm_trainer.advantages.base import Estimates, Units
from rllm_trainer.cluster._session import Session
from rllm_trainer.correction import Corrected, Correction
from rllm_trainer.engine import _verl_estimators
from rllm_trainer.exceptions import EngineError
from rllm_trainer.types import Float32, Int32

__all__ = ["HeadEngine"]


class HeadEngine:
    """Of one batch: token ids of each row -> what verl has computed for it."""

    def __init__(self, session: Session, logprobs: Mapping[bytes, Float32], reference: Mapping[bytes, Float32]) -> None:
        self.vocab_size = session.vocab_size
        self._settings = session.settings
        self._logprobs = logprobs
        self._reference = reference

    def estimate(self, rule: str, units: Units) -> Estimates:
        """verl's estimator of that name."""
        arrays = {"lengths": units.lengths, "scores": units.scores, "old_logprobs": units.old_logprobs, "ref_logprobs": units.ref_logprobs}
        advantages, totals = _verl_estimators.estimate(
            rule,
            {name: value for name, value in arrays.items() if value is not None},
            groups=units.groups,
            components=units.components,
            config={"norm_adv_by_std_in_grpo": self._settings.norm_by_std},
            kl=(self._settings.kl_estimator, self._settings.kl_coef),
        )
        return Estimates(advantages=advantages, totals=totals)

    def logprobs(self, rows: Sequence[Int32], *, temperatures: Sequence[float], reference: bool = False) -> list[Float32]:
        """Those that verl's ranks computed for these rows."""
        known = self._reference if reference else self._logprobs
        missing = sum(row.tobytes() not in known for row in rows)
        if missing:
            raise EngineError(
                f"verl's trainer has computed no {'reference ' if reference else ''}logprobs for {missing} of {len(rows)} rows"
            )
        return [known[row.tobytes()] for row in rows]

    def sum_pi_squared(self, rows: Sequence[Int32], *, temperatures: Sequence[float]) -> list[Any]:
        raise EngineError("verl's trainer does not hand out sums of squared probabilities; use engine='direct-ray'")

    def correction(self, lengths: Int32, *, old: Float32, recorded: Float32, correction: Correction) -> Corrected:
        """verl's rollout correction."""
        found = _verl_estimators.correction(
            {
                "lengths": _travelled(lengths),
                "old_logprobs": _travelled(old),
                "recorded_logprobs": _travelled(recorded),
                "correction": correction,
            }
        )
        return Corrected(weights=found["weights"], kept=found["kept"], metrics=found["metrics"])


def _travelled(array: Any) -> dict[str, Any]:
    return {"dtype": array.dtype.str, "shape": array.shape, "data": array.tobytes()}
