"""A run's settings and state in, the source of its steps out: in turns with the updates, or ahead of them by a bound."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from rllm_trace.routing import Route
from rllm_trainer.config import Settings
from rllm_trainer.report import Report
from rllm_trainer.rollout.ahead import AheadSource, unfinished
from rllm_trainer.rollout.dataset import Task
from rllm_trainer.rollout.record import RolloutLog
from rllm_trainer.rollout.runner import Runner
from rllm_trainer.rollout.source import LiveSource
from rllm_trainer.state import State

__all__ = ["live_source"]


def live_source(
    batches: Iterator[list[Task]],
    runner: Runner,
    route: Route,
    *,
    settings: Settings,
    state: State,
    log: RolloutLog,
    report: Report,
    stop: threading.Event,
    spare: Callable[[int], Iterator[Task]] | None = None,
    greedy: bool = False,
) -> LiveSource | AheadSource:
    """What runs the app for each step. It takes up what the run folder has of groups that an interruption left unfinished."""
    first = unfinished(state.cursor, state.step)
    if settings.staleness == 0:
        return LiveSource(
            batches,
            runner,
            route,
            group_size=settings.group_size,
            seed=settings.seed,
            log=log,
            report=report,
            stop=stop,
            begun=log.read([first]),
            refill=settings.refill,
            spare=spare,
            faults=settings.faults,
            greedy=greedy,
        )
    drawn = state.step if state.cursor is None else state.cursor.drawn
    return AheadSource(
        batches,
        runner,
        route,
        staleness=settings.staleness,
        batch_tasks=settings.batch_tasks,
        group_size=settings.group_size,
        seed=settings.seed,
        log=log,
        report=report,
        stop=stop,
        state=state,
        begun=log.read(range(first, drawn + settings.staleness + 2)),
    )
