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
from rllm_trainer.types import Float32, Int32

__all__ = ["SwapNotProven", "Verdict", "judge", "pick_probe"]

_LEAST_NOISE = 2e-5
"""Nats; two float32 programs differ by this much even where one sample shows less."""
_TELLING = 10.0
"""A change is asked for where it exceeds the noise this many times."""
_ALLOWED = 5.0
"""The served logprobs may differ from the new ones by the noise this many times."""


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
    noise = max(measured, _LEAST_NOISE)
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


def pick_probe(
    rows: Sequence[Int32], old: Sequence[Float32], new: Sequence[Float32], *, temperature: float = 1.0, max_rows: int = 4
) -> Probe:
    """The rows with the tokens that moved most, at most ``max_rows`` of them, in their order."""
    moves = [float(np.nanmax(np.abs(n - o))) if len(o) > 1 else 0.0 for o, n in zip(old, new, strict=True)]
    kept = sorted(sorted(range(len(rows)), key=lambda i: -moves[i])[:max_rows])
    return Probe(rows=[rows[i] for i in kept], old=[old[i] for i in kept], new=[new[i] for i in kept], temperature=temperature)
