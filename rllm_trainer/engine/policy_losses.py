"""verl's policy losses by name: what each needs so that its gradient does not depend on how the batch is cut, or why it is refused.

The losses themselves are verl's functions, called in the engine's process; this table is what must be known about them before.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from rllm_trainer.exceptions import SettingError

__all__ = ["POLICY_LOSSES", "PolicyLoss", "policy_loss"]


class PolicyLoss(msgspec.Struct, frozen=True, kw_only=True):
    """One of verl's losses, as our engine must treat it."""

    name: str
    over_sequences: bool = False
    """A token's loss depends on the other tokens of its trajectory, so these must be computed at once."""
    zero_is_inert: bool = True
    """A token with advantage 0 has a gradient of exactly 0."""
    mean: Literal["ours", "token-mean of sequences", "mean of sequences"] = "ours"
    """Who averages: verl sums and we divide; or verl ignores the aggregation asked for and takes its own mean."""
    loss_agg: str | None = None
    """The only ``loss_agg`` that it can have, where verl fixes it."""
    needs: tuple[str, ...] = ()
    """Entries of ``verl={"actor": {...}}`` without which verl refuses it."""
    refused: str | None = None
    """Why it cannot be used here."""


_SEQUENCE_MEAN = "seq-mean-token-mean"
_COVARIANCE = (
    "verl picks its tokens by the covariance within one micro-batch, so the gradient would depend on the micro-batch size; "
    "use 'vanilla', 'cispo' or 'gspo'"
)

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
        PolicyLoss(name="clip_cov", refused=_COVARIANCE),
        PolicyLoss(name="kl_cov", refused=_COVARIANCE),
        PolicyLoss(
            name="bypass_mode",
            refused="here the ratio is taken to the recorded logprobs already, which is what it does; use 'vanilla' (its ppo_clip) "
            "or 'gpg' (its reinforce)",
        ),
    )
}


def policy_loss(name: str, *, loss_agg: str) -> PolicyLoss:
    """The loss of that name.

    Raises:
        SettingError: no such loss; it is refused here; or it cannot be aggregated as asked.
    """
    found = POLICY_LOSSES.get(name)
    usable = ", ".join(sorted(known for known, loss in POLICY_LOSSES.items() if loss.refused is None))
    if found is None:
        raise SettingError(f"policy_loss={name!r}: verl has no such loss; choose one of {usable}")
    if found.refused is not None:
        raise SettingError(f"policy_loss={name!r} is refused: {found.refused}")
    if found.loss_agg is not None and loss_agg != found.loss_agg:
        raise SettingError(
            f"policy_loss={name!r} is always aggregated as {found.loss_agg!r}; set loss_agg={found.loss_agg!r}, got {loss_agg!r}"
        )
    return found
