"""vLLM: its OpenAI routes pass, its development routes are used from here and pass nobody.

A swap is pause, load, version, resume. ``keep`` clears the caches with the pause: requests in flight go on from their tokens with
keys and values of the new weights. An adapter is loaded in place of the last one, under one name, which requests are given from then on.
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

__all__ = ["Vllm"]

_ADAPTER = "rllm-adapter"
_ADAPTER_WEIGHTS = "adapter_model.safetensors"
_ADAPTER_CONFIG = "adapter_config.json"
_CHAT, _TEXT, _RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"


class Vllm:
    """A ``Kind``. Options: ``adapter_folder`` (where an adapter is laid out for it), ``version`` (set at the start where ours)."""

    get_paths = frozenset({"/v1/models"})
    post_paths = frozenset({_CHAT, _TEXT, _RESPONSES, "/tokenize", "/detokenize"})
    health_path: str | None = "/health"
    whole_ids: frozenset[str] = frozenset()

    def __init__(self, upstream: Upstream, flow: Flow, options: dict[str, Any]) -> None:
        self._upstream = upstream
        self._flow = flow
        self._adapter_folder = Path(options.get("adapter_folder") or "adapter")
        self._model = ""
        self._adapter = False
        self._tell_version = bool(options.get("swaps", True))

    async def prepare(self) -> dict[str, Any]:
        listed = await self._upstream.call("GET", "/v1/models")
        served = listed["data"][0]
        self._model = served["id"]
        if self._tell_version:
            try:
                await self._upstream.call("POST", "/update_weight_version", {"new_version": str(self._flow.version)})
            except Refused as error:
                raise SwapFailed(
                    f"this vLLM cannot be given weights: {error}; start it with VLLM_SERVER_DEV_MODE=1 and the README's arguments"
                ) from error
        answer = await self._upstream.call("POST", _TEXT, {"prompt": [0], "max_tokens": 1, "model": self._model})
        return {"model": self._model, "max_model_len": served.get("max_model_len"), "versions": "metadata" in answer}

    def outgoing(self, path: str, body: bytes) -> bytes:
        if not self._adapter or path not in (_CHAT, _TEXT, _RESPONSES):
            return body
        try:
            asked: dict[str, Any] = msgspec.json.decode(body)
        except msgspec.DecodeError:
            return body
        return msgspec.json.encode({**asked, "model": self._served()}) if asked.get("model") == self._model else body

    async def score(self, rows: Sequence[Sequence[int]]) -> Scores:
        asked = {"prompt": list(rows), "max_tokens": 0, "echo": True, "logprobs": 0, "temperature": 1.0, "model": self._served()}
        answer = await self._upstream.call("POST", _TEXT, asked)
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        return clean_rows([choice["logprobs"]["token_logprobs"] for choice in choices])

    async def cached_tokens(self, row: Sequence[int], salt: str) -> int | None:
        asked = {"prompt": list(row), "max_tokens": 1, "cache_salt": salt, "model": self._served()}
        usage = (await self._upstream.call("POST", _TEXT, asked))["usage"]
        details = usage.get("prompt_tokens_details")
        return None if details is None else details.get("cached_tokens") or 0

    async def swap(self, order: SwapOrder) -> SwapDone:
        started = time.monotonic()
        async with self._flow.held() as in_flight:
            paused = time.monotonic()
            await self._post("/pause", params={"mode": order.in_flight, "clear_cache": "true"}, timeout=order.timeout)
            try:
                await (self._load_adapter(order) if order.lora else self._load(order))
            except (Refused, Unreachable) as error:
                raise SwapFailed(f"vLLM did not take version {order.version}: {error}") from error
            finally:
                await self._post("/resume")
            resumed = time.monotonic()
            self._flow.version = order.version
        await self._upstream.call("POST", _TEXT, {"prompt": [0], "max_tokens": 1, "model": self._served()})
        await self._require_version(order.version)
        return SwapDone(seconds=time.monotonic() - started, paused_seconds=resumed - paused, in_flight=in_flight)

    async def held_digest(self) -> str | None:
        answer = await self._upstream.call("POST", "/collective_rpc", {"method": "rllm_received_digest"})
        digests = {result["digest"] for result in answer["results"]}
        return digests.pop() if len(digests) == 1 else None

    async def _load(self, order: SwapOrder) -> None:
        await self._post("/start_weight_update")
        await self._post("/update_weights", {"update_info": {"path": order.path}}, timeout=order.timeout)
        await self._post("/finish_weight_update", {"weight_version": str(order.version)})

    async def _load_adapter(self, order: SwapOrder) -> None:
        folder = _laid_out(Path(order.path), self._adapter_folder / str(order.version))
        asked = {"lora_name": _ADAPTER, "lora_path": str(folder.resolve()), "load_inplace": True}
        await self._post("/v1/load_lora_adapter", asked, timeout=order.timeout)
        self._adapter = True
        await self._post("/update_weight_version", {"new_version": str(order.version)})
        for old in self._adapter_folder.iterdir():
            if old != folder:
                shutil.rmtree(old, ignore_errors=True)

    async def _require_version(self, version: int) -> None:
        told = (await self._upstream.call("GET", "/weight_info"))["weight_version"]
        if told != str(version):
            raise SwapFailed(f"after the swap to version {version} vLLM says {told}")

    async def _post(self, path: str, body: Any = None, *, params: dict[str, str] | None = None, timeout: float = 60.0) -> None:
        await self._upstream.call("POST", path, body, params=params, timeout=timeout)

    def _served(self) -> str:
        return _ADAPTER if self._adapter else self._model


def _laid_out(file: Path, folder: Path) -> Path:
    """The adapter as PEFT keeps it: its one file and what the file's header says of it."""
    folder.mkdir(parents=True, exist_ok=True)
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header: dict[str, Any] = msgspec.json.decode(opened.read(size))
    told: dict[str, str] = header.get("__metadata__", {})
    if "r" not in told or "lora_alpha" not in told:
        raise SwapFailed(f"{file} does not say its adapter's r and lora_alpha; the old weights stay served")
    modules = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in header if ".lora_" in name})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": int(told["r"]), "lora_alpha": float(told["lora_alpha"])}
    config |= {"target_modules": modules, "lora_dropout": 0.0, "bias": "none", "base_model_name_or_path": None}
    (folder / _ADAPTER_CONFIG).write_bytes(msgspec.json.encode(config))
    shutil.copyfile(file, folder / _ADAPTER_WEIGHTS)
    return folder
