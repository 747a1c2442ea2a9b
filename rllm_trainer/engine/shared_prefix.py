"""Rows in, token tries out: tokens that rows begin with in common go through the model once. Pure.

A trie lies flat in the order of a depth-first walk: a token's descendants follow it without a gap, so one number a token (where they
end) says who sees whom, and a row's own token j sees i exactly if ``i <= j < ends[i]``. A row alone is a trie without a branch.

Rows [1 2 3] and [1 2 4 5]: tokens 1 2 3 4 5, depths 0 1 2 2 3, ends 5 5 3 5 5. The token after 2 is predicted twice at 2: as 3 and as 4.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from rllm_trainer.types import Mask

__all__ = ["Trie", "build_tries"]

Ints = npt.NDArray[np.int64]


class Trie(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Rows that go through the model as one sequence. T = its tokens, N = wanted tokens of its rows."""

    rows: list[int]
    token_ids: Ints
    """(T)"""
    depths: Ints
    """(T) number of tokens before it in each row that holds it: its position."""
    ends: Ints
    """(T) one past its last descendant."""
    predict_at: Ints
    """(N) where in the trie each wanted token is predicted: at the token before it."""
    places: Ints
    """(N) where each wanted token stands in the flat columns."""

    @property
    def tokens(self) -> int:
        return len(self.token_ids)

    @property
    def wanted(self) -> int:
        return len(self.places)

    def distinct(self, labels: npt.NDArray[Any], temperatures: npt.NDArray[Any]) -> tuple[Trie, Ints]:
        """The trie with each (position, label, temperature) wanted once, and (N) which of them each wanted token was.

        Args:
            labels: (S) token ids of all rows.
            temperatures: (S)
        """
        keys = np.stack([self.predict_at, labels[self.places], temperatures[self.places].view(np.int32)])
        _, first, which = np.unique(keys, axis=1, return_index=True, return_inverse=True)
        return msgspec.structs.replace(self, predict_at=self.predict_at[first], places=self.places[first]), which.reshape(-1)


def build_tries(
    token_ids: npt.NDArray[Any],
    offsets: npt.NDArray[Any],
    wanted: Mask,
    *,
    share: bool = True,
    max_tokens: int,
    max_wanted: int,
    pairs_per_token: float,
) -> list[Trie]:
    """Every row that has a wanted token, in exactly one trie, up to the token before its last wanted one.

    Args:
        token_ids: (S) tokens of all rows.
        offsets: (B + 1) where rows begin.
        wanted: (S) tokens whose logprob is wanted; never the first of a row.
        share: False: every row alone.
        max_tokens: a trie takes no further row beyond this many tokens.
        max_wanted: nor beyond this many wanted tokens.
        pairs_per_token: how many pairs of tokens attention can look at for what one token costs elsewhere; a row joins
            only if what it saves exceeds what the larger square of attention costs.
    """
    inputs: list[tuple[bytes, int, Ints, Ints]] = []
    for row in range(len(offsets) - 1):
        at = np.flatnonzero(wanted[offsets[row] : offsets[row + 1]])
        if len(at):
            ids = np.asarray(token_ids[offsets[row] : offsets[row] + at[-1]], np.int64)
            inputs.append((ids.astype(">u4").tobytes(), row, ids, at))
    tries: list[Trie] = []
    open_trie: _Builder | None = None
    for _, row, ids, at in sorted(inputs, key=lambda part: part[:2]):
        common = open_trie.common(ids) if share and open_trie is not None else 0
        if open_trie is None or not open_trie.takes(len(ids), common, len(at), max_tokens, max_wanted, pairs_per_token):
            if open_trie is not None:
                tries.append(open_trie.finish())
            open_trie, common = _Builder(), 0
        open_trie.add(row, ids, common, at, int(offsets[row]))
    return [*tries, open_trie.finish()] if open_trie is not None else tries


class _Builder:
    """A trie that grows by rows in lexicographic order, which is the order of a depth-first walk."""

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._parts: list[Ints] = []
        self._depths: list[Ints] = []
        self._predict_at: list[Ints] = []
        self._places: list[Ints] = []
        self._last: Ints = np.zeros(0, np.int64)
        self._path: Ints = np.zeros(0, np.int64)
        self._closed: list[tuple[Ints, int]] = []
        self._size = 0
        self._wanted = 0

    def common(self, ids: Ints) -> int:
        """Tokens that ``ids`` shares with the row before it."""
        shorter = min(len(ids), len(self._last))
        differs = ids[:shorter] != self._last[:shorter]
        return int(differs.argmax()) if differs.any() else shorter

    def takes(self, length: int, common: int, wanted: int, max_tokens: int, max_wanted: int, pairs_per_token: float) -> bool:
        fresh = length - common
        if common == 0 or self._size + fresh > max_tokens or self._wanted + wanted > max_wanted:
            return False
        return common * pairs_per_token > (2 * self._size + fresh) * fresh - length * length

    def add(self, row: int, ids: Ints, common: int, at: Ints, begin: int) -> None:
        self._closed.append((self._path[common:], self._size))
        fresh = np.arange(self._size, self._size + len(ids) - common, dtype=np.int64)
        self._path = np.concatenate([self._path[:common], fresh])
        self._last = ids
        self._rows.append(row)
        self._parts.append(ids[common:])
        self._depths.append(np.arange(common, len(ids), dtype=np.int64))
        self._predict_at.append(self._path[at - 1])
        self._places.append(begin + at)
        self._size += len(fresh)
        self._wanted += len(at)

    def finish(self) -> Trie:
        ends = np.full(self._size, self._size, np.int64)
        for nodes, end in self._closed:
            ends[nodes] = end
        return Trie(
            rows=self._rows,
            token_ids=np.concatenate(self._parts),
            depths=np.concatenate(self._depths),
            ends=ends,
            predict_at=np.concatenate(self._predict_at),
            places=np.concatenate(self._places),
        )
