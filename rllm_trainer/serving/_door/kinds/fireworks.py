"""A hot-load deployment of Fireworks: weights go into its bucket as a snapshot, and are loaded by that name while it serves.

The load is a request and then a wait, until every replica is ready under the snapshot's identity. It does not say which weights sampled
which token, so nothing is inside while it loads: requests leave first, and new ones wait at the door.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rllm_trainer.serving._door.flow import Flow
from rllm_trainer.serving._door.kinds.base import Scores, SwapDone, SwapFailed, SwapOrder, clean_rows
from rllm_trainer.serving._door.upstream import Upstream

__all__ = ["Fireworks"]

_HOT_LOAD = "/hot_load/v1/models/hot_load"
_TEXT = "/v1/completions"


class Fireworks:
    """A ``Kind``. Options: ``model``, ``deployment``, ``bucket`` (mounted), ``model_folder``, ``run`` (names snapshots), ``poll``."""

    get_paths: frozenset[str] = frozenset()
    post_paths = frozenset({"/v1/chat/completions", _TEXT})
    health_path: str | None = None
    whole_ids: frozenset[str] = frozenset()

    def __init__(self, upstream: Upstream, flow: Flow, options: dict[str, Any]) -> None:
        self._upstream = upstream
        self._flow = flow
        self._model: str = options["model"]
        self._deployment: str = options["deployment"]
        self._bucket = Path(options["bucket"]) if options.get("bucket") else None
        self._model_folder = options.get("model_folder")
        self._run: str = options.get("run") or "run"
        self._poll = float(options.get("poll") or 2.0)

    async def prepare(self) -> dict[str, Any]:
        return {"model": f"{self._model}#{self._deployment}", "max_model_len": None}

    def outgoing(self, path: str, body: bytes) -> bytes:
        return body

    async def score(self, rows: Sequence[Sequence[int]]) -> Scores:
        return await asyncio.gather(*map(self._score, rows))

    async def cached_tokens(self, row: Sequence[int], salt: str) -> int | None:
        return None

    async def swap(self, order: SwapOrder) -> SwapDone:
        if order.lora:
            raise SwapFailed("got an adapter; Fireworks is given whole weights; the old weights stay served")
        if self._bucket is None:
            raise SwapFailed("there is no bucket to put weights into; the old weights stay served")
        if order.in_flight != "wait":
            raise SwapFailed(f"got in_flight={order.in_flight!r}; Fireworks can only be swapped when requests have left; give 'wait'")
        started = time.monotonic()
        identity = f"{self._run}-{order.version:06d}"
        await asyncio.to_thread(_upload, Path(order.path), self._bucket / identity, self._model_folder)
        async with self._flow.held() as in_flight:
            if not await self._flow.drained(order.timeout):
                raise SwapFailed(f"requests were still running after {order.timeout:g} s; the old weights stay served")
            paused = time.monotonic()
            body = {"identity": identity, "reset_prompt_cache": True}
            await self._upstream.call("POST", self._url(), body, headers=self._headers())
            await self._until_ready(identity, started + order.timeout)
            self._flow.version = order.version
            await self._upstream.call("POST", _TEXT, {"model": await self._name(), "prompt": [0], "max_tokens": 1})
            resumed = time.monotonic()
        return SwapDone(seconds=resumed - started, paused_seconds=resumed - paused, in_flight=in_flight)

    async def held_digest(self) -> str | None:
        return None

    async def _until_ready(self, identity: str, deadline: float) -> None:
        stage: Any = None
        while time.monotonic() < deadline:
            told = await self._upstream.call("GET", self._url(), headers=self._headers())
            replicas: list[dict[str, Any]] = told.get("replicas") or []
            for replica in replicas:
                loading: dict[str, Any] = replica.get("loading_state") or {}
                stage = loading.get("stage")
                if stage == "error" and loading.get("target_snapshot_identity") == identity:
                    raise SwapFailed(f"Fireworks could not load the snapshot {identity}: {loading}; the old weights stay served")
            if replicas and all(_serves(replica, identity) for replica in replicas):
                return
            await asyncio.sleep(self._poll)
        raise SwapFailed(f"Fireworks had not loaded the snapshot {identity} at the deadline; it was at stage {stage}")

    async def _score(self, row: Sequence[int]) -> list[float | None]:
        asked = {"model": await self._name(), "prompt": list(row), "max_tokens": 1, "echo": True, "logprobs": 0, "temperature": 1.0}
        choice = (await self._upstream.call("POST", _TEXT, asked))["choices"][0]
        return clean_rows([choice["logprobs"]["token_logprobs"][: len(row)]])[0]

    async def _name(self) -> str:
        return (await self.prepare())["model"]

    def _url(self) -> str:
        parts = urlsplit(self._upstream.base_url)
        return f"{parts.scheme}://{parts.netloc}{_HOT_LOAD}"

    def _headers(self) -> dict[str, str]:
        return {"fireworks-model": self._model, "fireworks-deployment": self._deployment}


def _serves(replica: dict[str, Any], identity: str) -> bool:
    return bool(replica.get("readiness")) and replica.get("current_snapshot_identity") == identity


def _upload(file: Path, folder: Path, model_folder: str | None) -> None:
    """The snapshot, complete before it is there under its name."""
    aside = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    for source in Path(model_folder).iterdir() if model_folder else ():
        if source.is_file() and ".safetensors" not in source.name:
            shutil.copyfile(source, aside / source.name)
    shutil.copyfile(file, aside / "model.safetensors")
    shutil.rmtree(folder, ignore_errors=True)
    aside.rename(folder)
