"""verl's ``remax``."""

from rllm_trainer.advantages.base import Rule

__all__ = ["RULE"]

RULE = Rule(
    name="remax",
    summary="Score minus that of the greedy reply to the same row.",
    grouped=False,
    inert_without_spread=False,
    needs=frozenset({"greedy"}),
)
