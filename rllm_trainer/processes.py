"""A run's plan in, a running engine and server out, both started at once; closed together, whatever happens.

Each is a child process that we own; a start that fails closes the other one, and so does a stop while they start.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rllm_trace.routing import CallSites, Route
from rllm_trainer._starts import Starts, starting
from rllm_trainer.config import Settings
from rllm_trainer.engine.verl_settings import Objective
from rllm_trainer.exceptions import ServerError
from rllm_trainer.loop import TrainingEngine
from rllm_trainer.rollout.runner import RunInterrupted
from rllm_trainer.serving.base import Capabilities, Continues, Server
from rllm_trainer.serving.replicas import Replicas

__all__ = ["route_to", "running", "serving", "start_engine", "start_server", "training"]

_POLL = 0.2
_GIVEN_UP_WITHIN = 60.0
"""Seconds that a start gets to come to its end once nobody waits for it."""


class _Closable(Protocol):
    def close(self) -> None: ...


T = TypeVar("T", bound=_Closable)


@contextmanager
def running(settings: Settings, model: Path, run_dir: Path, stop: threading.Event) -> Generator[tuple[TrainingEngine, Server]]:
    """Both, started side by side. Raises what a start raised; ``RunInterrupted`` where the stop event was set meanwhile."""
    _require_free_port(settings.port)
    engine = _started("engine", lambda: start_engine(settings, model, run_dir))
    server = _started("server", lambda: start_server(settings, model, run_dir))
    try:
        _wait([engine, server], stop)
        if server.done():
            server.result()
        _require_capable(server.result().capabilities, lora=settings.lora is not None)
        if settings.continuation == "exact" and not isinstance(server.result(), Continues):
            raise ServerError("continuation='exact' needs a server that takes a prompt's ids, which is serving='local' or 'vllm'")
        yield engine.result(), server.result()
    finally:
        _close(server)
        _close(engine)


@contextmanager
def training(
    settings: Settings, model: Path, run_dir: Path, stop: threading.Event, *, objective: Objective = "policy"
) -> Generator[TrainingEngine]:
    """An engine alone."""
    engine = _started("engine", lambda: start_engine(settings, model, run_dir, objective=objective))
    try:
        _wait([engine], stop)
        yield engine.result()
    finally:
        _close(engine)


@contextmanager
def serving(settings: Settings, model: Path | str | None, run_dir: Path, stop: threading.Event) -> Generator[Server]:
    """A server alone, to ask and not to give weights to; ``model``: the folder, or the name that a server which is there knows it by."""
    _require_free_port(settings.port)
    server = _started("server", lambda: start_server(settings, model, run_dir, swaps=False))
    try:
        _wait([server], stop)
        yield server.result()
    finally:
        _close(server)


def start_engine(settings: Settings, model: Path, run_dir: Path, *, objective: Objective = "policy") -> TrainingEngine:
    """What updates the weights."""
    if settings.engine == "direct-ray":
        from rllm_trainer.cluster.direct import RayEngine

        return RayEngine.start_on_ray(model, settings, run_dir, objective=objective)
    from rllm_trainer.engine.verl import VerlEngine

    return VerlEngine.start(model, settings, run_dir, objective=objective)


def start_server(settings: Settings, model: Path | str | None, run_dir: Path, *, swaps: bool = True) -> Server:
    """What serves the policy."""
    from rllm_trainer.serving.starting import start_serving

    return start_serving(settings, model, run_dir, swaps=swaps)


def route_to(server: Server, settings: Settings, sites: CallSites | None) -> Route:
    """Where the app's calls go."""
    return Route(
        base_url=server.base_url,
        api_key=server.api_key,
        model=server.model,
        replaces=frozenset(settings.replaces) if settings.replaces is not None else None,
        sampling=settings.sampling or {},
        constrained=settings.constrained,
        call_timeout=settings.call_timeout,
        sites=sites,
        resolve=server.resolve if isinstance(server, Replicas) else None,
    )


def _require_free_port(port: int) -> None:
    """Says that a port is taken before anything takes seconds to start."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ServerError(
                f"port {port} on 127.0.0.1 cannot be used: {error.strerror}; give another port, or port=0 for a free one"
            ) from None


def _require_capable(can: Capabilities, *, lora: bool) -> None:
    """Refuses a server that training cannot be exact with, before the first rollout."""
    needed = {
        "token ids": can.token_ids,
        "logprobs": can.logprobs,
        "logprobs at the temperature used": can.processed_logprobs,
        "a swap of weights": can.swap,
        "a swap of adapters": can.lora_swap or not lora,
    }
    missing = [name for name, there in needed.items() if not there]
    if missing:
        raise ServerError(f"the server cannot be trained with: it lacks {', '.join(missing)}")


class _Start(Future[T]):
    """What will have been started, and the way to stop waiting for it."""

    def __init__(self) -> None:
        super().__init__()
        self.starts = Starts()


def _started(name: str, start: Callable[[], T]) -> _Start[T]:
    future: _Start[T] = _Start()

    def run() -> None:
        starting.set(future.starts)
        try:
            future.set_result(start())
        except BaseException as error:  # noqa: BLE001 - raised again by whoever waits
            future.set_exception(error)

    threading.Thread(target=run, name=f"rllm-start-{name}", daemon=True).start()
    return future


def _wait(starting: Sequence[Future[Any]], stop: threading.Event) -> None:
    """Until all are up, one has failed, or the run is stopped."""
    pause = threading.Event()
    while not all(future.done() for future in starting):
        if stop.is_set():
            raise RunInterrupted
        if any(future.done() and future.exception() is not None for future in starting):
            return
        pause.wait(_POLL)


def _close(start: _Start[T]) -> None:
    """Close what was started; what is still starting is ended: nothing is left behind, and nothing waited for."""
    if not start.done():
        start.starts.give_up()
    with contextlib.suppress(Exception):
        start.result(timeout=_GIVEN_UP_WITHIN).close()
