"""verl's ``grpo_vectorized``."""

from rllm_trainer.advantages.base import Rule

__all__ = ["RULE"]

RULE = Rule(
    name="grpo_vectorized",
    summary="``grpo``, computed over all groups at once.",
    grouped=True,
    inert_without_spread=True,
)
