"""verl's ``rloo``."""

from rllm_trainer.advantages.base import Rule

__all__ = ["RULE"]

RULE = Rule(
    name="rloo",
    summary="Score minus the mean of the others in the group.",
    grouped=True,
    inert_without_spread=True,
)
