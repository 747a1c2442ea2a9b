"""What a rule of credit is: verl's estimator of that name, what it takes, and what it makes of groups that say nothing.

The estimators are verl's own functions, run in the engine's process. A *unit* is what a group counts once: an episode, a trajectory
or a call. U = units, L = trained tokens of all units, one unit after another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import msgspec

from rllm_trainer.types import Float32, Int32

__all__ = ["Estimates", "Estimator", "Rule", "Units"]

Need = Literal["components", "greedy", "sum_pi_squared"]


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """One estimator, under verl's name."""

    name: str
    summary: str
    """One line for people."""
    grouped: bool
    """Its baseline is the unit's group, so a unit alone has none: advantage 0, counted."""
    inert_without_spread: bool
    """A group of equal scores has advantage 0; set exactly, where verl leaves what rounding left."""
    whitens: bool = False
    """It divides by the deviation over the tokens of the batch, which a single token does not have: then all is 0."""
    needs: frozenset[Need] = frozenset()
    """What it takes besides scores: each reward by name, what a greedy rollout of the row was worth, or the sum of squared
    probabilities at each token."""
    refused: str | None = None
    """Why it cannot be used here."""
    module: str | None = None
    """The user's module that registered it with verl; None: it is verl's own, or ``function`` is it."""
    function: Callable[[Units], Float32] | None = None
    """A user's own rule: units in, (L) advantages out, run here. None: verl's estimator, run in the engine's process."""


class Units(msgspec.Struct, frozen=True, kw_only=True):
    """What an estimator gets."""

    lengths: Int32
    """(U) trained tokens of each unit, 0 where it has none: its score counts in its group all the same."""
    scores: Float32
    """(U)"""
    groups: list[str]
    """(U)"""
    old_logprobs: Float32 | None = None
    """(L)"""
    ref_logprobs: Float32 | None = None
    """(L) given where the KL term is part of the reward."""
    sum_pi_squared: Float32 | None = None
    """(L)"""
    baselines: Float32 | None = None
    """(U) what a greedy rollout of the unit's row was worth; given where the rule takes it."""
    components: Mapping[str, Float32] = {}
    """Reward name -> (U) values."""


class Estimates(msgspec.Struct, frozen=True, kw_only=True):
    """What an estimator gives."""

    advantages: Float32
    """(L)"""
    totals: Float32
    """(U) score of each unit with its KL penalty, if the KL term is part of the reward."""


class Estimator(Protocol):
    """Who runs the rules and reads logprobs: the engine."""

    def estimate(self, rule: str, units: Units) -> Estimates:
        """verl's estimator of that name, once over all units."""
        ...

    def logprobs(self, rows: Sequence[Int32], *, temperatures: Sequence[float], reference: bool = False) -> list[Float32]:
        """As ``Engine.logprobs``."""
        ...

    def sum_pi_squared(self, rows: Sequence[Int32], *, temperatures: Sequence[float]) -> list[Any]:
        """For each row (T) the sum of squared probabilities of the distribution that each token was drawn from, NaN first."""
        ...
