"""A Ray worker that runs the app: one job in, its outcome out, with the app's calls led to the front of the worker's own node.

The app runs here as it does in ``fit``'s process: in a thread of its own or in the event loop for async apps, with its episode and its
rewards. A worker that dies takes its running jobs with it; they are infrastructure faults, and are tried again elsewhere.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from pickle import PicklingError
from typing import Any

import msgspec

from rllm_trace._configure import configure
from rllm_trace.routing import CallSite, CallSites, Route
from rllm_trainer.cluster.loading import ray_api
from rllm_trainer.exceptions import SettingError
from rllm_trainer.rollout.attempt import Attempt, Conditions, Job, Outcome
from rllm_trainer.rollout.rewards import RewardPlan
from rllm_trainer.rollout.runner import Limits, Runner

__all__ = ["AppWorker", "Assignment", "FrontAddress", "packed_app"]


class FrontAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a node's apps find the policy."""

    url: str
    """Without a path."""
    api_key: str
    model: str

    def __repr__(self) -> str:
        return f"FrontAddress(url={self.url!r}, model={self.model!r})"


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt, as it travels."""

    number: int
    """Which of all attempts."""
    job: Job
    attempt: int
    route: Route | None
    """None: the app's own endpoints."""
    version: int
    metadata: dict[str, Any]
    fronts: dict[str, FrontAddress]
    """Node id -> its front; empty: ``route`` has the address."""
    counted: bool
    """Its calls are those of a call site of training; an evaluation's are not."""


class AppWorker:
    """Made into an async actor by whoever starts it."""

    def __init__(self, packed: bytes, path: Sequence[str], *, several_nodes: bool = False, node_id: str = "") -> None:
        """``packed``: app and rewards, from ``packed_app``; ``path``: where the user's process finds modules.

        ``several_nodes``: Ray tasks that the app starts may run elsewhere, and send what they record here.
        """
        if several_nodes:
            configure(reachable_at=str(ray_api().ray.util.get_node_ip_address()))
        sys.path += [entry for entry in path if entry not in sys.path]
        app, rewards = _unpacked(packed)
        self._runner = Runner(app, rewards, Limits())
        self._sites = CallSites()
        self._running: dict[int, Attempt] = {}
        self._node_id = node_id or _node_id()

    async def place(self) -> dict[str, Any]:
        """Node and process."""
        return {"node_id": self._node_id, "pid": os.getpid(), "running": len(self._running)}

    async def run(self, assignment: Assignment) -> Outcome:
        """One attempt, from its start to its outcome."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Outcome] = loop.create_future()

        def ended(_: Attempt, outcome: Outcome) -> None:
            loop.call_soon_threadsafe(_settle, done, outcome)

        conditions = Conditions(route=self._route(assignment), version=assignment.version, metadata=assignment.metadata)
        attempt = await asyncio.to_thread(self._runner.attempt, assignment.job, assignment.attempt, conditions, ended)
        self._running[assignment.number] = attempt
        try:
            return await done
        finally:
            self._running.pop(assignment.number, None)

    async def give_up(self, number: int, reason: str) -> tuple[Outcome, str] | None:
        """End an attempt from outside: its outcome as recorded so far, and its stack. None: it has ended by itself."""
        attempt = self._running.get(number)
        if attempt is None:
            return None
        given_up = await asyncio.to_thread(attempt.give_up, reason)
        await asyncio.to_thread(self._runner.leave_blocked_lane)
        return given_up

    async def sites(self) -> list[CallSite]:
        """Call sites seen in this process."""
        return self._sites.seen()

    def _route(self, assignment: Assignment) -> Route | None:
        route = assignment.route
        if route is None:
            return None
        route = msgspec.structs.replace(route, sites=self._sites if assignment.counted else None)
        front = _nearest(assignment.fronts, self._node_id)
        if front is None:
            return route
        session = secrets.token_hex(8)  # every call of this attempt goes to one replica
        return msgspec.structs.replace(route, base_url=f"{front.url}/s/{session}/v1", api_key=front.api_key, model=front.model)


def packed_app(app: Callable[..., Any], rewards: RewardPlan) -> bytes:
    """App and rewards as Ray carries functions: by name where their module can be imported, else by value.

    Raises:
        SettingError: something that they close over cannot be carried.
    """
    try:
        return bytes(ray_api().cloudpickle.dumps((app, rewards)))
    except (TypeError, ValueError, AttributeError, RecursionError, PicklingError) as error:
        raise SettingError(
            f"the app or a reward cannot be carried to Ray's workers: {error}; make what it needs inside the function, or in a module"
        ) from error


def _unpacked(packed: bytes) -> tuple[Callable[..., Any], RewardPlan]:
    return ray_api().cloudpickle.loads(packed)


def _nearest(fronts: Mapping[str, FrontAddress], node_id: str) -> FrontAddress | None:
    return fronts.get(node_id) or next(iter(fronts.values()), None)


def _settle(done: asyncio.Future[Outcome], outcome: Outcome) -> None:
    if not done.done():
        done.set_result(outcome)


def _node_id() -> str:
    ray = ray_api().ray
    return str(ray.get_runtime_context().get_node_id())
