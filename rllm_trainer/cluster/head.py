"""verl's process of a run: a plan in, the trained model's weights and what was measured out. An actor on the user's own node.

What it uses of verl is loaded once its environment is set, by name.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import Any

import msgspec

from rllm_trainer.cluster.loading import verl_compose, verl_run
from rllm_trainer.cluster.verl_overrides import Facts
from rllm_trainer.config import Settings
from rllm_trainer.evaluation import Evaluation
from rllm_trainer.metrics import Line
from rllm_trainer.rollout.dataset import Task
from rllm_trainer.trainability_report import TrainabilityReport

__all__ = ["Head", "HeadPlan", "HeadResult"]


class HeadPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What the user's process has planned."""

    settings: Settings
    facts: Facts
    eval_tasks: list[Task]
    overrides: list[str]
    done: int
    """Steps that a run which is continued has done."""


class HeadResult(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it."""

    lines: list[Line]
    trainability: TrainabilityReport
    before: Evaluation | None
    last_evaluation: Evaluation | None
    stopped: bool
    """It was stopped after a whole step; a checkpoint of it is there."""
    versions: dict[str, str]


class Head:
    """Made into an actor by the user's process, with verl's environment."""

    def __init__(self, mailbox: Any) -> None:
        self._mailbox = mailbox

    def check(self, plan: HeadPlan) -> str:
        """Compose verl's configuration and let verl validate it, before anything is started. Gives it as YAML."""
        return str(verl_compose().composed_yaml(plan.overrides))

    def run(self, plan: HeadPlan, workers: Sequence[Any]) -> HeadResult:
        """Train. Raises what ended the run."""
        try:
            return verl_run().train(plan, workers, self._mailbox)
        except BaseException:
            traceback.print_exc()
            raise
