"""Stored episodes in, better weights out: the loop of ``fit`` without an app to run and without a server.

What a step sees follows from the store and the settings alone, so it is the same bit for bit whenever it is replayed. The recorded
logprobs are those that the ratio is taken to as long as the weights are the ones that sampled; from then on they are verl's
rollout correction's to deal with.
"""

from __future__ import annotations

import contextvars
import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any, Unpack

import msgspec

from rllm_trainer.advantages import greedy_rule, require_greedy, rules_of
from rllm_trainer.checkpoint import SETTINGS_FILE, Checkpoints, export_model, how_to_continue, new_run_dir, owned, standing, write_json
from rllm_trainer.config import Settings, SettingsKw, make_settings, table
from rllm_trainer.credit_log import CreditLog
from rllm_trainer.engine.memory import free_memory, model_shape, require_memory
from rllm_trainer.engine.verl_settings import require_supported
from rllm_trainer.exceptions import DatasetError, NoSignal
from rllm_trainer.interrupts import interruptible
from rllm_trainer.loop import Loop, Parts
from rllm_trainer.metrics import Line, MetricsLog
from rllm_trainer.models import resolve_model
from rllm_trainer.plan import require_here, require_steps, versions_here
from rllm_trainer.preparation import make_samples
from rllm_trainer.processes import training
from rllm_trainer.report import Report
from rllm_trainer.rollout.dataset import FixedTasks, read_tasks
from rllm_trainer.rollout.lane import Lane
from rllm_trainer.rollout.rewards import RewardFunction, given_functions
from rllm_trainer.rollout.runner import RunInterrupted
from rllm_trainer.rollout.stored import (
    StoredBatches,
    StoredGroup,
    StoredSource,
    read_greedy,
    read_recorded,
    scored_again,
    stored_groups,
    with_greedy,
)
from rllm_trainer.samples import Counters
from rllm_trainer.state import State
from rllm_trainer.token_text import text_of_tokens
from rllm_trainer.trainability_report import TrainabilityReport
from rllm_trainer.types import Rollout

__all__ = ["ReplayResult", "replay"]

RESULT_FILE = "result.json"
MODEL_FOLDER = "model"
_USED = frozenset(
    {
        "algorithm", "batch_tasks", "betas", "clip_grad", "clip_high", "clip_low", "cluster", "correction", "discount", "engine",
        "entropy_coef", "epochs", "eps", "faults", "group_by", "keep", "kl_coef", "kl_estimator", "kl_in", "limits", "lora", "loss_agg",
        "lr", "mask_truncated", "max_model_len", "micro_batch_tokens", "norm_by_std", "overlong", "policy_loss", "ppo_epochs", "progress",
        "ray", "reject_below", "returns", "sample_mode", "save_every", "schedule", "seed", "shuffle", "steps", "threads", "verl",
        "warmup_steps", "weight_decay",
    }
)  # fmt: skip
_COMPARED = 2
"""Episodes that a rule with a baseline needs in a group."""


class ReplayResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a replay came to."""

    model_path: Path
    """The trained model: a Hugging Face folder."""
    metrics: list[Line]
    """One line a step, as in ``metrics.jsonl``."""
    trainability: Counters
    """What became of the calls and tokens of the steps taken; a continued replay counts those since."""
    trainability_report: TrainabilityReport
    """The same with the causes, each with an example; also in ``trainability.md``."""
    set_aside: dict[str, int]
    """Why -> episodes that were in no group."""
    run_dir: Path
    warnings: list[str]


class _Plan(msgspec.Struct, frozen=True, kw_only=True):
    settings: Settings
    batches: StoredBatches
    set_aside: dict[str, int]
    model: Path
    run_dir: Path
    state: State
    resumed: bool
    checkpoint: Path | None
    record: dict[str, Any]
    """For ``settings.json``."""


def replay(
    store: Any,
    model: str | Path,
    reward: Callable[..., Any] | Iterable[Callable[..., Any]] | None = None,
    algorithm: str | dict[str, str] = "grpo",
    output_dir: str | Path | None = None,
    dataset: Any = None,
    **settings: Unpack[SettingsKw],
) -> ReplayResult:
    """Train ``model`` on episodes that were recorded before.

    Args:
        store: the folder of a store, the run folder of a ``fit``, a JSONL file of episodes, a ``Store``, or a list of episodes.
        model: a Hugging Face folder or name; best the one that made the episodes.
        reward: functions that score each episode anew, their parameters filled from ``output``, ``row``, ``episode``, ``error`` and the
            row's columns; what it had been given does not count then. None: the stored rewards, later ones included.
        algorithm: advantage estimator, under verl's name, or one for each role.
        output_dir: the run folder; None: a new one under ``runs/``.
        dataset: the rows that the episodes were recorded on; gives rewards the columns that the app was not called with.
        settings: those of ``Settings`` that a replay uses; others are refused. Without ``batch_tasks`` and ``shuffle``, episodes that a
            run recorded are taken in its steps.

    Raises:
        TrainerError: something was refused or went wrong; the message says what to do.
        KeyboardInterrupt: after Ctrl-C, once the run is on file and can be continued.
    """
    report = Report(progress=settings.get("progress", True) is not False)
    resume = settings.pop("resume", False)
    given: dict[str, Any] = dict(settings) | ({"algorithm": algorithm} if algorithm != "grpo" else {})
    plan = _plan(store, model, reward, output_dir, dataset, given, resume=resume, report=report)
    with interruptible(report.warn) as stop, owned(plan.run_dir):
        write_json(plan.run_dir / SETTINGS_FILE, plan.record)
        try:
            return _run(plan, report, stop.event)
        except RunInterrupted:
            report.warn(how_to_continue("replay", plan.run_dir))
            error = stop.error()
    raise error


def _plan(
    store: Any, model: Any, reward: Any, output_dir: Any, dataset: Any, given: dict[str, Any], *, resume: Any, report: Report
) -> _Plan:
    refused = dict.fromkeys(set(Settings.__struct_fields__) - _USED, "replay runs no app and serves nothing")
    settings = make_settings({"shuffle": False} | given, refused=refused)
    require_here(settings, given)
    rules = rules_of(settings.algorithm)
    require_greedy(settings)
    functions = given_functions(reward)
    folder = resolve_model(model, say=report.note)
    require_supported(settings)
    memory = require_memory(model_shape(folder), settings, available=free_memory())
    rollouts, steps, aside = read_recorded(store)
    if functions is not None:
        rollouts = _scored(_with_rows(rollouts, dataset), functions)
    groups = stored_groups(rollouts, steps, smallest=_COMPARED if any(rule.grouped for rule in rules) else 1, aside=aside)
    if (rule := greedy_rule(settings.algorithm)) is not None:
        groups = with_greedy(groups, _greedy(store, functions, dataset), rule=rule)
    set_aside = dict(+aside)
    counters = _require_trainable(groups, settings, set_aside)
    as_recorded = "batch_tasks" not in given and not settings.shuffle and all(group.step is not None for group in groups)
    batches = StoredBatches(groups, batch_tasks=None if as_recorded else settings.batch_tasks, shuffle=settings.shuffle, seed=settings.seed)
    total = settings.steps or batches.steps(settings.epochs or 1)
    require_steps(settings, total)
    run_dir = new_run_dir(output_dir, name="replay", resume=resume)
    fingerprint = _fingerprint(groups, settings, folder, as_recorded=as_recorded)
    state, checkpoint = standing(run_dir, keep=settings.keep, fingerprint=fingerprint, steps=total, resume=resume)
    facts = {
        "store": f"{sum(len(group.group.rollouts) for group in groups)} episodes in {len(groups)} groups",
        "set aside": _listed(set_aside) or "none",
        "reward": ", ".join(f.name for f in functions) + ", for every episode anew" if functions is not None else "as stored",
        "tokens to train": f"{counters.trained_tokens} of {counters.sampled_tokens} sampled",
        "batches": "as the run took them" if as_recorded else f"{settings.batch_tasks} groups each",
        "model": str(folder),
        "steps in all": str(total),
        "memory": f"{memory.total / 2**30:.1f} GiB at most, by estimate",
        "run folder": str(run_dir),
    }
    report.settings([row for row in table(settings, given) if row.name in _USED], facts)
    return _Plan(
        settings=settings,
        batches=batches,
        set_aside=set_aside,
        model=folder,
        run_dir=run_dir,
        state=state,
        resumed=bool(resume),
        checkpoint=checkpoint,
        record={"facts": facts, "settings": settings, "given": sorted(given), "versions": versions_here()},
    )


def _run(plan: _Plan, report: Report, stop: threading.Event) -> ReplayResult:
    settings, run_dir = plan.settings, plan.run_dir
    with ExitStack() as open_:
        with report.doing("engine started"):
            engine = open_.enter_context(training(settings, plan.model, run_dir, stop))
        if plan.checkpoint is not None:
            engine.load(plan.checkpoint)
        metrics = MetricsLog(run_dir, resume_after=plan.state.step if plan.resumed else None)
        open_.callback(metrics.close)
        checkpoints = Checkpoints(run_dir, settings.keep)
        parts = Parts(
            settings=settings,
            engine=engine,
            server=None,
            source=StoredSource(plan.batches.batches(epochs=settings.epochs, start=plan.state.step)),
            evaluator=None,
            sites=None,
            metrics=metrics,
            checkpoints=checkpoints,
            report=report,
            stop=stop,
            decode=text_of_tokens(plan.model),
            credit=CreditLog(run_dir, resume_after=plan.state.step if plan.resumed else None),
        )
        loop = Loop(parts, plan.state)
        loop.run()
        newest = checkpoints.latest()
    assert newest is not None, "the loop writes a checkpoint before it returns"
    export_model(newest[1], run_dir / MODEL_FOLDER)
    report.trainability(loop.trainability, since=plan.state.step)
    result = ReplayResult(
        model_path=run_dir / MODEL_FOLDER,
        metrics=metrics.lines,
        trainability=loop.trainability.counters,
        trainability_report=loop.trainability,
        set_aside=plan.set_aside,
        run_dir=run_dir,
        warnings=report.warnings,
    )
    write_json(run_dir / RESULT_FILE, result)
    report.note(f"model: {result.model_path}")
    return result


def _greedy(store: Any, functions: Sequence[RewardFunction] | None, dataset: Any) -> list[tuple[int, Rollout]]:
    """The greedy rollouts on file and their steps, with the rewards that the others have."""
    found = read_greedy(store)
    if functions is None or not found:
        return found
    scored = _scored(_with_rows([rollout for _, rollout in found], dataset), functions)
    return [(step, rollout) for (step, _), rollout in zip(found, scored, strict=True)]


def _with_rows(rollouts: Sequence[Rollout], dataset: Any) -> list[Rollout]:
    """Rollouts with the row that a reward may ask for: the recorded one, that of the data set, or what the app was called with."""
    rows: dict[str, Any] = {}
    if dataset is not None:
        tasks = read_tasks(dataset)
        if not isinstance(tasks, FixedTasks):
            raise DatasetError("dataset: got an iterable, which is drawn once; rows are looked up by task here: give a list or a file")
        rows = {task.id: task.row for task in tasks.tasks}
        missing = [r.task_id for r in rollouts if r.row is None and r.task_id not in rows]
        if missing:
            raise DatasetError(
                f"dataset: {len(missing)} of {len(rollouts)} episodes are of a task that is none of its rows, such as {missing[0]}; give "
                "the rows that the episodes were recorded on"
            )
    return [
        r if r.row is not None else msgspec.structs.replace(r, row=rows.get(r.task_id, r.episode.input if r.episode is not None else None))
        for r in rollouts
    ]


def _scored(rollouts: Sequence[Rollout], functions: Sequence[RewardFunction]) -> list[Rollout]:
    for function in functions:
        function.arguments(output=None, row=rollouts[0].row, episode=None, error=None)  # refused before the first is called
    lane: list[Lane] = []

    def awaited(work: Coroutine[Any, Any, Any]) -> Any:
        if not lane:
            lane.append(Lane("rllm-rewards"))
        return lane[0].submit(work, contextvars.copy_context()).done.result()

    try:
        return [scored_again(rollout, functions, awaited=awaited) for rollout in rollouts]
    finally:
        for one in lane:
            one.close(timeout=2.0)


def _require_trainable(groups: Sequence[StoredGroup], settings: Settings, set_aside: Mapping[str, int]) -> Counters:
    """What the store holds. Raises ``NoSignal`` where none of it can be trained, with the reasons."""
    reasons: Counter[str] = Counter()
    counters = Counters()
    for group in groups:
        samples = make_samples(group.group.rollouts, settings=settings, vocab_size=None)
        counters = reduce(add, (one.counters for one in samples.values()), counters)
        for one in samples.values():
            reasons.update(f"{aside.reason} ({aside.detail})" for aside in one.set_aside)
    if not counters.trained_tokens:
        lost = Counter(f"{r.fault}: {r.reason}" for g in groups for r in g.group.rollouts if r.fault is not None)
        why = _listed(dict(set_aside)) or _listed(dict(reasons.most_common(3))) or _listed(dict(lost.most_common(3)))
        raise NoSignal(
            f"nothing in the store can be trained: {why or 'its episodes made no call'}; record episodes with token ids and rewards, "
            "several for each task: rllm.configure(store=...), rllm.collect() or fit does"
        )
    return counters


def _fingerprint(groups: Sequence[StoredGroup], settings: Settings, model: Path, *, as_recorded: bool) -> dict[str, Any]:
    content = hashlib.sha256()
    for group in groups:
        for rollout in [*group.group.rollouts, *([group.group.greedy] if group.group.greedy is not None else [])]:
            content.update(f"{group.id} {rollout.episode.id if rollout.episode else ''} {rollout.reward}\n".encode())
    names = ("seed", "shuffle", "algorithm", "sample_mode")
    batches = "recorded steps" if as_recorded else settings.batch_tasks
    return {"store": content.hexdigest()[:16], "model": str(model), "batch_tasks": batches} | {n: getattr(settings, n) for n in names}


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name}: {count}" for name, count in Counter(counts).most_common())
