"""verl's ``gdpo``."""

from rllm_trainer.advantages.base import Rule

__all__ = ["RULE"]

RULE = Rule(
    name="gdpo",
    summary="Each reward normalised by itself in its group, then summed and whitened over the batch.",
    grouped=True,
    inert_without_spread=False,
    whitens=True,
    needs=frozenset({"components"}),
)
