"""Token sequences in, in any order; one radix tree out, which stores every distinct token once.

A call places its prompt and its replies. An edge of the tree holds the tokens that a call adds to the longest prefix recorded
before it; where two sequences part inside an edge, the edge is cut there. The finished tree depends on the set of placed calls
and on nothing else: nodes are numbered depth first, the largest child first, equally large ones by their first token.

Placing touches each token a fixed number of times, in numpy. A prompt is first compared with the last call of its own lineage;
where that fails, position-weighted hashes of all recorded ends find the longest one that it starts with. A hash only proposes:
tokens are always compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from rllm_trainer.types import Int32

__all__ = ["Int64", "SharedPrefixes", "TokenTree", "TreeBuilder", "shared_length"]

Int64 = npt.NDArray[np.int64]
_UInt64 = npt.NDArray[np.uint64]

ROOT = 0
_WORD = (1 << 64) - 1
_FIRST_BLOCK = 256
_PROMPT = -1
_NOTHING: Int32 = np.empty(0, np.int32)


class TokenTree(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The finished tree. Axes: D distinct tokens, N nodes (node 0 is the root, without tokens), C calls, S replies.

    Example: prompt [5, 6] with replies [7, 2] and [7, 3] is tokens [5 6 7 2 3] under nodes [] [5 6] [7] [2] [3].
    """

    tokens: Int32
    """(D) the edges' tokens, in order of the nodes."""
    parents: Int32
    """(N) -1 for the root; else smaller than the node."""
    depths: Int64
    """(N) tokens on the path from the root through the node's edge."""
    offsets: Int64
    """(N + 1) node n's edge is ``tokens[offsets[n]:offsets[n + 1]]``."""
    tops: Int32
    """(N) where the node's run begins: a node directly after its parent is of its parent's run, and a run's tokens lie together.
    The largest child comes first, so a path has few runs, however deep it is."""
    prompt_ends: Int32
    """(C) node where the call's prompt ends; calls in order of their keys."""
    reply_calls: Int32
    """(S) the call of each reply; replies of a call follow each other in the order in which they were given."""
    reply_ends: Int32
    """(S) node where the reply ends; the prompt's own node for a reply without tokens."""

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        arrays: list[npt.NDArray[Any]] = [
            self.tokens,
            self.parents,
            self.depths,
            self.offsets,
            self.tops,
            self.prompt_ends,
            self.reply_calls,
            self.reply_ends,
        ]
        return sum(array.nbytes for array in arrays)

    def path(self, node: int, start: int = 0, stop: int | None = None) -> Int32:
        """Tokens [start, stop) of the path from the root to the end of ``node``; a new array."""
        depth = int(self.depths[node])
        stop = depth if stop is None else min(stop, depth)
        runs: list[Int32] = []
        while depth > start:
            top, last = int(self.tops[node]), int(self.offsets[node + 1])
            above = depth - (last - int(self.offsets[top]))
            if above < stop:
                runs.append(self.tokens[last - depth + max(start, above) : last - max(0, depth - stop)])
            node, depth = int(self.parents[top]), above
        return np.concatenate(runs[::-1]) if runs else _NOTHING.copy()

    def nearest(self, ends: Int32) -> Int32:
        """(N) for each node the nearest of ``ends`` at or above it, -1 where there is none."""
        found = np.full(len(self.parents), -1, np.int32)
        found[ends] = ends
        above: list[int] = found.tolist()
        parents: list[int] = self.parents.tolist()
        for node in range(1, len(above)):
            if above[node] < 0:
                above[node] = above[parents[node]]
        return np.asarray(above, np.int32)


class SharedPrefixes:
    """How many leading tokens one reply's sequence (its prompt included) shares with each other."""

    def __init__(self, tree: TokenTree) -> None:
        self._order = np.argsort(tree.reply_ends, kind="stable")
        self._rank = np.empty_like(self._order)
        self._rank[self._order] = np.arange(len(self._order))
        ends = tree.reply_ends[self._order]
        starts = np.append(tree.depths[tree.parents], np.iinfo(np.int64).max)
        starts[ROOT] = 0
        self._with_next = np.empty(max(0, len(ends) - 1), np.int64)
        if len(self._with_next):
            between = np.stack([ends[:-1] + 1, ends[1:] + 1], axis=1).ravel()
            self._with_next = np.minimum.reduceat(starts, between)[::2]
            same = ends[:-1] == ends[1:]
            self._with_next[same] = tree.depths[ends[:-1][same]]
        self._own = tree.depths[tree.reply_ends]

    def of(self, reply: int) -> Int64:
        """(S) tokens shared with ``reply``; its own length for itself."""
        rank = int(self._rank[reply])
        shared = np.empty(len(self._order), np.int64)
        shared[rank] = self._own[reply]
        shared[rank + 1 :] = np.minimum.accumulate(self._with_next[rank:])
        shared[:rank] = np.minimum.accumulate(self._with_next[:rank][::-1])[::-1]
        out = np.empty_like(shared)
        out[self._order] = shared
        return out


