"""Episodes on disk: whole or not there, written by many processes at once, readable by pandas, Polars and DuckDB.

    with Store("runs/store") as store:
        store.append(episode)
        store.add_reward(0.7, name="human", episode_id=episode.id)
        for episode in store.episodes(workflow="solve", min_reward=0.5): ...

Each process appends to a log of its own; an episode that ``append`` has returned from survives a kill. Logs are sealed into Parquet
when they are large or old, on ``close`` and on ``seal``, the logs of processes that died among them: ``episodes/*.parquet`` is then what
other programs read. Rewards given later lie beside them, and are part of the episodes that this class gives back. Reading does
not need the writers to stop. Sealing needs pyarrow (extra ``store``); without it everything else works on the logs.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import datetime
from typing import Any, Final, Self

from rllm_trace._disclosure import Disclosure, Redact, disclose_episode
from rllm_trace._guard import counters, warn_once
from rllm_trace._store_folder import Folder, Segment, new_stem, rows_of_log
from rllm_trace._store_log import LogWriter, frame_of
from rllm_trace._store_parquet import has_parquet, read_rows
from rllm_trace._store_rewards import LateRewards, write_rewards
from rllm_trace._store_rows import Row, episode_of, row_of
from rllm_trace._values import number, rewards_of
from rllm_trace.exceptions import ConfigurationError, UnknownEpisodeError
from rllm_trace.types import Episode, Reward

__all__ = ["Store", "open_store"]

_SEGMENT_BYTES: Final = 64 * 2**20
_SEGMENT_SECONDS: Final = 3_600.0
_SMALLEST_SEGMENT: Final = 2**16
_CLOSE: Final = 30.0
"""Seconds that ``close`` waits for sealing; a log that is not sealed by then is sealed by whoever opens the store next."""

_log = logging.getLogger("rllm_trace")


class Store:
    """A folder of episodes. Safe to use from several threads and processes.

    ``capture_content=False`` and ``redact`` decide what of an episode is written at all. ``max_bytes`` and ``max_age`` (seconds) bound the
    folder: the oldest segments that nobody writes go first, whole, and their episodes are counted as dropped. A new segment begins
    after ``segment_bytes`` or ``segment_seconds``. Raises ConfigurationError for a folder or a limit that cannot be.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        capture_content: bool | None = None,
        redact: Redact | None = None,
        max_bytes: int | None = None,
        max_age: float | None = None,
        segment_bytes: int = _SEGMENT_BYTES,
        segment_seconds: float = _SEGMENT_SECONDS,
    ) -> None:
        for name, value in (("max_bytes", max_bytes), ("max_age", max_age), ("segment_bytes", segment_bytes)):
            if value is not None and not value > 0:
                raise ConfigurationError(f"got {name}={value!r}; expected a number above 0")
        self._folder = Folder(folder)
        self._disclosure = _disclosure(capture_content, redact)
        self._max_bytes, self._max_age = max_bytes, max_age
        self._segment_bytes = segment_bytes if max_bytes is None else max(_SMALLEST_SEGMENT, min(segment_bytes, max_bytes // 8))
        self._segment_seconds = segment_seconds
        self._lost = 0
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.RLock()
        self._owner = os.getpid()
        self._writer: LogWriter | None = None
        self._began = 0.0
        self._sealing: list[threading.Thread] = []
        self._stem = new_stem()
        self._ids: dict[str, tuple[int, frozenset[str]]] = {}
        """Ids of segments by stem, with the size that the segment had then."""
        self._written: set[str] = set()
        """Ids in the segment that this process is writing."""

    def append(self, episode: Episode) -> None:
        """Writes the episode; it survives a kill of this process from then on. Raises OSError, with nothing written, for a full disk."""
        if self._owner != os.getpid():
            self._leave_to_parent()
        try:
            payload = frame_of(row_of(disclose_episode(episode, self._disclosure)))
            with self._lock:
                self._append(payload)
                self._written.add(episode.id)
        except BaseException:
            self._lost += 1
            raise
        counters.add("exported", "stored episode")

    write = append

    def _leave_to_parent(self) -> None:
        """In a forked child: begins anew, the inherited file closed, so that its lock ends with the parent."""
        inherited = self._writer
        self._begin()
        if inherited is not None:
            inherited.close()

    def _append(self, payload: bytes) -> None:
        writer = self._writer
        if writer is not None and (writer.size >= self._segment_bytes or time.monotonic() - self._began >= self._segment_seconds):
            self._retire()
        if self._writer is None:
            self._stem, self._began, self._written = new_stem(), time.monotonic(), set()
            self._writer = LogWriter(self._folder.log_path(self._stem))
        self._writer.append(payload)

    def episodes(
        self,
        *,
        ids: Collection[str] | None = None,
        workflow: str | None = None,
        task_id: str | None = None,
        session_id: str | None = None,
        termination: str | None = None,
        since: datetime | int | None = None,
        until: datetime | int | None = None,
        min_reward: float | None = None,
    ) -> Iterator[Episode]:
        """The stored episodes that fit, each once, oldest segment first, with the rewards that were given later.

        ``since`` and ``until``: start of the episode, as a datetime with a time zone or Unix nanoseconds; ``until`` is not included.
        ``min_reward``: of the whole episode, later rewards included; an episode without a reward does not fit.
        """
        exact = {"workflow": workflow, "task_id": task_id, "session_id": session_id, "termination": termination}
        wanted = _Wanted({name: value for name, value in exact.items() if value is not None}, ids, _nanoseconds(since), _nanoseconds(until))
        late = LateRewards(self._folder.rewards)
        seen: set[str] = set()
        for row in self._rows(wanted):
            if row["id"] in seen:
                continue
            seen.add(row["id"])
            episode = late.applied(episode_of(row))
            if min_reward is None or (episode.reward is not None and episode.reward >= min_reward):
                yield episode

    def __iter__(self) -> Iterator[Episode]:
        return self.episodes()

    def _rows(self, wanted: _Wanted) -> Iterator[Row]:
        done: set[str] = set()
        again = True
        while again:
            again = False
            for segment in self._folder.segments():
                if segment.stem in done:
                    continue
                try:
                    yield from _rows_of(segment, wanted)
                except FileNotFoundError:  # sealed or merged since the folder was read; the segment now has another file
                    again = True
                else:
                    done.add(segment.stem)

    def add_reward(
        self, value: Any, *, name: str = "reward", weight: float = 1.0, episode_id: str | None = None, span_id: str | None = None
    ) -> None:
        """Scores a stored episode, from any process. ``value`` is what a reward function may return.

        ``span_id``: of the trajectory or call that is scored; None: the episode. Raises RewardError for what is no reward,
        UnknownEpisodeError if the store has no such episode.
        """
        if episode_id is None:
            raise UnknownEpisodeError("add_reward needs episode_id=, the id of an episode in the store")
        given = rewards_of(value, name, number(weight, name), target=span_id, span_id=None)
        if not self.give(episode_id, given):
            raise UnknownEpisodeError(f"the store {str(self._folder.path)!r} has no episode {episode_id!r}")

    def give(self, episode_id: str, given: Sequence[Reward]) -> bool:
        """The same for rewards that have been checked. False, and nothing written, if the store has no such episode."""
        if not self.has(episode_id):
            return False
        write_rewards(self._folder.rewards / f"{self._stem}.jsonl", episode_id, given)
        return True

    def has(self, episode_id: str) -> bool:
        """Whether the episode is in the store."""
        if self._owner == os.getpid() and episode_id in self._written:
            return True
        for segment in reversed(self._folder.segments()):
            size, known = self._ids.get(segment.stem, (-1, frozenset[str]()))
            if size != segment.size:
                size = segment.size
                with contextlib.suppress(FileNotFoundError):
                    known = frozenset(self._folder.ids(segment))
                self._ids[segment.stem] = (size, known)
            if episode_id in known:
                return True
        return False

    def seal(self) -> int:
        """Makes Parquet of everything that no other process is writing; gives how many episodes. Raises OSError if the disk refuses."""
        if not has_parquet():
            raise ConfigurationError("sealing needs pyarrow: pip install 'rllm-trace[store]'")
        with self._lock:
            writer, stem = self._take_writer()
        count = 0 if writer is None else self._sealed(writer, stem)
        for thread in self._sealing:
            thread.join(_CLOSE)
        count += self._folder.seal_orphans()
        self._folder.merge(max(_SMALLEST_SEGMENT, self._segment_bytes // 4))
        self._folder.enforce(max_bytes=self._max_bytes, max_age=self._max_age)
        return count

    def flush(self, timeout: float) -> bool:
        """Returns once the disk has everything. True if nothing was lost since the last flush."""
        with self._lock:
            lost, self._lost = self._lost, 0
            if self._writer is not None and self._owner == os.getpid():
                self._writer.sync()
        return lost == 0

    def close(self) -> None:
        """Ends this process's segment and seals what can be; a later ``append`` begins a new one. Takes at most half a minute."""
        if self._owner != os.getpid():
            return
        if has_parquet():
            self._sealed_in_time()
        else:
            with self._lock:
                writer, _ = self._take_writer()
            if writer is not None:
                writer.close()
            self._folder.enforce(max_bytes=self._max_bytes, max_age=self._max_age)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _sealed_in_time(self) -> None:
        try:
            self._in_background(self.seal).join(_CLOSE)
        except RuntimeError:  # the interpreter is ending and starts no more threads: what is written stays in its log
            with self._lock:
                writer, _ = self._take_writer()
            if writer is not None:
                writer.close()

    def _take_writer(self) -> tuple[LogWriter | None, str]:
        writer, self._writer = self._writer if self._owner == os.getpid() else None, None
        return writer, self._stem

    def _retire(self) -> None:
        """Ends the segment; it is sealed beside the app, its lock held until then."""
        writer, stem = self._take_writer()
        if writer is None:
            return
        if not has_parquet():
            writer.close()
            return
        self._sealing = [thread for thread in self._sealing if thread.is_alive()]
        self._sealing.append(self._in_background(lambda: self._sealed(writer, stem)))

    def _sealed(self, writer: LogWriter, stem: str) -> int:
        try:
            return self._folder.seal(stem)
        finally:
            writer.close()
            self._folder.enforce(max_bytes=self._max_bytes, max_age=self._max_age)

    def _in_background(self, work: Callable[[], Any]) -> threading.Thread:
        """A daemon thread in an empty context, whose failure is logged: what it was to seal stays in its log."""

        def run() -> None:
            try:
                work()
            except Exception as error:  # noqa: BLE001 - a full disk must not look like a crash of the app
                counters.add("failed", "sealed segment")
                _log.warning("store %s: a segment could not be sealed and stays in log/: %s", self._folder.path, error)

        thread = threading.Thread(target=run, name="rllm-trace-seal", daemon=True)
        contextvars.Context().run(thread.start)
        return thread


def open_store(folder: str | os.PathLike[str] | Store, *, capture_content: bool | None = None, redact: Redact | None = None) -> Store:
    """The store that ``configure(store=...)`` names: a folder, or a Store with limits of its own."""
    if isinstance(folder, Store):
        if capture_content is not None or redact is not None:
            folder._disclosure = _disclosure(capture_content, redact)
        return folder
    if not has_parquet():
        warn_once(
            "store without pyarrow",
            f"store={str(folder)!r}: episodes are written and can be read by rllm_trace.store, but pandas and DuckDB cannot read them "
            "until pyarrow is there: pip install 'rllm-trace[store]'",
        )
    return Store(folder, capture_content=capture_content, redact=redact)


class _Wanted:
    """Which rows are asked for, by columns."""

    def __init__(self, exact: dict[str, Any], ids: Collection[str] | None, since: int | None, until: int | None) -> None:
        self._exact = exact
        self._ids = None if ids is None else frozenset(ids)
        self._since, self._until = since, until

    def row(self, row: Row) -> bool:
        return (
            all(row.get(name) == value for name, value in self._exact.items())
            and (self._ids is None or row["id"] in self._ids)
            and (self._since is None or row["started"] >= self._since)
            and (self._until is None or row["started"] < self._until)
        )


def _rows_of(segment: Segment, wanted: _Wanted) -> Iterator[Row]:
    if segment.sealed:
        return read_rows(segment.path, wanted.row)
    return (row for row in rows_of_log(segment.path) if wanted.row(row))


def _disclosure(capture_content: bool | None, redact: Redact | None) -> Disclosure:
    content = capture_content is not False
    return Disclosure(content=content, tokens=content, redact=redact)


def _nanoseconds(when: datetime | int | None) -> int | None:
    if isinstance(when, datetime):
        if when.tzinfo is None:
            raise ConfigurationError(f"got {when!r}; expected a datetime with a time zone, or Unix nanoseconds")
        return int(when.timestamp() * 1_000_000) * 1_000
    return when
