"""Where weights lie between an engine and a server of this host: in shared memory if there is room, else in the run folder.

The newest one or two versions are kept; in shared memory the next one is written over the older of them, or the only one. The folder is
its owner's alone, and locked while its run lives; one whose run was killed is removed by the next run that starts.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import IO

__all__ = ["WeightsFolder"]

_SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "rllm-weights-"
_LOCK = ".lock"


class WeightsFolder:
    """Files named by version, the newest ``keep`` of them."""

    def __init__(self, run_dir: Path, num_bytes: int, *, keep: int = 2, shared_memory: Path = _SHARED_MEMORY) -> None:
        _sweep(shared_memory)
        self.keep = keep
        """Versions."""
        room = (keep + 1) * num_bytes
        in_memory = shared_memory.is_dir() and os.access(shared_memory, os.W_OK) and shutil.disk_usage(shared_memory).free > room
        parent = shared_memory if in_memory else run_dir
        self._in_memory = in_memory
        self.path, self._lock = _locked_folder(parent)

    def file(self, version: int) -> Path:
        """Where the weights of ``version`` go."""
        return self.path / f"weights-{version:06d}.safetensors"

    def spare(self, version: int) -> Path | None:
        """The file that the weights of ``version`` may be written over; only pages that are there already cannot run out."""
        files = [file for file in self._files() if file != self.file(version)]
        return files[0] if self._in_memory and len(files) >= self.keep else None

    def keep_newest(self) -> None:
        """Remove all but the newest, by the time that they were written."""
        for old in self._files()[: -self.keep]:
            old.unlink(missing_ok=True)

    def _files(self) -> list[Path]:
        return sorted(self.path.glob("weights-*.safetensors"), key=lambda file: file.stat().st_mtime_ns)

    def close(self) -> None:
        """Remove the folder; safe to call twice."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def _locked_folder(parent: Path) -> tuple[Path, IO[bytes]]:
    """A new folder that is held; made again if another run swept it before the lock was taken."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        lock = (folder / _LOCK).open("wb")
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / _LOCK).exists():
            return folder, lock
        lock.close()


def _sweep(parent: Path) -> None:
    """Remove folders that no living process holds."""
    for folder in parent.glob(f"{_PREFIX}*"):
        try:
            with (folder / _LOCK).open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue
        shutil.rmtree(folder, ignore_errors=True)
