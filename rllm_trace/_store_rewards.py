"""Rewards that were given to stored episodes later: one JSON line each, appended by any process, applied when the episodes are read."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from rllm_trace._guard import counters
from rllm_trace.episodes import with_rewards
from rllm_trace.exceptions import UnknownEpisodeError
from rllm_trace.types import Episode, Reward

__all__ = ["LateRewards", "write_rewards"]

_SCHEMA: Final = "rllm.reward"
_VERSION: Final = 1


class _Line(msgspec.Struct, kw_only=True):
    schema: str
    version: int
    given: int
    """Unix time, nanoseconds."""
    episode_id: str
    name: str
    value: float
    weight: float = 1.0
    span_id: str | None = None
    """Of the trajectory or call that is scored; None: the episode."""


_decoder: Final = msgspec.json.Decoder(_Line)


def write_rewards(path: Path, episode_id: str, given: Sequence[Reward]) -> None:
    """Appends the rewards, in one write. Raises OSError if the disk refuses."""
    now = time.time_ns()
    lines = [
        _Line(
            schema=_SCHEMA,
            version=_VERSION,
            given=now,
            episode_id=episode_id,
            name=reward.name,
            value=reward.value,
            weight=reward.weight,
            span_id=reward.target,
        )
        for reward in given
    ]
    data = b"\n" + b"\n".join(msgspec.json.encode(line) for line in lines) + b"\n"  # begins a line of its own, whatever a crash left
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        written = os.write(file, data)
        while written < len(data):
            written += os.write(file, data[written:])
        os.fsync(file)
    finally:
        os.close(file)


class LateRewards:
    """All later rewards of a folder, as it is now."""

    def __init__(self, folder: Path) -> None:
        lines = [line for path in folder.glob("*.jsonl") for line in _read(path)]
        self._by_episode: dict[str, list[Reward]] = defaultdict(list)
        for line in sorted(lines, key=lambda line: line.given):
            self._by_episode[line.episode_id].append(Reward(name=line.name, value=line.value, weight=line.weight, target=line.span_id))

    def applied(self, episode: Episode) -> Episode:
        """The episode with its later rewards, in the order in which they were given; one that scores no span of it is counted."""
        for reward in self._by_episode.get(episode.id, ()):
            try:
                episode = with_rewards(episode, [reward])
            except UnknownEpisodeError:
                counters.add("orphan", "stored reward")
        return episode


def _read(path: Path) -> list[_Line]:
    found: list[_Line] = []
    for text in path.read_bytes().splitlines():
        if not text:
            continue
        try:
            line = _decoder.decode(text)
        except msgspec.DecodeError:
            counters.add("failed", "damaged reward")
            continue
        if line.schema != _SCHEMA or line.version > _VERSION:
            raise ValueError(f"{path} is of {line.schema} version {line.version}, this rllm_trace reads up to {_VERSION}")
        found.append(line)
    return found
