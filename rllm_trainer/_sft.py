"""Episodes or chats in, a model that is likelier to say what was said in them out: supervised fine-tuning, with verl's loss.

From stored episodes it trains the tokens that were sampled, of the episodes that earned enough: rejection sampling. From chats it
trains what the assistant says. The loss is the mean negative logprob over a batch's trained tokens, however they lie in rows.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Unpack

import msgspec
import numpy as np

from rllm_trainer.batching import make_batch, require_scale_factor
from rllm_trainer.chats import tokenize_chats
from rllm_trainer.checkpoint import SETTINGS_FILE, Checkpoints, export_model, how_to_continue, new_run_dir, owned, standing, write_json
from rllm_trainer.config import Settings, SettingsKw, make_settings, table
from rllm_trainer.engine.memory import free_memory, model_shape, require_memory
from rllm_trainer.engine.verl_settings import passed_to_verl
from rllm_trainer.exceptions import SettingError
from rllm_trainer.interrupts import interruptible
from rllm_trainer.loop import TrainingEngine
from rllm_trainer.measures import update_measures
from rllm_trainer.metrics import EVAL_NLL, Line, MetricsLog
from rllm_trainer.models import resolve_model
from rllm_trainer.plan import require_here, require_steps, versions_here
from rllm_trainer.processes import training
from rllm_trainer.report import Losses, Report
from rllm_trainer.rollout.dataset import FixedTasks, Task
from rllm_trainer.rollout.runner import RunInterrupted
from rllm_trainer.schedule import learning_rate
from rllm_trainer.sft_rows import Unit, Units, read_units, require_apart
from rllm_trainer.state import State

__all__ = ["SftResult", "sft"]

RESULT_FILE = "result.json"
MODEL_FOLDER = "model"
BEFORE_FILE = "before.json"
_USED = frozenset(
    {
        "batch_tasks", "betas", "clip_grad", "cluster", "engine", "epochs", "eps", "eval_every", "keep", "lora", "loss_agg", "lr",
        "mask_truncated", "max_model_len", "micro_batch_tokens", "overlong", "progress", "ray", "sample_mode", "save_every", "schedule",
        "seed", "shuffle", "steps", "threads", "verl", "warmup_steps", "weight_decay",
    }
)  # fmt: skip
_OF_EPISODES = ("mask_truncated", "sample_mode")
_IDLE_SECTIONS = ("algorithm",)
_EVAL_TOKENS = 65_536
"""Tokens of held-out rows that go to the engine in one call."""


class SftResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a fine-tuning came to."""

    model_path: Path
    """The trained model: a Hugging Face folder."""
    metrics: list[Line]
    """One line a step, as in ``metrics.jsonl``; the evaluations before and after are lines too."""
    before: float | None
    """Held-out negative log-likelihood a token, nats, of the model that the run started from; None without ``eval_dataset``."""
    after: float | None
    set_aside: dict[str, int]
    """Why -> episodes or chats that were not trained."""
    run_dir: Path
    warnings: list[str]


class _Plan(msgspec.Struct, frozen=True, kw_only=True):
    settings: Settings
    given: Units
    held_out: list[Unit]
    model: Path
    run_dir: Path
    state: State
    resumed: bool
    checkpoint: Path | None
    record: dict[str, Any]
    """For ``settings.json``."""

    def batches(self) -> Iterator[list[Unit]]:
        """The batches that are left."""
        settings = self.settings
        tasks = FixedTasks([Task(id=unit.id, row=unit) for unit in self.given.units])
        drawn = tasks.batches(
            settings.batch_tasks, epochs=settings.epochs, seed=settings.seed, shuffle=settings.shuffle, start=self.state.step
        )
        return ([task.row for task in batch] for batch in drawn)


def sft(
    store_or_chats: Any,
    model: str | Path,
    min_reward: float | None = None,
    output_dir: str | Path | None = None,
    eval_dataset: Any = None,
    **settings: Unpack[SettingsKw],
) -> SftResult:
    """Fine-tune ``model`` on what was said.

    Args:
        store_or_chats: stored episodes (the folder of a store, the run folder of a ``fit``, a JSONL file of episodes, a ``Store``, a list
            of episodes), or chats: ``{"messages": [...], "tools": [...]}`` in a list, a path to JSONL or Parquet, or a table.
        model: a Hugging Face folder or name.
        min_reward: of stored episodes, those that earned at least so much; None: all that did not fail for another's fault.
        output_dir: the run folder; None: a new one under ``runs/``.
        eval_dataset: episodes or chats that are never trained on, as ``store_or_chats``; their likelihood is measured before, after and
            every ``eval_every`` steps.
        settings: those of ``Settings`` that a fine-tuning uses; others are refused. ``batch_tasks`` episodes or chats make a step.

    Raises:
        TrainerError: something was refused or went wrong; the message says what to do.
        KeyboardInterrupt: after Ctrl-C, once the run is on file and can be continued.
    """
    report = Report(progress=settings.get("progress", True) is not False)
    resume = settings.pop("resume", False)
    plan = _plan(store_or_chats, model, min_reward, output_dir, eval_dataset, dict(settings), resume=resume, report=report)
    with interruptible(report.warn) as stop, owned(plan.run_dir):
        write_json(plan.run_dir / SETTINGS_FILE, plan.record)
        try:
            return _run(plan, report, stop.event)
        except RunInterrupted:
            report.warn(how_to_continue("sft", plan.run_dir))
            error = stop.error()
    raise error


