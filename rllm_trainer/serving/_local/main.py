"""The server's process: config in over the inherited socket, a listening port out. Nothing else is in here but the order of starting.

The scheduler steps the model in a thread, the web server's loop runs in another, and the main thread answers the parent.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from rllm_trainer._child import child_config, serve
from rllm_trainer.serving._local.spec import eos_token_ids, read_config, read_spec

__all__ = ["LocalConfig", "main"]

_LOOPBACK = "127.0.0.1"
_SWITCH_INTERVAL = 0.0005
"""Seconds after which a thread gives way: the stepping thread comes back from every call into torch and should not wait 5 ms."""


class LocalConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What ``LocalServer.start`` sends."""

    model_path: str
    name: str
    api_key: str
    version: int
    port: int
    threads: int
    max_model_len: int | None
    kv_bytes: int
    max_rows: int
    max_waiting: int
    chat_template: str | None
    tool_format: str | None
    thinks: bool
    continues: bool
    swaps: bool


def main() -> None:
    config = msgspec.convert(child_config(), LocalConfig)
    sys.setswitchinterval(_SWITCH_INTERVAL)
    try:
        listening = _listen(config.port)
        ready = _start(config, listening)
    except (ValueError, OSError) as error:
        ready = {"failed": str(error)}
    serve({}, ready=ready)


def _listen(port: int) -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((_LOOPBACK, port))
        sock.listen(1024)
    except OSError as error:
        sock.close()
        raise ValueError(f"got port {port}, which is in use on {_LOOPBACK}; choose another, or port=0 for a free one") from error
    return sock


def _start(config: LocalConfig, listening: socket.socket) -> dict[str, Any]:
    folder = Path(config.model_path)
    described = read_config(folder)
    spec = read_spec(described)
    if spec is not None:
        _lengths(config, spec.max_positions, spec.kv_bytes_per_token)

    import torch

    from rllm_trainer.serving._local.app import Service, deliver_to
    from rllm_trainer.serving._local.loader import open_model
    from rllm_trainer.serving._local.requests import Intake
    from rllm_trainer.serving._local.scheduler import Scheduler

    torch.set_num_threads(config.threads)
    loader = open_model(folder, spec, swaps=config.swaps)
    max_len, kv_tokens = _lengths(config, loader.max_positions, loader.kv_bytes_per_token)
    runner = loader.runner(kv_tokens=kv_tokens, max_len=max_len, max_rows=config.max_rows)
    intake = Intake(
        folder,
        name=config.name,
        vocab=loader.vocab,
        eos=eos_token_ids(folder, described),
        max_len=max_len,
        chat_template=config.chat_template,
        tool_format=config.tool_format,
        thinks=config.thinks,
        continues=config.continues,
        fits=runner.fits,
    )
    loop = asyncio.new_event_loop()
    scheduler = Scheduler(runner, version=config.version, max_waiting=config.max_waiting, deliver=deliver_to(loop))
    service = Service(intake, loader, scheduler, api_key=config.api_key)
    up = threading.Event()

    def steps() -> None:
        torch.set_num_threads(config.threads)  # holds for the calling thread; those that pack weights have their own
        scheduler.run()

    threading.Thread(target=_or_die, args=(steps,), name="rllm-steps", daemon=True).start()
    threading.Thread(target=_or_die, args=(lambda: _serve_http(loop, service, listening, up),), name="rllm-http", daemon=True).start()
    up.wait()
    return {"port": listening.getsockname()[1], "max_model_len": max_len, "kv_tokens": kv_tokens, "vocab": loader.vocab}


def _lengths(config: LocalConfig, max_positions: int, kv_bytes_per_token: int) -> tuple[int, int]:
    """(longest sequence, tokens of keys and values). A sequence is held twice while it goes over from its prompt to decoding."""
    kv_tokens = config.kv_bytes // kv_bytes_per_token
    if config.max_model_len is None:
        return min(max_positions, kv_tokens // 2), kv_tokens
    if config.max_model_len > max_positions:
        raise ValueError(f"got max_model_len {config.max_model_len}; expected at most {max_positions}, which this model was made for")
    if kv_tokens < 2 * config.max_model_len:
        raise ValueError(
            f"got kv_bytes {config.kv_bytes}, too little for one sequence of max_model_len {config.max_model_len} tokens; "
            f"expected at least {2 * config.max_model_len * kv_bytes_per_token}, or a smaller max_model_len"
        )
    return config.max_model_len, kv_tokens


def _serve_http(loop: asyncio.AbstractEventLoop, service: Any, listening: socket.socket, up: threading.Event) -> None:
    import uvicorn

    from rllm_trainer.serving._local.app import make_app

    asyncio.set_event_loop(loop)
    options = uvicorn.Config(
        make_app(service), log_level="warning", access_log=False, lifespan="off", timeout_keep_alive=75, server_header=False
    )
    loop.call_soon(up.set)
    loop.run_until_complete(uvicorn.Server(options).serve([listening]))


def _or_die(run: Callable[[], None]) -> None:
    """A server without one of its threads would only look alive."""
    try:
        run()
    except BaseException:  # noqa: BLE001 - the process ends with it
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(70)


if __name__ == "__main__":
    main()
