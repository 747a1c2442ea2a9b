"""Trains the model that an app calls: ``from rllm_trainer import fit``.

Importing loads no torch, ray, verl or vllm; each name is resolved when it is first used. A function's module has a name of its own
(``_fit``), so that importing the module never hides the function. Where the extra ``trainer`` is not installed, the first use says so.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rllm_trainer._extra import require_extra

if TYPE_CHECKING:
    from rllm_trainer._evaluate import EvaluateResult, evaluate
    from rllm_trainer._fit import FitResult, fit
    from rllm_trainer._replay import ReplayResult, replay
    from rllm_trainer._sft import SftResult, sft
    from rllm_trainer.evaluation import Evaluation, Rise, Scores
    from rllm_trainer.exceptions import TrainerError

__all__ = [
    "EvaluateResult",
    "Evaluation",
    "FitResult",
    "ReplayResult",
    "Rise",
    "Scores",
    "SftResult",
    "TrainerError",
    "evaluate",
    "fit",
    "replay",
    "sft",
]

_HOMES = {
    "EvaluateResult": "rllm_trainer._evaluate",
    "Evaluation": "rllm_trainer.evaluation",
    "FitResult": "rllm_trainer._fit",
    "ReplayResult": "rllm_trainer._replay",
    "Rise": "rllm_trainer.evaluation",
    "Scores": "rllm_trainer.evaluation",
    "SftResult": "rllm_trainer._sft",
    "TrainerError": "rllm_trainer.exceptions",
    "evaluate": "rllm_trainer._evaluate",
    "fit": "rllm_trainer._fit",
    "replay": "rllm_trainer._replay",
    "sft": "rllm_trainer._sft",
}


_ALONE = frozenset({"TrainerError"})
"""Needs nothing that the SDK does not have."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name not in _ALONE:
        require_extra()
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
