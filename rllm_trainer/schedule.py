"""A step in, its learning rate out. A function of the step alone, so that a resumed run has nothing to restore."""

from __future__ import annotations

import math

from rllm_trainer.config import Schedule

__all__ = ["learning_rate"]


def learning_rate(step: int, *, peak: float, schedule: Schedule, warmup_steps: int, steps: int | None) -> float:
    """The learning rate of step 1, 2, ...

    It rises linearly over the warm-up, reaching ``peak`` in its last step; then it stays, or falls so that the step after the
    last one would have 0. Without a known number of steps only ``constant`` is defined.
    """
    if step <= warmup_steps:
        return peak * step / warmup_steps
    if schedule == "constant":
        return peak
    assert steps is not None, "a falling schedule needs a number of steps; fit checks it"
    done = (step - 1 - warmup_steps) / (steps - warmup_steps)
    share = 1.0 - done if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return peak * share
