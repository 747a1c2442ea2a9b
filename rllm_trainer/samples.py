"""One episode in; out, rows in which each exactly sampled token is trained once, and a reason for every one that is not.

Calls are placed on a token tree by their ids alone: order of arrival, names and texts decide nothing. Prompts and observations are
never trained. ``sampled = trained + lost`` holds in every episode, and what is lost has a reason.

Example: prompt [5, 6] with reply [7, 2], then prompt [5, 6, 7, 2, 8] with reply [9, 2], is one row [5 6 7 2 8 9 2] with two spans.
Had the second prompt been [5, 6, 7, 8], it would be a row of its own, and the break at token 3 would have a cause.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import msgspec

from rllm_trace.types import Episode
from rllm_trainer.breaks import Break, Decode, find_breaks
from rllm_trainer.exceptions import SettingError
from rllm_trainer.lineage import Lineages, find_lineages
from rllm_trainer.placing import PlacedCall, Reason, SetAside, sort_out
from rllm_trainer.rows import Mode, ReplySpan, Rows, plan_rows
from rllm_trainer.tree import TokenTree, TreeBuilder
from rllm_trainer.types import Int32, Sample

__all__ = ["Counters", "Overlong", "SampleSet", "build_samples", "leave_out", "reconstruct"]

Overlong = Literal["refuse", "mask", "split"]
"""A reply that ends beyond ``max_len``: an error; left out and counted; or trained in pieces, the later ones with less context."""

_NEVER_MEANT = "no_train"
_SHORTEST_ROW = 2


class Counters(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one episode's calls and tokens, or of many episodes': counters add up with ``+``."""

    episodes: int = 0
    calls: int = 0
    trained_calls: int = 0
    """Calls of which at least one token is trained."""
    sampled_tokens: int = 0
    """Sampled in calls meant for training, those without ids included where the server counted them."""
    trained_tokens: int = 0
    lost_tokens: dict[str, int] = {}
    """By reason; together with ``trained_tokens`` they make ``sampled_tokens``."""
    no_train_tokens: int = 0
    """Sampled under ``no_train`` or inside a reward; part of nothing above."""
    set_aside_calls: dict[str, int] = {}
    """Calls that are not trained, by reason."""
    breaks: dict[str, int] = {}
    """Prompts that continue nothing recorded, by cause."""
    cut_after_break: dict[str, int] = {}
    """Sampled tokens that a broken prompt shows as other ids or not at all, by cause. They are trained, in their own row."""
    forks: int = 0
    """Further continuations of a reply that another call had continued before."""
    rows: int = 0
    row_tokens: int = 0
    """Tokens of all rows, prompts included."""
    distinct_tokens: int = 0
    """Tokens of the tree: what the rows would hold if shared prefixes stood once."""
    spans: int = 0
    """Replies trained."""
    empty_replies: int = 0
    """Replies of trained calls that have no token."""
    cut_context_tokens: int = 0
    """Trained with less context than they were sampled with, because a row was split."""
    unversioned_tokens: int = 0
    """Trained tokens whose policy version the server did not tell."""
    multi_call_episodes: int = 0
    """Episodes with two or more trained calls."""
    one_row_episodes: int = 0
    """Those of them that became one row with two or more trained replies."""

    def __add__(self, other: Counters) -> Counters:
        mine, theirs = msgspec.structs.asdict(self), msgspec.structs.asdict(other)
        return msgspec.convert({name: _sum(value, theirs[name]) for name, value in mine.items()}, Counters)

    @property
    def share_trained(self) -> float:
        """Share of the sampled tokens that is trained; 1 where nothing was sampled."""
        return self.trained_tokens / self.sampled_tokens if self.sampled_tokens else 1.0


