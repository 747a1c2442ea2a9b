"""The files of a store: which there are, in what order, whose they are, and which may go.

``log/`` holds one log for each process that is writing, or died writing; ``episodes/`` what has been sealed into Parquet; ``rewards/`` the
rewards that were given later, as JSON lines. A segment is known by its stem, which begins with its time, so that the order of names is the
order of writing. A stem that is in both folders was sealed by a process that died before it could remove the log: the sealed one counts.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Final

import msgspec

from rllm_trace import _given as given
from rllm_trace._guard import counters
from rllm_trace._store_log import end_of_frames, id_of_frame, read_frames, row_of_frame, try_lock
from rllm_trace._store_parquet import count_rows, has_parquet, read_column, read_metadata, read_rows, write_rows
from rllm_trace._store_rows import Row
from rllm_trace.exceptions import ConfigurationError

__all__ = ["Folder", "Segment", "new_stem", "rows_of_log"]

_LOG: Final = ".log"
_SEALED: Final = ".parquet"
_MERGED: Final = "-merged"
_REPLACES: Final = "rllm.replaces"
_MANY: Final = 32
"""Small sealed files that lie side by side before they are merged."""
_STALE: Final = 3_600.0
"""Seconds after which a file that was being written aside is taken to be forgotten."""


class Segment(msgspec.Struct, frozen=True, order=True):
    """A file of episodes."""

    stem: str
    path: Path

    @property
    def sealed(self) -> bool:
        return self.path.suffix == _SEALED

    @property
    def size(self) -> int:
        """Bytes; 0 if it is gone."""
        with contextlib.suppress(OSError):
            return self.path.stat().st_size
        return 0


def new_stem() -> str:
    """A name that no other process makes."""
    return f"{time.time_ns():020d}-{os.getpid()}-{os.urandom(4).hex()}"


class Folder:
    """A store's folder, made if it is not there. Raises ConfigurationError if it cannot be."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = given.path(path, "store")
        self.log, self.episodes, self.rewards = self.path / "log", self.path / "episodes", self.path / "rewards"
        try:
            for folder in (self.path, self.log, self.episodes, self.rewards):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(f"store={str(path)!r}: {error.strerror or error}; give a folder that can be written") from error

    def segments(self) -> list[Segment]:
        """All segments, oldest first."""
        found = {path.stem: Segment(path.stem, path) for path in self.log.glob(f"*{_LOG}")}
        found |= {path.stem: Segment(path.stem, path) for path in self.episodes.glob(f"[!.]*{_SEALED}")}
        return sorted(found.values())

    def log_path(self, stem: str) -> Path:
        return self.log / f"{stem}{_LOG}"

    def sealed_path(self, stem: str) -> Path:
        return self.episodes / f"{stem}{_SEALED}"

    def seal(self, stem: str) -> int:
        """Turns a log into Parquet and removes it; gives how many episodes. The caller has its lock, or is its writer.

        Raises OSError if the disk refuses; the log then stays as it is.
        """
        path, sealed = self.log_path(stem), self.sealed_path(stem)
        count = 0
        if not sealed.exists():
            whole = end_of_frames(path)
            if whole.count:
                count = write_rows(sealed, rows_of_log(path), metadata={})
                _as_old_as(sealed, [path])
            if whole.torn:
                counters.add("dropped", "episode cut short by a crash")
        path.unlink(missing_ok=True)
        return count

    def seal_orphans(self) -> int:
        """Seals the logs whose writers are gone; gives how many episodes."""
        count = 0
        for path in sorted(self.log.glob(f"*{_LOG}")):
            with contextlib.suppress(FileNotFoundError), _locked(path) as ours:
                if ours:
                    count += self.seal(path.stem)
        return count

    def merge(self, small: int) -> int:
        """Makes one file of the sealed files below ``small`` bytes, if there are many; gives how many it replaced."""
        with _locked(self.episodes / ".lock", create=True) as ours:
            if not ours:
                return 0
            self._finish_merges()
            parts = [segment for segment in self.segments() if segment.sealed and segment.size < small]
            if len(parts) < _MANY:
                return 0
            stem = f"{parts[0].stem.removesuffix(_MERGED)}-{os.urandom(4).hex()}{_MERGED}"
            replaced = ",".join(part.stem for part in parts)
            rows = (row for part in parts for row in read_rows(part.path))
            write_rows(self.sealed_path(stem), rows, metadata={_REPLACES: replaced})
            _as_old_as(self.sealed_path(stem), [part.path for part in parts])
            for part in parts:
                part.path.unlink(missing_ok=True)
            return len(parts)

    def _finish_merges(self) -> None:
        """Removes what a merge replaced and, because its process died, did not remove; and files that were being written aside."""
        for path in self.episodes.glob(f"*{_MERGED}{_SEALED}"):
            for stem in read_metadata(path).get(_REPLACES, "").split(","):
                if stem:
                    self.sealed_path(stem).unlink(missing_ok=True)
        for path in (*self.episodes.glob(".*.tmp"), *self.log.glob("*.new")):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > _STALE:
                    path.unlink()

    def enforce(self, *, max_bytes: int | None, max_age: float | None) -> int:
        """Removes the oldest segments that nobody writes until the limits hold; gives how many episodes went with them."""
        gone = 0
        segments = self.segments()
        total = sum(segment.size for segment in segments)
        for segment in segments:
            too_large = max_bytes is not None and total > max_bytes
            with contextlib.suppress(OSError):
                too_old = max_age is not None and time.time() - segment.path.stat().st_mtime > max_age
                if not (too_large or too_old):
                    continue
                size = segment.size
                gone += _remove(segment)
                total -= size
        if gone:
            counters.add("dropped", "stored episode", gone)
        return gone

    def ids(self, segment: Segment) -> Iterable[str]:
        """The ids of the episodes in a segment."""
        if segment.sealed:
            return read_column(segment.path, "id")
        return [id_of_frame(payload) for _, payload in read_frames(segment.path) if payload is not None]


def rows_of_log(path: Path) -> Generator[Row]:
    """The rows of a log; frames that are damaged are left out and counted."""
    for _, payload in read_frames(path):
        if payload is None:
            counters.add("failed", "damaged episode")
        else:
            yield row_of_frame(payload)


def _as_old_as(path: Path, parts: Iterable[Path]) -> None:
    """Gives the file the time of the youngest of its parts, which is what limits of age go by."""
    youngest = max(part.stat().st_mtime_ns for part in parts)
    os.utime(path, ns=(youngest, youngest))


def _remove(segment: Segment) -> int:
    if segment.sealed:
        count = count_rows(segment.path) if has_parquet() else 0
        segment.path.unlink()
        return count
    with _locked(segment.path) as ours:
        if not ours:
            return 0
        count = sum(1 for _ in read_frames(segment.path))
        segment.path.unlink()
        return count


@contextlib.contextmanager
def _locked(path: Path, *, create: bool = False) -> Generator[bool]:
    """Whether nobody else has the file's lock; holds it meanwhile."""
    file = os.open(path, os.O_RDWR | (os.O_CREAT if create else 0), 0o600)
    try:
        yield try_lock(file)
    finally:
        os.close(file)
