"""One process's log of episodes: frames appended one by one, each whole or not there.

A file is eight bytes of magic and version, then frames: length and CRC32 of the payload (little-endian uint32), payload. A frame goes to
the system in one write, so a killed process loses at most the one that it was writing; a write that the disk refused is taken back. A
payload holds the episode's id, its columns as msgpack, compressed as fast as can be, and its token arrays beside them: the bytes of ids
that are not zero, logprobs as they are. Making it small is for the file that the log is sealed into. The file is locked while its writer
lives: whoever gets the lock knows that the writer is gone.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from rllm_trace._store_rows import Row
from rllm_trace.types import Logprobs, TokenIds

__all__ = ["Frames", "LogWriter", "end_of_frames", "frame_of", "id_of_frame", "read_frames", "row_of_frame", "try_lock"]

_MAGIC: Final = b"rllmlog"
_VERSION: Final = 2
_HEADER: Final = _MAGIC + bytes([_VERSION])
_FRAME: Final = struct.Struct("<II")
_SQUEEZED: Final = 0
"""Of version 1: columns as msgpack, both kinds of arrays as compressed byte planes."""
_JSON: Final = 1
"""The same with JSON. For columns with lone surrogates, which msgpack cannot spell, it still is what is written."""
_QUICK: Final = 2
_LEVELS: Final = {_SQUEEZED: 3, _JSON: 3, _QUICK: 1}
_ARRAYS: Final[tuple[tuple[type[TokenIds] | type[Logprobs], str], ...]] = ((TokenIds, "ids"), (Logprobs, "logprobs"))


class _Payload(msgspec.Struct, array_like=True):
    id: str
    format: int
    columns: bytes
    ids: bytes
    logprobs: bytes


_decoder: Final = msgspec.msgpack.Decoder(_Payload)


class LogWriter:
    """Appends frames to a new file. Raises OSError if the folder does not let it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        aside = path.with_suffix(".new")
        self._file = os.open(aside, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        try:
            try_lock(self._file)
            os.write(self._file, _HEADER)
            os.rename(aside, path)  # locked before anyone can see it
        except BaseException:
            os.close(self._file)
            aside.unlink(missing_ok=True)
            raise
        self.size = len(_HEADER)
        self.count = 0
        """Frames in the file."""

    def append(self, payload: bytes) -> None:
        """Writes one frame. Raises OSError, with the file as it was, if the disk refuses."""
        data = _FRAME.pack(len(payload), zlib.crc32(payload)) + payload
        try:
            written = os.write(self._file, data)
            while written < len(data):
                written += os.write(self._file, data[written:])
        except OSError:
            os.ftruncate(self._file, self.size)
            raise
        self.size += len(data)
        self.count += 1

    def sync(self) -> None:
        """Returns once the disk has everything."""
        os.fsync(self._file)

    def close(self) -> None:
        """Gives up the lock."""
        os.close(self._file)


def try_lock(file: int) -> bool:
    """Locks the file if nobody has; True also where the system or the file system knows no locks."""
    try:
        import fcntl
    except ImportError:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def read_frames(path: Path, *, start: int = 0) -> Iterator[tuple[int, bytes | None]]:
    """(offset of its end, payload) of every whole frame from ``start`` on; None for one that is damaged. A torn end is left out.

    Raises ValueError if the file is no log, or of a newer version.
    """
    with path.open("rb") as file:
        header = file.read(len(_HEADER))
        if not header.startswith(_MAGIC) or len(header) < len(_HEADER):
            raise ValueError(f"{path} is no log of episodes")
        if header[-1] > _VERSION:
            raise ValueError(f"{path} is of version {header[-1]}, this rllm_trace reads up to {_VERSION}: use the release that wrote it")
        file.seek(max(start, len(_HEADER)))
        while True:
            head = file.read(_FRAME.size)
            if len(head) < _FRAME.size:
                return
            length, checksum = _FRAME.unpack(head)
            payload = file.read(length)
            if len(payload) < length:
                return
            yield file.tell(), payload if zlib.crc32(payload) == checksum else None


class Frames(msgspec.Struct, frozen=True):
    """What a log holds."""

    count: int
    """Whole frames, damaged ones not counted."""
    torn: bool
    """Whether the file ends in the middle of a frame."""


def end_of_frames(path: Path) -> Frames:
    """How many frames the log has, and how it ends."""
    count, end = 0, len(_HEADER)
    for position, payload in read_frames(path):
        count, end = count + (payload is not None), position
    return Frames(count, path.stat().st_size > end)


def id_of_frame(payload: bytes) -> str:
    """The episode's id, without reading the rest."""
    return _decoder.decode(payload).id


def frame_of(row: Row) -> bytes:
    """The payload that holds the row."""
    arrays: dict[type, list[bytes]] = {kind: [] for kind, _ in _ARRAYS}

    def take(array: Any, kind: type) -> int | None:
        if array is None:
            return None
        arrays[kind].append(array.packed())
        return len(array)

    bare = _each_array(row, take)
    try:
        form, columns, squeeze = _QUICK, msgspec.msgpack.encode(bare), _SQUEEZES[_QUICK]
    except UnicodeEncodeError:
        form, columns, squeeze = _JSON, json.dumps(bare).encode(), _SQUEEZES[_JSON]
    squeezed = {name: pack(b"".join(arrays[kind])) for (kind, name), pack in zip(_ARRAYS, squeeze, strict=True)}
    known_as = row["id"].encode("utf-8", "replace").decode()
    return msgspec.msgpack.encode(_Payload(known_as, form, zlib.compress(columns, _LEVELS[form]), **squeezed))


def row_of_frame(payload: bytes) -> Row:
    """The row that the payload holds."""
    found = _decoder.decode(payload)
    columns = zlib.decompress(found.columns)
    row: Row = json.loads(columns) if found.format == _JSON else msgspec.msgpack.decode(columns)
    expand = _EXPANDS[found.format]
    readers = {kind: _reader(kind, unpack(getattr(found, name))) for (kind, name), unpack in zip(_ARRAYS, expand, strict=True)}
    return _each_array(row, lambda length, kind: None if length is None else readers[kind](length))


def _each_array(row: Row, swap: Callable[[Any, Any], Any]) -> Row:
    """The row with each array, or what stands for it, exchanged for ``swap(it, its kind)``; always in the same order."""
    calls: list[Row] = []
    for call in row["calls"]:
        changed = {**call, "prompt_new": swap(call["prompt_new"], TokenIds)}
        changed["choices"] = [
            {**choice, "token_ids": swap(choice["token_ids"], TokenIds), "logprobs": swap(choice["logprobs"], Logprobs)}
            for choice in call["choices"]
        ]
        calls.append(changed)
    return {**row, "calls": calls}


def _reader(kind: type[TokenIds] | type[Logprobs], data: bytes) -> Callable[[int], Any]:
    position = 0

    def read(length: int) -> Any:
        nonlocal position
        start, position = position, position + 4 * length
        return kind(data[start:position])

    return read


def _squeezed(data: bytes) -> bytes:
    """Compressed by byte planes: the first bytes of all numbers, then the second ones, ..."""
    return zlib.compress(b"".join(data[plane::4] for plane in range(4)), _LEVELS[_SQUEEZED]) if data else b""


def _expanded(data: bytes) -> bytes:
    return _of_planes(zlib.decompress(data), 4) if data else b""


def _trimmed(data: bytes) -> bytes:
    """How many byte planes are not all zero, then those."""
    planes = [data[plane::4] for plane in range(4)]
    while planes and planes[-1].count(0) == len(planes[-1]):
        planes.pop()
    return bytes((len(planes),)) + len(data).to_bytes(8, "little") + b"".join(planes)


def _untrimmed(data: bytes) -> bytes:
    count, length = data[0], int.from_bytes(data[1:9], "little")
    return _of_planes(data[9:], count) if count else bytes(length)


def _of_planes(planes: bytes, count: int) -> bytes:
    length = len(planes) // count
    whole = bytearray(4 * length)
    for plane in range(count):
        whole[plane::4] = planes[plane * length : (plane + 1) * length]
    return bytes(whole)


_SQUEEZES: Final = {_JSON: (_squeezed, _squeezed), _QUICK: (_trimmed, bytes)}
_EXPANDS: Final = {_SQUEEZED: (_expanded, _expanded), _JSON: (_expanded, _expanded), _QUICK: (_untrimmed, bytes)}
"""Of each format: for ids, for logprobs."""
