"""A server behind the door, parent side: what the loop asks is answered through one child process that stands between app and server.

A swap is proven as the embedded server's is: the trainer's old and new logprobs on tokens that moved, else the digest of what was
received, and besides that a prompt that the prefix cache held before must not be found in it afterwards.
"""

from __future__ import annotations

import contextlib
import secrets
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np

from rllm_trainer._child import Child, ChildDied, ChildError
from rllm_trainer.engine.base import WeightsFile
from rllm_trainer.exceptions import ServerError
from rllm_trainer.serving.base import CONTINUED, Capabilities, Probe, SwapReport
from rllm_trainer.serving.owned import PROXY_NAMES, OwnedServer
from rllm_trainer.serving.proof import SwapNotProven, judge
from rllm_trainer.serving_settings import InFlight
from rllm_trainer.types import Float32, Int32

__all__ = ["FLOAT32_NOISE", "HALF_NOISE", "ContinuingDoor", "DoorServer", "read_key"]

_MODULE = "rllm_trainer.serving._door.main"
_CALL_TIMEOUT = 600.0
_SWAP_TIMEOUT = 1800.0
"""Seconds for a swap, the wait for requests in flight included."""
_OWN_START = 180.0
"""Seconds that the door itself may take to start, on a machine that is busy."""
_CLOSE = 10.0
"""Seconds from TERM to KILL."""
_CACHE_TOKENS = 512
"""A prompt of this many tokens has whole blocks of every prefix cache; a server that takes less is sent less."""

FLOAT32_NOISE = 1e-3
HALF_NOISE = 0.5
"""Nats by which a server may differ from the trainer before a swap: computing in float32, or in half precision."""


