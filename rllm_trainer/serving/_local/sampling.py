"""Logits and each row's wishes in, one token a row with the logprob that it was sampled with out.

The logprob reported is the sampled distribution's own: after penalties, bias, grammar, temperature and truncation. Temperature 0 takes the
likeliest token and reports its logprob at temperature 1. A token is found by inverting the cumulative probability at one uniform number
of the row's own generator, so the same seed gives the same token whoever else is in the batch; sums run in float64 where it matters.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np
import torch
from torch import Tensor

from rllm_trainer.serving._local.kernels import floats, ints

__all__ = ["Row", "Sampled", "SamplingParams", "gathered_logprobs", "generator", "sample", "top_logprobs"]

_BLOCK = 256


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How a request wants its tokens drawn; the defaults are the model's own distribution."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: off."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}

    @property
    def reshapes(self) -> bool:
        """Changes logits before the temperature."""
        return bool(self.presence_penalty or self.frequency_penalty or self.logit_bias) or self.repetition_penalty != 1.0

    @property
    def truncates(self) -> bool:
        return self.temperature > 0 and (self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0)


class Row(msgspec.Struct, kw_only=True, eq=False):
    """What one row of logits is sampled with."""

    params: SamplingParams
    rng: np.random.Generator
    prompt_ids: Sequence[int]
    sampled_ids: Sequence[int]
    allowed: Tensor | None = None
    """(vocab) bool: what a grammar allows next; None: everything."""
    top: int = 0
    """How many of the likeliest tokens to report."""


class Sampled(msgspec.Struct, frozen=True, kw_only=True):
    """One drawn token."""

    token_id: int
    logprob: float
    """NaN where the model's logits were not finite."""
    top: list[tuple[int, float]]
    """(id, logprob) of the likeliest tokens, best first."""


def generator(seed: int, choice: int) -> np.random.Generator:
    """The random numbers of one choice of one request; any integer is a seed, and those of 64 bits, negative ones too, all differ."""
    return np.random.Generator(np.random.Philox(key=np.array([seed & (2**64 - 1), choice], np.uint64)))


def sample(logits_RV: Tensor, rows: Sequence[Row]) -> list[Sampled]:
    """Draw one token per row. The logits are overwritten."""
    for index, row in enumerate(rows):
        if row.params.reshapes:
            _reshape(logits_RV[index], row)
        if row.allowed is not None:
            logits_RV[index].masked_fill_(~row.allowed, -math.inf)
    temperatures = [row.params.temperature or 1.0 for row in rows]
    if any(t != 1.0 for t in temperatures):
        logits_RV.div_(torch.tensor(temperatures).unsqueeze(1))
    for index, row in enumerate(rows):
        if row.params.truncates:
            _truncate(logits_RV[index], row.params)
    peaks = logits_RV.amax(dim=1, keepdim=True)
    mass = torch.sub(logits_RV, peaks).exp_()
    ids, totals = _invert(mass, torch.tensor([row.rng.random() for row in rows], dtype=torch.float64))
    ids.clamp_(max=logits_RV.shape[1] - 1)
    greedy = [index for index, row in enumerate(rows) if row.params.temperature == 0.0]
    if greedy:
        ids[greedy] = logits_RV[greedy].argmax(dim=1)
    normalizers = peaks.squeeze(1).double() + totals.log()
    logprobs = floats(logits_RV.gather(1, ids.unsqueeze(1)).squeeze(1).double() - normalizers)
    out: list[Sampled] = []
    for index, (row, token, logprob) in enumerate(zip(rows, ints(ids), logprobs, strict=True)):
        top = _top(logits_RV[index], float(normalizers[index]), row.top) if row.top else []
        out.append(Sampled(token_id=token, logprob=logprob if logprob != logprob else min(logprob, 0.0), top=top))
    return out


def gathered_logprobs(logits_RV: Tensor, ids: Sequence[int], temperature: float) -> list[float]:
    """The logprob of one given token per row."""
    scaled = logits_RV if temperature == 1.0 else logits_RV / temperature
    picked = torch.log_softmax(scaled, dim=1).gather(1, torch.tensor(ids).unsqueeze(1))
    return floats(picked.squeeze(1))


def top_logprobs(logits_RV: Tensor, count: int) -> list[list[tuple[int, float]]]:
    """The likeliest tokens of each row at temperature 1, best first."""
    normalizers = torch.logsumexp(logits_RV, dim=1)
    return [_top(row, float(n), count) for row, n in zip(logits_RV, normalizers, strict=True)]


def _top(logits_V: Tensor, normalizer: float, count: int) -> list[tuple[int, float]]:
    values, ids = logits_V.topk(count)
    return [(i, v - normalizer) for i, v in zip(ints(ids), floats(values), strict=True)]


def _invert(mass_RV: Tensor, uniform_R: Tensor) -> tuple[Tensor, Tensor]:
    """Index where each row's cumulative mass passes its uniform number, and each row's total mass (float64)."""
    rows, vocab = mass_RV.shape
    if vocab % _BLOCK:
        mass_RV = torch.nn.functional.pad(mass_RV, (0, _BLOCK - vocab % _BLOCK))
    blocks = mass_RV.view(rows, -1, _BLOCK)
    upto = blocks.sum(dim=2).double().cumsum(dim=1)
    target = (uniform_R * upto[:, -1]).unsqueeze(1)
    block = torch.searchsorted(upto, target, right=True).clamp_(max=upto.shape[1] - 1)
    before = torch.where(block > 0, upto.gather(1, (block - 1).clamp_(min=0)), torch.zeros_like(target))
    inside = blocks[torch.arange(rows), block.squeeze(1)]
    within = torch.searchsorted(inside.double().cumsum(dim=1), target - before, right=True)
    # Rounding between the two sums may point past the block's last possible token.
    last = _BLOCK - 1 - (inside > 0).flip(1).int().argmax(dim=1, keepdim=True)
    return (block * _BLOCK + torch.minimum(within, last)).squeeze(1), upto[:, -1]


def _reshape(logits_V: Tensor, row: Row) -> None:
    params = row.params
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*row.prompt_ids, *row.sampled_ids}))
        values = logits_V[seen]
        logits_V[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if (params.presence_penalty or params.frequency_penalty) and row.sampled_ids:
        counts = Counter(row.sampled_ids)
        amounts = torch.tensor([params.presence_penalty + params.frequency_penalty * n for n in counts.values()])
        logits_V[torch.tensor(list(counts))] -= amounts
    if params.logit_bias:
        logits_V[torch.tensor(list(params.logit_bias))] += torch.tensor(list(params.logit_bias.values()))


def _truncate(logits_V: Tensor, params: SamplingParams) -> None:
    if params.min_p > 0.0:
        logits_V.masked_fill_(logits_V < logits_V.max() + math.log(params.min_p), -math.inf)
    if 0 < params.top_k < logits_V.shape[0]:
        logits_V.masked_fill_(logits_V < logits_V.topk(params.top_k).values[-1], -math.inf)
    if params.top_p < 1.0:
        ordered, ids = logits_V.sort(descending=True)
        probabilities = torch.softmax(ordered.double(), dim=0)
        dropped = probabilities.cumsum(dim=0) - probabilities >= params.top_p
        logits_V[ids[dropped]] = -math.inf
