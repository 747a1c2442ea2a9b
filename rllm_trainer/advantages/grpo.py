"""verl's ``grpo``."""

from rllm_trainer.advantages.base import Rule

__all__ = ["RULE"]

RULE = Rule(
    name="grpo",
    summary="Score minus the group's mean, divided by its deviation (``norm_by_std``).",
    grouped=True,
    inert_without_spread=True,
)
