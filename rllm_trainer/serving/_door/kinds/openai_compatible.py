"""Any server that speaks OpenAI's API: requests pass as they are, and nothing more is known of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from rllm_trainer.serving._door.flow import Flow
from rllm_trainer.serving._door.kinds.base import Scores, SwapDone, SwapFailed, SwapOrder
from rllm_trainer.serving._door.upstream import Refused, Unreachable, Upstream

__all__ = ["OpenAICompatible"]


class OpenAICompatible:
    """A ``Kind``. Options: ``model``, where the server lists more than one."""

    get_paths = frozenset({"/v1/models"})
    post_paths = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses"})
    health_path: str | None = None
    whole_ids: frozenset[str] = frozenset()

    def __init__(self, upstream: Upstream, flow: Flow, options: dict[str, Any]) -> None:
        self._upstream = upstream
        self._model: str | None = options.get("model")

    async def prepare(self) -> dict[str, Any]:
        if self._model is not None:
            return {"model": self._model, "max_model_len": None}
        try:
            listed = [model["id"] for model in (await self._upstream.call("GET", "/v1/models"))["data"]]
        except (Refused, Unreachable, KeyError, TypeError) as error:
            raise SwapFailed(f"the server does not list its models ({error}); name one: model=...") from error
        if len(listed) != 1:
            raise SwapFailed(f"the server lists {len(listed)} models ({', '.join(listed[:5])}); name one: model=...")
        return {"model": listed[0], "max_model_len": None}

    def outgoing(self, path: str, body: bytes) -> bytes:
        return body

    async def score(self, rows: Sequence[Sequence[int]]) -> Scores:
        _cannot("score given tokens")

    async def cached_tokens(self, row: Sequence[int], salt: str) -> int | None:
        return None

    async def swap(self, order: SwapOrder) -> SwapDone:
        _cannot("be given weights")

    async def held_digest(self) -> str | None:
        return None


def _cannot(what: str) -> NoReturn:
    raise SwapFailed(f"a server of which only OpenAI's API is known cannot {what}")
