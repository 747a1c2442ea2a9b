"""What the loop asks of a server: an OpenAI-compatible address, what it can do, and a proven swap of weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import msgspec

from rllm_trainer.engine.base import WeightsFile
from rllm_trainer.types import Float32, Int32

__all__ = ["CONTINUED", "PROVEN_BY_LOGPROBS", "Capabilities", "Continues", "Probe", "Server", "SwapReport"]

CONTINUED = "continued"
"""A prompt that was made of recorded ids, among the counts of ``Continues``."""
PROVEN_BY_LOGPROBS = "logprobs"
"""Of a swap report: old and new weights were told apart."""


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What a server can do; what it cannot is refused before the first rollout."""

    token_ids: bool
    logprobs: bool
    processed_logprobs: bool
    """Reported logprobs are those at the temperature used."""
    swap: bool
    lora_swap: bool
    per_token_versions: bool
    token_prompts: bool
    """Takes token ids as a prompt (for exact continuation and probes)."""


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """Fixed tokens on which the trainer's old and new weights differ: what a swap is proven with."""

    rows: list[Int32]
    """Each (T)."""
    old: list[Float32]
    """The trainer's logprob of each token under the weights before the swap, (T) with NaN first and on tokens that do not count."""
    new: list[Float32]
    """Under the weights after it, likewise."""
    temperature: float = 1.0

    def __post_init__(self) -> None:
        lengths = [len(row) for row in self.rows]
        for name in ("old", "new"):
            if [len(values) for values in getattr(self, name)] != lengths:
                raise AssertionError(f"{name} has rows of {[len(v) for v in getattr(self, name)]} tokens, rows {lengths}")


class SwapReport(msgspec.Struct, frozen=True, kw_only=True):
    """One swap, as measured."""

    version: int
    seconds: float
    """From the request to the first token under the new version."""
    requests_in_flight: int
    proof: str
    """What proved it: ``logprobs`` (old and new told apart) or ``digest`` (the change is too small to tell)."""
    max_difference: float
    """Largest |server - trainer| on the probe tokens under the new weights, nats."""


class Server(Protocol):
    """Started by us, or given as a URL; loopback and a token by default."""

    capabilities: Capabilities

    @property
    def base_url(self) -> str:
        """Ends in ``/v1``."""
        ...

    @property
    def api_key(self) -> str: ...

    @property
    def model(self) -> str: ...

    @property
    def version(self) -> int: ...

    def swap(self, weights: WeightsFile, *, probe: Probe | None = None) -> SwapReport:
        """Load, clear caches of old weights, resume; requests in flight are kept. Raises with the old weights still served.

        ``probe``: prove it by logprobs where the change is large enough to tell; else, and without a probe, by digest.
        """
        ...

    def prompt_logprobs(self, rows: Sequence[Int32], *, temperature: float = 1.0) -> list[Float32]:
        """For each row (T) the served weights' logprob of each token given the ones before it, (T) with NaN first."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class Continues(Protocol):
    """A server that can make the next prompt of a chat from the ids that it recorded."""

    def continuations(self) -> Counter[str]:
        """Since the start: prompts ``CONTINUED``, and by cause those that do not continue all that was recorded; empty if it is not to."""
        ...
