"""SGLang: its OpenAI routes pass, and are asked for ids under SGLang's own names; weights are loaded from a folder on a disk that both see.

It refuses a streamed chat that asks for ids (0.5.23), so such a chat is asked for whole and streamed by the door.

A swap is pause, load with its version and a flushed cache, continue. Running requests are retracted, so that they go on with keys and
values of the new weights; ``wait`` lets them leave first. SGLang tells versions token by token itself.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from rllm_trainer.serving._door.flow import Flow
from rllm_trainer.serving._door.kinds.base import Scores, SwapDone, SwapFailed, SwapOrder, clean_rows
from rllm_trainer.serving._door.upstream import Refused, Unreachable, Upstream

__all__ = ["SGLang"]

_CHAT, _TEXT = "/v1/chat/completions", "/v1/completions"
_PAUSES = {"keep": "retract", "wait": "retract", "abort": "abort"}
"""``in_place`` would go on with keys and values of the old weights."""


class SGLang:
    """A ``Kind``. Options: ``model_folder`` (what of the model is not its weights), ``staging`` (where each version is laid out)."""

    get_paths = frozenset({"/v1/models"})
    post_paths = frozenset({_CHAT, _TEXT, "/tokenize", "/detokenize"})
    health_path: str | None = "/health"
    whole_ids = frozenset({_CHAT})

    def __init__(self, upstream: Upstream, flow: Flow, options: dict[str, Any]) -> None:
        self._upstream = upstream
        self._flow = flow
        self._model_folder = options.get("model_folder")
        self._staging = Path(options.get("staging") or "weights")
        self._swaps = bool(options.get("swaps", True))

    async def prepare(self) -> dict[str, Any]:
        listed = await self._upstream.call("GET", "/v1/models")
        if self._swaps:
            asked = {"new_version": str(self._flow.version), "abort_all_requests": False}
            try:
                await self._upstream.call("POST", "/update_weight_version", asked)
            except Refused as error:
                raise SwapFailed(f"this SGLang cannot be told a version: {error}") from error
        served = listed["data"][0]
        return {"model": served["id"], "max_model_len": served.get("max_model_len")}

    def outgoing(self, path: str, body: bytes) -> bytes:
        if path not in (_CHAT, _TEXT) or b"return_token_ids" not in body:
            return body
        try:
            asked: dict[str, Any] = msgspec.json.decode(body)
        except msgspec.DecodeError:
            return body
        return msgspec.json.encode({**asked, "return_prompt_token_ids": True}) if asked.get("return_token_ids") else body

    async def score(self, rows: Sequence[Sequence[int]]) -> Scores:
        asked = {
            "input_ids": list(rows),
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        answers = await self._upstream.call("POST", "/generate", asked)
        return clean_rows([[entry[0] for entry in answer["meta_info"]["input_token_logprobs"]] for answer in answers])

    async def cached_tokens(self, row: Sequence[int], salt: str) -> int | None:
        asked = {"input_ids": list(row), "sampling_params": {"max_new_tokens": 1, "temperature": 1.0}, "extra_key": salt}
        return (await self._upstream.call("POST", "/generate", asked))["meta_info"].get("cached_tokens")

    async def swap(self, order: SwapOrder) -> SwapDone:
        if order.lora:
            raise SwapFailed("got an adapter; SGLang is given whole weights; the old weights stay served")
        started = time.monotonic()
        async with self._flow.held() as in_flight:
            if order.in_flight == "wait" and not await self._flow.drained(order.timeout):
                raise SwapFailed(f"requests were still running after {order.timeout:g} s; the old weights stay served")
            paused = time.monotonic()
            await self._upstream.call("POST", "/pause_generation", {"mode": _PAUSES[order.in_flight]})
            try:
                await self._load(order)
            finally:
                await self._upstream.call("POST", "/continue_generation", {})
            resumed = time.monotonic()
            self._flow.version = order.version
        await self._upstream.call("POST", "/generate", {"input_ids": [0], "sampling_params": {"max_new_tokens": 1}})
        await self._require_version(order.version)
        return SwapDone(seconds=time.monotonic() - started, paused_seconds=resumed - paused, in_flight=in_flight)

    async def held_digest(self) -> str | None:
        return None

    async def _load(self, order: SwapOrder) -> None:
        folder = laid_out(Path(order.path), self._staging / f"{order.version:06d}", self._model_folder)
        asked = {
            "model_path": str(folder.resolve()),
            "weight_version": str(order.version),
            "flush_cache": True,
            "abort_all_requests": False,
            "keep_pause": True,
        }
        try:
            answer = await self._upstream.call("POST", "/update_weights_from_disk", asked, timeout=order.timeout)
        except (Refused, Unreachable) as error:
            raise SwapFailed(f"SGLang did not take version {order.version}: {error}") from error
        if not answer.get("success"):
            raise SwapFailed(f"SGLang did not take version {order.version}: {answer.get('message')}")
        for old in self._staging.iterdir():
            if old != folder:
                shutil.rmtree(old, ignore_errors=True)

    async def _require_version(self, version: int) -> None:
        told = (await self._upstream.call("GET", "/model_info")).get("weight_version")
        if told != str(version):
            raise SwapFailed(f"after the swap to version {version} SGLang says {told}")


def laid_out(file: Path, folder: Path, model_folder: str | None) -> Path:
    """A model folder whose weights are ``file``, everything else as in ``model_folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    for source in Path(model_folder).iterdir() if model_folder else ():
        target = folder / source.name
        if source.is_file() and ".safetensors" not in source.name and not target.exists():
            shutil.copyfile(source, target)
    weights = folder / "model.safetensors"
    weights.unlink(missing_ok=True)
    weights.symlink_to(file.resolve())
    return folder
