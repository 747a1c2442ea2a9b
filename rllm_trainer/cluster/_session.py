"""What a run's own parts in verl's process share: one run a process, set before verl's trainer is made.

The trainer waits in verl's code; what ends its wait (a stop, a fault that no retry mends) is left here, and looked at between two polls.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from rllm_trace.routing import Route
from rllm_trainer.cluster.rows import Rows
from rllm_trainer.config import Settings
from rllm_trainer.credit_log import CreditLog
from rllm_trainer.rollout.dataset import Task
from rllm_trainer.rollout.record import RolloutLog
from rllm_trainer.rollout.runner import RunInterrupted
from rllm_trainer.samples import SampleSet
from rllm_trainer.types import Group

__all__ = ["GroupRows", "Session", "begin", "current"]


class GroupRows(msgspec.Struct, frozen=True, kw_only=True):
    """A group whose rollouts have ended, and its rows."""

    group: Group
    samples: Mapping[str, SampleSet]
    """Episode id -> its rows."""
    seconds: float
    """From its dispatch to its last rollout."""


@dataclass
class Session:
    """One run."""

    settings: Settings
    model: Path
    run_dir: Path
    eval_tasks: Sequence[Task]
    steps: int | None
    """In all; None: until the rows run out."""
    vocab_size: int
    max_model_len: int
    workers: Sequence[Any]
    """Handles of the app's workers."""
    route: Route
    """Without an address: fronts have it."""
    events: Any
    """``EventReport``."""
    log: RolloutLog
    credit: CreditLog
    rows: Rows = field(init=False)
    """Tasks by their position in the order in which they are drawn, batch after batch."""
    stop: threading.Event = field(default_factory=threading.Event)
    version: int = 0
    """Of the weights that replicas serve."""
    runner: Any = None
    groups: dict[str, GroupRows] = field(default_factory=dict[str, GroupRows])
    """verl's id of a prompt -> its group, from its end until it is trained."""
    notes: Counter[str] = field(default_factory=Counter[str])
    failure: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        """What no retry mends: the trainer ends with the first of these."""
        self.failure = self.failure or error

    def check(self) -> None:
        """Raises what ended the run."""
        if self.failure is not None:
            raise self.failure
        if self.stop.is_set():
            raise RunInterrupted


class _Current:
    session: Session | None = None


def begin(session: Session) -> Session:
    """The run of this process from now on."""
    _Current.session = session
    return session


def current() -> Session:
    """The run of this process."""
    assert _Current.session is not None, "the head begins a session before verl's trainer is made"
    return _Current.session
