"""Scalars in, a TensorBoard event file out.

The format is written here in full (a TFRecord frame around two small protobuf messages), because the package that owns it
would load protobuf and start a thread in the app's process.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

__all__ = ["EventFile"]

_CRC_POLYNOMIAL = 0x82F63B78
_CRC_MASK = 0xA282EAD8
_VERSION = b"brain.Event:2"


def _crc_table() -> tuple[int, ...]:
    table: list[int] = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = (crc >> 1) ^ (_CRC_POLYNOMIAL if crc & 1 else 0)
        table.append(crc)
    return tuple(table)


_TABLE = _crc_table()


class EventFile:
    """One event file in ``folder``; each ``write`` is on disk when it returns."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        started = time.time()
        self._file: BinaryIO = (folder / f"events.out.tfevents.{time.time_ns()}.rllm").open("xb")
        self._record(_double(1, started) + _bytes(3, _VERSION))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """All scalars of one step, as one event."""
        values = b"".join(_bytes(1, _bytes(1, name.encode()) + _float(2, value)) for name, value in scalars.items())
        self._record(_double(1, time.time()) + _varint_field(2, step) + _bytes(5, values))

    def close(self) -> None:
        self._file.close()

    def _record(self, event: bytes) -> None:
        length = struct.pack("<Q", len(event))
        self._file.write(length + _masked_crc(length) + event + _masked_crc(event))
        self._file.flush()


def _masked_crc(data: bytes) -> bytes:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + _CRC_MASK) & 0xFFFFFFFF)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append((value & 0x7F) | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _varint_field(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _double(number: int, value: float) -> bytes:
    return _varint(number << 3 | 1) + struct.pack("<d", value)


def _float(number: int, value: float) -> bytes:
    return _varint(number << 3 | 5) + struct.pack("<f", value)


def _bytes(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(value)) + value
