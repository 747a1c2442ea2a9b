"""A weight matrix in, the fastest product that this machine has for it out: oneDNN's pre-packed layout where torch carries it.

For a handful of rows, packing a matrix anew at every product costs as much as the product; packed once, a decode step over 8 sequences
takes half the time. The packed matrix gives its plain one back bit for bit, so what is served can be hashed. Where the layout is the one
that we know (found out once a shape, on the first matrix that is packed), other values are written into the same memory, which takes half
as long as having oneDNN pack them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

__all__ = ["LEAST_ROWS", "Linear", "all_finite", "floats", "ints"]

LEAST_ROWS = 4
"""A product of fewer rows than this costs more than one of so many: oneDNN streams the matrix better then."""

_ROWS_HINT = 32
"""oneDNN picks its layout for this many rows; it serves 1 to 1,000 rows equally well, where a hint of 1 makes 8 rows slow."""

_PANEL = 64
"""Rows that lie side by side in the layout that we know, (out / 64, in, 64): oneDNN's on AVX2 and AVX-512."""
_AT_ONCE = 16 * _PANEL
"""Rows that are transposed at a time: they stay in the cache until they are copied."""
_in_panels: dict[tuple[int, ...], bool] = {}
"""What was found out, by shape."""


def _packing_available() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


class Linear:
    """``x @ weight.T + bias`` for one matrix (out, in), float32."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.shape = tuple(weight.shape)
        self.bias = bias
        self._packed = _packing_available()
        self._weight: Tensor = _pack(weight) if self._packed else weight.clone()
        self._op: Any = cast("Any", torch.ops.mkldnn)._linear_pointwise if self._packed else None
        self._panels = _panels_of(weight, self._weight) if self._packed else None
        """(out / 64 * in * 64), the packed matrix's own memory; None where its layout is not the one that we know."""

    def __call__(self, x_NI: Tensor) -> Tensor:
        if self._packed:
            return self._op(x_NI, self._weight, self.bias, "none", [], "")
        return torch.nn.functional.linear(x_NI, self._weight, self.bias)

    def plus(self, x_NI: Tensor, residual_NO: Tensor) -> Tensor:
        """The product with a residual added, in one pass."""
        if self._packed:
            return self._op.binary(x_NI, residual_NO, self._weight, self.bias, "add")
        return residual_NO + torch.nn.functional.linear(x_NI, self._weight, self.bias)

    def takes(self, parts: Sequence[int]) -> bool:
        """Whether parts of so many rows, one below the other, can be written into the matrix by ``put``."""
        return not self._packed or (self._panels is not None and not any(rows % _PANEL for rows in parts))

    def put(self, at: int, rows_RI: Tensor) -> None:
        """Other values for the rows from ``at`` on, in the memory that is there; no product may be under way."""
        if self._panels is None:
            self._weight[at : at + len(rows_RI)].copy_(rows_RI)
            return
        for start in range(0, len(rows_RI), _AT_ONCE):
            some = rows_RI[start : start + _AT_ONCE]
            begin = (at + start) * self.shape[1]
            self._panels[begin : begin + some.numel()].copy_(_as_panels(some))

    def give_up(self) -> None:
        """Free the matrix, which is not to be multiplied any more."""
        self._weight, self._panels = torch.empty(0), None

    def dense(self) -> Tensor:
        """The matrix as it was given."""
        return self._weight.to_dense() if self._packed else self._weight


def _pack(weight: Tensor) -> Tensor:
    return cast("Any", torch.ops.mkldnn)._reorder_linear_weight(weight, _ROWS_HINT)


def _memory(packed: Tensor) -> Tensor:
    """The packed matrix's own memory as a flat tensor; good while the matrix lives."""
    ops = cast("Any", torch.ops.mkldnn)
    held = (ctypes.c_byte * ops._nbytes(packed)).from_address(ops.data_ptr(packed))
    return cast("Any", torch).frombuffer(held, dtype=torch.float32)


def _as_panels(rows_RI: Tensor) -> Tensor:
    """(R / 64 * in * 64): every 64 rows transposed. To torch that is a shuffle of channels, which it does with vector instructions; its
    transposing copy, which does not, takes half as long again."""
    rows, width = rows_RI.shape
    pixels = rows_RI.reshape(1, 1, rows // _PANEL, _PANEL * width).permute(0, 3, 1, 2)
    return cast("Any", torch).native_channel_shuffle(pixels, _PANEL).permute(0, 2, 3, 1).reshape(-1)


def _panels_of(weight: Tensor, packed: Tensor) -> Tensor | None:
    """The memory of the packed matrix, where oneDNN has packed it as ``_as_panels`` does."""
    rows, width = weight.shape
    if rows % _PANEL or not hasattr(torch.ops.mkldnn, "data_ptr"):
        return None
    memory = _memory(packed)
    if weight.shape not in _in_panels:
        same = len(memory) == weight.numel() and all(
            torch.equal(memory[start * width : (start + _AT_ONCE) * width], _as_panels(weight[start : start + _AT_ONCE]))
            for start in range(0, rows, _AT_ONCE)
        )
        if same and torch.equal(memory[: _PANEL * width], weight[:_PANEL].reshape(-1)):
            return None  # transposed or not, these values are the same: they say nothing of others
        _in_panels[weight.shape] = same
    return memory if _in_panels[weight.shape] else None


def all_finite(tensor: Tensor) -> bool:
    """One pass at memory speed: a sum over NaN or infinity is not finite; a finite tensor whose sum overflows is looked at again."""
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())


def floats(values_N: Tensor) -> list[float]:
    """A vector as Python numbers."""
    return cast("Any", values_N).tolist()


def ints(values_N: Tensor) -> list[int]:
    """A vector of integers as Python numbers."""
    return cast("Any", values_N).tolist()
