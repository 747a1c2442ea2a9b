"""A checkpoint's tensors in, one complete set of packed weights out, or an error that leaves what is served as it was.

A set is written over one that is no longer served, where there is one: two take turns, and neither is made anew. ``qkv`` and ``gate_up``
are fused. Rows of queries and keys are stored with the two halves of each rotary pair side by side, so that the rotation is one complex
product; scores do not change, and ``named_tensors`` gives every tensor back under its Hugging Face name, bit for bit. A tied head is
packed from the embedding of the same file, never kept from an earlier one.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, cast

import msgspec
import torch
from torch import Tensor

from rllm_trainer._digest import DigestBuilder
from rllm_trainer.serving._local.checkpoint import DTYPES, Checkpoint, WeightsError, staging
from rllm_trainer.serving._local.kernels import Linear, all_finite
from rllm_trainer.serving._local.spec import ModelSpec

__all__ = ["Layer", "Weights", "build", "check", "digest", "merged_with_adapter"]

_EMBED, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_BUFFERS = ("rotary_emb.inv_freq",)
_WORKERS = 4
"""Threads that copy and pack; it is memory traffic, which a few threads exhaust."""
_TALL = 2048
"""Rows of a vocabulary's matrix that one thread takes at a time."""

Get = Callable[[str], Tensor]
"""Name -> tensor in float32, good until this thread's next one."""


class Layer(msgspec.Struct, kw_only=True, eq=False):
    """One decoder layer as ``model.py`` multiplies it."""

    norm1: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Linear
    norm2: Tensor
    gate_up: Linear
    down: Linear


class Weights(msgspec.Struct, kw_only=True, eq=False):
    """All of a model's weights at one policy version, float32."""

    spec: ModelSpec
    embed: Tensor
    layers: list[Layer]
    norm: Tensor
    head: Linear
    dtypes: dict[str, str]
    """Safetensors dtype of each tensor as it came; served values are float32."""


def check(spec: ModelSpec, checkpoint: Checkpoint) -> None:
    """Raises ``WeightsError`` unless names, shapes and dtypes are this model's. Values are checked as they are read."""
    want = spec.tensors()
    have = checkpoint.shapes
    missing = sorted(want.keys() - have.keys())
    extra = sorted(n for n in have.keys() - want.keys() if not n.endswith(_BUFFERS) and not (spec.tied and n == _HEAD))
    if missing or extra:
        raise WeightsError(
            f"got {checkpoint.path} with {len(have)} tensors: {len(missing)} missing {missing[:3]}, {len(extra)} unknown {extra[:3]}; "
            f"expected the {len(want)} tensors of this {spec.family} model under their Hugging Face names"
        )
    for name, shape in want.items():
        if have[name] != shape:
            raise WeightsError(f"got {name} of shape {have[name]} in {checkpoint.path}; expected {shape}")
    odd = sorted({code for name, code in checkpoint.dtypes.items() if name in want} - DTYPES.keys())
    if odd:
        raise WeightsError(f"got tensors of dtype {odd} in {checkpoint.path}; expected one of {sorted(DTYPES)}")
    if spec.tied and _HEAD in have and not torch.equal(checkpoint.get(_HEAD), checkpoint.get(_EMBED)):
        raise WeightsError(f"got {_HEAD} that differs from {_EMBED} in {checkpoint.path}, but this model ties them; send only {_EMBED}")


