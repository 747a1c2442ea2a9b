"""An app and rows in, its scores out; nothing is trained.

With a model, the app's calls go to it as in training; without one they keep their own endpoints, which makes a baseline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Unpack

import msgspec

from rllm_trainer.checkpoint import SETTINGS_FILE, new_run_dir, owned, write_json
from rllm_trainer.config import Settings, SettingsKw, make_settings, table
from rllm_trainer.evaluation import Evaluation, Evaluator
from rllm_trainer.exceptions import SettingError
from rllm_trainer.interrupts import interruptible
from rllm_trainer.models import resolve_model
from rllm_trainer.plan import fixed_tasks, limits_of, require_arguments
from rllm_trainer.processes import route_to, serving
from rllm_trainer.report import Report
from rllm_trainer.rollout.arguments import app_name
from rllm_trainer.rollout.record import RolloutLog
from rllm_trainer.rollout.rewards import plan_rewards
from rllm_trainer.rollout.runner import RunInterrupted, Runner

__all__ = ["EvaluateResult", "evaluate"]

_RESULT = "result.json"
_USED = frozenset(
    {
        "batch_timeout",
        "call_timeout",
        "concurrency",
        "constrained",
        "eval_greedy",
        "max_model_len",
        "max_tokens",
        "fireworks",
        "port",
        "progress",
        "replaces",
        "replicas",
        "retries",
        "rollout_timeout",
        "sampling",
        "seed",
        "serving",
        "serving_key",
        "serving_url",
        "threads",
        "vllm",
    }
)
_ONLY_WITH_A_MODEL = frozenset(
    {
        "call_timeout",
        "constrained",
        "eval_greedy",
        "max_model_len",
        "max_tokens",
        "port",
        "replaces",
        "replicas",
        "sampling",
        "serving",
        "threads",
        "vllm",
    }
)


class EvaluateResult(msgspec.Struct, frozen=True, kw_only=True):
    """What an evaluation came to."""

    evaluation: Evaluation
    run_dir: Path
    warnings: list[str]

    @property
    def mean(self) -> float:
        """The mean sampled reward; a rollout that failed counts 0."""
        return self.evaluation.sampled.mean


def evaluate(
    app: Callable[..., Any],
    dataset: Any,
    model: str | Path | None = None,
    reward: Callable[..., Any] | Iterable[Callable[..., Any]] | None = None,
    n: int = 1,
    output_dir: str | Path | None = None,
    **settings: Unpack[SettingsKw],
) -> EvaluateResult:
    """Score ``app`` on every row of ``dataset``.

    Args:
        model: a Hugging Face folder or name to serve and lead the app's calls to; None: the app's own endpoints, nothing redirected. With
            a server that is there (``serving_url``, ``fireworks``): the name that it knows the model by; None: the one that it serves.
        reward: as for ``fit``.
        n: sampled rollouts of each row; their mean is the row's score.
        output_dir: the run folder; None: a new one under ``runs/``.
        settings: those of ``Settings`` that an evaluation uses; others are refused.

    Raises:
        TrainerError: something was refused or went wrong; the message says what to do.
    """
    report = Report(progress=settings.get("progress", True) is not False)
    there = settings.get("serving_url") is not None or settings.get("fireworks") is not None
    table_of = _settings(dict(settings), n=n, own_endpoints=model is None and not there)
    rewards = plan_rewards(reward, app)
    tasks = fixed_tasks(dataset, "dataset")
    runner = Runner(app, rewards, limits_of(table_of))
    require_arguments(tasks, runner.binder, rewards)
    if there:
        served = None if model is None else str(model)
    else:
        served = None if model is None else resolve_model(model, say=report.note)
    run_dir = new_run_dir(output_dir, name=f"{app_name(app)}-evaluation", resume=False)
    facts = {
        "app": app_name(app),
        "dataset": f"{len(tasks)} rows",
        "reward": rewards.source,
        "model": str(served) if served is not None else "the one that is served" if there else "the app's own endpoints",
        "run folder": str(run_dir),
    }
    report.settings([row for row in table(table_of, settings) if row.name in _USED], facts)
    with interruptible(report.warn) as stop, owned(run_dir):
        write_json(run_dir / SETTINGS_FILE, {"facts": facts, "settings": table_of, "given": sorted(settings)})
        try:
            with ExitStack() as open_:
                open_.callback(runner.close)
                log = RolloutLog(run_dir)
                open_.callback(log.close)
                route = None
                if served is not None or there:
                    route = route_to(open_.enter_context(serving(table_of, served, run_dir, stop.event)), table_of, None)
                evaluator = Evaluator(tasks, runner, route, n=n, seed=table_of.seed, log=log, report=report, stop=stop.event)
                found = evaluator.run(step=0, version=0, greedy=table_of.eval_greedy)
        except RunInterrupted:
            error = stop.error()
        else:
            report.evaluation(
                "of " + facts["model"], found.sampled.interval, found.greedy.interval if found.greedy else None, found.sampled.failures
            )
            result = EvaluateResult(evaluation=found, run_dir=run_dir, warnings=report.warnings)
            write_json(run_dir / _RESULT, result)
            return result
    raise error


def _settings(given: dict[str, Any], *, n: int, own_endpoints: bool) -> Settings:
    if "resume" in given:
        raise SettingError(f"resume={given['resume']!r} would have no effect: an evaluation is not continued; leave it out")
    refused = dict.fromkeys(set(Settings.__struct_fields__) - _USED, "evaluate trains nothing")
    if own_endpoints:
        refused |= dict.fromkeys(_ONLY_WITH_A_MODEL, "without a model the app's calls keep their own endpoints")
    return make_settings(given | {"eval_n": n}, refused={name: why for name, why in refused.items() if name != "eval_n"})
