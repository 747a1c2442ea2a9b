"""verl's ``gae``."""

from rllm_trainer.advantages.base import Rule

__all__ = ["RULE"]

RULE = Rule(
    name="gae",
    summary="Generalised advantages of a critic.",
    grouped=False,
    inert_without_spread=False,
    refused="its critic cannot be loaded without a GPU (verl 0.9.1 fixes flash attention for value heads); "
    "use 'grpo', 'rloo' or 'reinforce_plus_plus'",
)
