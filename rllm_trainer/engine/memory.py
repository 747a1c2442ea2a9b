"""What training a model will hold in memory, before it is started: a model's folder and settings in, bytes by cause out.

Read from ``config.json`` and the headers of the safetensors files; no weight is loaded. What does not fit is refused with the largest
setting that does.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec

from rllm_trainer.config import Settings
from rllm_trainer.exceptions import ModelError, SettingError

__all__ = ["MemoryEstimate", "ModelShape", "estimate_memory", "free_memory", "model_shape", "require_memory", "with_micro_batch"]

_CHOICES = (2048, 1024, 512, 256)
"""Micro-batch tokens, if the user gives none: large enough that a group's common prompt is computed once, small enough to fit."""
_FLOAT = 4
_HIDDEN_PER_LAYER = 14
"""Vectors of hidden size that one layer keeps for its backward pass, per token (norms, queries, keys and values, residuals)."""
_WIDE_PER_LAYER = 4
"""Vectors of the feed-forward size that it keeps."""
_LOGITS = 4
"""Matrices of logits alive at once: logits, scaled, log-softmax, gradient."""
_PROCESS = 700 << 20
"""Interpreter and libraries of the engine's process."""
_LORA_PER_RANK = 14
"""A fair count of hidden-size columns per layer and rank over all linear layers of a block (seven layers, two matrices)."""


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """What the estimate needs to know of a model."""

    parameters: int
    layers: int
    hidden: int
    intermediate: int
    vocab: int


class MemoryEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes by cause."""

    weights: int
    gradients: int
    moments: int
    served_copy: int
    """Three versions: of an embedded server one in shared memory, and two sets of its own, one of which is served; of others two in shared
    memory."""
    reference: int
    activations: int
    logits: int
    process: int = _PROCESS

    @property
    def total(self) -> int:
        return sum(msgspec.structs.astuple(self))


def model_shape(model_path: Path) -> ModelShape:
    """Read a model folder.

    Raises:
        ModelError: no config, or no safetensors file.
    """
    try:
        config: dict[str, Any] = json.loads((model_path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"got model folder {model_path} without a readable config.json: {error}") from error
    config = {**config, **config.get("text_config", {})}
    files = sorted(model_path.glob("*.safetensors"))
    if not files:
        raise ModelError(f"got model folder {model_path} without safetensors files; convert the weights to safetensors first")
    hidden = int(config.get("hidden_size", 0))
    return ModelShape(
        parameters=sum(_numbers_in(file) for file in files),
        layers=int(config.get("num_hidden_layers", 0)),
        hidden=hidden,
        intermediate=int(config.get("intermediate_size", 4 * hidden)),
        vocab=int(config.get("vocab_size", 0)),
    )


def estimate_memory(shape: ModelShape, settings: Settings, *, longest_row: int | None = None) -> MemoryEstimate:
    """Bytes that engine and served copies will hold at most, in float32.

    Args:
        longest_row: tokens of the longest row; a single row goes through whole even if it exceeds ``micro_batch_tokens``.
    """
    tokens = max(settings.micro_batch_tokens or _CHOICES[0], longest_row or settings.max_model_len or 0)
    trained = shape.parameters if settings.lora is None else shape.layers * settings.lora.r * shape.hidden * _LORA_PER_RANK
    needs_reference = settings.kl_coef > 0 and settings.lora is None
    per_token = shape.layers * (_HIDDEN_PER_LAYER * shape.hidden + _WIDE_PER_LAYER * shape.intermediate)
    return MemoryEstimate(
        weights=_FLOAT * (shape.parameters + (trained if settings.lora is not None else 0)),
        gradients=_FLOAT * trained,
        moments=2 * _FLOAT * trained,
        served_copy=_FLOAT * (2 * shape.parameters + (shape.parameters if settings.lora is None else trained)),
        reference=_FLOAT * shape.parameters if needs_reference else 0,
        activations=_FLOAT * tokens * per_token,
        logits=_FLOAT * _LOGITS * tokens * shape.vocab,
    )


def require_memory(shape: ModelShape, settings: Settings, *, available: int, longest_row: int | None = None) -> MemoryEstimate:
    """The estimate, if it fits.

    Raises:
        SettingError: it does not; the message has the parts and the largest ``micro_batch_tokens`` that fits, or what to give up.
    """
    estimate = estimate_memory(shape, settings, longest_row=longest_row)
    if estimate.total <= available:
        return estimate
    parts = ", ".join(f"{name} {_gib(size)}" for name, size in msgspec.structs.asdict(estimate).items() if size)
    raise SettingError(
        f"training needs {_gib(estimate.total)} ({parts}), {_gib(available)} are free; {_remedy(shape, settings, estimate, available)}"
    )


def with_micro_batch(shape: ModelShape, settings: Settings, *, available: int) -> Settings:
    """The settings with ``micro_batch_tokens`` set: as given, or the largest usual one that fits.

    Raises:
        SettingError: nothing fits; as ``require_memory``.
    """
    for tokens in _CHOICES if settings.micro_batch_tokens is None else ():
        chosen = msgspec.structs.replace(settings, micro_batch_tokens=tokens)
        if estimate_memory(shape, chosen).total <= available:
            return chosen
    least = settings if settings.micro_batch_tokens is not None else msgspec.structs.replace(settings, micro_batch_tokens=_CHOICES[-1])
    require_memory(shape, least, available=available)
    return least


def free_memory() -> int:
    """Bytes that this process may still take: the machine's, or its control group's if that is less."""
    free = _meminfo_available()
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    try:
        text = limit.read_text().strip()
        if text != "max":
            free = min(free, int(text) - int(used.read_text()))
    except (OSError, ValueError):
        pass
    return free


def _remedy(shape: ModelShape, settings: Settings, estimate: MemoryEstimate, available: int) -> str:
    fixed = estimate.total - estimate.activations - estimate.logits
    tokens = max(settings.micro_batch_tokens or _CHOICES[0], settings.max_model_len or 0)
    per_token = (estimate.activations + estimate.logits) // max(1, tokens)
    fitting = (available - fixed) // max(1, per_token)
    if fitting >= 64:
        return f"the largest that fits is micro_batch_tokens={fitting} with max_model_len={fitting}"
    if settings.kl_coef > 0 and settings.lora is None and estimate.reference > estimate.total - available:
        return "set kl_coef=0, which needs no reference"
    if settings.lora is None:
        return "train an adapter instead: lora={'r': 16}, or take a smaller model"
    return "take a smaller model or a larger machine"


def _numbers_in(file: Path) -> int:
    with file.open("rb") as opened:
        header: dict[str, Any] = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
    header.pop("__metadata__", None)
    total = 0
    for tensor in header.values():
        count = 1
        for size in tensor["shape"]:
            count *= size
        total += count
    return total


def _meminfo_available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"
