"""A safetensors file in, one sha256 over names, dtypes, shapes and bytes out: what an engine wrote and what a server holds, compared.

The digest is taken tensor by tensor in sorted order of name, so it depends on neither the order nor the header of the file. Both
sides of a swap use this one function, or ``DigestBuilder`` where the tensors are in memory. No torch.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["DigestBuilder", "file_digest"]


class DigestBuilder:
    """Fed with every tensor in sorted order of name; ``hexdigest`` is the digest."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._last = ""

    def add(self, name: str, dtype: str, shape: Sequence[int], data: Any) -> None:
        """``dtype`` is the safetensors code, such as ``F32`` or ``BF16``; ``data`` a contiguous little-endian buffer."""
        assert name > self._last, f"{name!r} comes after {self._last!r}; tensors are hashed in sorted order"
        self._last = name
        self._hash.update(json.dumps([name, dtype, list(shape)], separators=(",", ":")).encode())
        self._hash.update(data)

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def file_digest(path: Path) -> str:
    """Digest of the tensors of one safetensors file. Raises ``ValueError`` if it is none."""
    builder = DigestBuilder()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as view:
        size = int.from_bytes(view[:8], "little")
        if not 2 <= size <= len(view) - 8:
            raise ValueError(f"got {path}, whose header claims {size} bytes of {len(view)}; expected a safetensors file")
        header: dict[str, Any] = json.loads(bytes(view[8 : 8 + size]))
        header.pop("__metadata__", None)
        for name in sorted(header):
            start, end = header[name]["data_offsets"]
            with view[8 + size + start : 8 + size + end] as data:
                builder.add(name, header[name]["dtype"], header[name]["shape"], data)
    return builder.hexdigest()
