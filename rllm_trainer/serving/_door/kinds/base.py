"""What the door asks of a server: whether it is up, what a request looks like to it, logprobs of given tokens, and a swap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from rllm_trainer.serving_settings import InFlight

__all__ = ["Kind", "Scores", "SwapDone", "SwapFailed", "SwapOrder", "clean_rows"]

Scores = list[list[float | None]]
"""For each row (T) the logprob of each token given the ones before it, None first, in float."""


class SwapOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Weights to serve."""

    path: str
    """A safetensors file on this host."""
    version: int
    lora: bool = False
    in_flight: InFlight = "keep"
    timeout: float = 600.0
    """Seconds for the whole of it."""


class SwapDone(msgspec.Struct, frozen=True, kw_only=True):
    """A swap that the server says it has made."""

    seconds: float
    """From the order to the first token under the new version."""
    paused_seconds: float
    """How long no token was sampled."""
    in_flight: int
    """Requests inside when it began."""


class SwapFailed(Exception):
    """The server did not take the weights; the message says what it serves."""


class Kind(Protocol):
    """One server. Made with its ``Upstream``, the ``Flow`` of requests and its own options."""

    get_paths: frozenset[str]
    post_paths: frozenset[str]
    """What is passed through; nothing else is."""
    health_path: str | None
    """None: the server has no such route."""
    whole_ids: frozenset[str]
    """Paths on which the server tells the ids of chat completions only in a whole answer; the door makes streams of those."""

    async def prepare(self) -> dict[str, Any]:
        """Once, when the server is up: ``model`` (its name to clients), ``max_model_len`` where known, ``versions`` (whether it tells them
        token by token; absent: as its kind does). Raises ``SwapFailed``."""
        ...

    def outgoing(self, path: str, body: bytes) -> bytes:
        """The request as this server wants it."""
        ...

    async def score(self, rows: Sequence[Sequence[int]]) -> Scores:
        """Logprobs at temperature 1, under the weights that are served."""
        ...

    async def cached_tokens(self, row: Sequence[int], salt: str) -> int | None:
        """Ask for one token after ``row`` and say how many of its tokens came from the prefix cache; None: the server does not say.

        ``salt`` keeps the row apart from everybody else's."""
        ...

    async def swap(self, order: SwapOrder) -> SwapDone:
        """Raises ``SwapFailed``, ``Refused`` or ``Unreachable``."""
        ...

    async def held_digest(self) -> str | None:
        """Digest of the tensors that the server received last; None: it does not say."""
        ...


def clean_rows(rows: Sequence[Sequence[float | None]]) -> Scores:
    """The first token of a row has no logprob, whatever a server says there."""
    return [[None, *row[1:]] for row in rows]
