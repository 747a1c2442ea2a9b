"""The records of the trainer, one per arrow: rollouts become samples, samples become a batch.

Arrays are numpy; the letter after the underscore in a comment or name is the axis: T = tokens of a row.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from rllm_trace.types import Episode

__all__ = ["Batch", "Fault", "Float32", "Group", "Int32", "Mask", "Rollout", "Row", "Sample", "SampledSpan", "SpanCredit"]

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]

Fault = Literal["infrastructure", "policy", "reward", "app"]
"""Whose fault a rollout's failure is: ours or the machine's; the policy's; the reward function's; the app's own
(it failed before its first exact call; leaves the gradient like an infrastructure fault)."""


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """One run of the app on one row, with what came of it."""

    task_id: str
    """Same row, same id; made from the row's content."""
    index: int
    """Which of the group's rollouts, 0 .. group_size - 1."""
    row: Any
    episode: Episode | None
    """None only where the app never entered its workflow."""
    reward: float | None
    """Total reward of the episode, given inside the app or by ``reward=``."""
    rewards: dict[str, float]
    """By name, before weights."""
    fault: Fault | None = None
    reason: str | None = None
    """One sentence for the report where ``fault`` is set."""
    policy_version: int = 0
    """Version being served when the rollout was dispatched."""
    seconds: float = 0.0


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """All rollouts of one task in one step: what a group baseline is taken over."""

    task_id: str
    rollouts: list[Rollout]
    greedy: Rollout | None = None
    """One more at temperature 0, where a rule takes its reward as a baseline; never trained, and counted in nothing else."""


class SampledSpan(msgspec.Struct, frozen=True, kw_only=True):
    """The reply tokens of one choice of one call, as they lie in a row."""

    span_id: str
    choice: int
    trajectory_id: str
    role: str
    """The trajectory's name."""
    start: int
    """First token in the row."""
    stop: int
    """One past the last token in the row."""
    trained: bool = True
    """False where another row trains these tokens, or none does: they are context here."""
    offset: int = 0
    """Index in the reply of the token at ``start``; above 0 only where an over-long row was split inside the reply."""
    finish_reason: str | None = None
    """The choice's own, such as ``stop`` or ``length``."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One row: a root-to-leaf path of an episode's token tree.

    Example: prompt [5, 6], reply [7, 2], tool text [8], reply [9, 2] is
    token_ids [5 6 7 2 8 9 2], trained_mask [0 0 1 1 0 1 1], spans [2,4) and [5,7).
    """

    id: str
    """Deterministic: made of the episode id and the last call's span id and choice."""
    episode_id: str
    task_id: str
    token_ids: Int32
    """(T)"""
    trained_mask: Mask
    """(T) True on sampled tokens that this row trains; each sampled token is True in exactly one row."""
    logprobs: Float32
    """(T) the server's logprob of each sampled token; NaN where the token was not sampled."""
    versions: Int32
    """(T) policy version that sampled the token; -1 where the token was not sampled, or the server tells no version."""
    temperature: float
    """Temperature of every trained span in this row; a lineage that changes it is cut."""
    spans: list[SampledSpan]
    """In row order; together they cover every sampled token of the row."""
    cause: str | None = None
    """Why this row does not continue an earlier one: a break cause; None for a first row."""

    def __post_init__(self) -> None:
        n = len(self.token_ids)
        for name in ("trained_mask", "logprobs", "versions"):
            if len(getattr(self, name)) != n:
                raise AssertionError(f"{name} has {len(getattr(self, name))} entries, token_ids {n}")


class SpanCredit(msgspec.Struct, frozen=True, kw_only=True):
    """What gave a reply its advantages."""

    span_id: str
    choice: int
    level: Literal["call", "trajectory", "episode", "to_go", "none"]
    """Whose reward it was; ``to_go``: its own and what came after it; ``none``: nothing that contains it was scored."""
    rule: str
    """The estimator, under verl's name."""
    score: float | None
    """The reward of its own call, trajectory or episode."""
    shares: dict[str, float]
    """Id of the call or of each trajectory that has a word -> its share; they add up to 1."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A sample with its credit: what the engine trains on."""

    sample: Sample
    advantages: Float32
    """(T) 0 where not trained."""
    weights: Float32
    """(T) share of each trained token in the loss, before the batch's denominator; 0 where not trained, 1 for token-mean."""
    old_logprobs: Float32
    """(T) logprobs of the policy that the ratio is taken to; NaN where not sampled."""
    ref_logprobs: Float32 | None = None
    """(T) logprobs of the KL reference; None where no KL term is used."""
    is_weights: Float32 | None = None
    """(T) importance weights of a rollout correction; None where none is used."""
    group: str
    """Task group; mini-batches are never cut inside one."""
    credit: list[SpanCredit] = []
    """What gave each reply that this row trains its advantages."""


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """What one optimizer step sees."""

    rows: list[Row]
    denominator: float
    """What the summed, weighted token losses are divided by: for token-mean, the number of trained tokens of the batch."""
    step: int
    policy_version: int
