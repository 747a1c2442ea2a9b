"""verl's ``rloo_vectorized``."""

from rllm_trainer.advantages.base import Rule

__all__ = ["RULE"]

RULE = Rule(
    name="rloo_vectorized",
    summary="``rloo``, computed over all groups at once.",
    grouped=True,
    inert_without_spread=True,
)
