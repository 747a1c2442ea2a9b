"""Trains the model that an app calls: ``from rllm_trainer import fit``.

Importing loads no torch, ray, verl or vllm; each name is resolved when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rllm_trainer.evaluate import EvaluateResult, evaluate
    from rllm_trainer.evaluation import Evaluation, Rise, Scores
    from rllm_trainer.exceptions import TrainerError
    from rllm_trainer.fit import FitResult, fit

__all__ = ["EvaluateResult", "Evaluation", "FitResult", "Rise", "Scores", "TrainerError", "evaluate", "fit"]

_HOMES = {
    "EvaluateResult": "rllm_trainer.evaluate",
    "Evaluation": "rllm_trainer.evaluation",
    "FitResult": "rllm_trainer.fit",
    "Rise": "rllm_trainer.evaluation",
    "Scores": "rllm_trainer.evaluation",
    "TrainerError": "rllm_trainer.exceptions",
    "evaluate": "rllm_trainer.evaluate",
    "fit": "rllm_trainer.fit",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