class DoorServer(OwnedServer):
    """A ``Server``. ``close`` ends the door and what it started; a server that was there before goes on."""

    capabilities: Capabilities

    def __init__(
        self,
        child: Child,
        *,
        name: str,
        api_key: str,
        version: int,
        capabilities: Capabilities,
        in_flight: InFlight = "keep",
        most_noise: float = FLOAT32_NOISE,
    ) -> None:
        super().__init__(child, api_key=api_key, model=child.ready["model"], version=version)
        self._name = name
        self._in_flight: InFlight = in_flight
        self._most_noise = most_noise
        self._proven: WeightsFile | None = None
        """What is served, where it came by a swap: the file to go back to."""
        tells = bool(child.ready.get("versions", capabilities.per_token_versions))
        self.capabilities = msgspec.structs.replace(capabilities, per_token_versions=tells)
        self.max_model_len: int | None = child.ready["max_model_len"]
        """Most tokens of prompt and reply together; None: the server does not say."""

    @classmethod
    def open(
        cls,
        config: dict[str, Any],
        *,
        name: str,
        log_path: Path,
        capabilities: Capabilities,
        in_flight: InFlight = "keep",
        most_noise: float = FLOAT32_NOISE,
    ) -> Self:
        """Open a door.

        Args:
            config: fields of ``DoorConfig``; ``api_key`` is made here.
            name: for messages, such as ``"vLLM"``.
            log_path: gets what the door and a server that it starts print.

        Raises:
            ServerError: the server did not start, or is not what is needed; the message says why.
        """
        api_key = secrets.token_urlsafe(32)
        timeout = float(config.get("start_timeout", _CALL_TIMEOUT)) + _OWN_START
        try:
            child = Child.start(
                _MODULE,
                {**config, "api_key": api_key},
                name=name,
                log_path=log_path,
                env=dict.fromkeys(PROXY_NAMES),
                start_timeout=timeout,
            )
        except ChildDied as error:
            raise ServerError(str(error)) from error
        failed = child.ready.get("failed")
        if failed is not None:
            child.close(timeout=_CLOSE)
            raise ServerError(f"{name} cannot be used: {failed}; last lines of {log_path}:\n{child.log_tail()}")
        return cls(
            child,
            name=name,
            api_key=api_key,
            version=int(config["version"]),
            capabilities=capabilities,
            in_flight=in_flight,
            most_noise=most_noise,
        )

    def check(self) -> None:
        """Raises ``ServerError``, with the last log lines, if the server is gone."""
        if not self._child.alive:
            raise ServerError(f"{self._name} has ended; last lines of {self._child.log_path}:\n{self._child.log_tail()}")

    def stats(self) -> dict[str, Any]:
        """``version``, ``inside`` (requests now) and ``passed`` (requests since the start)."""
        return self._call("stats", {}, timeout=60.0)

    def swap(self, weights: WeightsFile, *, probe: Probe | None = None) -> SwapReport:
        """Serve other weights of the same model from the next token on; what becomes of requests in flight is as set.

        Raises:
            ServerError: the weights were refused, and the old ones are still served.
            SwapNotProven: what was served was not what the file holds; the message says what is served now.
        """
        before = None if probe is None else self.prompt_logprobs(probe.rows)
        try:
            report = self._swapped(weights, probe, before)
        except SwapNotProven as error:
            raise SwapNotProven(f"{error}; {self._go_back()}") from error
        self._proven = weights
        return report

    def _swapped(self, weights: WeightsFile, probe: Probe | None, before: list[Float32] | None) -> SwapReport:
        salt = secrets.token_hex(8)
        row = _cacheable(probe, min(_CACHE_TOKENS, (self.max_model_len or _CACHE_TOKENS + 1) - 1))
        self._cached(row, salt)
        report = self.swap_unproven(weights)
        self._require_cleared(row, salt)
        if probe is None or before is None:
            self._prove_by_digest(weights)
            return report
        verdict = judge(probe, before, self.prompt_logprobs(probe.rows), most_noise=self._most_noise)
        if verdict.proof == "digest":
            self._prove_by_digest(weights)
        return msgspec.structs.replace(report, proof=verdict.proof, max_difference=verdict.max_difference)

    def _go_back(self) -> str:
        """Have the weights before the last swap served again; what came of it, in words."""
        if self._proven is None:
            return f"it goes on with what it serves, as there is no file of the weights before version {self._version}"
        try:
            self.swap_unproven(self._proven)
        except ServerError as error:
            return f"the weights before it could not be put back: {error}"
        return f"version {self._version} is served again"

    def swap_unproven(self, weights: WeightsFile) -> SwapReport:
        """The swap alone; the version is read back."""
        done = self._call("swap", self._order(weights), timeout=_SWAP_TIMEOUT + _OWN_START)
        self._version = int(self.stats()["version"])
        if self._version != weights.version:
            raise SwapNotProven(f"after the swap to version {weights.version} {self._name} is at version {self._version}")
        return SwapReport(
            version=weights.version, seconds=done["seconds"], requests_in_flight=done["in_flight"], proof="digest", max_difference=0.0
        )

    def prompt_logprobs(self, rows: Sequence[Int32], *, temperature: float = 1.0) -> list[Float32]:
        if temperature != 1.0:
            raise ValueError(f"got temperature {temperature:g}; {self._name} scores given tokens at 1 only")
        scored = self._call("score", {"rows": [row.tolist() for row in rows]})["logprobs"]
        return [np.array([np.nan if value is None else value for value in row], np.float32) for row in scored]

    def close(self) -> None:
        self._child.close(timeout=_CLOSE)

    def _order(self, weights: WeightsFile) -> dict[str, Any]:
        return {"path": str(weights.path.resolve()), "version": weights.version, "lora": weights.lora} | {
            "in_flight": self._in_flight,
            "timeout": _SWAP_TIMEOUT,
        }

    def _prove_by_digest(self, weights: WeightsFile) -> None:
        """By what the server received, where it can say that; an adapter and a foreign server are believed their version."""
        if weights.lora:
            return
        held = self._call("held_digest", {})["digest"]
        if held is not None and held != weights.taken_digest():
            raise SwapNotProven(
                f"after the swap to version {weights.version} {self._name} holds tensors of digest {held}, not {weights.taken_digest()}"
            )

    def _cached(self, row: list[int], salt: str) -> int | None:
        return self._call("cached_tokens", {"row": row, "salt": salt})["tokens"]

    def _require_cleared(self, row: list[int], salt: str) -> None:
        found = self._cached(row, salt)
        if found:
            raise SwapNotProven(f"after the swap {self._name} still took {found} tokens of a prompt from the cache of the old weights")

    def _call(self, method: str, payload: dict[str, Any], timeout: float = _CALL_TIMEOUT) -> dict[str, Any]:
        try:
            return self._child.call(method, payload, timeout=timeout)
        except ChildDied as error:
            raise ServerError(str(error)) from error
        except ChildError as error:
            raise ServerError(f"{self._name}: {error.message}") from error
        except TimeoutError as error:
            with contextlib.suppress(Exception):
                self._child.close(timeout=_CLOSE)
            raise ServerError(f"{self._name} was ended: {error}; last lines of its log:\n{self._child.log_tail()}") from error


class ContinuingDoor(DoorServer):
    """One that continues the chats that it has recorded: its config names ``continues``."""

    def continuations(self) -> Counter[str]:
        """See ``Continues``."""
        told = self.stats()
        return Counter({CONTINUED: told["continued"], **told["not_continued"]})


def read_key(variable: str | None) -> str | None:
    """The key in an environment variable. Raises ``ServerError`` where it is not set."""
    import os

    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise ServerError(
            f"got serving_key={variable!r}, and the environment has no variable of that name; expected it to hold the server's key"
        )
    return key


def _cacheable(probe: Probe | None, length: int) -> list[int]:
    """A prompt of so many of the probe's own tokens, over and over."""
    tokens = [0] if probe is None else [token for row in probe.rows for token in row.tolist()]
    return (tokens * (length // len(tokens) + 1))[:length]
