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

__all__ = ["SwapNotProven", "Verdict", "judge", "telling_windows"]

_LEAST_NOISE = 0.05
"""Part of the noise that is allowed: two programs in float32 differ by this much (5e-5 nats) on one token of thousands, even where the
few that are looked at show less."""
_LEAST_HALF = 0.01
"""Nats; the same in half precision."""
_TELLING = 10.0
"""A change is asked for where it exceeds the noise this many times."""
_ALLOWED = 5.0
"""The served logprobs may differ from the new ones by the noise this many times."""
_ANY = 1e-9
"""What a trained token that should not move counts beside one that is not trained."""


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
    noise = max(measured, min(_LEAST_NOISE * most_noise, _LEAST_HALF))
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


def telling_windows(rows: Sequence[Row], *, length: int = 8, most: int = 2) -> list[tuple[int, int, int]]:
    """(row, start, stop) of at most so many stretches of tokens, no two alike, that an update should move most.

    A token moves the further, the larger its advantage and the less likely it was. Scoring costs by the token, and weights that are not
    the right ones show on any: what came long before is left out.
    """
    found = sorted((_window(row, length, number) for number, row in enumerate(rows) if row.sample.trained_mask[1:].any()), reverse=True)
    picked: dict[bytes, tuple[int, int, int]] = {}
    for _, nearness, start, stop in found:
        picked.setdefault(rows[-nearness].sample.token_ids[start:stop].tobytes(), (-nearness, start, stop))
        if len(picked) == most:
            break
    return sorted(picked.values())


def _window(row: Row, length: int, number: int) -> tuple[float, int, int, int]:
    """(how far its tokens should move together, the first one left out; minus the row's number; start; stop) of the row's best stretch."""
    trained, count = row.sample.trained_mask, len(row.sample.token_ids)
    unlikely = 1 - np.exp(np.nan_to_num(row.sample.logprobs, nan=0.0))
    far = np.where(trained, np.abs(row.advantages) * unlikely + _ANY, 0.0)
    until = np.concatenate([[0.0], np.cumsum(far)])
    stops = np.arange(min(length, count), count + 1)
    starts = np.maximum(stops - length, 0)
    together = until[stops] - until[starts + 1]
    best = int(together.argmax())
    return float(together[best]), -number, int(starts[best]), int(stops[best])
