"""Recorded episodes in, groups of scored rollouts out, as a step takes them; what no group can take is set aside, with its reason.

A group is the episodes of one task: of one step where a run recorded them, of the whole store else. The task is the row that a run
worked on; where there was no run, it is what the workflow was called with, so that equal inputs are compared. What recorded an episode
for another purpose (an evaluation, an attempt that another one followed) is not trained.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from rllm_trace.exceptions import RewardError as BadReward
from rllm_trace.exporters.jsonl import iter_episodes
from rllm_trace.store import Store
from rllm_trace.types import Episode
from rllm_trainer.exceptions import DatasetError, RewardError
from rllm_trainer.rollout.dataset import FixedTasks, Task, make_task
from rllm_trainer.rollout.faults import judge_recorded, leaves_gradient
from rllm_trainer.rollout.record import ROLLOUTS_FILE, read_rollouts
from rllm_trainer.rollout.rewards import RewardFunction, total_reward
from rllm_trainer.rollout.scoring import Awaited, scored_by, without_rewards
from rllm_trainer.rollout.source import Collected
from rllm_trainer.state import Cursor
from rllm_trainer.types import Group, Rollout

__all__ = [
    "RecordedFailure",
    "StoredBatches",
    "StoredGroup",
    "StoredSource",
    "read_episodes",
    "read_greedy",
    "read_recorded",
    "scored_again",
    "stored_groups",
    "with_greedy",
]

_EXPECTED = (
    "the folder of a store, the run folder of a fit, a .jsonl file of episodes, a rllm_trace.store.Store, or a list of episodes, such as "
    "collect() gives"
)
_STORE_FOLDERS = ("log", "episodes")


class StoredGroup(msgspec.Struct, frozen=True, kw_only=True):
    """One group, and the step that it was recorded for."""

    step: int | None
    """None: no run recorded it."""
    group: Group

    @property
    def id(self) -> str:
        """Tells it from all others of the store."""
        return self.group.task_id if self.step is None else f"{self.group.task_id}@{self.step}"


def read_recorded(source: Any, *, grouped: bool = True) -> tuple[list[Rollout], list[int | None], Counter[str]]:
    """Rollouts, the step of each, and how many episodes were set aside for which reason.

    Rollouts of a run folder are as its run saw them; those made of bare episodes have the rewards that are stored with them.

    Args:
        grouped: an episode whose task is not known is set aside. False: it is a task of its own.

    Raises:
        DatasetError: it is none of what holds episodes, or holds none.
    """
    if isinstance(source, (str, Path)) and (Path(source) / ROLLOUTS_FILE).is_file():
        by_step = read_rollouts(Path(source))
        pairs = [(rollout, step) for step in sorted(by_step) for rollout in by_step[step]]
        if not pairs:
            raise DatasetError(f"{source} holds no training rollouts; give the folder of a run that took a step")
        return [rollout for rollout, _ in pairs], [step for _, step in pairs], Counter()
    aside: Counter[str] = Counter()
    chosen = _chosen(read_episodes(source), aside, grouped=grouped)
    return [_rollout(task_id, index, episode) for task_id, index, _, episode in chosen], [step for _, _, step, _ in chosen], aside


def read_greedy(source: Any) -> list[tuple[int, Rollout]]:
    """(step, greedy rollout) of a run folder; none of anything else, and where the run made none."""
    if not (isinstance(source, (str, Path)) and (Path(source) / ROLLOUTS_FILE).is_file()):
        return []
    return [(step, rollout) for step, rollouts in read_rollouts(Path(source), split="greedy").items() for rollout in rollouts]


def read_episodes(source: Any) -> Iterator[Episode]:
    """The episodes of whatever holds them. Raises ``DatasetError`` for anything else."""
    if isinstance(source, Store):
        return source.episodes()
    if isinstance(source, (str, Path)):
        path = Path(source)
        if path.is_file() and path.suffix in (".jsonl", ".ndjson"):
            return iter_episodes(path)
        if path.is_dir() and any((path / name).is_dir() for name in _STORE_FOLDERS):
            return Store(path).episodes()
        raise DatasetError(f"store: got {str(source)!r}, which holds no episodes; expected {_EXPECTED}")
    given: Any = source
    if isinstance(given, Iterable) and not isinstance(given, (Mapping, bytes)):
        return _only_episodes(cast("Iterable[Any]", given))
    raise DatasetError(f"store: got {type(source).__name__}; expected {_EXPECTED}")


def stored_groups(rollouts: Sequence[Rollout], steps: Sequence[int | None], *, smallest: int, aside: Counter[str]) -> list[StoredGroup]:
    """Groups in the order of their steps and tasks.

    Args:
        smallest: rollouts that a group must have to be trained; those of smaller ones are added to ``aside``.
    """
    members: dict[tuple[int, str], list[Rollout]] = {}
    for rollout, step in zip(rollouts, steps, strict=True):
        members.setdefault((-1 if step is None else step, rollout.task_id), []).append(rollout)
    groups: list[StoredGroup] = []
    for (step, task_id), found in sorted(members.items(), key=lambda item: item[0]):
        if len(found) < smallest:
            aside["alone in its group: there is nothing to compare it with"] += len(found)
            continue
        group = Group(task_id=task_id, rollouts=sorted(found, key=lambda rollout: rollout.index))
        groups.append(StoredGroup(step=None if step < 0 else step, group=group))
    return groups


def with_greedy(groups: Sequence[StoredGroup], greedy: Iterable[tuple[int, Rollout]], *, rule: str) -> list[StoredGroup]:
    """The groups with the greedy rollouts of their steps and tasks. Raises ``DatasetError`` where one has none."""
    known = {(step, rollout.task_id): rollout for step, rollout in greedy}
    missing = [one.id for one in groups if (one.step, one.group.task_id) not in known]
    if missing:
        raise DatasetError(
            f"algorithm={rule!r} takes the reward of a greedy rollout of each row, and {len(missing)} of {len(groups)} groups in the store "
            f"have none, such as {missing[0]}; give the run folder of a fit(algorithm={rule!r}), or use another algorithm"
        )
    return [
        msgspec.structs.replace(one, group=msgspec.structs.replace(one.group, greedy=known[one.step, one.group.task_id]))
        for one in groups
        if one.step is not None
    ]


def scored_again(rollout: Rollout, functions: Sequence[RewardFunction], *, awaited: Awaited) -> Rollout:
    """The rollout with the rewards of these functions instead of those that it had.

    Functions are filled as after a live run; where the app had failed, only those that take ``error`` are called, with its record.
    """
    episode = rollout.episode
    if episode is None or rollout.fault in ("infrastructure", "app"):
        return rollout
    failed = RecordedFailure(f"{episode.error.type}: {episode.error.message}") if episode.error is not None else None
    due = [function for function in functions if failed is None or function.takes_error]
    bare = without_rewards(episode)
    try:
        scored = scored_by(due, bare, output=episode.output, row=rollout.row, error=failed, awaited=awaited)
    except (RewardError, BadReward) as refused:
        reason = f"{refused} (task {rollout.task_id})"
        return msgspec.structs.replace(rollout, episode=bare, reward=None, rewards={}, fault="reward", reason=reason)
    return _worth(msgspec.structs.replace(rollout, episode=scored, fault=None if rollout.fault == "reward" else rollout.fault))


class RecordedFailure(Exception):
    """What a recorded app raised: its type and message; the exception itself is not there any more."""


def _only_episodes(given: Iterable[Any]) -> Iterator[Episode]:
    for number, one in enumerate(given):
        if not isinstance(one, Episode):
            raise DatasetError(f"store: item {number} is a {type(one).__name__}; expected rllm_trace.Episode; expected {_EXPECTED}")
        yield one


def _chosen(episodes: Iterable[Episode], aside: Counter[str], *, grouped: bool) -> list[tuple[str, int, int | None, Episode]]:
    """(task id, index, step, episode) of what can be in a group, in the order of the store."""
    attempts: dict[tuple[Any, ...], list[Episode]] = {}
    for episode in episodes:
        split = episode.metadata.get("split")
        if split == "greedy":
            aside["made at temperature 0, as a baseline"] += 1
            continue
        if split not in (None, "train"):
            aside["made for an evaluation"] += 1
            continue
        task_id = episode.task_id or (_task_of_input(episode) if grouped else episode.id)
        if task_id is None:
            aside["no task: it has neither a task id nor an input"] += 1
            continue
        step, index = episode.metadata.get("step"), episode.metadata.get("index")
        of_a_run = split is not None and isinstance(step, int) and isinstance(index, int)
        key = (task_id, step, index) if of_a_run else (task_id, None, episode.id)
        attempts.setdefault(key, []).append(episode)
    chosen: list[tuple[str, int, int | None, Episode]] = []
    numbers: Counter[str] = Counter()
    for (task_id, step, index), made in attempts.items():
        last = max(int(episode.metadata.get("attempt", 0)) for episode in made)
        of_last = [episode for episode in made if int(episode.metadata.get("attempt", 0)) == last]
        episode = min(of_last, key=lambda one: (one.parent_episode_id is not None, one.started))
        aside["an attempt that another one followed"] += len(made) - len(of_last)
        aside["a further episode of the same run of the app"] += len(of_last) - 1
        chosen.append((task_id, index if isinstance(index, int) else numbers[task_id], step, episode))
        numbers[task_id] += 1
    return chosen


def _task_of_input(episode: Episode) -> str | None:
    if not episode.input:
        return None
    try:
        return make_task({"workflow": episode.workflow, "input": episode.input}, 0, "store").id
    except DatasetError:
        return None


def _rollout(task_id: str, index: int, episode: Episode) -> Rollout:
    verdict = judge_recorded(episode)
    version = next((call.policy_version_start for call in episode.calls if call.policy_version_start is not None), 0)
    rollout = Rollout(
        task_id=task_id,
        index=index,
        row=None,
        episode=episode,
        reward=None,
        rewards={},
        fault=verdict.fault,
        reason=verdict.reason,
        policy_version=version,
        seconds=(episode.ended - episode.started) / 1e9,
    )
    return rollout if leaves_gradient(verdict.fault) else _worth(rollout)


def _worth(rollout: Rollout) -> Rollout:
    """The rollout with what its episode's rewards add up to; one that nothing scored is the reward's fault, or worth 0 if the policy's."""
    assert rollout.episode is not None
    total = total_reward(rollout.episode)
    if total.reward is not None:
        return msgspec.structs.replace(rollout, reward=total.reward, rewards=total.rewards)
    if rollout.fault == "policy":
        return msgspec.structs.replace(rollout, reward=0.0, rewards={})
    reason = f"no reward was given (task {rollout.task_id})"
    return msgspec.structs.replace(rollout, reward=None, rewards={}, fault="reward", reason=reason)


