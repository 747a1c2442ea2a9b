"""The calls of an episode, sorted out: which go on the token tree, which of their replies are trained, and why the others are not.

A call is trained when its record says so and its arrays bear it out: every reply has ids, one finite logprob for each, and no id
lies outside the vocabulary. A call that is not trained still goes on the tree where its ids are known, because later prompts may
contain its reply. Nothing leaves without a reason and the number of its sampled tokens.
"""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np

from rllm_trace.types import Choice, Episode, ModelCall, Trajectory
from rllm_trainer.types import Float32, Int32

__all__ = ["PlacedCall", "PlacedReply", "Reason", "SetAside", "sort_out"]

Reason = Literal[
    "failed",
    "incomplete",
    "late",
    "no_train",
    "inexact",
    "multimodal",
    "untrainable",
    "duplicate span id",
    "no prompt ids",
    "logprobs do not match ids",
    "id outside the vocabulary",
    "truncated",
    "over-long",
    "rejected",
    "group without signal",
]
"""Why sampled tokens are not trained."""

_UNTOLD = -1
_DEFAULT_TEMPERATURE = 1.0
_INT32_IDS = 1 << 31


class SetAside(msgspec.Struct, frozen=True, kw_only=True):
    """One call, or one reply of it, that is recorded and not trained."""

    span_id: str
    trajectory_id: str
    role: str
    """The trajectory's name."""
    choice: int | None = None
    """Index of the reply; None: the whole call."""
    reason: Reason
    detail: str
    """One sentence for the report."""
    tokens: int
    """Sampled tokens that are not trained for it; from ``usage`` where the server sent no ids."""


