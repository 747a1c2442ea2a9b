"""The door's process: config in over the inherited socket, a listening port out. Nothing else is in here but the order of starting.

The server behind the door is started by this process or was there before; the event loop runs in a thread, and the main thread answers
the parent's calls.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec

from rllm_trainer._child import child_config, serve
from rllm_trainer.serving._door.continuing import Continuing
from rllm_trainer.serving._door.flow import Flow
from rllm_trainer.serving._door.kinds import KINDS
from rllm_trainer.serving._door.kinds.base import Kind, SwapFailed, SwapOrder
from rllm_trainer.serving._door.process import Supervised, end_group
from rllm_trainer.serving._door.upstream import Refused, Unreachable, Upstream

__all__ = ["DoorConfig", "main"]

_LOOPBACK = "127.0.0.1"


class DoorConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a ``DoorServer`` sends."""

    kind: str
    api_key: str
    """The token that clients show here."""
    version: int
    port: int = 0
    base_url: str
    uds: str | None = None
    """Socket in ``folder`` that the server listens on; ``base_url`` is then only a name."""
    upstream_key: str | None = None
    command: list[str] | None = None
    """Starts the server; None: it is there."""
    env: dict[str, str] = {}
    """Of the server's process, beside this one's."""
    folder: str | None = None
    """Where the server runs; made, for its owner alone."""
    options: dict[str, Any] = {}
    start_timeout: float = 600.0
    hung_after: float = 300.0
    versions: bool = True
    continues: str | None = None
    """Folder of the model whose chats are given prompts that continue what was recorded; None: none are."""


class _Door:
    """What the parent's calls work with."""

    def __init__(self, config: DoorConfig, loop: asyncio.AbstractEventLoop) -> None:
        self._config = config
        self._loop = loop
        self.flow = Flow(config.version)
        self.upstream: Upstream
        self.kind: Kind
        self.process: Supervised | None = None
        self.continuing: Continuing | None = None

    async def open(self) -> dict[str, Any]:
        config = self._config
        deadline = time.monotonic() + config.start_timeout
        if config.command is not None:
            self.process = self._started(config.command)
        self.upstream = Upstream(config.base_url, uds=config.uds, key=config.upstream_key)
        self.kind = KINDS[config.kind](self.upstream, self.flow, config.options)
        health = self.kind.health_path
        if health is not None and not await self.upstream.until_healthy(
            health, deadline, lambda: self.process is None or self.process.alive
        ):
            if self.process is not None and not self.process.alive:
                raise SwapFailed(f"it ended with exit code {self.process.exit_code} before it answered")
            raise SwapFailed(f"it did not answer GET {health} within {config.start_timeout:g} s")
        ready = await self.kind.prepare()
        if config.continues is not None:
            self.continuing = _continuing(config.continues, ready)
        if self.process is not None and health is not None:
            watching = self._loop.create_task(self.process.watch(self.upstream, health, hung_after=config.hung_after))
            watching.add_done_callback(_broken_watch)
        return {**ready, "port": await _listen(self, config)}

    def _started(self, command: list[str]) -> Supervised:
        assert self._config.folder is not None
        folder = Path(self._config.folder)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        os.chdir(folder)
        if self._config.uds is not None:
            Path(self._config.uds).unlink(missing_ok=True)
        return Supervised(command, {**os.environ, **self._config.env}, folder, name=self._config.kind)

    def asked_to_end(self, *_: object) -> None:
        """TERM, in the main thread."""
        if self.process is not None:
            self.process.end_with_grace()
        os._exit(0)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """In the event loop; its errors are the caller's, in words."""
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result()
        except (Refused, Unreachable) as error:
            raise SwapFailed(str(error)) from error

    def swap(self, payload: dict[str, Any]) -> dict[str, Any]:
        order = msgspec.convert(payload, SwapOrder)
        return msgspec.to_builtins(self.run(self.kind.swap(order)))

    def score(self, payload: dict[str, Any]) -> dict[str, Any]:
        return {"logprobs": self.run(self.kind.score(payload["rows"]))}

    def cached_tokens(self, payload: dict[str, Any]) -> dict[str, Any]:
        return {"tokens": self.run(self.kind.cached_tokens(payload["row"], payload["salt"]))}

    def held_digest(self, _: dict[str, Any]) -> dict[str, Any]:
        return {"digest": self.run(self.kind.held_digest())}

    def stats(self, _: dict[str, Any]) -> dict[str, Any]:
        told = {"version": self.flow.version, "inside": self.flow.inside, "passed": self.flow.passed}
        return told if self.continuing is None else told | self.continuing.stats()


def main() -> None:
    config = msgspec.convert(child_config(), DoorConfig)
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="rllm-door", daemon=True).start()
    door = _Door(config, loop)
    signal.signal(signal.SIGTERM, door.asked_to_end)
    try:
        ready = asyncio.run_coroutine_threadsafe(door.open(), loop).result()
    except (SwapFailed, Refused, Unreachable, OSError, KeyError, IndexError, TypeError) as error:
        traceback.print_exc()
        ready = {"failed": str(error) or repr(error)}
    handlers = {name: getattr(door, name) for name in ("swap", "score", "cached_tokens", "held_digest", "stats")}
    serve(handlers, ready=ready)


def _continuing(folder: str, ready: dict[str, Any]) -> Continuing:
    if not ready.get("versions"):
        raise SwapFailed("it has not our middleware, which takes the prompts of continued chats; start it with the documented arguments")
    try:
        return Continuing(Path(folder), ready.get("max_model_len") or sys.maxsize)
    except ValueError as error:
        raise SwapFailed(str(error)) from error


async def _listen(door: _Door, config: DoorConfig) -> int:
    """Starts the web server; gives its port."""
    import uvicorn

    from rllm_trainer.serving._door.app import make_app

    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind((_LOOPBACK, config.port))
    listening.listen(1024)
    app = make_app(door.upstream, door.kind, door.flow, api_key=config.api_key, versions=config.versions, continuing=door.continuing)
    options = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", timeout_keep_alive=75, server_header=False)
    server = uvicorn.Server(options)
    serving = asyncio.get_running_loop().create_task(server.serve([listening]))
    serving.add_done_callback(lambda _: end_group("the door has closed by itself"))
    return listening.getsockname()[1]


def _broken_watch(watch: asyncio.Task[None]) -> None:
    if not watch.cancelled() and (error := watch.exception()) is not None:
        traceback.print_exception(error)
        sys.stderr.flush()
        end_group("the watch over the server broke")


if __name__ == "__main__":
    main()
