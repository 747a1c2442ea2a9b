"""Token ids in, the keys and values already computed for their longest known prefix out: a radix tree, bounded in tokens.

Everything in it belongs to one set of weights; ``clear`` is part of every swap. A prefix is found to the token, not to the block, so
rollouts of one prompt recompute a single token each and the next turn of a chat computes only what is new.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from torch import Tensor

__all__ = ["Ids", "PrefixStore", "common_prefix"]

Ids = npt.NDArray[np.int32]


def common_prefix(a: Ids, b: Ids) -> int:
    """How many leading ids are equal."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    return int(differs.argmax()) if differs.any() else n


class _Node:
    """An edge of the tree: its ids, and keys and values of shape (layers, 2, kv heads, len(ids), head_dim)."""

    __slots__ = ("children", "ids", "kv", "parent", "used")

    def __init__(self, ids: Ids, kv: Tensor | None, parent: _Node | None, used: int) -> None:
        self.ids = ids
        self.kv = kv
        self.parent = parent
        self.used = used
        self.children: dict[int, _Node] = {}


class PrefixStore:
    """Least recently used leaves go first when room is needed."""

    def __init__(self) -> None:
        self._clock = 0
        self.clear()

    def clear(self) -> None:
        self._root = _Node(np.empty(0, np.int32), None, None, 0)
        self.tokens = 0
        """Tokens whose keys and values are held."""

    def match(self, ids: Ids, limit: int) -> int:
        """Length of the longest held prefix of ``ids``, at most ``limit``."""
        return sum(n for _, n in self._path(ids, limit))

    def copy_into(self, draft: Tensor, ids: Ids, limit: int) -> int:
        """Write the longest held prefix into ``draft`` (layers, 2, kv heads, T, head_dim) and return its length."""
        self._clock += 1
        done = 0
        for node, n in self._path(ids, limit):
            node.used = self._clock
            assert node.kv is not None
            draft[:, :, :, done : done + n].copy_(node.kv[:, :, :, :n])
            done += n
        return done

    def insert(self, ids: Ids, read: Callable[[int, int], Tensor], room: int) -> None:
        """Hold keys and values of ``ids``: ``read(start, stop)`` is asked for what is not held yet, if it fits into ``room`` tokens."""
        self._clock += 1
        node, done = self._root, 0
        while done < len(ids):
            child = node.children.get(int(ids[done]))
            if child is None:
                break
            n = common_prefix(child.ids, ids[done:])
            child.used = self._clock
            node = self._split(child, n) if n < len(child.ids) else child
            done += n
        new = len(ids) - done
        if new <= 0 or new > room:
            return
        self.shrink(room - new)
        if node is not self._root and node.parent is None:
            return
        leaf = _Node(ids[done:].copy(), read(done, len(ids)), node, self._clock)
        node.children[int(leaf.ids[0])] = leaf
        self.tokens += new

    def shrink(self, tokens: int) -> None:
        """Drop least recently used leaves until at most ``tokens`` are held."""
        while self.tokens > max(tokens, 0):
            leaf = min(self._leaves(self._root), key=lambda node: node.used)
            assert leaf.parent is not None
            del leaf.parent.children[int(leaf.ids[0])]
            leaf.parent = None
            self.tokens -= len(leaf.ids)

    def _path(self, ids: Ids, limit: int) -> list[tuple[_Node, int]]:
        path: list[tuple[_Node, int]] = []
        node, done = self._root, 0
        while done < min(limit, len(ids)):
            child = node.children.get(int(ids[done]))
            if child is None:
                break
            n = min(common_prefix(child.ids, ids[done:]), limit - done)
            path.append((child, n))
            done += n
            if n < len(child.ids):
                break
            node = child
        return path

    def _split(self, node: _Node, n: int) -> _Node:
        assert node.parent is not None
        assert node.kv is not None
        head = _Node(node.ids[:n].copy(), node.kv[:, :, :, :n].clone(), node.parent, node.used)
        node.parent.children[int(head.ids[0])] = head
        node.ids, node.kv, node.parent = node.ids[n:].copy(), node.kv[:, :, :, n:].clone(), head
        head.children[int(node.ids[0])] = node
        return head

    def _leaves(self, node: _Node) -> list[_Node]:
        stack, leaves = [node], list[_Node]()
        while stack:
            top = stack.pop()
            stack.extend(top.children.values())
            if not top.children and top.parent is not None:
                leaves.append(top)
        return leaves
