"""Episodes as JSON lines: one line in, the equal Episode out.

A line is ``{"schema": "rllm.episode", "version": 1, "episode": {...}}``; token arrays are base64 of little-endian int32 and float32,
values that JSON cannot spell are tagged (``_plain``). A line is written by one ``write``, so several processes may share a file. A line
that a crash cut short is skipped when read, with one warning that says how many there were.
"""

from __future__ import annotations

import json
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from rllm_trace import _given as given
from rllm_trace._plain import from_plain, to_plain
from rllm_trace._tokens import pack_ids, pack_logprobs, unpack_ids, unpack_logprobs
from rllm_trace.exceptions import RllmWarning
from rllm_trace.exporters.base import Wishes
from rllm_trace.types import Episode, Logprobs, ModelCall, TokenIds

__all__ = ["JSONLExporter", "decode_episode", "encode_episode", "iter_episodes", "read_episodes", "write_episodes"]

_SCHEMA: Final = "rllm.episode"
_VERSION: Final = 1


class _Line(msgspec.Struct, kw_only=True):
    schema: str
    version: int
    episode: Episode


class _Head(msgspec.Struct, kw_only=True):
    schema: str = ""
    version: int = 0


class JSONLExporter:
    """Appends every episode to ``path``, ids and logprobs included unless ``tokens=False``; folders are made as needed."""

    def __init__(self, path: str | os.PathLike[str], *, capture_content: bool | None = None, tokens: bool | None = None) -> None:
        self.wishes = Wishes(capture_content=capture_content, content_default=True, tokens=tokens)
        self.path = given.path(path, "path")
        self._lock = threading.Lock()
        self._file: int | None = None
        self._owner = os.getpid()
        self._torn = False
        """The file ends in the middle of a line."""

    def export_episode(self, episode: Episode) -> None:
        """Writes one line. Raises OSError if the disk refuses."""
        line = encode_episode(episode) + b"\n"
        if self._owner != os.getpid():  # a forked child: the lock may be held by a thread that is not here
            self._lock, self._file, self._owner = threading.Lock(), None, os.getpid()
        with self._lock:
            if self._file is None:
                self._open()
            ended, self._torn = b"\n" if self._torn else b"", True
            _write_all(cast("int", self._file), ended + line)
            self._torn = False

    def shutdown(self) -> None:
        """Closes the file; a later episode opens it again."""
        with self._lock:
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._torn = _ends_midline(self.path)
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


def write_episodes(path: str | os.PathLike[str], episodes: Iterable[Episode]) -> int:
    """Appends ``episodes`` to the file at ``path``; gives how many."""
    exporter = JSONLExporter(path)
    count = 0
    try:
        for episode in episodes:
            exporter.export_episode(episode)
            count += 1
    finally:
        exporter.shutdown()
    return count


def read_episodes(path: str | os.PathLike[str]) -> list[Episode]:
    """Every episode of the file, equal to what was written. Raises ValueError on a line of a newer version."""
    return list(iter_episodes(path))


def iter_episodes(path: str | os.PathLike[str]) -> Iterator[Episode]:
    """The same, one by one."""
    broken: list[int] = []
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                yield decode_episode(line)
            except msgspec.DecodeError:
                broken.append(number)
    if broken:
        warnings.warn(
            f"{path}: {len(broken)} line(s) cut short or damaged, skipped; the first is line {broken[0]}", RllmWarning, stacklevel=2
        )


def encode_episode(episode: Episode) -> bytes:
    """The episode as one JSON line, without its end."""
    line = {"schema": _SCHEMA, "version": _VERSION, "episode": _each_open_field(episode, to_plain)}
    try:
        return msgspec.json.encode(line, enc_hook=_pack)
    except UnicodeEncodeError:  # a lone surrogate in some text
        return json.dumps(msgspec.to_builtins(line, enc_hook=_pack), separators=(",", ":")).encode()


def decode_episode(line: bytes) -> Episode:
    """The episode of one line. Raises ValueError if it is of another schema or a newer version, or damaged (then a DecodeError)."""
    try:
        found = msgspec.json.decode(line, type=_Line, dec_hook=_unpack)
    except msgspec.DecodeError as error:
        found = _second_look(line, error)
    _check(found)
    return _each_open_field(found.episode, from_plain)


def _second_look(line: bytes, error: msgspec.DecodeError) -> _Line:
    """Reads what the fast decoder refused: a lone surrogate, or a version that it does not fit."""
    try:
        plain = json.loads(line)
    except ValueError:
        raise error from None
    _check(msgspec.convert(plain, _Head))
    return msgspec.convert(plain, _Line, dec_hook=_unpack)


def _check(line: _Line | _Head) -> None:
    if line.schema != _SCHEMA or line.version > _VERSION:
        raise ValueError(
            f"a line of schema {line.schema!r} version {line.version}; this rllm_trace reads {_SCHEMA!r} up to version {_VERSION}: "
            "read it with the release that wrote it, or a later one"
        )


def _pack(value: Any) -> Any:
    if isinstance(value, TokenIds):
        return pack_ids(value)
    if isinstance(value, Logprobs):
        return pack_logprobs(value)
    raise NotImplementedError(f"a {type(value).__name__} in a record")


def _unpack(kind: type, value: Any) -> Any:
    if kind is TokenIds:
        return unpack_ids(value)
    if kind is Logprobs:
        return unpack_logprobs(value)
    raise NotImplementedError(f"a {kind.__name__} in a record")


def _each_open_field(episode: Episode, convert: Callable[[Any], Any]) -> Episode:
    """The episode with ``convert`` applied to every field that holds values of any shape: the user's own, or the wire's."""
    return msgspec.structs.replace(
        episode,
        input=convert(episode.input),
        output=convert(episode.output),
        metadata=convert(episode.metadata),
        trajectories=[
            msgspec.structs.replace(
                trajectory,
                calls=[_each_open_field_of_call(call, convert) for call in trajectory.calls],
                tools=[
                    msgspec.structs.replace(tool, arguments=convert(tool.arguments), result=convert(tool.result))
                    for tool in trajectory.tools
                ],
            )
            for trajectory in episode.trajectories
        ],
    )


def _each_open_field_of_call(call: ModelCall, convert: Callable[[Any], Any]) -> ModelCall:
    return msgspec.structs.replace(
        call,
        messages=convert(call.messages),
        tools=convert(call.tools),
        sampling=convert(call.sampling),
        requested_sampling=convert(call.requested_sampling),
        choices=[msgspec.structs.replace(choice, tool_calls=convert(choice.tool_calls)) for choice in call.choices],
    )


def _write_all(file: int, data: bytes) -> None:
    """One ``write``, unless the disk takes less at a time."""
    written = os.write(file, data)
    while written < len(data):
        written += os.write(file, data[written:])


def _ends_midline(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except OSError:  # there is none, or it is empty
        return False