def _plan(
    source: Any, model: Any, min_reward: Any, output_dir: Any, eval_dataset: Any, given: dict[str, Any], *, resume: Any, report: Report
) -> _Plan:
    settings = _settings(given, has_evaluation=eval_dataset is not None)
    if min_reward is not None and (isinstance(min_reward, bool) or not isinstance(min_reward, (int, float)) or not np.isfinite(min_reward)):
        raise SettingError(f"got min_reward={min_reward!r}; expected a finite number, or None for all episodes")
    folder = resolve_model(model, say=report.note)
    memory = require_memory(model_shape(folder), settings, available=free_memory())

    def tokenize(chats: Any) -> Any:
        with report.doing(f"{len(chats)} chats tokenised"):
            return tokenize_chats(chats, folder)

    units = read_units(source, "store_or_chats", min_reward=min_reward, settings=settings, tokenize=tokenize)
    _refuse_idle(units, given)
    held_out: list[Unit] = []
    if eval_dataset is not None:
        held_out = read_units(eval_dataset, "eval_dataset", min_reward=None, settings=settings, tokenize=tokenize).units
        require_apart(units.units, held_out)
    steps = settings.steps or FixedTasks([Task(id=unit.id, row=unit) for unit in units.units]).steps(
        settings.epochs or 1, settings.batch_tasks
    )
    require_steps(settings, steps)
    run_dir = new_run_dir(output_dir, name="sft", resume=resume)
    fingerprint = _fingerprint(units.units, settings, folder)
    state, checkpoint = standing(run_dir, keep=settings.keep, fingerprint=fingerprint, steps=steps, resume=resume)
    facts = {
        units.what: f"{len(units.units)}, {sum(unit.trained_tokens for unit in units.units)} tokens to train",
        "set aside": _listed(units.set_aside) or "none",
        **units.notes,
        "held out": f"{len(held_out)}, {sum(unit.trained_tokens for unit in held_out)} tokens" if held_out else "none",
        "model": str(folder),
        "steps in all": str(steps),
        "memory": f"{memory.total / 2**30:.1f} GiB at most, by estimate",
        "run folder": str(run_dir),
    }
    facts = {name: str(value) for name, value in facts.items()}
    report.settings([row for row in table(settings, given) if row.name in _USED], facts)
    return _Plan(
        settings=settings,
        given=units,
        held_out=held_out,
        model=folder,
        run_dir=run_dir,
        state=state,
        resumed=bool(resume),
        checkpoint=checkpoint,
        record={"facts": facts, "settings": settings, "given": sorted(given), "versions": versions_here()},
    )


def _run(plan: _Plan, report: Report, stop: threading.Event) -> SftResult:
    settings, run_dir, state = plan.settings, plan.run_dir, plan.state
    with ExitStack() as open_:
        with report.doing("engine started"):
            engine = open_.enter_context(training(settings, plan.model, run_dir, stop, objective="sft"))
        if plan.checkpoint is not None:
            engine.load(plan.checkpoint)
        metrics = MetricsLog(run_dir, resume_after=state.step if plan.resumed else None)
        open_.callback(metrics.close)
        checkpoints = Checkpoints(run_dir, settings.keep)
        before = _before(plan, engine, metrics, report)
        batches = plan.batches()
        try:
            while state.steps is None or state.step < state.steps:
                if stop.is_set():
                    raise RunInterrupted
                batch = next(batches, None)
                if batch is None:
                    break
                state = _step(state, batch, plan, engine, metrics, report)
                if state.step % settings.save_every == 0:
                    checkpoints.save(state, engine)
        except RunInterrupted:
            if state.step > 0:
                checkpoints.save(state, engine)
            raise
        checkpoints.save(state, engine)
        after = nll(engine, plan.held_out) if plan.held_out else None
        if after is not None:
            metrics.write(state.step, {EVAL_NLL: after})
            report.note(f"held-out loss: before {before:.4f}, after {after:.4f} nats a token")
        newest = checkpoints.latest()
    assert newest is not None, "a run has at least one step"
    export_model(newest[1], run_dir / MODEL_FOLDER)
    result = SftResult(
        model_path=run_dir / MODEL_FOLDER,
        metrics=metrics.lines,
        before=before,
        after=after,
        set_aside=plan.given.set_aside,
        run_dir=run_dir,
        warnings=report.warnings,
    )
    write_json(run_dir / RESULT_FILE, result)
    report.note(f"model: {result.model_path}")
    return result


