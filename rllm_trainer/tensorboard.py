"""Scalars in, a TensorBoard event file out, through the tensorboard package's own records and writer.

Only its record writer is used: each ``write`` is on disk when it returns, and no thread is started in the app's process.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["EventFile"]

_VERSION = "brain.Event:2"


class EventFile:
    """One event file in ``folder``; each ``write`` is on disk when it returns."""

    def __init__(self, folder: Path) -> None:
        event_pb2: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
        summary_pb2: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        record_writer: Any = importlib.import_module("tensorboard.summary.writer.record_writer")

        self._event: Any = event_pb2.Event
        self._summary: Any = summary_pb2.Summary
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / f"events.out.tfevents.{time.time_ns()}.rllm").open("xb")
        self._records: Any = record_writer.RecordWriter(file)
        self._put(self._event(wall_time=time.time(), file_version=_VERSION))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """All scalars of one step, as one event."""
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self._put(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))

    def close(self) -> None:
        self._records.close()

    def _put(self, event: Any) -> None:
        self._records.write(event.SerializeToString())
        self._records.flush()
