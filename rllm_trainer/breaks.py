"""Placed calls in; out, for each prompt that does not continue what was recorded, one cause and where it shows.

A prompt continues a recorded sequence when it starts with all of its tokens, reply included. It is a break when it does not,
unless it merely forks: the same prompt asked again, a conversation taken back to an earlier turn, another message after a recorded
reply. Every break is compared, tokens and messages, with its nearest lineage: the earlier reply with which it shares most tokens,
of its own trajectory before others, the latest among equals.

A new conversation that carries no recorded turn loses nothing; it is named ``other agent``, whoever begins it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from rllm_trainer.causes import Cause, Decode, Finding, Parting, Turn, explain
from rllm_trainer.lineage import Lineages
from rllm_trainer.messages import Message, drift, reply_message, text_of, view
from rllm_trainer.placing import PlacedCall, PlacedReply
from rllm_trainer.tree import Int64, SharedPrefixes, TokenTree, shared_length

__all__ = ["Break", "Cause", "Decode", "find_breaks"]

_EXCERPT_TOKENS = 12
_EXCERPT_CHARACTERS = 80
_LONGEST_HEADER = 16
"""Tokens; what a template writes between the last message and the reply (a role, an empty or opened thinking block) is shorter."""


class Break(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt that does not continue what was recorded."""

    cause: Cause
    span_id: str
    """The call whose prompt it is."""
    trajectory_id: str
    role: str
    recorded_span_id: str
    """The call at the end of the nearest recorded lineage."""
    recorded_choice: int
    position: int
    """First token of the prompt that differs from that lineage."""
    message: int | None
    """First message of the request that accounts for it; None where messages tell nothing."""
    recorded_ids: list[int]
    """What was recorded from ``position`` on, a few tokens."""
    prompt_ids: list[int]
    """What the prompt has there."""
    recorded_text: str
    """``recorded_ids`` as text; without a decoder, the recorded message from its first differing character on."""
    prompt_text: str
    sampled_after: int
    """Sampled tokens of the recorded lineage from ``position`` on: the new prompt shows them as other ids, or not at all."""


def find_breaks(calls: Sequence[PlacedCall], lineages: Lineages, tree: TokenTree, *, decode: Decode | None = None) -> dict[int, Break]:
    """The break of each trained call that has one, by the call's index.

    Args:
        calls: in the order of the tree's keys, which is their order in time.
        decode: makes causes surer and examples readable; without it, texts are taken from the messages.
    """
    search = _NearestSearch(calls, lineages, tree)
    found: dict[int, Break] = {}
    for index, call in enumerate(calls):
        if call.trains and (nearest := search.parting(index)) is not None:
            parting, sampled_after = nearest
            finding = explain(parting, decode)
            if finding.cause is not None:
                found[index] = _described(parting, finding.cause, finding, sampled_after, decode)
    return found


