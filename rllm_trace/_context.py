"""Which episode, trajectory and span the running code belongs to.

One private context variable, so that asyncio tasks carry it by themselves and the user's own OpenTelemetry context is never touched.
Leaving a scope restores what was before only where the scope is still the running one: a generator finalized somewhere else, or a
coroutine closed by the garbage collector, changes nothing there. No token is kept, so none can be "created in a different Context".
"""

from __future__ import annotations

import os
import threading
from contextvars import ContextVar
from typing import Any, Final

from rllm_trace import attributes as A
from rllm_trace._open import OpenEpisode, OpenTrajectory

__all__ = ["Carried", "Scope", "capture", "carried", "carry", "current", "enter", "inherited", "leave", "restore"]


class Scope:
    """Where code runs: immutable, made anew for every workflow, agent, tool, reward and ``no_train``."""

    __slots__ = ("episode", "in_reward", "no_train", "parent", "span_id", "trajectory")

    def __init__(
        self, episode: OpenEpisode, trajectory: OpenTrajectory, span_id: str, *, no_train: bool, in_reward: bool, parent: Scope | None
    ) -> None:
        self.episode = episode
        self.trajectory = trajectory
        self.span_id = span_id
        """Parent of what starts in here."""
        self.no_train = no_train
        self.in_reward = in_reward
        self.parent = parent
        """The scope around this one; None for the outermost."""

    @property
    def trajectory_id(self) -> str:
        return self.trajectory.id

    @property
    def trajectory_name(self) -> str:
        return self.trajectory.name

    def next_call_number(self) -> int:
        """Number of the next call in this trajectory, from 0."""
        return self.trajectory.next_call_number()

    def inside(
        self, *, span_id: str | None = None, trajectory: OpenTrajectory | None = None, no_train: bool = False, in_reward: bool = False
    ) -> Scope:
        """A scope within this one."""
        return Scope(
            self.episode,
            trajectory or self.trajectory,
            span_id or self.span_id,
            no_train=no_train or self.no_train,
            in_reward=in_reward or self.in_reward,
            parent=self,
        )

    def within(self, other: Scope) -> bool:
        """Whether it is ``other`` or lies inside it."""
        scope: Scope | None = self
        while scope is not None:
            if scope is other:
                return True
            scope = scope.parent
        return False


_scope: ContextVar[Scope | None] = ContextVar("rllm_scope", default=None)


class _Inherited:
    """What code outside any scope of this process belongs to: nothing, or the workflow whose ``child_env`` the process was started with.

    The environment is read once, the first time that somebody wants to know.
    """

    def __init__(self) -> None:
        self.scope: Scope | None = None
        self.asked = False
        self._asking = False
        self._lock = threading.RLock()

    def ask(self) -> Scope | None:
        with self._lock:
            if not self.asked and not self._asking:
                self._asking = True
                if os.environ.get(A.ENV_CONTEXT):
                    from rllm_trace._handover import inherit

                    self.scope = inherit()
                self.asked = True
            return self.scope


inherited: Final = _Inherited()


def current() -> Scope | None:
    """Where the running code belongs; None outside any workflow. Its episode may have ended (``episode.closed``)."""
    scope = _scope.get()
    if scope is not None:
        return scope
    return inherited.scope if inherited.asked else inherited.ask()


def enter(scope: Scope | None) -> Scope | None:
    """Makes ``scope`` the running one; gives what was before, for ``leave``."""
    before = _scope.get()
    _scope.set(scope)
    return before


def leave(scope: Scope | None, before: Scope | None) -> Scope | None:
    """Restores ``before`` if the running scope is ``scope`` or inside it. Gives what was running (in ``scope`` or inside it)."""
    running = _scope.get()
    if running is scope or (running is not None and scope is not None and running.within(scope)):
        _scope.set(before)
        return running
    return scope


carried: Final[list[ContextVar[Any]]] = [_scope]
"""The context variables that threads and executors take along. Only ours: the user's own keep their behaviour."""


def carry(variable: ContextVar[Any]) -> None:
    """Has threads and executors take ``variable`` along too; asking twice changes nothing."""
    if variable not in carried:
        carried.append(variable)


Carried = tuple[tuple[ContextVar[Any], Any], ...]


def capture() -> Carried:
    """The values of all carried variables here."""
    return tuple((variable, variable.get()) for variable in carried)


def restore(values: Carried) -> None:
    """Sets the carried variables in the running context."""
    for variable, value in values:
        variable.set(value)
