"""Keys and values of the sequences that are decoding: one row each, rows without gaps, so that one attention call serves them all.

Per layer two tensors (rows, kv heads, capacity, head_dim). They grow by doubling, rows and capacity apart, and a row that ends is
overwritten by the last one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rllm_trainer.serving._local.spec import ModelSpec

__all__ = ["Arena"]

_FIRST_CAPACITY = 256


class Arena:
    """``used`` rows hold sequences, in order; what lies past a row's length is never read unmasked."""

    def __init__(self, spec: ModelSpec, max_rows: int, max_len: int) -> None:
        self._spec = spec
        self._max_rows = max_rows
        self._max_len = max_len
        self.reset()

    def reset(self) -> None:
        """Give everything up."""
        self.used = self.rows = self.capacity = 0
        self.k: list[Tensor] = []
        self.v: list[Tensor] = []

    @property
    def tokens(self) -> int:
        """Tokens of memory held, used or not."""
        return self.rows * self.capacity

    def size_for(self, rows: int, length: int, *, least: bool = False) -> tuple[int, int]:
        """The (rows, capacity) to hold ``rows`` sequences of up to ``length`` tokens: grown from what is there, or the least that does."""
        have_rows, have_capacity = (0, 0) if least else (self.rows, self.capacity)
        first = min(_FIRST_CAPACITY, self._max_len)
        return _grown(have_rows or 1, rows, self._max_rows), _grown(have_capacity or first, length, self._max_len)

    def resize(self, rows: int, capacity: int) -> None:
        """Make it (rows, capacity), at least what ``used`` rows need; their tokens are kept."""
        if (rows, capacity) == (self.rows, self.capacity):
            return
        both = min(capacity, self.capacity)
        for layer in range(self._spec.layers):
            for tensors in (self.k, self.v):
                # Zeros, not leftovers: a masked-out NaN would still spoil a weighted sum.
                fresh = torch.zeros(rows, self._spec.kv_heads, capacity, self._spec.head_dim)
                if layer < len(tensors):
                    fresh[: self.used, :, :both].copy_(tensors[layer][: self.used, :, :both])
                    tensors[layer] = fresh
                else:
                    tensors.append(fresh)
        self.rows, self.capacity = rows, capacity

    def add(self, draft: Tensor, length: int) -> int:
        """Take over a sequence whose first ``length`` tokens lie in ``draft`` (layers, 2, kv heads, T, head_dim). Returns its row."""
        row = self.used
        for layer, (k, v) in enumerate(zip(self.k, self.v, strict=True)):
            k[row, :, :length].copy_(draft[layer, 0, :, :length])
            v[row, :, :length].copy_(draft[layer, 1, :, :length])
        self.used += 1
        return row

    def remove(self, row: int, last_length: int) -> int | None:
        """Free a row; the last one, of ``last_length`` tokens, moves into it. Returns the row that moved, None if none had to."""
        self.used -= 1
        last = self.used
        if row == last:
            return None
        for tensors in (self.k, self.v):
            for tensor in tensors:
                tensor[row, :, :last_length].copy_(tensor[last, :, :last_length])
        return last

    def read(self, row: int, start: int, stop: int) -> Tensor:
        """Copy of a row's tokens [start, stop): (layers, 2, kv heads, stop - start, head_dim)."""
        spec = self._spec
        out = torch.empty(spec.layers, 2, spec.kv_heads, stop - start, spec.head_dim)
        for layer, (k, v) in enumerate(zip(self.k, self.v, strict=True)):
            out[layer, 0].copy_(k[row, :, start:stop])
            out[layer, 1].copy_(v[row, :, start:stop])
        return out


def _grown(size: int, need: int, most: int) -> int:
    while size < need:
        size *= 2
    return min(size, most)
