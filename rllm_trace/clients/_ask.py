"""May this call ask its server for token ids and logprobs, with which fields, and what if the server refuses them.

Calls to the policy always ask, and a refusal is the app's error. Other endpoints are asked unless their host is known to be strict; there
is no probe request: the first real call carries the fields, one that is refused with a 400, 403 or 422 naming an added field is sent
once more untouched, and the refusal is remembered for that base URL, model and field; one of a stream for streams only, since there are
servers (SGLang) that tell ids of whole answers alone. Every server that tells ids is asked by the same names: vLLM's, which SGLang,
Fireworks and our own server share; llama.cpp tells them beside its logprobs.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping
from types import NoneType
from typing import Any, Final, cast

from rllm_trace.clients._decode import Keep, Operation

__all__ = ["Asking", "Refusals", "ask", "is_strict", "refusals"]

_STRICT_HOSTS: Final = (
    "amazonaws.com",
    "anthropic.com",
    "azure.com",
    "cerebras.ai",
    "cohere.ai",
    "cohere.com",
    "deepseek.com",
    "googleapis.com",
    "groq.com",
    "mistral.ai",
    "openai.com",
    "openrouter.ai",
    "perplexity.ai",
    "x.ai",
)
"""Hosts, with all their subdomains, that refuse unknown fields or give no ids."""

_REFUSING: Final = frozenset({400, 403, 422})
_MAX_REMEMBERED: Final = 4_096

_FIELDS: Final[dict[Operation, dict[str, Any]]] = {
    "chat": {"logprobs": True, "return_token_ids": True},
    "text_completion": {"logprobs": 1, "return_token_ids": True},
    "responses": {},
}
_STREAM_OPTIONS: Final = "stream_options"
_NO_FIELDS: Final[frozenset[str]] = frozenset()


class Refusals:
    """Which field was refused by which model at which base URL, in this process: to any call, or to streams."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fields: dict[tuple[str, str, bool], frozenset[str]] = {}

    def of(self, base_url: str, model: str, *, stream: bool) -> frozenset[str]:
        whole = self._fields.get((base_url, model, False), _NO_FIELDS)
        return whole | self._fields.get((base_url, model, True), _NO_FIELDS) if stream else whole

    def remember(self, base_url: str, model: str, fields: frozenset[str], *, stream: bool) -> None:
        with self._lock:
            if len(self._fields) >= _MAX_REMEMBERED:
                self._fields.pop(next(iter(self._fields)))
            key = (base_url, model, stream)
            self._fields[key] = self._fields.get(key, _NO_FIELDS) | fields

    def clear(self) -> None:
        with self._lock:
            self._fields.clear()


refusals: Final = Refusals()


class Asking:
    """The body with the fields that ask, and what of the answer the app asked for itself."""

    __slots__ = ("added", "body", "keep")

    def __init__(self, body: dict[str, Any], added: dict[str, Any], keep: Keep) -> None:
        self.body = body
        self.added = added
        """Added field -> the app's own value of it, None if it gave none."""
        self.keep = keep


@functools.lru_cache(maxsize=1_024)
def is_strict(host: str) -> bool:
    """Whether ``host`` is one that is never asked on its own account."""
    host = host.lower().rstrip(".")
    return any(host == strict or host.endswith("." + strict) for strict in _STRICT_HOSTS)


def ask(body: Mapping[str, Any], operation: Operation, refused: frozenset[str], *, policy: bool) -> Asking:
    """Adds to ``body`` what asks for tokens, fields in ``refused`` excepted. The app's own fields stay as they are, or grow."""
    if _STREAM_OPTIONS not in body and all(body.get(field) is None for field in _FIELDS[operation]):
        adds, asking = _usual(operation, refused, bool(body.get("stream")), policy)
        return Asking({**body, **adds}, asking.added, asking.keep)
    return _ask(body, operation, refused, policy)


@functools.lru_cache(maxsize=256)
def _usual(operation: Operation, refused: frozenset[str], streams: bool, policy: bool) -> tuple[dict[str, Any], Asking]:
    """What is added to a body that asks for nothing of it by itself."""
    asking = _ask({"stream": streams}, operation, refused, policy)
    return {field: asking.body[field] for field in asking.added}, asking


def _ask(body: Mapping[str, Any], operation: Operation, refused: frozenset[str], policy: bool) -> Asking:
    sent = dict(body)
    added: dict[str, Any] = {}
    for field, value in _FIELDS[operation].items():
        if field not in refused and not _asks_already(body.get(field), operation):
            sent[field] = value
            added[field] = body.get(field)
    options = body.get(_STREAM_OPTIONS)
    if added and body.get("stream") and _STREAM_OPTIONS not in refused and isinstance(options, (Mapping, NoneType)):
        known: Mapping[str, Any] = cast("Mapping[str, Any]", options or {})
        if not known.get("include_usage"):
            sent[_STREAM_OPTIONS] = {**known, "include_usage": True}
            added[_STREAM_OPTIONS] = options
    if operation == "responses":
        return Asking(sent, added, Keep(ids=not policy, logprobs=True, versions=not policy))
    keep = Keep(
        ids="return_token_ids" not in added, logprobs="logprobs" not in added, usage_chunk=_STREAM_OPTIONS not in added, versions=not policy
    )
    return Asking(sent, added, keep)


def _asks_already(value: Any, operation: Operation) -> bool:
    return value is not None and value is not False if operation == "text_completion" else bool(value)


def refused_fields(status: int | None, message: str, added: Mapping[str, Any]) -> frozenset[str]:
    """Which of the added fields an error names, if it is one that refuses a field."""
    if status not in _REFUSING:
        return frozenset()
    return frozenset(field for field in added if field in message)