class _NearestSearch:
    """Finds, for a call, the recorded lineage that it could have continued and does not."""

    def __init__(self, calls: Sequence[PlacedCall], lineages: Lineages, tree: TokenTree) -> None:
        self._calls = calls
        self._lineages = lineages
        self._tree = tree
        numbers: dict[str, int] = {}
        self._owner_of_call = np.asarray([numbers.setdefault(call.trajectory_id, len(numbers)) for call in calls], np.int32)
        self._stops = tree.depths[tree.reply_ends]
        self._prefixes: SharedPrefixes | None = None

    def parting(self, index: int) -> tuple[Parting, int] | None:
        """Where the call leaves its nearest lineage, and how many of that lineage's sampled tokens come after.

        None where the call begins the episode, continues, or forks without carrying a turn beyond what it continues.
        """
        call, parent = self._calls[index], self._lineages.parent_of_call[index]
        earlier = self._lineages.first_reply[index]
        if earlier == 0 or (parent >= 0 and not self._carries_turn_after(call, parent)):
            return None
        self._prefixes = self._prefixes or SharedPrefixes(self._tree)
        shared = np.minimum(self._prefixes.of(earlier)[:earlier], len(call.prompt))
        if int(shared.max()) == len(call.prompt):
            return None
        candidates = self._candidates(shared, parent, index)
        if not len(candidates) or bool((shared[candidates] == self._stops[candidates]).any()):
            return None
        return self._at(call, self._echoed(candidates, call), int(shared[candidates[0]]), extends=parent >= 0)

    def _candidates(self, shared: Int64, parent: int, index: int) -> Int64:
        """Of the earlier replies those that share most with the call, of its own trajectory if that has any."""
        candidates = np.arange(len(shared))
        if parent >= 0:
            begun = self._lineages.stop[parent]
            candidates = candidates[(shared >= begun) & (self._stops[: len(shared)] > begun)]
        own = candidates[self._owner_of_call[self._tree.reply_calls[candidates]] == self._owner_of_call[index]]
        candidates = own if len(own) else candidates
        return candidates[shared[candidates] == shared[candidates].max(initial=0)]

    def _carries_turn_after(self, call: PlacedCall, parent: int) -> bool:
        """Whether the request may hold an assistant turn beyond the sequence that its prompt continues."""
        if call.call.operation == "text_completion":
            return True
        begun = self._calls[self._lineages.call_of_reply[parent]].call.messages
        return any(message.get("role") == "assistant" for message in call.call.messages[len(begun) + 1 :])

    def _echoed(self, candidates: Int64, call: PlacedCall) -> int:
        """Of equally near replies the latest call's; among its choices the one that the request repeats."""
        owner = self._lineages.call_of_reply[int(candidates[-1])]
        choices = [
            reply for reply in candidates[-len(self._calls[owner].replies) :].tolist() if self._lineages.call_of_reply[reply] == owner
        ]
        at = len(self._calls[owner].call.messages)
        if len(choices) > 1 and at < len(call.call.messages):
            sent = call.call.messages[at]
            for alike in (_same, _drifted):
                for reply in choices:
                    if alike(reply_message(self._reply(reply).choice), sent):
                        return reply
        return choices[0]

    def _reply(self, reply: int) -> PlacedReply:
        owner = self._lineages.call_of_reply[reply]
        return self._calls[owner].replies[reply - self._lineages.first_reply[owner]]

    def _at(self, call: PlacedCall, nearest: int, position: int, *, extends: bool) -> tuple[Parting, int]:
        """Walk up the lineage to the turn in which ``position`` lies."""
        turn: Turn | None = None
        sampled_after = 0
        above = nearest
        while above >= 0 and position < self._lineages.stop[above]:
            start, stop, begun = self._lineages.start[above], self._lineages.stop[above], self._lineages.parent_of_reply(above)
            sampled_after += stop - max(start, position)
            if position >= max(start - _LONGEST_HEADER, self._lineages.stop[begun] if begun >= 0 else 0):
                owner = self._calls[self._lineages.call_of_reply[above]]
                turn = Turn(call=owner, reply=self._reply(above), offset=position - start)
            above = begun
        parting = Parting(
            sent=call,
            recorded=self._calls[self._lineages.call_of_reply[nearest]],
            reply=self._reply(nearest),
            position=position,
            turn=turn,
            extends=extends,
            frame_shared=above >= 0,
        )
        return parting, sampled_after


def _same(recorded: Message, sent: Message) -> bool:
    return view(recorded) == view(sent)


def _drifted(recorded: Message, sent: Message) -> bool:
    return drift(recorded, sent) is not None


def _described(parting: Parting, cause: Cause, finding: Finding, sampled_after: int, decode: Decode | None) -> Break:
    recorded_ids, prompt_ids = parting.recorded_ids(_EXCERPT_TOKENS), parting.sent_ids(_EXCERPT_TOKENS)
    if decode is None:
        recorded_text, prompt_text = _message_excerpts(parting, finding.message)
    else:
        recorded_text, prompt_text = decode(recorded_ids), decode(prompt_ids)
    return Break(
        cause=cause,
        span_id=parting.sent.call.span_id,
        trajectory_id=parting.sent.trajectory_id,
        role=parting.sent.role,
        recorded_span_id=parting.recorded.call.span_id,
        recorded_choice=parting.reply.choice.index,
        position=parting.position,
        message=finding.message,
        recorded_ids=recorded_ids,
        prompt_ids=prompt_ids,
        recorded_text=recorded_text,
        prompt_text=prompt_text,
        sampled_after=sampled_after,
    )


def _message_excerpts(parting: Parting, message: int | None) -> tuple[str, str]:
    recorded, sent = parting.conversation(), parting.sent.call.messages
    if message is None or message >= min(len(recorded), len(sent)):
        return "", ""
    before, after = text_of(recorded[message]) or "", text_of(sent[message]) or ""
    at = shared_length(np.frombuffer(before.encode("utf-32-le"), np.int32), np.frombuffer(after.encode("utf-32-le"), np.int32))
    return before[at : at + _EXCERPT_CHARACTERS], after[at : at + _EXCERPT_CHARACTERS]