class _Placed(msgspec.Struct, kw_only=True, eq=False):
    """One placed call, with the arrays that it came as (not copied)."""

    key: Any
    prompt: Int32
    replies: Sequence[Int32]
    prompt_node: int
    prompt_hash: int
    reply_nodes: list[int]
    reply_hashes: list[int]


class TreeBuilder:
    """A tree that grows call by call. Holds the given arrays, uncopied, until ``finish``; they must not change meanwhile."""

    def __init__(self) -> None:
        self._edges: list[Int32] = [_NOTHING]
        self._parents: list[int] = [-1]
        self._children: list[dict[int, int]] = [{}]
        self._placed: list[_Placed] = []
        self._last: dict[str, _Placed] = {}
        self._ends = _Ends()

    def __len__(self) -> int:
        return len(self._placed)

    def place(self, key: Any, prompt: Int32, replies: Sequence[Int32], *, lineage: str = "") -> None:
        """Place one call.

        Args:
            key: orders the calls in the finished tree; unique, comparable with the other keys.
            prompt: int32 (P).
            replies: int32 (R) each; may be none, and may be empty.
            lineage: the prompt is first compared with the last call placed under the same name; it changes the speed only.
        """
        node, length, prefix_hash = self._recorded_prefix(prompt, lineage)
        node = self._descend(node, prompt, length)
        prompt_hash = prefix_hash + _hash(prompt, length, offset=0)
        placed = _Placed(
            key=key,
            prompt=prompt,
            replies=replies,
            prompt_node=node,
            prompt_hash=prompt_hash & _WORD,
            reply_nodes=[self._descend(node, reply, 0) for reply in replies],
            reply_hashes=[(prompt_hash + _hash(reply, 0, offset=len(prompt))) & _WORD for reply in replies],
        )
        self._placed.append(placed)
        self._last[lineage] = placed
        self._ends.add(len(prompt), placed.prompt_hash, placed, _PROMPT)
        for index, reply in enumerate(replies):
            if len(reply):
                self._ends.add(len(prompt) + len(reply), placed.reply_hashes[index], placed, index)

    def finish(self) -> TokenTree:
        """The tree in its final numbering, with copies of the distinct tokens only."""
        order, renumbered = self._depth_first()
        edges = [self._edges[node] for node in order]
        lengths = np.fromiter((len(edge) for edge in edges), np.int64, len(edges))
        offsets = np.zeros(len(edges) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        parents = np.fromiter((renumbered[self._parents[node]] if node else -1 for node in order), np.int32, len(order))
        depths: list[int] = lengths.tolist()
        tops = list(range(len(order)))
        for node, parent in enumerate(parents.tolist()):
            if node:
                depths[node] += depths[parent]
                tops[node] = tops[parent] if parent == node - 1 else node
        placed = sorted(self._placed, key=lambda call: call.key)
        return TokenTree(
            tokens=np.concatenate(edges),
            parents=parents,
            depths=np.asarray(depths, np.int64),
            offsets=offsets,
            tops=np.asarray(tops, np.int32),
            prompt_ends=np.asarray([renumbered[call.prompt_node] for call in placed], np.int32),
            reply_calls=np.asarray([index for index, call in enumerate(placed) for _ in call.replies], np.int32),
            reply_ends=np.asarray([renumbered[node] for call in placed for node in call.reply_nodes], np.int32),
        )

    def _depth_first(self) -> tuple[list[int], list[int]]:
        """Nodes in their final order, and for each node its place there: largest child first, then by first token."""
        sizes = [1] * len(self._edges)
        for node in reversed(self._walk([sorted(children) for children in self._children])):
            if node:
                sizes[self._parents[node]] += sizes[node]
        ordered = [sorted(children, key=lambda first, of=children: (-sizes[of[first]], first)) for children in self._children]
        order = self._walk(ordered)
        renumbered = [0] * len(order)
        for place, node in enumerate(order):
            renumbered[node] = place
        return order, renumbered

    def _walk(self, firsts: Sequence[Sequence[int]]) -> list[int]:
        order: list[int] = []
        open_nodes = [ROOT]
        while open_nodes:
            node = open_nodes.pop()
            order.append(node)
            children = self._children[node]
            open_nodes.extend(children[first] for first in reversed(firsts[node]))
        return order

    def _recorded_prefix(self, prompt: Int32, lineage: str) -> tuple[int, int, int]:
        """A node that ``prompt`` passes through, its depth and its hash: the deepest recorded end, where that can be found at once."""
        last = self._last.get(lineage)
        if last is not None and _starts_with(prompt, last.prompt, 0):
            best, length = -1, len(last.prompt)
            for index, reply in enumerate(last.replies):
                end = len(last.prompt) + len(reply)
                if end > length and _starts_with(prompt, reply, len(last.prompt)):
                    best, length = index, end
            if best < 0:
                return last.prompt_node, length, last.prompt_hash
            return last.reply_nodes[best], length, last.reply_hashes[best]
        for placed, index in self._ends.longest_first(prompt):
            reply = _NOTHING if index == _PROMPT else placed.replies[index]
            if _starts_with(prompt, placed.prompt, 0) and _starts_with(prompt, reply, len(placed.prompt)):
                if index == _PROMPT:
                    return placed.prompt_node, len(placed.prompt), placed.prompt_hash
                return placed.reply_nodes[index], len(placed.prompt) + len(reply), placed.reply_hashes[index]
        return ROOT, 0, 0

    def _descend(self, node: int, tokens: Int32, at: int) -> int:
        """The node where ``tokens`` ends, ``node`` being where ``tokens[:at]`` ends; made if it is not there."""
        while at < len(tokens):
            child = self._children[node].get(int(tokens[at]))
            if child is None:
                return self._add(node, tokens[at:])
            edge = self._edges[child]
            shared = shared_length(edge, tokens[at:])
            if shared < len(edge):
                child = self._cut(child, shared)
            node, at = child, at + shared
        return node

    def _add(self, parent: int, edge: Int32) -> int:
        node = len(self._edges)
        self._edges.append(edge)
        self._parents.append(parent)
        self._children.append({})
        self._children[parent][int(edge[0])] = node
        return node

    def _cut(self, node: int, at: int) -> int:
        """Put a new node ``at`` tokens into the edge of ``node``, which keeps its number and its end."""
        edge = self._edges[node]
        above = self._add(self._parents[node], edge[:at])
        self._edges[node] = edge[at:]
        self._parents[node] = above
        self._children[above][int(edge[at])] = node
        return above


class _Ends:
    """Where recorded prompts and replies end: length and hash of each, for the question which of them a new prompt starts with."""

    def __init__(self) -> None:
        self._lengths = np.empty(64, np.int64)
        self._hashes = np.empty(64, np.uint64)
        self._whose: list[tuple[_Placed, int]] = []

    def add(self, length: int, hashed: int, placed: _Placed, index: int) -> None:
        count = len(self._whose)
        if count == len(self._lengths):
            self._lengths = np.resize(self._lengths, 2 * count)
            self._hashes = np.resize(self._hashes, 2 * count)
        self._lengths[count] = length
        self._hashes[count] = hashed
        self._whose.append((placed, index))

    def longest_first(self, prompt: Int32) -> list[tuple[_Placed, int]]:
        """Those whose hash is that of the prompt's first tokens, longest first; among equals the one placed first."""
        count = len(self._whose)
        fitting = np.flatnonzero(self._lengths[:count] <= len(prompt))
        fitting = fitting[self._lengths[fitting] > 0]
        if not len(fitting):
            return []
        lengths = self._lengths[fitting]
        sums = np.cumsum(prompt.astype(np.uint64) * _weights_for(len(prompt))[: len(prompt)])
        same = sums[lengths - 1] == self._hashes[fitting]
        found = fitting[same][np.argsort(-lengths[same], kind="stable")]
        return [self._whose[index] for index in found.tolist()]


def shared_length(left: Int32, right: Int32) -> int:
    """Number of leading tokens that two sequences share."""
    length = min(len(left), len(right))
    start, block = 0, _FIRST_BLOCK
    while start < length:
        stop = min(length, start + block)
        differs = left[start:stop] != right[start:stop]
        first = int(differs.argmax())
        if differs[first]:
            return start + first
        start, block = stop, block * 4
    return length


def _starts_with(tokens: Int32, part: Int32, at: int) -> bool:
    """Whether ``part`` stands in ``tokens`` at ``at``; looks at the end first, where growing prompts differ."""
    stop = at + len(part)
    if stop > len(tokens):
        return False
    tail = max(0, len(part) - _FIRST_BLOCK)
    if not (tokens[at + tail : stop] == part[tail:]).all():
        return False
    return not tail or bool((tokens[at : at + tail] == part[:tail]).all())


def _hash(tokens: Int32, start: int, *, offset: int) -> int:
    """What ``tokens[start:]`` adds to the hash of a sequence in which ``tokens`` begins at ``offset``."""
    if start == len(tokens):
        return 0
    weights = _weights_for(offset + len(tokens))[offset + start : offset + len(tokens)]
    return int(np.dot(tokens[start:].astype(np.uint64), weights))


def _weights_for(length: int) -> _UInt64:
    """At least ``length`` weights, one per position."""
    return _weights(max(12, (length - 1).bit_length()))


@cache
def _weights(bits: int) -> _UInt64:
    """2**bits odd 64-bit numbers: splitmix64 of the position."""
    mixed = np.arange(1, (1 << bits) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)
