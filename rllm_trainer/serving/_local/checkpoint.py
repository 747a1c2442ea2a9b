"""Safetensors files in, their tensors out: read when asked for, and from shared memory without a copy.

Files in shared memory stay mapped from one swap to the next: those that an engine writes take turns, and their pages are there already.
"""

from __future__ import annotations

import math
import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import torch
from torch import Tensor

__all__ = ["DTYPES", "Checkpoint", "WeightsError", "staging"]

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
"""Safetensors codes of the dtypes that weights may come in."""
_buffers = threading.local()
_SHARED_MEMORY = Path("/dev/shm")
_MOST_MAPPED = 2


class WeightsError(ValueError):
    """A file does not hold this model's weights; nothing was changed."""


class Checkpoint:
    """The tensors of one safetensors file, or of a folder's shards; nothing is read before it is asked for."""

    def __init__(self, path: Path) -> None:
        from safetensors import safe_open

        files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
        if not files:
            raise WeightsError(f"got {path}, which holds no safetensors file; expected model.safetensors or its shards")
        self.path = path
        self.metadata: dict[str, str] = {}
        self._files: dict[str, Any] = {}
        self._places: dict[str, tuple[Path, int]] = {}
        self._mapped: dict[Path, mmap.mmap | None] = {}
        self.dtypes: dict[str, str] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for file in files:
            try:
                opened: Any = safe_open(file, framework="pt", device="cpu")
            except Exception as error:
                raise WeightsError(f"got {file}, which is no readable safetensors file: {error}") from error
            self.metadata.update(opened.metadata() or {})
            starts = _starts(file)
            self._mapped[file] = _maps.of(file)
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                part = opened.get_slice(name)
                self._files[name] = opened
                self._places[name] = file, starts[name]
                self.dtypes[name] = part.get_dtype()
                self.shapes[name] = tuple(part.get_shape())

    def get(self, name: str) -> Tensor:
        """The tensor in the file's dtype; mapped, so valid while the file is not rewritten."""
        return self._files[name].get_tensor(name)

    def floats(self, name: str) -> Tensor:
        """The tensor in float32, valid until this thread's next one and while the file is not rewritten."""
        if self.dtypes[name] != "F32":
            return self.get(name).to(torch.float32)
        file, at = self._places[name]
        mapped = self._mapped[file]
        if mapped is None:
            return self._read(name, file, at)
        return cast("Any", torch).from_numpy(np.frombuffer(mapped, np.float32, math.prod(self.shapes[name]), at).reshape(self.shapes[name]))

    def _read(self, name: str, file: Path, at: int) -> Tensor:
        """Read, not mapped: a page of a new mapping costs more than a copy of it."""
        out = staging("read", self.shapes[name])
        left = memoryview(cast("Any", out).numpy().reshape(-1)).cast("B")
        handle = os.open(file, os.O_RDONLY)
        try:
            while left:
                count = os.preadv(handle, [left], at)
                if not count:
                    raise WeightsError(f"got {file}, which ends inside {name}; the weights before it stay served")
                left, at = left[count:], at + count
        finally:
            os.close(handle)
        return out


class _Maps:
    """Files in shared memory that stay mapped: those that an engine writes take turns, and their pages are there already."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: OrderedDict[tuple[int, int], mmap.mmap] = OrderedDict()
        """By device and inode, which nothing else can have while it is mapped."""

    def of(self, file: Path) -> mmap.mmap | None:
        if not file.resolve().is_relative_to(_SHARED_MEMORY) or not os.access(file, os.W_OK):
            return None  # torch takes no memory that it could not write to; it is never written to
        with self._lock, file.open("r+b") as opened:
            status = os.fstat(opened.fileno())
            key = status.st_dev, status.st_ino
            held = self._held.get(key)
            if held is None or len(held) != status.st_size:
                held = self._held[key] = mmap.mmap(opened.fileno(), 0, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
            self._held.move_to_end(key)
            while len(self._held) > _MOST_MAPPED:
                self._held.popitem(last=False)
            return held


_maps = _Maps()


def staging(use: str, shape: Sequence[int]) -> Tensor:
    """This thread's buffer for one use, for what is packed at once: memory fresh from the system costs more than the copy into it."""
    size = math.prod(shape)
    buffer: Tensor | None = getattr(_buffers, use, None)
    if buffer is None or buffer.numel() < size:
        buffer = torch.empty(size)
        setattr(_buffers, use, buffer)
    return buffer[:size].view(*shape)


def _starts(file: Path) -> dict[str, int]:
    """Where in a safetensors file the bytes of each tensor begin."""
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header: dict[str, Any] = msgspec.json.decode(opened.read(size))
    return {name: 8 + size + told["data_offsets"][0] for name, told in header.items() if name != "__metadata__"}
