"""verl's ``tir_optimal_token_baseline``."""

from rllm_trainer.advantages.base import Rule

__all__ = ["RULE"]

RULE = Rule(
    name="tir_optimal_token_baseline",
    summary="``optimal_token_baseline`` for trajectories of several turns.",
    grouped=True,
    inert_without_spread=False,
    needs=frozenset({"sum_pi_squared"}),
)