class PlacedReply(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One choice whose ids go on the tree. R = its tokens."""

    choice: Choice
    token_ids: Int32
    """(R)"""
    logprobs: Float32 | None
    """(R) None where the reply is not trained."""
    versions: Int32
    """(R) policy version of each token; -1 where the server tells none."""
    trains: bool


class PlacedCall(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One call whose ids go on the tree. P = its prompt's tokens."""

    call: ModelCall
    trajectory_id: str
    role: str
    prompt: Int32
    """(P)"""
    replies: list[PlacedReply]
    temperature: float
    trains: bool
    """One of its replies is trained."""


def sort_out(
    episode: Episode, *, vocab_size: int | None = None, mask_truncated: bool = False, mask_beyond: int | None = None
) -> tuple[list[PlacedCall], list[SetAside]]:
    """The calls that go on the tree, in order of (start, span id), and everything that is not trained, in the same order.

    Args:
        vocab_size: ids must be smaller; None: not known.
        mask_truncated: leave out replies that were cut by ``max_tokens``.
        mask_beyond: leave out replies that end beyond so many tokens, prompt included; None: none.
    """
    placed: list[PlacedCall] = []
    set_aside: list[SetAside] = []
    seen: set[str] = set()
    for trajectory, call in _in_order(episode):
        if call.span_id in seen:
            set_aside.append(_aside(trajectory, call, "duplicate span id", f"span {call.span_id} stands in the episode twice", tokens=0))
            continue
        seen.add(call.span_id)
        outside = _outside(call, vocab_size)
        why = _why_not(call) or _misaligned(call) if outside is None else ("id outside the vocabulary", outside)
        if why is not None:
            set_aside.append(_aside(trajectory, call, *why, tokens=_sampled(call)))
        if outside is not None or not call.prompt_token_ids:
            continue
        replies: list[PlacedReply] = []
        for choice in call.choices:
            if choice.token_ids is not None:
                left_out = None if why else _left_out(call, choice, mask_truncated=mask_truncated, mask_beyond=mask_beyond)
                if left_out is not None:
                    set_aside.append(_aside(trajectory, call, *left_out, tokens=len(choice.token_ids), choice=choice.index))
                replies.append(_reply(call, choice, trains=not why and not left_out))
        placed.append(
            PlacedCall(
                call=call,
                trajectory_id=trajectory.id,
                role=trajectory.name,
                prompt=np.asarray(call.prompt_token_ids, np.int32),
                replies=replies,
                temperature=_temperature(call),
                trains=any(reply.trains for reply in replies),
            )
        )
    return placed, set_aside


def _in_order(episode: Episode) -> list[tuple[Trajectory, ModelCall]]:
    pairs = [(trajectory, call) for trajectory in episode.trajectories for call in trajectory.calls]
    return sorted(pairs, key=lambda pair: (pair[1].started, pair[1].span_id, pair[0].id))


def _aside(trajectory: Trajectory, call: ModelCall, reason: Reason, detail: str, *, tokens: int, choice: int | None = None) -> SetAside:
    return SetAside(
        span_id=call.span_id, trajectory_id=trajectory.id, role=trajectory.name, choice=choice, reason=reason, detail=detail, tokens=tokens
    )


def _why_not(call: ModelCall) -> tuple[Reason, str] | None:
    """What the record itself says against training the call."""
    if call.no_train:
        return "no_train", "made under no_train or inside a reward"
    if call.error is not None:
        return "failed", f"{call.error.type}: {call.error.message}"
    if call.late:
        return "late", "ended after its episode had been delivered"
    if not call.complete:
        return "incomplete", "the reply was not received to its end"
    if not call.exact:
        return "inexact", call.inexact_reason or "no reason recorded"
    if call.multimodal:
        return "multimodal", "the prompt has parts that are not text"
    if not call.trainable:
        return "untrainable", "the record says so and gives no reason"
    return None


def _misaligned(call: ModelCall) -> tuple[Reason, str] | None:
    """What the record's arrays say against training a call that claims to be exact."""
    if not call.prompt_token_ids:
        return "no prompt ids", "got no prompt token ids; a reply needs at least one token before it"
    if not call.choices:
        return "logprobs do not match ids", "the call has no choices"
    for choice in call.choices:
        if choice.token_ids is None or choice.logprobs is None:
            missing = "ids" if choice.token_ids is None else "logprobs"
            return "logprobs do not match ids", f"choice {choice.index} has no {missing}"
        if len(choice.token_ids) != len(choice.logprobs):
            return "logprobs do not match ids", f"choice {choice.index} has {len(choice.logprobs)} logprobs for {len(choice.token_ids)} ids"
        if not np.isfinite(np.asarray(choice.logprobs, np.float32)).all():
            return "logprobs do not match ids", f"choice {choice.index} has a logprob that is not finite"
    if _temperature(call) <= 0:
        return "inexact", f"temperature {_temperature(call):g}"
    return None


def _outside(call: ModelCall, vocab_size: int | None) -> str | None:
    """Names the first id that no vocabulary of this size has."""
    limit = _INT32_IDS if vocab_size is None else vocab_size
    for what, ids in [("the prompt", call.prompt_token_ids), *((f"choice {choice.index}", choice.token_ids) for choice in call.choices)]:
        if ids:
            unsigned = np.asarray(ids, np.int32).view(np.uint32)
            if int(unsigned.max()) >= limit:
                at = int((unsigned >= limit).argmax())
                return f"id {ids[at]} at token {at} of {what}; the vocabulary has {'no negative ids' if vocab_size is None else vocab_size}"
    return None


def _sampled(call: ModelCall) -> int:
    known = [len(choice.token_ids) for choice in call.choices if choice.token_ids is not None]
    if known or call.usage is None:
        return sum(known)
    return call.usage.completion_tokens


def _temperature(call: ModelCall) -> float:
    value = call.sampling.get("temperature")
    return _DEFAULT_TEMPERATURE if value is None else float(value)


def _left_out(call: ModelCall, choice: Choice, *, mask_truncated: bool, mask_beyond: int | None) -> tuple[Reason, str] | None:
    """What the settings say against training one reply of a call that could be trained."""
    length = len(call.prompt_token_ids or ()) + len(choice.token_ids or ())
    if mask_beyond is not None and length > mask_beyond:
        return "over-long", f"prompt and reply are {length} tokens, max_len is {mask_beyond}"
    if mask_truncated and choice.finish_reason == "length":
        return "truncated", "cut by max_tokens, and mask_truncated is set"
    return None


def _reply(call: ModelCall, choice: Choice, *, trains: bool) -> PlacedReply:
    return PlacedReply(
        choice=choice,
        token_ids=np.asarray(choice.token_ids, np.int32),
        logprobs=np.asarray(choice.logprobs, np.float32) if trains else None,
        versions=_versions(call, choice),
        trains=trains,
    )


def _versions(call: ModelCall, choice: Choice) -> Int32:
    """Version of each token. What the server does not tell token by token is given the oldest version it can have: the call's start."""
    oldest = _UNTOLD if call.policy_version_start is None else call.policy_version_start
    versions = np.full(len(choice.token_ids or ()), oldest, np.int32)
    for version, start, stop in (call.version_spans if choice.index == 0 else choice.version_spans) or ():
        versions[start:stop] = version
    return versions
