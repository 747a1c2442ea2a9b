"""A weight matrix in, the fastest product that this machine has for it out: oneDNN's pre-packed layout where torch carries it.

For a handful of rows, packing a matrix anew at every product costs as much as the product; packed once, a decode step over 8 sequences
takes half the time. The packed matrix gives its plain one back bit for bit, so what is served can be hashed.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

__all__ = ["LEAST_ROWS", "Linear", "all_finite", "floats", "ints"]

LEAST_ROWS = 4
"""A product of fewer rows than this costs more than one of so many: oneDNN streams the matrix better then."""

_ROWS_HINT = 32
"""oneDNN picks its layout for this many rows; it serves 1 to 1,000 rows equally well, where a hint of 1 makes 8 rows slow."""


def _packing_available() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


class Linear:
    """``x @ weight.T + bias`` for one matrix (out, in), float32."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        ops = cast("Any", torch.ops.mkldnn)
        self.shape = tuple(weight.shape)
        self._bias = bias
        self._packed = _packing_available()
        self._weight: Tensor = ops._reorder_linear_weight(weight, _ROWS_HINT) if self._packed else weight.clone()
        self._op: Any = ops._linear_pointwise if self._packed else None

    def __call__(self, x_NI: Tensor) -> Tensor:
        if self._packed:
            return self._op(x_NI, self._weight, self._bias, "none", [], "")
        return torch.nn.functional.linear(x_NI, self._weight, self._bias)

    def plus(self, x_NI: Tensor, residual_NO: Tensor) -> Tensor:
        """The product with a residual added, in one pass."""
        if self._packed:
            return self._op.binary(x_NI, residual_NO, self._weight, self._bias, "add")
        return residual_NO + torch.nn.functional.linear(x_NI, self._weight, self._bias)

    def dense(self) -> Tensor:
        """The matrix as it was given."""
        return self._weight.to_dense() if self._packed else self._weight

    @property
    def bias(self) -> Tensor | None:
        return self._bias


def all_finite(tensor: Tensor) -> bool:
    """One pass at memory speed: a sum over NaN or infinity is not finite; a finite tensor whose sum overflows is looked at again."""
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())


def floats(values_N: Tensor) -> list[float]:
    """A vector as Python numbers."""
    return cast("Any", values_N).tolist()


def ints(values_N: Tensor) -> list[int]:
    """A vector of integers as Python numbers."""
    return cast("Any", values_N).tolist()
