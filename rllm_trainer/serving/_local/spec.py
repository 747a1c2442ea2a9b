"""A model folder's ``config.json`` in, the numbers that the forward needs out; None where the family is not one we compute ourselves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

__all__ = ["ModelSpec", "Rope", "eos_token_ids", "read_config", "read_spec"]

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_QKV_BIAS = ("qwen2",)
_QK_NORM = ("qwen3",)


class Rope(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary position embedding over the whole head, in the three forms that need no state."""

    theta: float
    kind: str = "default"
    """``default``, ``linear`` or ``llama3``."""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of a decoder-only model with RoPE, grouped heads and a gated SiLU feed-forward."""

    family: str
    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    tied: bool
    """The output head is the embedding matrix; files then hold it once."""
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    max_positions: int
    rope: Rope

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of all layers in float32."""
        return self.layers * 2 * self.kv_heads * self.head_dim * 4

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the checkpoint by its Hugging Face name, with its shape."""
        q, kv, h, i = self.heads * self.head_dim, self.kv_heads * self.head_dim, self.hidden, self.intermediate
        names: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab, h), "model.norm.weight": (h,)}
        if not self.tied:
            names["lm_head.weight"] = (self.vocab, h)
        for layer in range(self.layers):
            p = f"model.layers.{layer}."
            names[p + "input_layernorm.weight"] = (h,)
            names[p + "post_attention_layernorm.weight"] = (h,)
            for name, rows in (("q", q), ("k", kv), ("v", kv)):
                names[f"{p}self_attn.{name}_proj.weight"] = (rows, h)
                if self.qkv_bias:
                    names[f"{p}self_attn.{name}_proj.bias"] = (rows,)
            names[p + "self_attn.o_proj.weight"] = (h, q)
            if self.o_bias:
                names[p + "self_attn.o_proj.bias"] = (h,)
            if self.qk_norm:
                names[p + "self_attn.q_norm.weight"] = (self.head_dim,)
                names[p + "self_attn.k_norm.weight"] = (self.head_dim,)
            for name, shape in (("gate", (i, h)), ("up", (i, h)), ("down", (h, i))):
                names[f"{p}mlp.{name}_proj.weight"] = shape
                if self.mlp_bias:
                    names[f"{p}mlp.{name}_proj.bias"] = shape[:1]
        return names


def read_config(folder: Path) -> dict[str, Any]:
    """Raises ``ValueError`` where the folder holds no model."""
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"got model folder {folder}, which has no config.json; expected a Hugging Face model folder")
    return msgspec.json.decode(path.read_bytes())


def read_spec(config: Mapping[str, Any]) -> ModelSpec | None:
    """None: a family, activation, window or rotary form outside what ``model.py`` computes."""
    family = config.get("model_type", "")
    if family not in _FAMILIES or config.get("hidden_act", "silu") != "silu":
        return None
    windowed = config.get("use_sliding_window", family == "mistral") and config.get("sliding_window")
    if windowed or any(kind != "full_attention" for kind in config.get("layer_types") or ()):
        return None
    rope = _rope(config)
    if rope is None or "quantization_config" in config:
        return None
    heads = config["num_attention_heads"]
    attention_bias = bool(config.get("attention_bias", False))
    return ModelSpec(
        family=family,
        vocab=config["vocab_size"],
        hidden=config["hidden_size"],
        intermediate=config["intermediate_size"],
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        eps=config.get("rms_norm_eps", 1e-6),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=family in _QKV_BIAS or attention_bias,
        o_bias=family not in _QKV_BIAS and attention_bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=family in _QK_NORM,
        max_positions=config.get("max_position_embeddings", 2048),
        rope=rope,
    )


def _rope(config: Mapping[str, Any]) -> Rope | None:
    given: dict[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = given.get("rope_type", given.get("type", "default"))
    theta = float(given.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    if float(given.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0) != 1.0:
        return None
    if kind == "default":
        return Rope(theta=theta)
    if kind == "linear":
        return Rope(theta=theta, kind=kind, factor=float(given["factor"]))
    if kind == "llama3":
        return Rope(
            theta=theta,
            kind=kind,
            factor=float(given["factor"]),
            low_freq_factor=float(given["low_freq_factor"]),
            high_freq_factor=float(given["high_freq_factor"]),
            original_positions=int(given["original_max_position_embeddings"]),
        )
    return None


def eos_token_ids(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Ids that end a reply: the generation config's, else the model config's."""
    path = folder / "generation_config.json"
    generation: dict[str, Any] = msgspec.json.decode(path.read_bytes()) if path.is_file() else {}
    ids: int | list[int] | None = generation.get("eos_token_id", config.get("eos_token_id"))
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else tuple(ids)