def _step(state: State, units: Sequence[Unit], plan: _Plan, engine: TrainingEngine, metrics: MetricsLog, report: Report) -> State:
    settings, step = plan.settings, state.step + 1
    started = time.monotonic()
    assert settings.lr is not None
    lr = learning_rate(step, peak=settings.lr, schedule=settings.schedule, warmup_steps=settings.warmup_steps, steps=state.steps)
    rows = [row for unit in units for row in unit.rows]
    line = update_measures(engine.update(make_batch(rows, settings=settings, step=step, policy_version=state.version), lr=lr))
    if settings.eval_every is not None and step % settings.eval_every == 0 and step != state.steps:
        line[EVAL_NLL] = nll(engine, plan.held_out)
    line["seconds"] = time.monotonic() - started
    line["tokens/trained"] = sum(unit.trained_tokens for unit in units)
    report.step(metrics.write(step, line), Losses(), steps=state.steps)
    return msgspec.structs.replace(state, step=step, version=step)


def nll(engine: TrainingEngine, units: Sequence[Unit]) -> float:
    """Mean negative logprob over the trained tokens of the units, nats."""
    total, tokens = 0.0, 0
    for samples in _chunks([row.sample for unit in units for row in unit.rows]):
        found = engine.logprobs([s.token_ids for s in samples], temperatures=[1.0] * len(samples))
        for sample, logprobs in zip(samples, found, strict=True):
            total -= float(logprobs[sample.trained_mask].sum(dtype=np.float64))
            tokens += int(sample.trained_mask.sum())
    return total / tokens


def _chunks(samples: Sequence[Any]) -> Iterator[list[Any]]:
    chunk: list[Any] = []
    size = 0
    for sample in samples:
        if chunk and size + len(sample.token_ids) > _EVAL_TOKENS:
            yield chunk
            chunk, size = [], 0
        chunk.append(sample)
        size += len(sample.token_ids)
    if chunk:
        yield chunk


def _before(plan: _Plan, engine: TrainingEngine, metrics: MetricsLog, report: Report) -> float | None:
    """The held-out loss of the model that the run started from; of a continued run, the one that it has on file."""
    if not plan.held_out:
        return None
    path = plan.run_dir / BEFORE_FILE
    if plan.resumed and path.exists():
        return msgspec.json.decode(path.read_bytes(), type=float)
    found = nll(engine, plan.held_out)
    metrics.write(plan.state.step, {EVAL_NLL: found})
    report.note(f"held-out loss before: {found:.4f} nats a token")
    write_json(path, found)
    return found


def _settings(given: dict[str, Any], *, has_evaluation: bool) -> Settings:
    refused = dict.fromkeys(set(Settings.__struct_fields__) - _USED, "sft runs no app, serves nothing and gives no credit")
    if not has_evaluation:
        refused["eval_every"] = "there is no eval_dataset"
    settings = make_settings(given, refused=refused)
    require_here(settings, given)
    passed = passed_to_verl(settings)
    for section in _IDLE_SECTIONS:
        if section in passed:
            raise SettingError(f"verl[{section!r}] would have no effect: sft gives no credit; leave it out")
    idle = [name for name in passed.get("actor", {}) if name != "loss_scale_factor"]
    if idle:
        raise SettingError(f"verl['actor'][{idle[0]!r}] would have no effect: sft has no policy loss; leave it out")
    require_scale_factor(settings)
    return settings


def _refuse_idle(units: Units, given: Mapping[str, Any]) -> None:
    for name in _OF_EPISODES:
        if units.what == "chats" and name in given:
            raise SettingError(
                f"{name}={given[name]!r} would have no effect: it is about recorded calls, and these are chats; leave it out"
            )


def _fingerprint(units: Sequence[Unit], settings: Settings, model: Path) -> dict[str, Any]:
    content = hashlib.sha256(" ".join(unit.id for unit in units).encode()).hexdigest()[:16]
    return {"rows": content, "model": str(model)} | {
        name: getattr(settings, name) for name in ("seed", "batch_tasks", "shuffle", "sample_mode")
    }


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name}: {count}" for name, count in counts.items())
