"""verl's ``reinforce_plus_plus``."""

from rllm_trainer.advantages.base import Rule

__all__ = ["RULE"]

RULE = Rule(
    name="reinforce_plus_plus",
    summary="Discounted return, whitened over the tokens of the batch; no group.",
    grouped=False,
    inert_without_spread=False,
    whitens=True,
)
