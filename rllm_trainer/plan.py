"""What the user asked for in, a run that can be started out; what can be refused without starting anything is refused here.

No process, no port and no file but the run folder is made. The order of the checks is the order in which a person would want to know.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from rllm_trainer.advantages import require_greedy
from rllm_trainer.checkpoint import new_run_dir, standing
from rllm_trainer.cluster.refusals import ON_RAY, require_cluster, require_elsewhere
from rllm_trainer.cluster.saved import saved_step
from rllm_trainer.config import SettingRow, Settings, make_settings, table
from rllm_trainer.correction import require_correction
from rllm_trainer.engine.memory import free_memory, model_shape, require_memory
from rllm_trainer.engine.verl_settings import child_settings
from rllm_trainer.exceptions import DatasetError, SettingError
from rllm_trainer.models import DEFAULT_MODEL, resolve_model
from rllm_trainer.report import Report
from rllm_trainer.rollout.ahead import unfinished
from rllm_trainer.rollout.arguments import Binder, app_name
from rllm_trainer.rollout.dataset import FixedTasks, StreamedTasks, Task, read_tasks, require_disjoint
from rllm_trainer.rollout.rewards import RewardPlan, plan_rewards
from rllm_trainer.rollout.runner import Limits
from rllm_trainer.serving_settings import require_trainable
from rllm_trainer.state import State

__all__ = [
    "Ask",
    "RunPlan",
    "fixed_tasks",
    "guarded",
    "limits_of",
    "plan_run",
    "require_arguments",
    "require_here",
    "require_steps",
    "versions_here",
]

_PACKAGES = ("rllm-trace", "verl", "torch", "transformers", "openai")
_OF_EVALUATION = ("eval_every", "eval_n", "eval_greedy")
_MOST_EVALUATION_ROWS = 100_000


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """What ``fit`` was called with, as given."""

    app: Callable[..., Any]
    dataset: Any
    model: Any
    reward: Any
    eval_dataset: Any
    output_dir: Any
    resume: Any
    given: dict[str, Any]
    """Settings by name."""


class RunPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A run that can be started."""

    name: str
    settings: Settings
    tasks: FixedTasks | StreamedTasks
    eval_tasks: list[Task]
    """Empty: there is no evaluation."""
    rewards: RewardPlan
    model: Path
    run_dir: Path
    state: State
    resumed: bool
    """The run is continued: what it has on file counts."""
    done: int
    """Steps that it has taken by then; verl's trainer keeps them in checkpoints of its own, of which ``state`` does not know."""
    checkpoint: Path | None
    """What the engine continues from; None: it starts from the model."""
    facts: dict[str, str]
    rows: list[SettingRow]
    record: dict[str, Any]
    """For ``settings.json``, once the run folder is owned."""

    def spare(self, step: int) -> Iterator[Task]:
        """Further rows for one step, in place of groups without signal."""
        return self.tasks.spare(step, seed=self.settings.seed) if isinstance(self.tasks, FixedTasks) else iter(())

    def batches(self) -> Iterator[list[Task]]:
        """The batches that are left, none with a row of the evaluation."""
        settings = self.settings
        start = unfinished(self.state.cursor, self.state.step) - 1
        if isinstance(self.tasks, FixedTasks):
            drawn = self.tasks.batches(
                settings.batch_tasks, epochs=settings.epochs, seed=settings.seed, shuffle=settings.shuffle, start=start
            )
        else:
            drawn = self.tasks.batches(settings.batch_tasks, start=start)
        if self.state.steps is not None:
            drawn = islice(drawn, max(0, self.state.steps - start))
        return guarded(drawn, self.eval_tasks)


