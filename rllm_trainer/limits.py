"""How little of what was sampled may be trained, how old it may be, and how far trainer and server may be apart, before a run stops."""

from __future__ import annotations

from typing import Annotated

import msgspec

__all__ = ["Limits"]

_Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a run stops rather than train on what is left; None: never for this."""

    share_trained: _Share | None = 0.5
    """Least share of the sampled tokens that is trained, of those that no setting leaves out (``reject_below``, ``mask_truncated``)."""
    groups_without_signal: _Share | None = None
    """Largest share of groups."""
    staleness: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Most versions behind."""
    ratio_p99: Annotated[float, msgspec.Meta(ge=1)] | None = 10.0
    """Largest factor between trainer and server."""
