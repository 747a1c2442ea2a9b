"""Replies on a token tree in; out, the rows in which each trained reply token stands exactly once.

Which row trains a reply is planned over replies, not tokens, so a plan is small; a row's arrays are made when the row is asked for,
because rows that share long prefixes are many times larger than the tree that holds them.

A lineage is followed from its first trained reply to the last one that continues it; where it forks, the earliest continuation goes
on in the same row and each other one begins a row of its own, with what it shares as context. Replies of one row have one
temperature.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, overload

import msgspec
import numpy as np

from rllm_trainer.tree import TokenTree
from rllm_trainer.types import Float32, Int32, Sample, SampledSpan

__all__ = ["Mode", "ReplySpan", "RowPlan", "Rows", "plan_rows"]

Mode = Literal["tree", "prefix", "call"]
"""``tree``: a row names every reply that it holds, also those that another row trains; ``prefix``: a row names the replies of its own
unbroken lineage; ``call``: one row per reply."""

_UNSAMPLED = -1


class ReplySpan(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One reply on the tree. R = its tokens."""

    span_id: str
    choice: int
    trajectory_id: str
    role: str
    finish_reason: str | None
    node: int
    """Tree node where it ends."""
    start: int
    """Tokens before it."""
    stop: int
    """Tokens up to its end."""
    parent: int
    """The reply whose sequence its prompt starts with; -1: none."""
    temperature: float
    trains: bool
    cause: str | None
    """Break cause of its call's prompt."""
    logprobs: Float32 | None
    """(R) None where it is not trained."""
    versions: Int32
    """(R)"""


class RowPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One row, before its arrays are made."""

    id: str
    last: int
    """The last reply that it trains."""
    owner: int
    """Number that the replies trained by this row carry; pieces of a split row share it."""
    cause: str | None
    begin: int = 0
    """First token of the path that is in the row."""
    train_from: int = 0
    """Tokens of the path before this one are context, whoever sampled them."""
    end: int
    """One past the last token of the path that is in the row."""


class Rows(Sequence[Sample]):
    """The rows of an episode; each is made anew whenever it is asked for."""

    def __init__(
        self,
        tree: TokenTree,
        spans: Sequence[ReplySpan],
        plans: Sequence[RowPlan],
        owners: Sequence[int],
        *,
        episode_id: str,
        task_id: str,
        mode: Mode,
    ) -> None:
        self._tree = tree
        self._spans = spans
        self._plans = plans
        self._owners = owners
        self._episode_id = episode_id
        self._task_id = task_id
        self._mode: Mode = mode

    def __len__(self) -> int:
        return len(self._plans)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        if isinstance(index, slice):
            return [self._make(plan) for plan in self._plans[index]]
        return self._make(self._plans[index])

    def __iter__(self) -> Iterator[Sample]:
        return map(self._make, self._plans)

    def __repr__(self) -> str:
        return f"<{len(self)} rows of episode {self._episode_id}>"

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows together."""
        return sum(plan.end - plan.begin for plan in self._plans)

    def _make(self, plan: RowPlan) -> Sample:
        length = plan.end - plan.begin
        trained_mask = np.zeros(length, np.bool_)
        logprobs = np.full(length, np.nan, np.float32)
        versions = np.full(length, _UNSAMPLED, np.int32)
        named: list[SampledSpan] = []
        for index in self._path(plan):
            span, owned = self._spans[index], self._owners[index] == plan.owner
            for start, stop, trained in _pieces(span, plan, owned=owned):
                row, reply = slice(start - plan.begin, stop - plan.begin), slice(start - span.start, stop - span.start)
                trained_mask[row] = trained
                if span.logprobs is not None:
                    logprobs[row] = span.logprobs[reply]
                    versions[row] = span.versions[reply]
                named.append(
                    SampledSpan(
                        span_id=span.span_id,
                        choice=span.choice,
                        trajectory_id=span.trajectory_id,
                        role=span.role,
                        start=row.start,
                        stop=row.stop,
                        trained=trained,
                        offset=reply.start,
                        finish_reason=span.finish_reason,
                    )
                )
        last = self._spans[plan.last]
        return Sample(
            id=plan.id,
            episode_id=self._episode_id,
            task_id=self._task_id,
            token_ids=self._tree.path(last.node, plan.begin, plan.end),
            trained_mask=trained_mask,
            logprobs=logprobs,
            versions=versions,
            temperature=last.temperature,
            spans=named,
            cause=plan.cause,
        )

    def _path(self, plan: RowPlan) -> list[int]:
        """The replies that the row names, in row order."""
        path: list[int] = []
        index = plan.last
        while index >= 0:
            span = self._spans[index]
            if span.stop <= plan.begin:
                break
            if self._mode == "tree" or self._owners[index] == plan.owner:
                path.append(index)
            index = span.parent
        return path[::-1]


