"""An app and rows in, better weights out: the whole run, from the first check to the result.

Everything that was started is closed and everything that was changed is put back when it returns or raises. The same run can be
started from a notebook, twice in one process, or continued after Ctrl-C.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, Unpack

import msgspec

from rllm_trace.routing import CallSites
from rllm_trainer.advantages import greedy_rule
from rllm_trainer.checkpoint import SETTINGS_FILE, Checkpoints, export_model, how_to_continue, owned, write_json
from rllm_trainer.config import SettingsKw
from rllm_trainer.credit_log import CreditLog
from rllm_trainer.evaluation import Evaluation, Evaluator, Rise, rise_of
from rllm_trainer.exceptions import ServerError
from rllm_trainer.interrupts import interruptible
from rllm_trainer.loop import Loop, Parts
from rllm_trainer.measures import evaluation_measures
from rllm_trainer.metrics import Line, MetricsLog
from rllm_trainer.plan import Ask, RunPlan, limits_of, plan_run
from rllm_trainer.plots import draw_reward_curve
from rllm_trainer.processes import route_to, running
from rllm_trainer.report import Report
from rllm_trainer.rollout.live import live_source
from rllm_trainer.rollout.record import RolloutLog
from rllm_trainer.rollout.runner import RunInterrupted, Runner
from rllm_trainer.samples import Counters
from rllm_trainer.serving.base import Server
from rllm_trainer.serving_settings import Serving
from rllm_trainer.template import template_breaks, tokenize_with
from rllm_trainer.token_text import text_of_tokens
from rllm_trainer.trainability_report import TrainabilityReport

__all__ = ["FitResult", "fit"]

BEFORE_FILE = "before.json"
RESULT_FILE = "result.json"
CURVE_FILE = "reward_curve.png"
MODEL_FOLDER = "model"


class FitResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a run came to."""

    model_path: Path
    """The trained model: a Hugging Face folder."""
    metrics: list[Line]
    """One line a step, as in ``metrics.jsonl``; the evaluations before and after are lines too."""
    before: Evaluation | None
    """Held-out scores of the model that the run started from; None without ``eval_dataset``."""
    after: Evaluation | None
    rise: Rise | None
    """After minus before, paired by task, with 95 % intervals."""
    trainability: Counters
    """What became of the calls and tokens of the steps taken; a continued run counts those since."""
    trainability_report: TrainabilityReport
    """The same with the causes, each with an example; also in ``trainability.md``."""
    run_dir: Path
    warnings: list[str]


def fit(
    app: Callable[..., Any],
    dataset: Any,
    model: str | Path | None = None,
    reward: Callable[..., Any] | Iterable[Callable[..., Any]] | None = None,
    eval_dataset: Any = None,
    algorithm: str | dict[str, str] = "grpo",
    group_size: int = 8,
    replaces: Iterable[str] | None = None,
    sampling: dict[str, Any] | None = None,
    output_dir: str | Path | None = None,
    serving: Serving = "auto",
    engine: Literal["auto", "verl", "cluster", "direct-ray"] = "auto",
    **settings: Unpack[SettingsKw],
) -> FitResult:
    """Train the model that ``app`` calls, on ``dataset``, so that its reward rises.

    Args:
        app: a function, sync or async; its OpenAI clients are led to the policy while it runs. Decorated with ``@rllm.workflow`` or not.
        dataset: rows, as a list of dicts or strings, a path to JSONL or Parquet, a pandas or Hugging Face table, or an iterable.
            Columns fill the app's parameters of their name.
        model: a Hugging Face folder or name; None: the embedded default.
        reward: functions called after the app, their parameters filled from ``output``, ``row``, ``episode``, ``error`` and the row's
            columns. None: rewards that the app gives, else those decorated with ``@rllm.reward`` in its module.
        eval_dataset: rows that are never trained on, scored before and after.
        algorithm: advantage estimator, under verl's name, or one for each role.
        group_size: rollouts of a row that are compared with each other.
        replaces: only calls that ask for these model names go to the policy; None: all.
        sampling: fields that override the app's own in calls to the policy.
        output_dir: the run folder; None: a new one under ``runs/``.
        serving: what serves the policy.
        engine: what updates the weights.
        settings: see ``rllm_trainer.config.Settings``; ``resume=True`` continues the run in ``output_dir``.

    Raises:
        TrainerError: something was refused or went wrong; the message says what to do.
        KeyboardInterrupt: after Ctrl-C, once the run is on file and can be continued.
    """
    replaces = replaces if replaces is None or isinstance(replaces, str) else list(replaces)
    given: dict[str, Any] = {"algorithm": algorithm, "group_size": group_size, "replaces": replaces, "sampling": sampling}
    given |= {"serving": serving, "engine": engine}
    resume = settings.pop("resume", False)
    report = Report(progress=settings.get("progress", True) is not False)
    ask = Ask(
        app=app,
        dataset=dataset,
        model=model,
        reward=reward,
        eval_dataset=eval_dataset,
        output_dir=output_dir,
        resume=resume,
        given={name: value for name, value in given.items() if value != _DEFAULTS[name]} | dict(settings),
    )
    plan = plan_run(ask, report)
    with interruptible(report.warn) as stop, owned(plan.run_dir):
        write_json(plan.run_dir / SETTINGS_FILE, plan.record)
        try:
            if plan.settings.engine == "cluster":
                return _run_on_cluster(ask, plan, report, stop.event)
            return _run(ask, plan, report, stop.event)
        except RunInterrupted:
            report.warn(how_to_continue("fit", plan.run_dir))
            error = stop.error()
    raise error