class SampleSet(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """All that one episode gives to training."""

    episode_id: str
    task_id: str = ""
    mode: Mode = "tree"
    samples: Sequence[Sample]
    """The rows. Each is made anew when asked for: keep it in a variable rather than asking twice."""
    set_aside: Sequence[SetAside] = ()
    """What is not trained, in order of the calls."""
    breaks: Sequence[Break] = ()
    """In order of the calls."""
    counters: Counters = Counters()
    tree: TokenTree | None = None
    """Every distinct token once. None only in sets made by hand."""
    spans: Sequence[ReplySpan] = ()
    """Every reply on the tree, also those that are not trained, in order of the calls."""


def build_samples(
    episode: Episode,
    *,
    mode: Mode = "tree",
    max_len: int | None = None,
    overlong: Overlong = "refuse",
    vocab_size: int | None = None,
    mask_truncated: bool = False,
    decode: Decode | None = None,
) -> SampleSet:
    """Make an episode's rows.

    Args:
        mode: how replies are gathered in rows; it changes neither which tokens are trained nor their context.
        max_len: most tokens of a row; None: no limit.
        overlong: what happens to replies that end beyond ``max_len``.
        vocab_size: a call with an id outside is set aside; None: only negative ids are.
        mask_truncated: leave replies out that were cut by ``max_tokens``.
        decode: token ids to text, for causes and examples of breaks.

    Raises:
        SettingError: a reply ends beyond ``max_len`` and ``overlong`` is ``refuse``; or ``max_len`` is below 2.
    """
    if max_len is not None and max_len < _SHORTEST_ROW:
        raise SettingError(f"max_len is {max_len}; a row needs at least {_SHORTEST_ROW} tokens, one before the first trained one")
    mask_beyond = max_len if overlong == "mask" else None
    calls, set_aside = sort_out(episode, vocab_size=vocab_size, mask_truncated=mask_truncated, mask_beyond=mask_beyond)
    if max_len is not None and overlong == "refuse":
        _refuse_overlong(episode, calls, max_len)
    tree = _tree_of(calls)
    lineages = find_lineages(calls, tree)
    breaks = find_breaks(calls, lineages, tree, decode=decode)
    spans = _spans(calls, lineages, tree, breaks)
    plans, owners = plan_rows(spans, mode=mode, episode_id=episode.id, max_len=max_len)
    task_id = episode.task_id or ""
    rows = Rows(tree, spans, plans, owners, episode_id=episode.id, task_id=task_id, mode=mode)
    found = list(breaks.values())
    counters = msgspec.structs.replace(
        _token_counters(set_aside, found, [span for span in spans if span.trains], max_len),
        episodes=1,
        calls=sum(len(trajectory.calls) for trajectory in episode.trajectories),
        forks=_forks(spans),
        rows=len(rows),
        row_tokens=rows.num_tokens,
        distinct_tokens=len(tree.tokens),
        empty_replies=sum(reply.trains and not len(reply.token_ids) for call in calls for reply in call.replies),
    )
    one_row = counters.multi_call_episodes == 1 and len(rows) == 1
    return SampleSet(
        episode_id=episode.id,
        task_id=task_id,
        mode=mode,
        samples=rows,
        set_aside=set_aside,
        breaks=found,
        counters=msgspec.structs.replace(counters, one_row_episodes=int(one_row)),
        tree=tree,
        spans=spans,
    )


def leave_out(sample_set: SampleSet, reason: Reason, detail: str) -> SampleSet:
    """The set without its rows: every reply that it would have trained is set aside, and its tokens are lost for ``reason``."""
    counters = sample_set.counters
    aside = [
        SetAside(
            span_id=span.span_id,
            trajectory_id=span.trajectory_id,
            role=span.role,
            choice=span.choice,
            reason=reason,
            detail=detail,
            tokens=span.stop - span.start,
        )
        for span in sample_set.spans
        if span.trains
    ]
    lost = Counter(counters.lost_tokens) + Counter({reason: counters.trained_tokens})
    nothing = dict.fromkeys(
        ("trained_calls", "trained_tokens", "rows", "row_tokens", "spans", "multi_call_episodes", "one_row_episodes"), 0
    )
    return msgspec.structs.replace(
        sample_set,
        samples=[],
        set_aside=[*sample_set.set_aside, *aside],
        counters=msgspec.structs.replace(counters, lost_tokens=dict(lost), unversioned_tokens=0, cut_context_tokens=0, **nothing),
    )


def reconstruct(sample_set: SampleSet, span_id: str, choice: int = 0) -> tuple[Int32, Int32]:
    """Prompt ids (P) and reply ids (R) of one choice of one call, read back from the tree.

    Raises:
        KeyError: no such reply is on the tree.
    """
    if sample_set.tree is not None:
        for span in sample_set.spans:
            if span.span_id == span_id and span.choice == choice:
                sequence = sample_set.tree.path(span.node)
                return sequence[: span.start], sequence[span.start :]
    raise KeyError(f"choice {choice} of span {span_id} is not on the tree of episode {sample_set.episode_id}")


def _tree_of(calls: Sequence[PlacedCall]) -> TokenTree:
    builder = TreeBuilder()
    for index, call in enumerate(calls):
        builder.place(index, call.prompt, [reply.token_ids for reply in call.replies], lineage=call.trajectory_id)
    return builder.finish()


def _refuse_overlong(episode: Episode, calls: Sequence[PlacedCall], max_len: int) -> None:
    for call in calls:
        for reply in call.replies:
            length = len(call.prompt) + len(reply.token_ids)
            if reply.trains and length > max_len:
                raise SettingError(
                    f"episode {episode.id}, call {call.call.span_id}: prompt and reply are {length} tokens, max_len is {max_len}. Raise "
                    "max_model_len, or choose overlong='mask' (leave such replies out, counted) or overlong='split' (train them in pieces, "
                    "with less context)"
                )


def _spans(calls: Sequence[PlacedCall], lineages: Lineages, tree: TokenTree, breaks: Mapping[int, Break]) -> list[ReplySpan]:
    ends: list[int] = tree.reply_ends.tolist()
    spans: list[ReplySpan] = []
    for index, call in enumerate(calls):
        broken = breaks.get(index)
        for reply in call.replies:
            at = len(spans)
            spans.append(
                ReplySpan(
                    span_id=call.call.span_id,
                    choice=reply.choice.index,
                    trajectory_id=call.trajectory_id,
                    role=call.role,
                    finish_reason=reply.choice.finish_reason,
                    node=ends[at],
                    start=lineages.start[at],
                    stop=lineages.stop[at],
                    parent=lineages.parent_of_call[index],
                    temperature=call.temperature,
                    trains=reply.trains and len(reply.token_ids) > 0,
                    cause=None if broken is None else broken.cause,
                    logprobs=reply.logprobs,
                    versions=reply.versions,
                )
            )
    return spans


def _token_counters(set_aside: Sequence[SetAside], breaks: Sequence[Break], trained: Sequence[ReplySpan], max_len: int | None) -> Counters:
    lost: Counter[str] = Counter()
    for aside in set_aside:
        lost[aside.reason] += aside.tokens
    never_meant = lost.pop(_NEVER_MEANT, 0)
    cut: Counter[str] = Counter()
    for broken in breaks:
        cut[broken.cause] += broken.sampled_after
    trained_tokens = sum(span.stop - span.start for span in trained)
    trained_calls = len({span.span_id for span in trained})
    return Counters(
        trained_calls=trained_calls,
        sampled_tokens=trained_tokens + lost.total(),
        trained_tokens=trained_tokens,
        lost_tokens={reason: tokens for reason, tokens in lost.items() if tokens},
        no_train_tokens=never_meant,
        set_aside_calls=dict(Counter(aside.reason for aside in set_aside if aside.choice is None)),
        breaks=dict(Counter(broken.cause for broken in breaks)),
        cut_after_break=dict(cut),
        spans=len(trained),
        cut_context_tokens=0 if max_len is None else sum(max(0, span.stop - max(span.start, max_len)) for span in trained),
        unversioned_tokens=sum(int((span.versions < 0).sum()) for span in trained),
        multi_call_episodes=int(trained_calls > 1),
    )


def _forks(spans: Sequence[ReplySpan]) -> int:
    """Calls that continue a reply which another trained call continues too, beyond the first of them."""
    continuations = {(span.parent, span.span_id) for span in spans if span.trains and span.parent >= 0}
    return len(continuations) - len({parent for parent, _ in continuations})


def _sum(left: Any, right: Any) -> Any:
    if isinstance(left, int):
        return left + right
    return dict(Counter(cast("dict[str, int]", left)) + Counter(cast("dict[str, int]", right)))
