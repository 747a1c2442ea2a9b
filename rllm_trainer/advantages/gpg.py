"""verl's ``gpg``."""

from rllm_trainer.advantages.base import Rule

__all__ = ["RULE"]

RULE = Rule(
    name="gpg",
    summary="Score minus the group's mean, scaled by the share of scores that are not 0.",
    grouped=True,
    inert_without_spread=True,
)
