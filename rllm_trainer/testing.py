"""Episodes by hand, for tests of what is made of them: lists of ints in, the SDK's own records out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from rllm_trace.types import Choice, Episode, Logprobs, ModelCall, TokenIds, Trajectory

__all__ = ["make_call", "make_choice", "make_episode"]

EPISODE_ID = "episode"
TRAJECTORY_ID = "main"


def make_choice(token_ids: Sequence[int], text: str | None = None, *, index: int = 0, **fields: Any) -> Choice:
    """A choice whose logprobs are -0.5 each, unless given."""
    fields.setdefault("logprobs", Logprobs([-0.5] * len(token_ids)))
    fields.setdefault("finish_reason", "stop")
    return Choice(index=index, token_ids=TokenIds(token_ids), text=text, **fields)


def make_call(span_id: str, prompt: Sequence[int], *replies: Sequence[int] | Choice, **fields: Any) -> ModelCall:
    """An exact call of the policy. ``replies`` are token ids or choices; ``fields`` overrides any field of the record.

    Calls made one after another with ``started`` left out begin in the order of their span ids.
    """
    choices = [
        msgspec.structs.replace(reply, index=index) if isinstance(reply, Choice) else make_choice(reply, index=index)
        for index, reply in enumerate(replies)
    ]
    record: dict[str, Any] = {
        "span_id": span_id,
        "parent_id": None,
        "model": "policy",
        "requested_model": "policy",
        "endpoint": "policy",
        "messages": [],
        "sampling": {},
        "choices": choices,
        "prompt_token_ids": TokenIds(prompt),
        "exact": True,
        "complete": True,
        "trainable": True,
        "policy_version_start": 0,
        "policy_version_end": 0,
        "started": 0,
        "ended": 0,
    }
    return ModelCall(**{**record, **fields})


def make_episode(
    *calls: ModelCall, agents: Sequence[Trajectory | tuple[str, Sequence[ModelCall]]] = (), episode_id: str = EPISODE_ID, **fields: Any
) -> Episode:
    """A completed episode. ``calls`` are its default trajectory; each of ``agents`` is a (role, calls) pair or a trajectory."""
    trajectories = [_trajectory(TRAJECTORY_ID, TRAJECTORY_ID, calls)] if calls else []
    for number, agent in enumerate(agents):
        trajectories.append(agent if isinstance(agent, Trajectory) else _trajectory(f"{agent[0]}-{number}", agent[0], agent[1]))
    record: dict[str, Any] = {
        "id": episode_id,
        "trace_id": "0" * 32,
        "span_id": TRAJECTORY_ID,
        "task_id": "task",
        "workflow": "app",
        "termination": "completed",
        "trajectories": trajectories,
        "rewards": [],
        "reward": None,
        "started": 0,
        "ended": 0,
        "metadata": {},
    }
    return Episode(**{**record, **fields})


def _trajectory(trajectory_id: str, role: str, calls: Sequence[ModelCall]) -> Trajectory:
    return Trajectory(id=trajectory_id, name=role, calls=list(calls), tools=[], rewards=[], reward=None, started=0, ended=0)
