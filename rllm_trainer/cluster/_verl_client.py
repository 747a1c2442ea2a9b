"""verl's client of the replicas, for modes in which rollouts go on while weights move: replies come whole, each token with its version.

verl's own client for them keeps only the newest version of a reply: what older weights had sampled would be trained as if the newest had.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl.workers.rollout.llm_server import LLMServerClient as _LLMServerClient

from rllm_trainer.cluster._replica import Reply
from rllm_trainer.cluster.carrying import whole_reply

__all__ = ["CarryingClient"]

LLMServerClient: Any = _LLMServerClient


class CarryingClient(LLMServerClient):
    """Made by verl's server manager, used in every front."""

    async def generate(self, request_id: str, *, prompt_ids: Sequence[int], sampling_params: Mapping[str, Any], **other: Any) -> Reply:
        """One reply, of at most ``max_tokens`` whatever updates come in between."""
        verls: Any = super()

        async def ask(ids: list[int], most: int) -> Any:
            params = {**sampling_params, "max_tokens": most}
            return await verls.generate(request_id, prompt_ids=[*prompt_ids, *ids], sampling_params=params, **other)

        return await whole_reply(ask, most=int(sampling_params["max_tokens"]))
