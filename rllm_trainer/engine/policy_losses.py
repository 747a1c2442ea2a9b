"""verl's policy losses by name: what each needs so that its gradient does not depend on how the batch is cut, or why it is refused.

The losses themselves are verl's functions, called in the engine's process; this table is what must be known about them before. Of a loss
that a module of the user's registered with verl nothing is known, so it is called once over the whole batch, as verl would call it there.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from rllm_trainer.advantages.registered import registered_in
from rllm_trainer.exceptions import SettingError

__all__ = ["POLICY_LOSSES", "PolicyLoss", "policy_loss"]


class PolicyLoss(msgspec.Struct, frozen=True, kw_only=True):
    """One of verl's losses, as our engine must treat it."""

    name: str
    over_sequences: bool = False
    """A token's loss depends on the other tokens of its trajectory, so these must be computed at once."""
    whole_batch: bool = False
    """A token's loss may depend on any other of the batch: the loss is computed once, over the logprobs of a first pass, and a second
    pass takes the gradient, each token's logprob times what the loss changes with it."""
    zero_is_inert: bool = True
    """A token with advantage 0 has a gradient of exactly 0."""
    mean: Literal["ours", "token-mean of sequences", "mean of sequences", "verl's"] = "ours"
    """Who averages: verl sums and we divide; or verl ignores the aggregation asked for and takes its own mean; or, over the whole
    batch, verl averages as asked."""
    loss_agg: str | None = None
    """The only ``loss_agg`` that it can have, where verl fixes it."""
    needs: tuple[str, ...] = ()
    """Entries of ``verl={"actor": {...}}`` without which verl refuses it."""
    module: str | None = None
    """The user's module that registered it with verl; None: it is verl's own."""


_SEQUENCE_MEAN = "seq-mean-token-mean"
POLICY_LOSSES: dict[str, PolicyLoss] = {
    loss.name: loss
    for loss in (
        PolicyLoss(name="vanilla"),
        PolicyLoss(name="cispo"),
        PolicyLoss(name="dppo_kl"),
        PolicyLoss(name="dppo_tv"),
        PolicyLoss(name="dro", zero_is_inert=False, needs=("policy_loss.dro_beta",)),
        PolicyLoss(name="geo_mean", over_sequences=True, mean="mean of sequences", loss_agg=_SEQUENCE_MEAN),
        PolicyLoss(name="gpg"),
        PolicyLoss(name="gspo", over_sequences=True),
        PolicyLoss(name="sapo", mean="token-mean of sequences", loss_agg=_SEQUENCE_MEAN),
        PolicyLoss(name="clip_cov", whole_batch=True, zero_is_inert=False),
        PolicyLoss(name="kl_cov", whole_batch=True, zero_is_inert=False),
        PolicyLoss(name="bypass_mode", whole_batch=True, zero_is_inert=False, mean="verl's", needs=("policy_loss.rollout_correction",)),
    )
}


def policy_loss(name: str, *, loss_agg: str) -> PolicyLoss:
    """The loss of that name: verl's, or one that a module of the user's registered with verl in this process.

    Raises:
        SettingError: no such loss, or it cannot be aggregated as asked.
    """
    found = POLICY_LOSSES.get(name)
    if found is None:
        module = registered_in("policy_loss", name)
        if module is None:
            usable = ", ".join(sorted(POLICY_LOSSES))
            raise SettingError(f"policy_loss={name!r}: neither verl nor a module of yours has such a loss; choose one of {usable}")
        found = PolicyLoss(name=name, whole_batch=True, zero_is_inert=False, mean="verl's", module=module)
    if found.loss_agg is not None and loss_agg != found.loss_agg:
        raise SettingError(
            f"policy_loss={name!r} is always aggregated as {found.loss_agg!r}; set loss_agg={found.loss_agg!r}, got {loss_agg!r}"
        )
    return found