_DEFAULTS: dict[str, Any] = {
    "algorithm": "grpo",
    "group_size": 8,
    "replaces": None,
    "sampling": None,
    "serving": "auto",
    "engine": "auto",
}


def _run(ask: Ask, plan: RunPlan, report: Report, stop: threading.Event) -> FitResult:
    settings, run_dir = plan.settings, plan.run_dir
    sites = CallSites()
    with ExitStack() as open_:
        with report.doing("engine and server started"):
            engine, server = open_.enter_context(running(settings, plan.model, run_dir, stop))
        if plan.checkpoint is not None:
            engine.load(plan.checkpoint)
            server.swap(engine.export_weights(plan.state.version))
        _check_template(server, report)
        runner = Runner(ask.app, plan.rewards, limits_of(settings))
        open_.callback(runner.close)
        log = RolloutLog(run_dir)
        open_.callback(log.close)
        metrics = MetricsLog(run_dir, resume_after=plan.state.step if plan.resumed else None)
        open_.callback(metrics.close)
        evaluator = None
        if plan.eval_tasks:
            evaluator = Evaluator(
                plan.eval_tasks,
                runner,
                route_to(server, settings, None),
                n=settings.eval_n,
                seed=settings.seed,
                log=log,
                report=report,
                stop=stop,
            )
        before = _before(plan, evaluator, metrics, report)
        source = live_source(
            plan.batches(),
            runner,
            route_to(server, settings, sites),
            settings=settings,
            state=plan.state,
            log=log,
            report=report,
            stop=stop,
            spare=plan.spare,
            greedy=greedy_rule(settings.algorithm) is not None,
        )
        open_.callback(source.close)
        checkpoints = Checkpoints(run_dir, settings.keep)
        parts = Parts(
            settings=settings,
            engine=engine,
            server=server,
            source=source,
            evaluator=evaluator,
            sites=sites,
            metrics=metrics,
            checkpoints=checkpoints,
            report=report,
            stop=stop,
            decode=text_of_tokens(plan.model),
            credit=CreditLog(run_dir, resume_after=plan.state.step if plan.resumed else None),
        )
        loop = Loop(parts, plan.state)
        loop.run()
        if loop.state.step and not loop.state.version:
            report.warn("no step had anything to learn from, so the weights are those that the run started with; metrics.jsonl says why")
        newest = checkpoints.latest()
    assert newest is not None, "the loop writes a checkpoint before it returns"
    export_model(newest[1], run_dir / MODEL_FOLDER)
    return _result(plan, before, loop.last_evaluation, loop.trainability, metrics.lines, report)


def _run_on_cluster(ask: Ask, plan: RunPlan, report: Report, stop: threading.Event) -> FitResult:
    from rllm_trainer.cluster.run import run_on_cluster

    done = run_on_cluster(ask, plan, report, stop)
    return _result(plan, done.before, done.last_evaluation, done.trainability, done.lines, report)


def _check_template(server: Server, report: Report) -> None:
    """Says where the chat template makes a row of every call."""
    try:
        breaks = template_breaks(tokenize_with(server))
    except ServerError as error:
        report.warn(f"the chat template's prefix property was not checked: {error}")
        return
    if breaks:
        report.warn(
            f"the chat template rewrites turns: {'; '.join(breaks)}; training stays exact, and each such call costs a row of its own"
        )


def _before(plan: RunPlan, evaluator: Evaluator | None, metrics: MetricsLog, report: Report) -> Evaluation | None:
    """The evaluation of the model that the run started from; of a continued run, the one that it has on file."""
    if evaluator is None:
        return None
    path = plan.run_dir / BEFORE_FILE
    if plan.resumed and path.exists():
        return msgspec.json.decode(path.read_bytes(), type=Evaluation)
    found = evaluator.run(step=0, version=plan.state.version, greedy=plan.settings.eval_greedy)
    report.evaluation("before", found.sampled.interval, found.greedy.interval if found.greedy else None, found.sampled.failures)
    metrics.write(0, evaluation_measures(found))
    write_json(path, found)
    return found


def _result(
    plan: RunPlan, before: Evaluation | None, after: Evaluation | None, found: TrainabilityReport, lines: list[Line], report: Report
) -> FitResult:
    rise = rise_of(before, after, seed=plan.settings.seed) if before is not None and after is not None else None
    report.trainability(found, since=plan.done)
    if after is not None:
        report.evaluation("after", after.sampled.interval, after.greedy.interval if after.greedy else None, after.sampled.failures)
    if rise is not None:
        report.note(f"rise: {rise.sampled}" + (f", greedy {rise.greedy}" if rise.greedy is not None else ""))
    result = FitResult(
        model_path=plan.run_dir / MODEL_FOLDER,
        metrics=lines,
        before=before,
        after=after,
        rise=rise,
        trainability=found.counters,
        trainability_report=found,
        run_dir=plan.run_dir,
        warnings=report.warnings,
    )
    draw_reward_curve(lines, plan.run_dir / CURVE_FILE, title=plan.name)
    write_json(plan.run_dir / RESULT_FILE, result)
    report.note(f"model: {result.model_path}")
    return result
