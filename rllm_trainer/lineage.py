"""Which recorded reply each call continues: the longest whose sequence, prompt and reply, its own prompt starts with."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from rllm_trainer.placing import PlacedCall
from rllm_trainer.tree import TokenTree

__all__ = ["Lineages", "find_lineages"]


class Lineages(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Calls C and replies S of one episode, linked by their tokens. A parent's sequence is shorter than its child's."""

    parent_of_call: list[int]
    """(C) the reply that the call continues; -1: none."""
    first_reply: list[int]
    """(C + 1) the replies of call c are first_reply[c] .. first_reply[c + 1] - 1."""
    call_of_reply: list[int]
    """(S)"""
    start: list[int]
    """(S) tokens before the reply."""
    stop: list[int]
    """(S) tokens up to its end."""

    def parent_of_reply(self, reply: int) -> int:
        return self.parent_of_call[self.call_of_reply[reply]]


def find_lineages(calls: Sequence[PlacedCall], tree: TokenTree) -> Lineages:
    """Link the calls, which are given in the order of the tree's keys.

    Where several replies end at the same token (a retry that sampled the same), the parent is one that began before the call, of
    its own trajectory if there is one, the latest of those.
    """
    call_of_reply: list[int] = tree.reply_calls.tolist()
    first_reply = np.searchsorted(tree.reply_calls, np.arange(len(calls) + 1)).tolist()
    start: list[int] = tree.depths[tree.prompt_ends[tree.reply_calls]].tolist()
    stop: list[int] = tree.depths[tree.reply_ends].tolist()
    ends: dict[int, list[int]] = {}
    for reply, node in enumerate(tree.reply_ends.tolist()):
        if stop[reply] > start[reply]:
            ends.setdefault(node, []).append(reply)
    nearest: list[int] = tree.nearest(np.fromiter(ends, np.int32, len(ends)))[tree.prompt_ends].tolist()

    def preference(reply: int, child: int) -> tuple[bool, bool, int]:
        owner = call_of_reply[reply]
        return owner < child, calls[owner].trajectory_id == calls[child].trajectory_id, reply

    parents = [
        max(ends[node], key=lambda reply, child=child: preference(reply, child)) if node >= 0 else -1 for child, node in enumerate(nearest)
    ]
    return Lineages(parent_of_call=parents, first_reply=first_reply, call_of_reply=call_of_reply, start=start, stop=stop)
