"""verl's ``grpo_passk``."""

from rllm_trainer.advantages.base import Rule

__all__ = ["RULE"]

RULE = Rule(
    name="grpo_passk",
    summary="Only the best of a group is credited, by its lead over the second (pass@k).",
    grouped=True,
    inert_without_spread=True,
)
