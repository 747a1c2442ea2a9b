"""verl's ``reinforce_plus_plus_baseline``."""

from rllm_trainer.advantages.base import Rule

__all__ = ["RULE"]

RULE = Rule(
    name="reinforce_plus_plus_baseline",
    summary="Score minus the group's mean, whitened over the tokens of the batch.",
    grouped=True,
    inert_without_spread=False,
    whitens=True,
)
