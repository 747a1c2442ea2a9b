"""Weights, tokens and where their keys and values go in; hidden states out. The whole forward, on one flat row of tokens.

A step mixes decoding sequences (one token each, the first rows) and chunks of prompts (the rest): every matrix is multiplied once, and
only attention knows which token belongs to whom. Heads of a group attend as if they were positions of one query, so keys and values are
never repeated.
"""

from __future__ import annotations

import math

import msgspec
import torch
from torch import Tensor

from rllm_trainer.serving._local.arena import Arena
from rllm_trainer.serving._local.kernels import LEAST_ROWS
from rllm_trainer.serving._local.spec import ModelSpec, Rope
from rllm_trainer.serving._local.weights import Layer, Weights

__all__ = ["Chunk", "Decoding", "forward", "inverse_frequencies", "logits", "rotations"]

_sdpa = torch.nn.functional.scaled_dot_product_attention
_rms_norm = torch.nn.functional.rms_norm

_CALL_COST_TOKENS = 40
"""One attention call costs about as much as this many keys of one row; decides whether rows of uneven length share a call."""


class Chunk(msgspec.Struct, kw_only=True, eq=False):
    """Consecutive prompt tokens of one sequence."""

    draft: Tensor
    """Its keys and values, (layers, 2, kv heads, T, head_dim), filled up to ``start``."""
    ids: list[int]
    start: int


class Decoding(msgspec.Struct, kw_only=True, eq=False):
    """One new token for each row of the arena."""

    arena: Arena
    ids: list[int]
    positions: list[int]
    """Where each token goes in its row."""