class StoredSource:
    """Gives a step the groups of its batch. The loop cannot tell it from a source that runs the app."""

    def __init__(self, batches: Iterator[Sequence[StoredGroup]]) -> None:
        self._batches = batches

    def collect(self, step: int, version: int) -> Collected | None:
        batch = next(self._batches, None)
        if batch is None:
            return None
        return Collected(groups=sorted((one.group for one in batch), key=lambda group: group.task_id), seconds=0.0)

    def cursor(self) -> Cursor | None:
        return None


class StoredBatches:
    """Which groups make a step: those that a run had recorded for one, or ``batch_tasks`` of them at a time."""

    def __init__(self, groups: Sequence[StoredGroup], *, batch_tasks: int | None, shuffle: bool, seed: int) -> None:
        """
        Args:
            batch_tasks: groups of a batch; None: the recorded steps, in their order.
        """
        self._of_steps: list[list[StoredGroup]] = []
        if batch_tasks is None:
            by_step: dict[int | None, list[StoredGroup]] = {}
            for group in groups:
                by_step.setdefault(group.step, []).append(group)
            self._of_steps = list(by_step.values())
        self._tasks = FixedTasks([Task(id=group.id, row=group) for group in groups])
        self._batch, self._shuffle, self._seed = batch_tasks or 1, shuffle, seed

    def steps(self, epochs: int) -> int:
        """Batches that so many passes make."""
        return epochs * len(self._of_steps) if self._of_steps else self._tasks.steps(epochs, self._batch)

    def batches(self, *, epochs: int | None, start: int) -> Iterator[list[StoredGroup]]:
        """Batches from number ``start`` on; without ``epochs`` there is no last one."""
        if not self._of_steps:
            drawn = self._tasks.batches(self._batch, epochs=epochs, seed=self._seed, shuffle=self._shuffle, start=start)
            return ([task.row for task in tasks] for tasks in drawn)
        last = None if epochs is None else epochs * len(self._of_steps)
        return (
            self._of_steps[number % len(self._of_steps)]
            for number in itertools.takewhile(lambda n: last is None or n < last, itertools.count(start))
        )