def plan_rows(spans: Sequence[ReplySpan], *, mode: Mode, episode_id: str, max_len: int | None) -> tuple[list[RowPlan], list[int]]:
    """The rows, in order of their first trained reply, and for each reply the number of the rows' owner that trains it (-1: none).

    Args:
        max_len: longer rows are split into pieces of at most so many tokens. Pieces lie at fixed places of the path, so that a token
            gets the same context in every mode; tokens after the first piece keep at least half of ``max_len`` as context.
    """
    owners = [_UNSAMPLED] * len(spans)
    plans: list[RowPlan] = []
    for owner, members in enumerate(_members(spans, mode)):
        for index in members:
            owners[index] = owner
        last = spans[members[-1]]
        whole = RowPlan(
            id=f"{episode_id}:{last.span_id}:{last.choice}", last=members[-1], owner=owner, cause=spans[members[0]].cause, end=last.stop
        )
        plans.extend([whole] if max_len is None or last.stop <= max_len else _split(whole, [spans[index] for index in members], max_len))
    return plans, owners


def _pieces(span: ReplySpan, plan: RowPlan, *, owned: bool) -> Iterator[tuple[int, int, bool]]:
    """The parts of a reply that lie in the row: (start, stop, trained), counted along the path."""
    start, stop = max(span.start, plan.begin), min(span.stop, plan.end)
    cut = min(stop, max(start, plan.train_from)) if owned else stop
    if start < cut:
        yield start, cut, False
    if cut < stop:
        yield cut, stop, True


def _members(spans: Sequence[ReplySpan], mode: Mode) -> list[list[int]]:
    """The replies that each row trains, in row order; rows in order of their first reply."""
    if mode == "call":
        return [[index] for index, span in enumerate(spans) if span.trains]
    children: dict[int, list[int]] = {}
    leads_to_training = [span.trains for span in spans]
    for index in sorted(range(len(spans)), key=lambda index: -spans[index].stop):
        parent = spans[index].parent
        if parent >= 0 and leads_to_training[index]:
            leads_to_training[parent] = True
            children.setdefault(parent, []).append(index)
    goes_on = {parent: min(options) for parent, options in children.items()}
    heads = [index for index, span in enumerate(spans) if leads_to_training[index] and (span.parent < 0 or goes_on[span.parent] != index)]
    rows: list[list[int]] = []
    for head in heads:
        by_temperature: dict[float, list[int]] = {}
        index: int | None = head
        while index is not None:
            if spans[index].trains:
                by_temperature.setdefault(spans[index].temperature, []).append(index)
            index = goes_on.get(index)
        rows.extend(by_temperature.values())
    return sorted(rows)


def _split(whole: RowPlan, trained: Sequence[ReplySpan], max_len: int) -> Iterator[RowPlan]:
    """Pieces that hold a trained token. Piece 0 is the path's first ``max_len`` tokens; each further one trains the next half."""
    step = max(1, max_len // 2)
    pieces = 1 + -(-(whole.end - max_len) // step)
    for number in range(pieces):
        begin = number * step
        end = min(whole.end, begin + max_len)
        train_from = 0 if number == 0 else begin + max_len - step
        if any(span.start < end and span.stop > train_from for span in trained):
            yield msgspec.structs.replace(whole, id=f"{whole.id}/{number}", begin=begin, end=end, train_from=train_from)
