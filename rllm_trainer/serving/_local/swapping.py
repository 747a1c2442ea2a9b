"""Weights in a file in, the same weights served out; those before them stay beside, to go back to, until the next are loaded.

Two sets of weights take turns: what is loaded is written over the set that nothing computes with, and then served from one step to the
next. A file that is refused spoils that set alone.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from rllm_trainer._digest import file_digest
from rllm_trainer.serving._local.checkpoint import WeightsError
from rllm_trainer.serving._local.loader import Loader
from rllm_trainer.serving._local.protocol import ApiError, SwapRequest
from rllm_trainer.serving._local.scheduler import Scheduler

__all__ = ["Swaps"]


class Swaps:
    """One at a time; another one meanwhile is refused."""

    def __init__(self, loader: Loader, scheduler: Scheduler) -> None:
        self._loader = loader
        self._scheduler = scheduler
        self._turn = asyncio.Lock()
        self._before: int | None = None
        """The version of what the loader's spare set holds; None: nothing to go back to."""

    async def swap(self, asked: SwapRequest) -> dict[str, Any]:
        """Raises ``ApiError`` where the weights are refused; the ones before them are served on."""
        started = time.monotonic()
        self._require_turn()
        async with self._turn:
            served, version, self._before = self._loader.served, self._scheduler.stats.version, None
            try:
                weights = await asyncio.to_thread(self._load, asked)
            except WeightsError as error:
                raise ApiError(400, str(error), code="weights_refused", param="path") from error
            loaded = time.monotonic()
            swapped = await asyncio.wrap_future(self._scheduler.swap(weights, asked.version, asked.in_flight))
            self._loader.served, self._loader.spare, self._before = weights, served, version
        return {
            "version": asked.version,
            "requests_in_flight": swapped.in_flight,
            "seconds": time.monotonic() - started,
            "load_seconds": loaded - started,
            "first_token_seconds": swapped.seconds,
        }

    async def back(self) -> dict[str, Any]:
        """Serve what was served before the last swap. Raises ``ApiError`` where that is gone: there was no swap, or one that failed."""
        self._require_turn()
        async with self._turn:
            version, self._before = self._before, None
            if version is None:
                raise ApiError(409, "there is no set of weights to go back to", code="nothing_to_go_back_to")
            loader = self._loader
            await asyncio.wrap_future(self._scheduler.swap(loader.spare, version))
            loader.served, loader.spare = loader.spare, loader.served
        return {"version": version}

    async def digest(self) -> dict[str, Any]:
        """Of what is served, read back from the buffers that are multiplied."""
        async with self._turn:
            held = await asyncio.to_thread(self._loader.digest, self._loader.served)
            return {"version": self._scheduler.stats.version, "digest": held}

    def _require_turn(self) -> None:
        if self._turn.locked():
            raise ApiError(409, "another swap is under way; wait for it", code="swap_under_way")

    def _load(self, asked: SwapRequest) -> Any:
        path = Path(asked.path)
        weights = self._loader.load(path, lora=asked.lora, over=self._loader.spare)
        if asked.digest is not None:
            held = file_digest(path) if asked.lora else self._loader.digest(weights)  # an adapter is merged into what is served
            if held != asked.digest:
                raise WeightsError(f"got tensors with digest {held} from {path}, expected {asked.digest}; the old weights stay served")
        return weights