def build(spec: ModelSpec, checkpoint: Checkpoint, get: Get | None = None, *, over: Weights | None = None) -> Weights:
    """A set of weights beside the one that is served. Raises ``WeightsError`` at a value that is not finite.

    ``get`` overrides where tensors come from (a merged adapter). ``over``: a set that nothing computes with any more; it is written over,
    and holds nothing of use where this fails.
    """
    check(spec, checkpoint)
    raw = get or checkpoint.floats

    def source(name: str) -> Tensor:
        return _finite(name, raw(name), checkpoint)

    @torch.inference_mode()
    def layer(index: int) -> Layer:
        return _layer(spec, f"model.layers.{index}.", source, over and over.layers[index])

    with ThreadPoolExecutor(min(os.cpu_count() or 1, _WORKERS), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        layers = [pool.submit(layer, index) for index in range(spec.layers)]
        embed, head = _vocabulary(spec, checkpoint, raw, over, pool)
        return Weights(
            spec=spec,
            embed=embed,
            layers=[done.result() for done in layers],
            norm=source("model.norm.weight").clone(),
            head=head,
            dtypes={n: code for n, code in checkpoint.dtypes.items() if n == _HEAD or n in spec.tensors()},
        )


def _finite(name: str, values: Tensor, checkpoint: Checkpoint) -> Tensor:
    if not all_finite(values):
        raise WeightsError(f"got {name} with a value that is not finite in {checkpoint.path}; the weights before it stay served")
    return values


@torch.inference_mode()
def _vocabulary(spec: ModelSpec, checkpoint: Checkpoint, raw: Get, over: Weights | None, pool: ThreadPoolExecutor) -> tuple[Tensor, Linear]:
    """Embedding and head, some rows a thread at a time: each is as large as several layers."""
    shape = spec.tensors()[_EMBED]
    embed = torch.empty(shape) if over is None else over.embed
    head = None if over is None or not over.head.takes([shape[0]]) else over.head
    if over is not None and head is None:
        over.head.give_up()

    def put(name: str, *, into_embed: bool, into_head: Linear | None) -> None:
        plain = raw(name)

        @torch.inference_mode()
        def some(start: int) -> None:
            rows = _finite(name, plain[start : start + _TALL], checkpoint)
            if into_embed:
                embed[start : start + _TALL].copy_(rows)
            if into_head is not None:
                into_head.put(start, rows)

        pieces: list[Future[None]] = [pool.submit(some, start) for start in range(0, shape[0], _TALL)]
        for piece in pieces:
            piece.result()

    put(_EMBED, into_embed=True, into_head=head if spec.tied else None)
    if head is None:
        return embed, Linear(embed if spec.tied else _finite(_HEAD, raw(_HEAD), checkpoint))
    if not spec.tied:
        put(_HEAD, into_embed=False, into_head=head)
    return embed, head


def _layer(spec: ModelSpec, p: str, source: Get, over: Layer | None) -> Layer:
    """One layer; its matrices lie where those of ``over`` lay, if they can."""
    shapes = spec.tensors()

    def placed(name: str, out: Tensor, heads: int | None) -> None:
        """A tensor as it is; or, of so many heads, its rows from (first halves, second halves) of each to pairs."""
        plain = source(p + name)
        if heads is None:
            out.copy_(plain)
        else:
            rest = plain.shape[1:]
            out.view(heads, -1, 2, *rest).copy_(plain.view(heads, 2, -1, *rest).transpose(1, 2))

    def stacked(names: list[str], heads: Sequence[int], *, staged: bool) -> Tensor:
        """The named tensors one below the other, the first ``len(heads)`` of them in pairs.

        ``staged``: the result is only good until the next one of this thread.
        """
        parts = [shapes[p + name] for name in names]
        shape = (sum(part[0] for part in parts), *parts[0][1:])
        out, at = staging("stacked", shape) if staged else torch.empty(shape), 0
        for index, (name, part) in enumerate(zip(names, parts, strict=True)):
            placed(name, out[at : at + part[0]], heads[index] if index < len(heads) else None)
            at += part[0]
        return out

    def linear(names: list[str], bias: bool, old: Linear | None, heads: Sequence[int] = ()) -> Linear:
        """``heads``: of those of the named matrices whose rows become rotary pairs."""
        matrices = [f"{name}.weight" for name in names]
        bias_O = stacked([f"{name}.bias" for name in names], heads, staged=False) if bias else None
        rows = [shapes[p + name][0] for name in matrices]
        if old is None or not old.takes(rows):
            if old is not None:
                old.give_up()
            alone = len(names) == 1 and not heads
            return Linear(source(p + matrices[0]) if alone else stacked(matrices, heads, staged=True), bias_O)
        at = 0
        for index, (name, count) in enumerate(zip(matrices, rows, strict=True)):
            old.put(at, stacked([name], heads[index : index + 1], staged=True) if index < len(heads) else source(p + name))
            at += count
        old.bias = bias_O
        return old

    def norm(name: str, *heads: int) -> Tensor:
        return stacked([f"{name}.weight"], heads, staged=False)

    return Layer(
        norm1=norm("input_layernorm"),
        qkv=linear([f"self_attn.{n}_proj" for n in "qkv"], spec.qkv_bias, over and over.qkv, [spec.heads, spec.kv_heads]),
        q_norm=norm("self_attn.q_norm", 1) if spec.qk_norm else None,
        k_norm=norm("self_attn.k_norm", 1) if spec.qk_norm else None,
        o=linear(["self_attn.o_proj"], spec.o_bias, over and over.o),
        norm2=norm("post_attention_layernorm"),
        gate_up=linear(["mlp.gate_proj", "mlp.up_proj"], spec.mlp_bias, over and over.gate_up),
        down=linear(["mlp.down_proj"], spec.mlp_bias, over and over.down),
    )


def _unpaired(rows: Tensor, heads: int) -> Tensor:
    """From pairs back to (first halves, second halves) of each head."""
    return rows.view(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def named_tensors(weights: Weights) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that is being served, read back from the packed buffers, under its Hugging Face name; order of layers."""
    spec = weights.spec
    q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    yield _EMBED, weights.embed
    yield "model.norm.weight", weights.norm
    yield _HEAD, weights.head.dense()
    for index, layer in enumerate(weights.layers):
        p = f"model.layers.{index}."
        yield p + "input_layernorm.weight", layer.norm1
        yield p + "post_attention_layernorm.weight", layer.norm2
        for linear, names, sizes in (
            (layer.qkv, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), (q, kv, kv)),
            (layer.o, ("self_attn.o_proj",), (spec.hidden,)),
            (layer.gate_up, ("mlp.gate_proj", "mlp.up_proj"), (spec.intermediate, spec.intermediate)),
            (layer.down, ("mlp.down_proj",), (spec.hidden,)),
        ):
            for kind, rows in (("weight", linear.dense()), ("bias", linear.bias)):
                if rows is not None:
                    at = 0
                    for name, size in zip(names, sizes, strict=True):
                        yield f"{p}{name}.{kind}", _restored(name, rows[at : at + size], spec)
                        at += size
        for name, norm in (("q", layer.q_norm), ("k", layer.k_norm)):
            if norm is not None:
                yield f"{p}self_attn.{name}_norm.weight", _unpaired(norm, 1)


def _restored(name: str, rows: Tensor, spec: ModelSpec) -> Tensor:
    heads = {"self_attn.q_proj": spec.heads, "self_attn.k_proj": spec.kv_heads}.get(name)
    return rows if heads is None else _unpaired(rows, heads)


def digest(weights: Weights) -> str:
    """The digest of what is served, in the dtypes that it came in. A tied head is read back and must still be the embedding."""
    builder = DigestBuilder()
    with torch.inference_mode():
        tensors = dict(named_tensors(weights))
        head = tensors[_HEAD]
        if weights.spec.tied and not torch.equal(head, weights.embed):
            return "the packed head is not the embedding that it is tied to"
        for name in sorted(weights.dtypes):
            code = weights.dtypes[name]
            plain = tensors[name].to(DTYPES[code]).contiguous()
            builder.add(name, code, plain.shape, cast("Any", plain.reshape(-1).view(torch.uint8).numpy()).data)
    return builder.hexdigest()


def merged_with_adapter(spec: ModelSpec, base: Checkpoint, adapter: Checkpoint) -> Callable[[str], Tensor]:
    """Where tensors come from when a LoRA adapter (PEFT names) is served: base + (alpha / r) * B @ A, in float32.

    alpha is read from the file's metadata (``lora_alpha``) or from ``adapter_config.json`` beside it.
    """
    pairs: dict[str, dict[str, str]] = {}
    for name in adapter.shapes:
        target, side = _lora_target(name)
        if target not in spec.tensors() or side is None:
            raise WeightsError(f"got adapter tensor {name} in {adapter.path}; expected lora_A and lora_B of this model's linear layers")
        pairs.setdefault(target, {})[side] = name
    alpha = _lora_alpha(adapter)
    for target, sides in pairs.items():
        if sides.keys() != {"A", "B"}:
            raise WeightsError(f"got only lora_{next(iter(sides))} for {target} in {adapter.path}; expected both lora_A and lora_B")
        a, b = adapter.shapes[sides["A"]], adapter.shapes[sides["B"]]
        if (b[0], a[1]) != spec.tensors()[target] or a[0] != b[1]:
            raise WeightsError(f"got lora_A {a} and lora_B {b} for {target} of shape {spec.tensors()[target]} in {adapter.path}")

    def get(name: str) -> Tensor:
        plain = base.get(name).to(torch.float32)
        if name not in pairs:
            return plain
        a, b = (adapter.get(pairs[name][side]).to(torch.float32) for side in "AB")
        return torch.addmm(plain, b, a, alpha=alpha(a.shape[0]))

    return get


def _lora_target(name: str) -> tuple[str, str | None]:
    stem = name.removeprefix("base_model.model.")
    for side in "AB":
        for form in (f".lora_{side}.weight", f".lora_{side}.default.weight"):
            if stem.endswith(form):
                return stem.removesuffix(form) + ".weight", side
    return stem, None


def _lora_alpha(adapter: Checkpoint) -> Callable[[int], float]:
    config: dict[str, Any] = dict(adapter.metadata)
    path = adapter.path.with_name("adapter_config.json")
    if path.is_file():
        with contextlib.suppress(msgspec.DecodeError):
            config = {**msgspec.json.decode(path.read_bytes()), **config}
    if "lora_alpha" not in config:
        raise WeightsError(f"got adapter {adapter.path} without its alpha; expected metadata lora_alpha or adapter_config.json beside it")
    if config.get("rank_pattern") or config.get("alpha_pattern") or config.get("use_dora"):
        raise WeightsError(
            f"got adapter {adapter.path} with rank_pattern, alpha_pattern or DoRA; expected one rank and alpha for all layers"
        )
    alpha = float(config["lora_alpha"])
    root = str(config.get("use_rslora", False)).lower() == "true"
    return lambda rank: alpha / (math.sqrt(rank) if root else rank)
