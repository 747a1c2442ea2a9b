"""The trainer's and the server's logprobs of the same tokens in, proof that a swap took place out, or an error that says what is served.

Before the swap the two must agree on the old weights; how far they do not is the noise of that pair of programs. Where the trainer's
new logprobs differ from its old ones by more than ten times that noise, the server must have moved with them; where no token does, logprobs
cannot tell old from new and the digest of what the server holds is asked for instead. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from rllm_trainer.exceptions import ServerError
from rllm_trainer.serving.base import Probe
from rllm_trainer.types import Float32, Row

__all__ = ["SwapNotProven", "Verdict", "judge", "telling_rows"]

_LEAST_NOISE = 0.02
"""Part of the noise that is allowed; two programs of one precision differ by this much (2e-5 nats in float32) even where a few tokens
show less."""
_TELLING = 10.0
"""A change is asked for where it exceeds the noise this many times."""
_ALLOWED = 5.0
"""The served logprobs may differ from the new ones by the noise this many times."""
_LITTLE_LONGER = 1.125
"""As long as the shortest: up to this many times."""


class SwapNotProven(ServerError):
    """The server does not serve the weights that it was given; the run must not go on with it."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What the logprobs say of a swap."""

    proof: Literal["logprobs", "digest"]
    """``digest``: no token moved far enough to tell; the digest must be compared."""
    max_difference: float
    """Largest |server - trainer| under the new weights, nats."""
    noise: float
    """Largest |server - trainer| under the old weights, nats."""
    telling_tokens: int
    """Tokens whose logprob moved by more than ten times the noise."""


def judge(
    probe: Probe, before: Sequence[Float32], after: Sequence[Float32], *, most_noise: float = 1e-3, what: str = "logprobs"
) -> Verdict:
    """Compare the server before and after a swap with the trainer.

    Args:
        probe: the trainer's side.
        before: the server's logprob of each token before the swap, rows (T); NaN where it was not asked for.
        after: the same after it.
        most_noise: nats; more than this before the swap means that the server was not serving the trainer's old weights. 1e-3 suits
            float32 on both sides; a bfloat16 server needs about 0.5.
        what: names the comparison in messages.

    Raises:
        SwapNotProven: the server served something else before, or does not serve the new weights now.
    """
    old, new, was, now = (np.concatenate(rows).astype(np.float64) for rows in (probe.old, probe.new, before, after))
    known = ~(np.isnan(old) | np.isnan(new) | np.isnan(was) | np.isnan(now))
    if not known.any():
        raise ValueError("got a probe without a single token that has logprobs on all sides; expected rows of two tokens or more")
    old, new, was, now = old[known], new[known], was[known], now[known]
    measured = float(np.abs(was - old).max())
    if not measured <= most_noise:
        raise SwapNotProven(
            f"before the swap the server's {what} differed from the trainer's by up to {measured:.2g} nats "
            f"(at most {most_noise:g} was expected): it was not serving the weights that the trainer had"
        )
    noise = max(measured, _LEAST_NOISE * most_noise)
    moved = np.abs(new - old) > _TELLING * noise
    difference = float(np.abs(now - new).max())
    if not difference <= _ALLOWED * noise:
        worst = int(np.abs(now - new).argmax())
        stayed = bool(moved.any()) and bool((np.abs(now - old)[moved] <= _ALLOWED * noise).all())
        seen = "it still serves the old weights" if stayed else "it serves neither the old nor the new weights whole"
        raise SwapNotProven(
            f"after the swap the server's {what} differ from the trainer's new ones by up to {difference:.2g} nats (noise {noise:.2g}; the "
            f"worst token went from {old[worst]:.4f} to {new[worst]:.4f}, the server says {now[worst]:.4f}): {seen}"
        )
    return Verdict(proof="logprobs" if moved.any() else "digest", max_difference=difference, noise=noise, telling_tokens=int(moved.sum()))


def telling_rows(rows: Sequence[Row], *, most_tokens: int = 64, most_rows: int = 4) -> list[tuple[int, int]]:
    """(row, stop) of the beginnings of rows that an update should move most: each up to the end of a reply that is trained.

    A token moves the further, the larger its advantage and the less likely it was. Scoring costs by the token, so of one that is to be
    looked at in its context short ones are taken: of ``most_tokens`` together, or as long as the shortest one there is.
    """
    rows_of_one = [number for number, row in enumerate(rows) if row.sample.temperature == rows[0].sample.temperature]
    begun = [_beginning(rows[number], span.stop, number) for number in rows_of_one for span in rows[number].sample.spans if span.trained]
    if not begun:
        return []
    left = max(most_tokens, min(stop for _, stop, _ in begun) * _LITTLE_LONGER)
    picked: dict[int, int] = {}
    for _, stop, number in sorted(begun, key=lambda one: (-one[0], one[1:])):
        if number not in picked and stop <= left and len(picked) < most_rows:
            picked[number] = stop
            left -= stop
    return sorted(picked.items())


def _beginning(row: Row, stop: int, number: int) -> tuple[float, int, int]:
    """(how far its tokens should move together, stop, number)."""
    trained = row.sample.trained_mask[:stop]
    unlikely = 1 - np.exp(np.nan_to_num(row.sample.logprobs[:stop][trained], nan=0.0))
    return float((np.abs(row.advantages[:stop][trained]) * unlikely).sum()), stop, number
