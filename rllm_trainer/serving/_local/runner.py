"""Sequences in, logits out, one step at a time; owns the memory of keys and values and decides who fits.

A sequence is a ``Lane``. While its prompt is computed, keys and values lie in a draft of its own; from its first sampled token on in the
arena. What ends or is complete goes into the prefix store. All three share one budget of tokens: the store gives way first, then
new sequences wait, then the newest ones are given up (their lanes are begun again later). ``use`` swaps the weights and forgets
everything that was computed with the old ones.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor

from rllm_trainer.serving._local.arena import Arena
from rllm_trainer.serving._local.model import Chunk, Decoding, forward, logits, rotations
from rllm_trainer.serving._local.prefix_store import Ids, PrefixStore
from rllm_trainer.serving._local.weights import Weights

__all__ = ["Lane", "NativeRunner", "Runner", "StepResult"]


class Lane(msgspec.Struct, kw_only=True, eq=False):
    """One sequence as the model sees it."""

    ids: list[int]
    """Prompt and sampled ids so far; the owner appends what it samples."""
    decodes: bool
    """False: only scored, it ends with its prompt."""
    scored_from: int = 1
    """Of a lane that is only scored, the first token whose logits are wanted."""
    computed: int = 0
    """Tokens whose keys and values are there."""
    cached: int = 0
    """How many of them came from the prefix store."""
    row: int | None = None
    """Row in the arena, once it decodes."""
    draft: Tensor | None = None

    @property
    def prompt_left(self) -> int:
        """Tokens still to compute before it can sample."""
        return 0 if self.row is not None else len(self.ids) - self.computed


class StepResult(msgspec.Struct, kw_only=True, eq=False):
    """Logits of one step."""

    lanes: list[Lane]
    """Sequences that can sample now: those decoding, then those whose prompt is complete."""
    logits: Tensor
    """(len(lanes), vocab) float32; the caller may overwrite it."""
    scored: list[tuple[Lane, int, Tensor]]
    """(lane, first, logits): logits[i] predict token first + i of a scored lane."""


class Runner(Protocol):
    """What the scheduler needs of a model; ``NativeRunner``, or ``fallback.py`` for the families that we do not compute ourselves."""

    vocab: int
    max_len: int

    def fits(self, length: int) -> bool:
        """Whether a sequence of so many tokens can be served at all."""
        ...

    def begin(self, ids: list[int], *, decodes: bool, reuse: int) -> Lane | None:
        """A lane whose first tokens, at most ``reuse``, may come from the prefix store; None: no room now."""
        ...

    def cached(self, ids: Ids, reuse: int) -> int:
        """How much of ``ids`` the prefix store would give."""
        ...

    def crowded_out(self) -> list[Lane]:
        """Lanes given up so that each of the others can take one more token; they are dead and must be begun again."""
        ...

    def step(self, chunks: list[tuple[Lane, int]]) -> StepResult:
        """One token for every decoding lane, and so many prompt tokens for each lane in ``chunks``."""
        ...

    def end(self, lane: Lane, *, keep: bool) -> None:
        """Free a lane; ``keep``: its keys and values may serve later prompts."""
        ...

    def use(self, weights: Weights) -> None:
        """Serve these weights from the next step on. Every lane is dead."""
        ...


class NativeRunner:
    """The forward of ``model.py`` under one memory budget."""

    def __init__(self, weights: Weights, *, kv_tokens: int, max_len: int, max_rows: int) -> None:
        self.vocab = weights.spec.vocab
        self.max_len = max_len
        self._weights = weights
        self._budget = kv_tokens
        self._max_rows = max_rows
        self._table = rotations(weights.spec, max_len)
        self._arena = Arena(weights.spec, max_rows, max_len)
        self._rows: list[Lane] = []
        self._drafts: list[Lane] = []
        self._store = PrefixStore()

    def fits(self, length: int) -> bool:
        rows, capacity = self._arena.size_for(1, length, least=True)
        return length <= self.max_len and rows * capacity + length <= self._budget

    def begin(self, ids: list[int], *, decodes: bool, reuse: int) -> Lane | None:
        length = len(ids)
        will_decode = len(self._rows) + sum(lane.decodes for lane in self._drafts) + decodes
        if will_decode > self._max_rows:
            return None
        longest = max([length, *(len(lane.ids) for lane in self._rows), *(len(lane.ids) for lane in self._drafts)]) + 1
        drafts = self._draft_tokens() + length
        held = self._arena_after(will_decode, longest, drafts)
        if held + drafts > self._budget and not self._rows and not self._drafts:
            self._arena.reset()
            held = self._arena_after(will_decode, longest, drafts)
        if held + drafts > self._budget:
            return None
        self._store.shrink(self._budget - held - drafts)
        spec = self._weights.spec
        draft = torch.empty(spec.layers, 2, spec.kv_heads, length, spec.head_dim)
        lane = Lane(ids=ids, decodes=decodes, draft=draft)
        lane.computed = lane.cached = self._store.copy_into(draft, np.asarray(ids, np.int32), min(reuse, length - 1))
        self._drafts.append(lane)
        return lane

    def cached(self, ids: Ids, reuse: int) -> int:
        return self._store.match(ids, min(reuse, len(ids) - 1))

    def crowded_out(self) -> list[Lane]:
        given_up: list[Lane] = []
        while self._rows:
            size = self._arena_size(len(self._rows), max(len(lane.ids) for lane in self._rows), self._draft_tokens())
            need = size[0] * size[1] + self._draft_tokens()
            if need <= self._budget or len(self._rows) + len(self._drafts) == 1:
                self._store.shrink(self._budget - need)
                self._arena.resize(*size)
                break
            victim = self._drafts[-1] if self._drafts else self._rows[-1]
            given_up.append(victim)
            self.end(victim, keep=False)
        return given_up

    def step(self, chunks: list[tuple[Lane, int]]) -> StepResult:
        decoding = None
        if self._rows:
            positions = [lane.computed for lane in self._rows]
            decoding = Decoding(arena=self._arena, ids=[lane.ids[-1] for lane in self._rows], positions=positions)
        work = [self._chunk(lane, count) for lane, count in chunks]
        hidden = forward(self._weights, self._table, decoding, work)
        lanes = list(self._rows)
        wanted = list(range(len(lanes)))
        scored: list[tuple[Lane, int, int, int]] = []
        at = len(lanes)
        for lane in lanes:
            lane.computed += 1
        for (lane, count), chunk in zip(chunks, work, strict=True):
            lane.computed += count
            if not lane.decodes:
                rows = min(count, len(lane.ids) - 1 - chunk.start)
                skip = max(lane.scored_from - 1 - chunk.start, 0)
                scored.append((lane, chunk.start + 1 + skip, at + skip, at + rows))
            elif lane.computed == len(lane.ids):
                lanes.append(lane)
                wanted.append(at + count - 1)
            at += count
        rows_RH = hidden if len(wanted) == hidden.shape[0] else hidden[wanted]
        result = StepResult(
            lanes=lanes,
            logits=logits(self._weights, rows_RH) if wanted else torch.empty(0, self.vocab),
            scored=self._scored(hidden, scored),
        )
        for lane, _ in chunks:
            if lane.computed == len(lane.ids):
                self._prompt_done(lane)
        return result

    def _scored(self, hidden: Tensor, parts: list[tuple[Lane, int, int, int]]) -> list[tuple[Lane, int, Tensor]]:
        """Logits of the rows that are asked for, (lane, first, start, stop) each, by one product for all."""
        parts = [part for part in parts if part[3] > part[2]]
        if not parts:
            return []
        rows = logits(self._weights, torch.cat([hidden[start:stop] for _, _, start, stop in parts]))
        ends = list(accumulate(stop - start for _, _, start, stop in parts))
        return [(lane, first, rows[end - stop + start : end]) for (lane, first, start, stop), end in zip(parts, ends, strict=True)]

    def end(self, lane: Lane, *, keep: bool) -> None:
        if lane.row is not None:
            row = lane.row
            if keep:
                ids = np.asarray(lane.ids[: lane.computed], np.int32)
                self._store.insert(ids, lambda start, stop: self._arena.read(row, start, stop), self._left())
            last = self._rows.pop()
            moved = self._arena.remove(row, last.computed)
            if moved is not None:
                self._rows[row] = last
                last.row = row
            lane.row = None
        elif lane.draft is not None:
            self._drafts.remove(lane)
            lane.draft = None

    def use(self, weights: Weights) -> None:
        self._weights = weights
        self._store.clear()
        for lane in [*self._rows, *self._drafts]:
            lane.row = lane.draft = None
        self._rows.clear()
        self._drafts.clear()
        self._arena.used = 0

    def _chunk(self, lane: Lane, count: int) -> Chunk:
        assert lane.draft is not None
        return Chunk(draft=lane.draft, ids=lane.ids[lane.computed : lane.computed + count], start=lane.computed)

    def _prompt_done(self, lane: Lane) -> None:
        draft = lane.draft
        assert draft is not None
        self._store.insert(np.asarray(lane.ids, np.int32), lambda start, stop: draft[:, :, :, start:stop].clone(), self._left())
        if lane.decodes:
            self._drafts.remove(lane)
            lane.draft = None
            length = max([lane.computed, *(other.computed for other in self._rows)])
            size = self._arena_size(len(self._rows) + 1, length, self._draft_tokens())
            self._store.shrink(self._budget - size[0] * size[1] - self._draft_tokens())
            self._arena.resize(*size)
            lane.row = self._arena.add(draft, lane.computed)
            self._rows.append(lane)

    def _arena_after(self, rows: int, length: int, drafts: int) -> int:
        """Tokens that the arena will hold once so many sequences decode."""
        if not rows:
            return self._arena.tokens
        size = self._arena_size(rows, min(length, self.max_len), drafts)
        return max(size[0] * size[1], self._arena.tokens)

    def _arena_size(self, rows: int, length: int, drafts: int) -> tuple[int, int]:
        """Doubled where the budget allows it, else the least that does."""
        size = self._arena.size_for(rows, length)
        return size if size[0] * size[1] + drafts <= self._budget else self._arena.size_for(rows, length, least=True)

    def _draft_tokens(self) -> int:
        return sum(len(lane.ids) for lane in self._drafts)

    def _left(self) -> int:
        """Tokens that the store may hold."""
        return self._budget - self._arena.tokens - self._draft_tokens()
