"""verl's ``opo``."""

from rllm_trainer.advantages.base import Rule

__all__ = ["RULE"]

RULE = Rule(
    name="opo",
    summary="Score minus the group's mean weighted by length.",
    grouped=True,
    inert_without_spread=True,
)
