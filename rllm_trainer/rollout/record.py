"""Rollouts in, two files out, and back: ``episodes.jsonl`` holds what ran, ``rollouts.jsonl`` what it was worth and when.

Every episode of a run is in the first, lossless; a line of the second names its episode by id. Together they give the rollouts of
any step again, equal to the ones that were trained: a run can be replayed, and a resumed run takes up the groups it had begun.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from rllm_trace._plain import from_plain, to_plain
from rllm_trace.exporters.jsonl import JSONLExporter, iter_episodes
from rllm_trace.types import Episode
from rllm_trainer.rollout.faults import leaves_gradient
from rllm_trainer.types import Fault, Group, Rollout

__all__ = ["EPISODES_FILE", "ROLLOUTS_FILE", "RolloutLine", "RolloutLog", "Split", "groups_of", "read_lines", "read_rollouts"]

EPISODES_FILE = "episodes.jsonl"
ROLLOUTS_FILE = "rollouts.jsonl"

Split = Literal["train", "greedy", "eval", "eval_greedy"]
"""``greedy``: at temperature 0 for a training step, as a baseline of its groups."""


class RolloutLine(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout as it stands in ``rollouts.jsonl``."""

    step: int
    """Training: the step it was made for. Evaluation: the step it was made after."""
    split: Split
    kind: Literal["ended", "retried", "extra"]
    """``retried``: an attempt that another one followed; ``extra``: a further episode of the same run of the app."""
    task_id: str
    index: int
    row: Any
    episode_id: str | None
    reward: float | None
    rewards: dict[str, float]
    fault: Fault | None
    reason: str | None
    policy_version: int
    seconds: float


class RolloutLog:
    """Appends to the two files of a run folder. A line is written after its episode, so a line that can be read has one."""

    def __init__(self, folder: Path) -> None:
        self._episodes = JSONLExporter(folder / EPISODES_FILE, capture_content=True, tokens=True)
        self._folder = folder
        self._path = folder / ROLLOUTS_FILE
        _end_last_line(self._path)
        self._file = self._path.open("ab")
        self._lock = threading.Lock()

    def write(self, rollout: Rollout, *, step: int, split: Split, kind: Literal["ended", "retried", "extra"] = "ended") -> None:
        """One rollout and its episode; from any thread."""
        line = RolloutLine(
            step=step,
            split=split,
            kind=kind,
            task_id=rollout.task_id,
            index=rollout.index,
            row=to_plain(rollout.row),
            episode_id=rollout.episode.id if rollout.episode is not None else None,
            reward=rollout.reward,
            rewards=rollout.rewards,
            fault=rollout.fault,
            reason=rollout.reason,
            policy_version=rollout.policy_version,
            seconds=rollout.seconds,
        )
        with self._lock:
            if rollout.episode is not None:
                self._episodes.export_episode(rollout.episode)
            self._file.write(msgspec.json.encode(line) + b"\n")
            self._file.flush()

    def extra(self, rollout: Rollout, episodes: Sequence[Episode], *, step: int, split: Split) -> None:
        """Further episodes of the same run of the app."""
        for episode in episodes:
            self.write(msgspec.structs.replace(rollout, episode=episode), step=step, split=split, kind="extra")

    def read(self, steps: Iterable[int]) -> dict[int, list[Rollout]]:
        """Training step -> the rollouts on file that may be taken over: what ended by a fault that is not the policy's is made again."""
        found = read_rollouts(self._folder, steps=steps)
        return {step: [r for r in rollouts if not leaves_gradient(r.fault)] for step, rollouts in found.items()}

    def close(self) -> None:
        self._file.close()
        self._episodes.shutdown()


def read_lines(folder: Path) -> list[RolloutLine]:
    """All whole lines of ``rollouts.jsonl``; one that a crash cut is left out."""
    path = folder / ROLLOUTS_FILE
    lines: list[RolloutLine] = []
    if path.exists():
        with path.open("rb") as file:
            for text in file:
                with contextlib.suppress(msgspec.DecodeError):
                    lines.append(msgspec.json.decode(text, type=RolloutLine))
    return lines


def read_rollouts(folder: Path, *, split: Split = "train", steps: Iterable[int] | None = None) -> dict[int, list[Rollout]]:
    """Step -> its rollouts, with their episodes, in the order in which they ended; of rollouts made twice, the later one."""
    wanted = None if steps is None else set(steps)
    chosen: dict[tuple[int, str, int], RolloutLine] = {}
    for line in read_lines(folder):
        if line.split == split and line.kind == "ended" and (wanted is None or line.step in wanted):
            key = (line.step, line.task_id, line.index)
            chosen.pop(key, None)
            chosen[key] = line
    ids = {line.episode_id for line in chosen.values()}
    path = folder / EPISODES_FILE
    episodes = {e.id: e for e in iter_episodes(path) if e.id in ids} if path.exists() else {}
    found: dict[int, list[Rollout]] = {}
    for line in chosen.values():
        if line.episode_id is not None and line.episode_id not in episodes:
            continue
        found.setdefault(line.step, []).append(_rollout(line, episodes.get(line.episode_id or "")))
    return found


def groups_of(rollouts: Iterable[Rollout]) -> list[Group]:
    """Rollouts by task: groups and the rollouts in them in an order that depends on their ids alone."""
    tasks: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        tasks.setdefault(rollout.task_id, []).append(rollout)
    return [Group(task_id=task_id, rollouts=sorted(tasks[task_id], key=lambda r: r.index)) for task_id in sorted(tasks)]


def _rollout(line: RolloutLine, episode: Episode | None) -> Rollout:
    return Rollout(
        task_id=line.task_id,
        index=line.index,
        row=from_plain(line.row),
        episode=episode,
        reward=line.reward,
        rewards=line.rewards,
        fault=line.fault,
        reason=line.reason,
        policy_version=line.policy_version,
        seconds=line.seconds,
    )


def _end_last_line(path: Path) -> None:
    """Ends a line that a crash cut short, so that the next one stands alone."""
    if path.exists() and path.stat().st_size:
        with path.open("rb+") as file:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
