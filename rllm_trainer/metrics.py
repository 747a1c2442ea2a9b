"""What one step measured, as one flat line: appended to ``metrics.jsonl``, to TensorBoard, and kept for the result.

A name is ``group/what``; a value is a finite number. What could not be measured is left out, never written as 0.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping
from pathlib import Path

from rllm_trainer.tensorboard import EventFile

__all__ = ["EVAL_GREEDY", "EVAL_NLL", "EVAL_SAMPLED", "GAP_MEAN", "REWARD_MEAN", "STEP", "Line", "MetricsLog", "read_metrics"]

Line = dict[str, float]
"""One step's metrics; ``step`` is among them."""

STEP = "step"
REWARD_MEAN = "reward/mean"
EVAL_SAMPLED = "eval/sampled"
EVAL_GREEDY = "eval/greedy"
EVAL_NLL = "eval/nll"
"""Nats a token."""
GAP_MEAN = "rollout/logprob_diff_mean"
"""The engine's measure: mean |trainer - server| over the trained tokens of a batch, before its update, nats."""


class MetricsLog:
    """The metrics of a run folder. A resumed run goes on in the same files, after the step that it resumes from."""

    def __init__(self, folder: Path, *, resume_after: int | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "metrics.jsonl"
        self.lines: list[Line] = [] if resume_after is None else [line for line in read_metrics(self.path) if line[STEP] <= resume_after]
        self._events = EventFile(folder / "tensorboard")
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text("".join(_encoded(line) for line in self.lines), encoding="utf-8")
        temporary.replace(self.path)

    def write(self, step: int, values: Mapping[str, float]) -> Line:
        """Append one step. Values that are not finite are left out and counted under ``not_finite``."""
        finite = {name: float(value) for name, value in values.items() if math.isfinite(value)}
        if len(finite) < len(values):
            finite["not_finite"] = float(len(values) - len(finite))
        line: Line = {STEP: step, **finite}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_encoded(line))
        self._events.write(step, finite)
        self.lines.append(line)
        return line

    def close(self) -> None:
        self._events.close()


def read_metrics(path: Path) -> list[Line]:
    """All whole lines of a ``metrics.jsonl``; a last line that a crash cut is left out."""
    lines: list[Line] = []
    if path.exists():
        for text in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                lines.append(json.loads(text))
    return lines


def _encoded(line: Line) -> str:
    return json.dumps(line) + "\n"
