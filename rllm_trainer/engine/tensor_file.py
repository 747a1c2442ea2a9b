"""Tensors in memory go in, one complete safetensors file and the digest of its tensors come out.

Hashed and written at the same time, from the tensors' own memory: weights go to a server through such a file at every step. The file
appears under its name when it is whole. No torch: a tensor is a code, a shape and a buffer.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from rllm_trainer._digest import DigestBuilder

__all__ = ["RawTensor", "write_tensors"]

_ALIGN = 8


class RawTensor(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One tensor as bytes."""

    name: str
    dtype: str
    """Safetensors code, such as ``F32`` or ``BF16``."""
    shape: tuple[int, ...]
    data: Any
    """Contiguous little-endian buffer of bytes."""


def write_tensors(
    path: Path, tensors: Sequence[RawTensor], metadata: Mapping[str, str] | None = None, *, sync: bool = False
) -> tuple[str, int]:
    """Write one file, whole or not at all; returns the digest of its tensors and their bytes.

    Args:
        metadata: strings for the file's header.
        sync: also make it survive a power cut.
    """
    ordered = sorted(tensors, key=lambda tensor: tensor.name)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with ThreadPoolExecutor(1) as hashing:
            digest = hashing.submit(_digest, ordered)
            size = _write(temporary, ordered, metadata or {}, sync=sync)
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)
    return digest.result(), size


def _write(path: Path, tensors: Sequence[RawTensor], metadata: Mapping[str, str], *, sync: bool) -> int:
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.data.nbytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % _ALIGN)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for tensor in tensors:
            file.write(tensor.data)
        if sync:
            file.flush()
            os.fsync(file.fileno())
    return end


def _digest(tensors: Sequence[RawTensor]) -> str:
    builder = DigestBuilder()
    for tensor in tensors:
        builder.add(tensor.name, tensor.dtype, tensor.shape, tensor.data)
    return builder.hexdigest()
