"""Tensors in memory go in, one complete safetensors file and the digest of its tensors come out.

Hashed and written at the same time, from the tensors' own memory: weights go to a server through such a file at every step. The file
appears under its name when it is whole. No torch: a tensor is a code, a shape and a buffer.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rllm_trainer._digest import DigestBuilder

__all__ = ["RawTensor", "TensorFiles", "tensors_digest", "write_tensors"]

_ALIGN = 8
_KEPT = 2
"""Files whose pages stay mapped: the two that take turns."""
_WORKERS = 2
"""Threads that copy; memory is no faster for more."""
_PIECE = 16 * 2**20


class RawTensor(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One tensor as bytes."""

    name: str
    dtype: str
    """Safetensors code, such as ``F32`` or ``BF16``."""
    shape: tuple[int, ...]
    data: Any
    """Contiguous little-endian buffer of bytes."""


class TensorFiles:
    """Writes files that take turns: over one that is no longer needed, into its own pages, which is a copy and nothing else.

    Fresh pages of shared memory cost five times the copy into them, and so does mapping those of a file anew.
    """

    def __init__(self) -> None:
        self._mapped: OrderedDict[int, mmap.mmap] = OrderedDict()
        """By inode."""

    def write(
        self,
        path: Path,
        tensors: Sequence[RawTensor],
        metadata: Mapping[str, str] | None = None,
        *,
        spare: Path | None,
        hashed: bool = True,
    ) -> tuple[str, int]:
        """As ``write_tensors``.

        Args:
            spare: a file in shared memory that may be written over, and is gone afterwards; of another size it is of no use.
            hashed: False: the digest is "".
        """
        ordered = sorted(tensors, key=lambda tensor: tensor.name)
        header, size = _header(ordered, metadata or {})
        if spare is None or not spare.exists() or spare.stat().st_size != len(header) + size:
            return write_tensors(path, ordered, metadata, hashed=hashed)
        temporary = path.with_name(f".{path.name}.tmp")
        spare.rename(temporary)
        try:
            with ThreadPoolExecutor(_WORKERS + 1) as pool:
                digest = pool.submit(tensors_digest, ordered) if hashed else None
                _fill(self._map(temporary), header, ordered, pool)
            os.utime(temporary)
            temporary.rename(path)
        finally:
            temporary.unlink(missing_ok=True)
        return digest.result() if digest is not None else "", size

    def _map(self, path: Path) -> mmap.mmap:
        with path.open("r+b") as file:
            inode = os.fstat(file.fileno()).st_ino
            if inode not in self._mapped:
                self._mapped[inode] = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
        self._mapped.move_to_end(inode)
        while len(self._mapped) > _KEPT:
            self._mapped.popitem(last=False)[1].close()
        return self._mapped[inode]


def write_tensors(
    path: Path,
    tensors: Sequence[RawTensor],
    metadata: Mapping[str, str] | None = None,
    *,
    sync: bool = False,
    hashed: bool = True,
) -> tuple[str, int]:
    """Write one file, whole or not at all; returns the digest of its tensors and their bytes.

    Args:
        metadata: strings for the file's header.
        sync: also make it survive a power cut.
        hashed: False: the digest is "".
    """
    ordered = sorted(tensors, key=lambda tensor: tensor.name)
    header, size = _header(ordered, metadata or {})
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with ThreadPoolExecutor(1) as hashing:
            digest = hashing.submit(tensors_digest, ordered) if hashed else None
            with temporary.open("wb") as file:
                file.write(header)
                for tensor in ordered:
                    file.write(tensor.data)
                if sync:
                    file.flush()
                    os.fsync(file.fileno())
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)
    return digest.result() if digest is not None else "", size


def tensors_digest(tensors: Sequence[RawTensor]) -> str:
    """What ``file_digest`` says of a file of these."""
    builder = DigestBuilder()
    for tensor in sorted(tensors, key=lambda tensor: tensor.name):
        builder.add(tensor.name, tensor.dtype, tensor.shape, tensor.data)
    return builder.hexdigest()


def _header(ordered: Sequence[RawTensor], metadata: Mapping[str, str]) -> tuple[bytes, int]:
    """What the file begins with, and the bytes of the tensors after it."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    end = 0
    for tensor in ordered:
        start, end = end, end + tensor.data.nbytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % _ALIGN)
    return struct.pack("<Q", len(encoded)) + encoded, end


def _fill(mapped: mmap.mmap, header: bytes, ordered: Sequence[RawTensor], pool: ThreadPoolExecutor) -> None:
    """All of the file's bytes, by several threads."""
    out = np.frombuffer(mapped, np.uint8)
    out[: len(header)] = np.frombuffer(header, np.uint8)

    def copy(piece: tuple[int, Any]) -> None:
        at, data = piece
        np.copyto(out[at : at + len(data)], data)

    list(pool.map(copy, _pieces(len(header), ordered)))


def _pieces(at: int, ordered: Sequence[RawTensor]) -> Iterator[tuple[int, Any]]:
    """(where in the file, bytes), none so large that the others wait for it."""
    for tensor in ordered:
        data = np.frombuffer(tensor.data, np.uint8) if tensor.data.nbytes else np.zeros(0, np.uint8)
        for start in range(0, len(data), _PIECE):
            yield at + start, data[start : start + _PIECE]
        at += len(data)
