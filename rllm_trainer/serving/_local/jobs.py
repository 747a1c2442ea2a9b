"""One sequence that a request wants: what it asks for, how far it is, and when it is over.

A ``Generation`` samples a reply; a ``Scoring`` only wants logprobs of ids that it brings. Both live from admission to their last update,
over swaps and over being given up for want of memory: what they hold are ids, everything else can be computed again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
import torch
from torch import Tensor

from rllm_trainer.serving._local.grammar import Matcher
from rllm_trainer.serving._local.runner import Lane
from rllm_trainer.serving._local.sampling import Row, Sampled, SamplingParams, gathered_logprobs, generator, top_logprobs
from rllm_trainer.serving._local.tokens import TextStream, Tokenizer

__all__ = ["Generation", "GenerationParams", "Scoring", "Update", "VersionSpan"]

FinishReason = Literal["stop", "length", "abort", "error"]


class VersionSpan(msgspec.Struct, kw_only=True):
    """Tokens [start, end) of a reply were sampled under this policy version."""

    version: int
    start: int
    end: int


class GenerationParams(msgspec.Struct, frozen=True, kw_only=True):
    """What a reply is sampled and ended with."""

    sampling: SamplingParams
    max_tokens: int
    """At least 1; prompt and reply together never pass the model's length."""
    stops: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    eos: frozenset[int] = frozenset()
    """Ids that end the reply; empty where they are to be ignored."""
    include_stop: bool = False
    skip_special: bool = True
    top: int = 0
    """How many of the likeliest tokens to report at each position."""
    seed: int
    choice: int = 0
    stream: bool = False


class Update(msgspec.Struct, frozen=True, kw_only=True):
    """News of a generation: tokens since the last update, or all of them where it does not stream."""

    sampled: list[Sampled]
    text: str
    """Settled text since the last update."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    """What went wrong, where ``finish_reason`` is ``error``."""


class Generation:
    """A reply being sampled. The scheduler's thread calls ``row`` and ``push``; ``news`` is read in the event loop."""

    def __init__(
        self,
        prompt_ids: Sequence[int],
        params: GenerationParams,
        *,
        tokenizer: Tokenizer,
        max_len: int,
        matcher: Matcher | None,
        news: asyncio.Queue[tuple[Generation, Update]],
    ) -> None:
        self.ids = list(prompt_ids)
        self.prompt_length = len(self.ids)
        self.params = params
        self.lane: Lane | None = None
        self.arrival = 0
        self.cancelled = False
        self.cached_tokens = 0
        """Prompt tokens whose computation was saved, at the first admission."""
        self.admitted = False
        self.versions: list[VersionSpan] = []
        self.news = news
        """Shared by the choices of a request; at most one update per token, so as long as the replies at most."""
        self._tokenizer = tokenizer
        self._matcher = matcher
        self._rng = generator(params.seed, params.choice)
        self._room = min(params.max_tokens, max_len - self.prompt_length)
        self._sampled: list[Sampled] = []
        self._sent = 0
        needs_text = bool(params.stops) or params.stream
        self._text = (
            TextStream(tokenizer, params.stops, include_stop=params.include_stop, skip_special=params.skip_special) if needs_text else None
        )

    @property
    def decodes(self) -> bool:
        return True

    @property
    def reuse(self) -> int:
        """Leading tokens that may come from the prefix cache."""
        return len(self.ids) - 1

    @property
    def reply_ids(self) -> list[int]:
        return self.ids[self.prompt_length :]

    def row(self) -> Row:
        """What the next token is sampled with. Raises ``ValueError`` where the grammar is stuck."""
        return Row(
            params=self.params.sampling,
            rng=self._rng,
            prompt_ids=self.ids[: self.prompt_length] if self.params.sampling.reshapes else (),
            sampled_ids=self.reply_ids if self.params.sampling.reshapes else (),
            allowed=self._matcher.allowed() if self._matcher is not None else None,
            top=self.params.top,
        )

    def push(self, sampled: Sampled, version: int) -> Update | None:
        """Take a token in. Returns what the requester should hear now, if anything."""
        token = sampled.token_id
        self.ids.append(token)
        self._sampled.append(sampled)
        self._stamp(version)
        if self._matcher is not None:
            self._matcher.consume(token)
        finish, reason = self._end(token)
        if finish is not None:
            return self._finish(finish, reason)
        if not self.params.stream or self._text is None:
            return None
        return self._update(self._text.take(), None, None)

    def abort(self) -> Update:
        """The reply ends as it is."""
        return self._finish("abort", None)

    def fail(self, error: str) -> Update:
        """The reply cannot go on."""
        return Update(sampled=[], text="", finish_reason="error", error=error)

    def _end(self, token: int) -> tuple[FinishReason | None, int | str | None]:
        if token in self.params.eos:
            return "stop", None
        if token in self.params.stop_token_ids:
            return "stop", token
        stop = self._text.push(token) if self._text is not None else None
        if stop is not None:
            return "stop", stop
        if len(self._sampled) >= self._room:
            return "length", None
        return None, None

    def _finish(self, finish: FinishReason, reason: int | str | None) -> Update:
        ids = self.reply_ids
        if finish == "stop" and not isinstance(reason, str) and not self.params.include_stop:
            ids = ids[:-1]
        if self._text is None:
            text = self._tokenizer.decode(ids, skip_special=self.params.skip_special)
        else:
            self._text.finish(ids)
            text = self._text.take()
        return self._update(text, finish, reason)

    def _update(self, text: str, finish: FinishReason | None, reason: int | str | None) -> Update:
        new, self._sent = self._sampled[self._sent :], len(self._sampled)
        return Update(sampled=new, text=text, finish_reason=finish, stop_reason=reason)

    def _stamp(self, version: int) -> None:
        at = len(self._sampled)
        if self.versions and self.versions[-1].version == version:
            self.versions[-1].end = at
        else:
            self.versions.append(VersionSpan(version=version, start=at - 1, end=at))


class Scoring:
    """Given ids whose logprobs are wanted. ``news`` gets itself, once, when it is done."""

    def __init__(self, ids: Sequence[int], *, start: int, temperature: float, top: int, reuse: int) -> None:
        self.ids = list(ids)
        self.start = start
        """The first token that is wanted."""
        self.reuse = reuse
        """Most tokens that may come from the prefix store."""
        self.cached = 0
        """How many did."""
        self.lane: Lane | None = None
        self.arrival = 0
        self.cancelled = False
        self.version = 0
        self.logprobs = np.full(len(self.ids), np.nan, np.float32)
        """(T) NaN before ``start``, and where what came before was not computed."""
        self.tops: list[list[tuple[int, float]]] = [[] for _ in self.ids]
        self.news: asyncio.Queue[Scoring] = asyncio.Queue()
        self._temperature = temperature
        self._top = top

    @property
    def decodes(self) -> bool:
        return False

    def take(self, first: int, logits_RV: Tensor) -> None:
        """Logits that predict tokens first, first + 1, ..."""
        with torch.inference_mode():
            skip = max(self.start - first, 0)
            rows = logits_RV[skip:]
            if not len(rows):
                return
            at = first + skip
            targets = self.ids[at : at + len(rows)]
            self.logprobs[at : at + len(rows)] = gathered_logprobs(rows, targets, self._temperature)
            if self._top:
                self.tops[at : at + len(rows)] = top_logprobs(rows, self._top)