def plan_run(ask: Ask, report: Report) -> RunPlan:
    """Check everything, and make or open the run folder.

    Raises the error of the first thing that cannot be: settings, rewards, rows, model or run folder.
    """
    refused: dict[str, str] = {}
    if ask.eval_dataset is None:
        refused = dict.fromkeys(_OF_EVALUATION, "there is no eval_dataset")
    if not ask.given.get("staleness"):
        refused["correction"] = "staleness=0 means that every token was sampled by the weights that are trained"
    settings = make_settings(ask.given, refused=refused)
    require_trainable(settings)
    require_greedy(settings)
    require_correction(settings.correction)
    name = app_name(ask.app)
    binder = Binder(ask.app)
    rewards = plan_rewards(ask.reward, ask.app)
    tasks = read_tasks(ask.dataset)
    eval_tasks = [] if ask.eval_dataset is None else fixed_tasks(ask.eval_dataset, "eval_dataset")
    _require_refillable(settings, tasks)
    steps = _steps(tasks, settings, ask.given)
    _check_rows(tasks, eval_tasks, binder, rewards)
    model = resolve_model(ask.model, say=report.note)
    memory = _require_engine(settings, ask.given, model)
    run_dir = new_run_dir(ask.output_dir, name=name, resume=ask.resume)
    fingerprint = _fingerprint(tasks, settings, model)
    state, checkpoint = standing(run_dir, keep=settings.keep, fingerprint=fingerprint, steps=steps, resume=ask.resume)
    facts = _facts(ask, name, tasks, eval_tasks, rewards, model, run_dir, state, memory)
    plan = RunPlan(
        name=name,
        settings=settings,
        tasks=tasks,
        eval_tasks=eval_tasks,
        rewards=rewards,
        model=model,
        run_dir=run_dir,
        state=state,
        resumed=bool(ask.resume),
        done=saved_step(run_dir) if settings.engine == "cluster" and ask.resume else state.step,
        checkpoint=checkpoint,
        facts=facts,
        rows=table(settings, ask.given),
        record={"facts": facts, "settings": settings, "given": sorted(ask.given), "versions": versions_here()},
    )
    _say(plan, binder, report)
    return plan


def _require_engine(settings: Settings, given: Mapping[str, Any], model: Path) -> str:
    """Refuses what the engine cannot honour; says what memory it is estimated to take here."""
    require_elsewhere(settings, given)
    if settings.engine in ON_RAY:
        require_cluster(settings, given)
    if settings.engine == "cluster":
        return "the cluster's"
    child_settings(settings, model)
    memory = require_memory(model_shape(model), settings, available=free_memory())
    return f"{memory.total / 2**30:.1f} GiB at most, by estimate"


def limits_of(settings: Settings) -> Limits:
    """What of the settings is the runner's."""
    return Limits(
        concurrency=settings.concurrency,
        rollout_timeout=settings.rollout_timeout,
        batch_timeout=settings.batch_timeout,
        retries=settings.retries,
        quorum=settings.quorum,
        quorum_grace=settings.quorum_grace,
    )


