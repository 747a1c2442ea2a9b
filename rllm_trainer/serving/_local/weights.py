"""Safetensors files in, one complete set of packed weights out, or an error that leaves everything as it was.

``qkv`` and ``gate_up`` are fused. Rows of queries and keys are stored with the two halves of each rotary pair side by side, so that the
rotation is one complex product; scores do not change, and ``named_tensors`` gives every tensor back under its Hugging Face name, bit for
bit. A tied head is packed from the embedding of the same file, never kept from an earlier one.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import torch
from torch import Tensor

from rllm_trainer._digest import DigestBuilder
from rllm_trainer.serving._local.kernels import Linear, all_finite
from rllm_trainer.serving._local.spec import ModelSpec

__all__ = ["DTYPES", "Checkpoint", "Layer", "Weights", "WeightsError", "build", "check", "digest", "merged_with_adapter"]

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
"""Safetensors codes of the dtypes that weights may come in."""
_EMBED, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_BUFFERS = ("rotary_emb.inv_freq",)
_WORKERS = 4
"""Threads that copy and pack; it is memory traffic, which a few threads exhaust."""
_buffers = threading.local()
_SHARED_MEMORY = Path("/dev/shm")
_MOST_MAPPED = 2


class WeightsError(ValueError):
    """A file does not hold this model's weights; nothing was changed."""


class Checkpoint:
    """The tensors of one safetensors file, or of a folder's shards; nothing is read before it is asked for."""

    def __init__(self, path: Path) -> None:
        from safetensors import safe_open

        files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
        if not files:
            raise WeightsError(f"got {path}, which holds no safetensors file; expected model.safetensors or its shards")
        self.path = path
        self.metadata: dict[str, str] = {}
        self._files: dict[str, Any] = {}
        self._places: dict[str, tuple[Path, int]] = {}
        self.dtypes: dict[str, str] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for file in files:
            try:
                opened: Any = safe_open(file, framework="pt", device="cpu")
            except Exception as error:
                raise WeightsError(f"got {file}, which is no readable safetensors file: {error}") from error
            self.metadata.update(opened.metadata() or {})
            starts = _starts(file)
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                part = opened.get_slice(name)
                self._files[name] = opened
                self._places[name] = file, starts[name]
                self.dtypes[name] = part.get_dtype()
                self.shapes[name] = tuple(part.get_shape())

    def get(self, name: str) -> Tensor:
        """The tensor in the file's dtype; mapped, so valid while the file is not rewritten."""
        return self._files[name].get_tensor(name)

    def floats(self, name: str) -> Tensor:
        """The tensor in float32, valid until this thread's next one and while the file is not rewritten."""
        if self.dtypes[name] != "F32":
            return self.get(name).to(torch.float32)
        file, at = self._places[name]
        mapped = _maps.of(file)
        if mapped is None:
            return self._read(name, file, at)
        return cast("Any", torch).from_numpy(np.frombuffer(mapped, np.float32, math.prod(self.shapes[name]), at).reshape(self.shapes[name]))

    def _read(self, name: str, file: Path, at: int) -> Tensor:
        """Read, not mapped: a page of a new mapping costs more than a copy of it."""
        out = _staging("read", self.shapes[name])
        left = memoryview(cast("Any", out).numpy().reshape(-1)).cast("B")
        handle = os.open(file, os.O_RDONLY)
        try:
            while left:
                count = os.preadv(handle, [left], at)
                if not count:
                    raise WeightsError(f"got {file}, which ends inside {name}; the weights before it stay served")
                left, at = left[count:], at + count
        finally:
            os.close(handle)
        return out


