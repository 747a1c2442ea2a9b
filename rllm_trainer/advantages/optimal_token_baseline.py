"""verl's ``optimal_token_baseline``."""

from rllm_trainer.advantages.base import Rule

__all__ = ["RULE"]

RULE = Rule(
    name="optimal_token_baseline",
    summary="Return minus a baseline of its own at each token, weighted by the path's variance so far.",
    grouped=True,
    inert_without_spread=False,
    needs=frozenset({"sum_pi_squared"}),
)