def fixed_tasks(dataset: Any, name: str) -> list[Task]:
    """All tasks of a data set that must have an end. Raises ``DatasetError`` where it has too many rows to be one."""
    tasks = read_tasks(dataset, name=name)
    if isinstance(tasks, FixedTasks):
        return tasks.tasks
    drawn = [task for batch in islice(tasks.batches(1000), _MOST_EVALUATION_ROWS // 1000 + 1) for task in batch]
    if len(drawn) > _MOST_EVALUATION_ROWS:
        raise DatasetError(f"{name}: got more than {_MOST_EVALUATION_ROWS} rows from an iterable; expected a fixed number: give a list")
    return list({task.id: task for task in drawn}.values())


def guarded(batches: Iterator[list[Task]], eval_tasks: Iterable[Task]) -> Iterator[list[Task]]:
    """The batches; raises ``DatasetError`` at the first that holds a row of the evaluation."""
    held_out = list(eval_tasks)
    for batch in batches:
        require_disjoint(held_out, batch)
        yield batch


def require_arguments(tasks: Iterable[Task], binder: Binder, rewards: RewardPlan) -> None:
    """Raises where a row does not fill the app's parameters, or the first one not those of a reward."""
    for number, task in enumerate(tasks):
        binder.bind(task.row)
        if number == 0:
            for function in rewards.functions:
                function.arguments(output=None, row=task.row, episode=None, error=None)


def _check_rows(tasks: FixedTasks | StreamedTasks, eval_tasks: list[Task], binder: Binder, rewards: RewardPlan) -> None:
    known = tasks.tasks if isinstance(tasks, FixedTasks) else [tasks.first]
    require_disjoint(known, eval_tasks)
    require_arguments(known, binder, rewards)
    require_arguments(eval_tasks, binder, rewards)


def _steps(tasks: FixedTasks | StreamedTasks, settings: Settings, given: Mapping[str, Any]) -> int | None:
    if isinstance(tasks, StreamedTasks) and given.get("shuffle"):
        raise SettingError("shuffle=True would have no effect: the rows come from an iterable, and are taken as they come; give a list")
    if settings.steps is not None:
        return settings.steps
    if isinstance(tasks, FixedTasks):
        assert settings.epochs is not None
        steps = tasks.steps(settings.epochs, settings.batch_tasks)
    else:
        if "epochs" in given:
            raise SettingError("epochs cannot be counted over an iterable, which is drawn once; give steps, or a list")
        steps = None
    require_steps(settings, steps)
    return steps


def _require_refillable(settings: Settings, tasks: FixedTasks | StreamedTasks) -> None:
    if settings.refill and settings.staleness:
        raise SettingError(f"refill={settings.refill} needs staleness=0: which groups say nothing is known when all of a step have ended")
    if settings.refill and not isinstance(tasks, FixedTasks):
        raise SettingError(f"refill={settings.refill} draws further rows, and an iterable's are drawn once, in order; give a list of rows")


def require_here(settings: Settings, given: Mapping[str, Any]) -> None:
    """Raises ``SettingError`` where steps that run no app are asked of verl's own trainer, or an engine does not read a setting."""
    if settings.engine == "cluster":
        raise SettingError(
            "engine='cluster' is verl's own trainer, which runs the app; engine='direct-ray' takes such steps on several devices"
        )
    require_elsewhere(settings, given)


def require_steps(settings: Settings, steps: int | None) -> None:
    """Raises ``SettingError`` where the schedule cannot be laid over so many steps; None: nobody knows how many."""
    if settings.schedule == "constant":
        return
    if steps is None:
        raise SettingError(f"schedule={settings.schedule!r} needs a known number of steps, and the rows come from an iterable; give steps")
    if settings.warmup_steps >= steps:
        raise SettingError(f"warmup_steps={settings.warmup_steps} leaves no step for the {settings.schedule} schedule: there are {steps}")


def _fingerprint(tasks: FixedTasks | StreamedTasks, settings: Settings, model: Path) -> dict[str, Any]:
    if isinstance(tasks, FixedTasks):
        rows = hashlib.sha256(" ".join(task.id for task in tasks.tasks).encode()).hexdigest()[:16]
    else:
        rows = f"an iterable from {tasks.first.id}"
    names = ("seed", "batch_tasks", "group_size", "shuffle", "algorithm", "sample_mode", "staleness")
    return {"rows": rows, "model": str(model)} | {name: getattr(settings, name) for name in names}


def _facts(
    ask: Ask,
    name: str,
    tasks: FixedTasks | StreamedTasks,
    eval_tasks: list[Task],
    rewards: RewardPlan,
    model: Path,
    run_dir: Path,
    state: State,
    memory: str,
) -> dict[str, str]:
    rows = f"{len(tasks)} rows" if isinstance(tasks, FixedTasks) else "an iterable, drawn as it is needed"
    chosen = f"{model} (the embedded default, {DEFAULT_MODEL}, because model is None)" if ask.model is None else str(model)
    return {
        "app": name,
        "dataset": rows,
        "eval_dataset": f"{len(eval_tasks)} rows" if eval_tasks else "none",
        "reward": rewards.source,
        "model": chosen,
        "steps in all": str(state.steps) if state.steps is not None else "until the rows run out",
        "memory": memory,
        "run folder": str(run_dir),
    }


def _say(plan: RunPlan, binder: Binder, report: Report) -> None:
    report.settings(plan.rows, plan.facts)
    if plan.resumed:
        report.note(f"continuing after step {plan.done}")
        if plan.state.steps is not None and plan.done >= plan.state.steps:
            report.warn(f"the run has taken {plan.done} steps, and there are {plan.state.steps} in all: nothing is left to train")
    first = plan.tasks.tasks[0] if isinstance(plan.tasks, FixedTasks) else plan.tasks.first
    unused = binder.unused(first.row)
    if unused:
        report.note(f"columns that the app is not given (rewards may use them): {', '.join(unused)}")
    if plan.tasks.duplicates:
        report.warn(f"{plan.tasks.duplicates} rows equal an earlier one and are left out: equal rows are one task")
    if isinstance(plan.tasks, FixedTasks) and len(plan.tasks) < plan.settings.batch_tasks:
        report.warn(f"batch_tasks is {plan.settings.batch_tasks}, and there are {len(plan.tasks)} rows: each batch has them all")
    if plan.settings.group_size == 1 and plan.settings.algorithm in ("grpo", "rloo"):
        report.warn(f"group_size=1 gives {plan.settings.algorithm} nothing to compare: every advantage is 0")


def versions_here() -> dict[str, str]:
    """Versions of Python and of the packages that a run depends on."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found