class _Plan(msgspec.Struct, kw_only=True, eq=False):
    """What is the same in every layer of one step."""

    decoding: Decoding | None
    rows: int
    """Decoding rows."""
    slots: Tensor
    """Where each decoding row's keys go in a layer's flat (rows * kv heads * capacity) view, (rows * kv heads)."""
    span: int
    """Longest decoding row, its new token included."""
    mask: Tensor | None
    """(rows, 1, 1, span), None where all rows are equally long."""
    lengths: list[int] | None
    """Row by row attention with these lengths, where one padded call would cost more."""
    chunks: list[Chunk]
    chunk_masks: list[Tensor | None]
    rotation: Tensor
    """(N, 1, head_dim / 2) complex64."""
    unattended: list[Tensor]
    """Zeros (n, heads * head_dim) for the rows that are only there to make up ``LEAST_ROWS``; empty where there are none."""


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Radians per position of each pair, (head_dim / 2), in float32 step by step as transformers computes them: over hundreds of positions
    the last bit of a frequency is seen in the logprobs."""
    plain = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind != "llama3":
        return plain
    wavelength = 2 * math.pi / plain
    longest, shortest = rope.original_positions / rope.low_freq_factor, rope.original_positions / rope.high_freq_factor
    slowed = torch.where(wavelength > longest, plain / rope.factor, plain)
    smooth = (rope.original_positions / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    between = (1 - smooth) * slowed / rope.factor + smooth * slowed
    return torch.where((wavelength >= shortest) & (wavelength <= longest), between, slowed)


def rotations(spec: ModelSpec, positions: int) -> Tensor:
    """Complex rotation of each pair at each position, (positions, head_dim / 2) complex64."""
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), inverse_frequencies(spec.rope, spec.head_dim))
    return torch.complex(angles.cos(), angles.sin())


def forward(weights: Weights, table: Tensor, decoding: Decoding | None, chunks: list[Chunk]) -> Tensor:
    """Hidden states (N, hidden) before the last norm: decoding rows, then the chunks in order. Keys and values are written in place."""
    spec = weights.spec
    ids: list[int] = [] if decoding is None else list(decoding.ids)
    positions: list[int] = [] if decoding is None else list(decoding.positions)
    for chunk in chunks:
        ids += chunk.ids
        positions += range(chunk.start, chunk.start + len(chunk.ids))
    count = len(ids)
    spare = max(LEAST_ROWS - count, 0)
    plan = _plan(spec, decoding, chunks, table[torch.tensor(positions + [0] * spare)].unsqueeze(1), spare)
    x_NH = weights.embed[torch.tensor(ids + [0] * spare)]
    for index, layer in enumerate(weights.layers):
        x_NH = _layer(spec, layer, index, x_NH, plan)
    return x_NH[:count]


def logits(weights: Weights, hidden_RH: Tensor) -> Tensor:
    """(R, vocab) for the rows given."""
    rows = hidden_RH.shape[0]
    if rows < LEAST_ROWS:
        hidden_RH = torch.nn.functional.pad(hidden_RH, (0, 0, 0, LEAST_ROWS - rows))
    return weights.head(_rms_norm(hidden_RH, (weights.spec.hidden,), weights.norm, weights.spec.eps))[:rows]


def _plan(spec: ModelSpec, decoding: Decoding | None, chunks: list[Chunk], rotation: Tensor, spare: int) -> _Plan:
    unattended = [torch.zeros(spare, spec.heads * spec.head_dim)] if spare else []
    masks = [_causal(chunk.start, len(chunk.ids), spec.heads // spec.kv_heads) for chunk in chunks]
    if decoding is None:
        none = torch.empty(0, dtype=torch.int64)
        return _Plan(
            decoding=None,
            rows=0,
            slots=none,
            span=0,
            mask=None,
            lengths=None,
            chunks=chunks,
            chunk_masks=masks,
            rotation=rotation,
            unattended=unattended,
        )
    positions = torch.tensor(decoding.positions)
    rows = len(decoding.positions)
    heads = torch.arange(rows * spec.kv_heads).view(rows, spec.kv_heads)
    lengths = [p + 1 for p in decoding.positions]
    span = max(lengths)
    padded = rows * span
    uneven = padded - sum(lengths)
    apart = uneven > rows * _CALL_COST_TOKENS
    mask = None
    if uneven and not apart:
        mask = torch.zeros(rows, 1, 1, span)
        mask.masked_fill_((torch.arange(span) > positions.unsqueeze(1)).view(rows, 1, 1, span), float("-inf"))
    return _Plan(
        decoding=decoding,
        rows=rows,
        slots=(heads * decoding.arena.capacity + positions.unsqueeze(1)).flatten(),
        span=span,
        mask=mask,
        lengths=lengths if apart else None,
        chunks=chunks,
        chunk_masks=masks,
        rotation=rotation,
        unattended=unattended,
    )


def _causal(start: int, count: int, group: int) -> Tensor | None:
    if count == 1:
        return None
    mask = torch.full((count, start + count), float("-inf")).triu_(start + 1)
    return mask.expand(group, -1, -1).reshape(group * count, start + count)


def _layer(spec: ModelSpec, layer: Layer, index: int, x_NH: Tensor, plan: _Plan) -> Tensor:
    n, heads, kv_heads, dim = x_NH.shape[0], spec.heads, spec.kv_heads, spec.head_dim
    qkv = layer.qkv(_rms_norm(x_NH, (spec.hidden,), layer.norm1, spec.eps)).view(n, heads + 2 * kv_heads, dim)
    v = qkv[:, heads + kv_heads :]
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = qkv[:, :heads], qkv[:, heads : heads + kv_heads]
        qk = torch.cat([_rms_norm(q, (dim,), layer.q_norm, spec.eps), _rms_norm(k, (dim,), layer.k_norm, spec.eps)], dim=1)
    else:
        qk = qkv[:, : heads + kv_heads]
    pairs = torch.view_as_complex(qk.view(n, heads + kv_heads, dim // 2, 2))
    qk = torch.view_as_real(pairs * plan.rotation).flatten(2)
    attended = _attend(spec, index, qk[:, :heads], qk[:, heads:], v, plan)
    x_NH = layer.o.plus(attended, x_NH)
    gate_up = layer.gate_up(_rms_norm(x_NH, (spec.hidden,), layer.norm2, spec.eps))
    gate, up = gate_up.chunk(2, dim=1)
    return layer.down.plus(torch.nn.functional.silu(gate).mul_(up), x_NH)


def _attend(spec: ModelSpec, index: int, q: Tensor, k: Tensor, v: Tensor, plan: _Plan) -> Tensor:
    """Write keys and values, then attend; (N, heads * head_dim)."""
    parts = [_attend_rows(spec, index, q[: plan.rows], k[: plan.rows], v[: plan.rows], plan)] if plan.rows else []
    at, group = plan.rows, spec.heads // spec.kv_heads
    for chunk, mask in zip(plan.chunks, plan.chunk_masks, strict=True):
        count = len(chunk.ids)
        end = chunk.start + count
        keys, values = chunk.draft[index, 0], chunk.draft[index, 1]
        keys[:, chunk.start : end].copy_(k[at : at + count].transpose(0, 1))
        values[:, chunk.start : end].copy_(v[at : at + count].transpose(0, 1))
        grouped = q[at : at + count].view(count, spec.kv_heads, group, spec.head_dim).permute(1, 2, 0, 3)
        query = grouped.reshape(1, spec.kv_heads, group * count, spec.head_dim)
        out = _sdpa(query, keys[None, :, :end], values[None, :, :end], attn_mask=mask)
        parts.append(out.view(spec.heads, count, spec.head_dim).transpose(0, 1).reshape(count, -1))
        at += count
    parts += plan.unattended
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend_rows(spec: ModelSpec, index: int, q: Tensor, k: Tensor, v: Tensor, plan: _Plan) -> Tensor:
    assert plan.decoding is not None
    arena, rows = plan.decoding.arena, plan.rows
    keys, values = arena.k[index], arena.v[index]
    flat = (-1, spec.head_dim)
    keys.view(flat).index_copy_(0, plan.slots, k.reshape(flat))
    values.view(flat).index_copy_(0, plan.slots, v.reshape(flat))
    query = q.view(rows, spec.kv_heads, spec.heads // spec.kv_heads, spec.head_dim)
    if plan.lengths is None:
        out = _sdpa(query, keys[:rows, :, : plan.span], values[:rows, :, : plan.span], attn_mask=plan.mask)
    else:
        each = [
            _sdpa(query[r : r + 1], keys[r : r + 1, :, :length], values[r : r + 1, :, :length]) for r, length in enumerate(plan.lengths)
        ]
        out = torch.cat(each)
    return out.reshape(rows, -1)