class _Maps:
    """Files in shared memory that stay mapped: those that an engine writes take turns, and their pages are there already."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: OrderedDict[tuple[int, int], mmap.mmap] = OrderedDict()
        """By device and inode, which nothing else can have while it is mapped."""

    def of(self, file: Path) -> mmap.mmap | None:
        if not file.resolve().is_relative_to(_SHARED_MEMORY) or not os.access(file, os.W_OK):
            return None  # torch takes no memory that it could not write to; it is never written to
        with self._lock, file.open("r+b") as opened:
            status = os.fstat(opened.fileno())
            key = status.st_dev, status.st_ino
            held = self._held.get(key)
            if held is None or len(held) != status.st_size:
                held = self._held[key] = mmap.mmap(opened.fileno(), 0, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
            self._held.move_to_end(key)
            while len(self._held) > _MOST_MAPPED:
                self._held.popitem(last=False)
            return held


_maps = _Maps()


def _starts(file: Path) -> dict[str, int]:
    """Where in a safetensors file the bytes of each tensor begin."""
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header: dict[str, Any] = msgspec.json.decode(opened.read(size))
    return {name: 8 + size + told["data_offsets"][0] for name, told in header.items() if name != "__metadata__"}


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


def build(spec: ModelSpec, checkpoint: Checkpoint, get: Callable[[str], Tensor] | None = None) -> Weights:
    """A new set of weights beside whatever is served. Raises ``WeightsError`` at a value that is not finite.

    ``get`` overrides where tensors come from (a merged adapter); it returns float32.
    """
    check(spec, checkpoint)
    shapes = spec.tensors()

    def source(name: str) -> Tensor:
        found = checkpoint.floats(name) if get is None else get(name)
        if not all_finite(found):
            raise WeightsError(f"got {name} with a value that is not finite in {checkpoint.path}; the weights before it stay served")
        return found

    def tensor(name: str) -> Tensor:
        return torch.empty(shapes[name]).copy_(source(name))

    @torch.inference_mode()
    def layer(index: int) -> Layer:
        return _layer(spec, f"model.layers.{index}.", source)

    @torch.inference_mode()
    def ends() -> tuple[Tensor, Tensor, Linear]:
        embed = tensor(_EMBED)
        return embed, tensor("model.norm.weight"), Linear(embed if spec.tied else tensor(_HEAD))

    with ThreadPoolExecutor(min(os.cpu_count() or 1, _WORKERS), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        outer = pool.submit(ends)
        layers = list(pool.map(layer, range(spec.layers)))
        embed, norm, head = outer.result()
    return Weights(
        spec=spec,
        embed=embed,
        layers=layers,
        norm=norm,
        head=head,
        dtypes={n: code for n, code in checkpoint.dtypes.items() if n == _HEAD or n in spec.tensors()},
    )


def _layer(spec: ModelSpec, p: str, source: Callable[[str], Tensor]) -> Layer:
    shapes = spec.tensors()

    def stacked(names: list[str], heads: Sequence[int], *, staged: bool) -> Tensor:
        """The named tensors one below the other; rows of the first ``len(heads)`` go from (first halves, second halves) to pairs.

        ``staged``: the result is only good until the next one of this thread.
        """
        parts = [shapes[p + name] for name in names]
        shape = (sum(part[0] for part in parts), *parts[0][1:])
        out = _staging("stacked", shape) if staged else torch.empty(shape)
        at = 0
        for index, (name, part) in enumerate(zip(names, parts, strict=True)):
            rows, plain = out[at : at + part[0]], source(p + name)
            if index < len(heads):
                rows.view(heads[index], -1, 2, *shape[1:]).copy_(plain.view(heads[index], 2, -1, *shape[1:]).transpose(1, 2))
            else:
                rows.copy_(plain)
            at += part[0]
        return out

    def linear(names: list[str], bias: bool, heads: Sequence[int] = ()) -> Linear:
        """``heads``: of those of the named matrices whose rows become rotary pairs."""
        alone = len(names) == 1 and not heads
        matrix = source(f"{p}{names[0]}.weight") if alone else stacked([f"{n}.weight" for n in names], heads, staged=True)
        return Linear(matrix, stacked([f"{n}.bias" for n in names], heads, staged=False) if bias else None)

    def norm(name: str, *heads: int) -> Tensor:
        return stacked([f"{name}.weight"], heads, staged=False)

    return Layer(
        norm1=norm("input_layernorm"),
        qkv=linear([f"self_attn.{n}_proj" for n in "qkv"], spec.qkv_bias, [spec.heads, spec.kv_heads]),
        q_norm=norm("self_attn.q_norm", 1) if spec.qk_norm else None,
        k_norm=norm("self_attn.k_norm", 1) if spec.qk_norm else None,
        o=linear(["self_attn.o_proj"], spec.o_bias),
        norm2=norm("post_attention_layernorm"),
        gate_up=linear(["mlp.gate_proj", "mlp.up_proj"], spec.mlp_bias),
        down=linear(["mlp.down_proj"], spec.mlp_bias),
    )


def _staging(use: str, shape: Sequence[int]) -> Tensor:
    """This thread's buffer for one use, for what is packed at once: memory fresh from the system costs more than the copy into it."""
    size = math.prod(shape)
    buffer: Tensor | None = getattr(_buffers, use, None)
    if buffer is None or buffer.numel() < size:
        buffer = torch.empty(size)
        setattr(_buffers, use, buffer)
    return buffer[:size].view(*shape)


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
