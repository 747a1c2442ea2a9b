"""A model folder in, a runner and a way to load later weights out: our own forward where it knows the family, else transformers'."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from rllm_trainer.serving._local.checkpoint import Checkpoint
from rllm_trainer.serving._local.runner import NativeRunner, Runner
from rllm_trainer.serving._local.spec import ModelSpec
from rllm_trainer.serving._local.weights import Weights, build, digest, merged_with_adapter

__all__ = ["Loader", "NativeLoader", "open_model"]


class Loader(Protocol):
    """Makes sets of weights for one model; nothing that is served changes here."""

    vocab: int
    max_positions: int
    kv_bytes_per_token: int
    served: Any
    spare: Any
    """A set of weights that nothing computes with, to load over; None: there is none yet."""

    def load(self, path: Path, *, lora: bool, over: Any = None) -> Any:
        """A complete set of weights from a file or folder. Raises ``WeightsError``.

        ``over``: a set that nothing computes with any more; it is written over, and holds nothing of use afterwards, even where this fails.
        """
        ...

    def digest(self, weights: Any) -> str:
        """What a set of weights hashes to, read back from the buffers that are multiplied."""
        ...

    def runner(self, *, kv_tokens: int, max_len: int, max_rows: int) -> Runner:
        """A runner over the weights that the folder holds."""
        ...


class NativeLoader:
    """Models that ``model.py`` computes."""

    def __init__(self, folder: Path, spec: ModelSpec, *, swaps: bool = False) -> None:
        self.vocab = spec.vocab
        self.max_positions = spec.max_positions
        self.kv_bytes_per_token = spec.kv_bytes_per_token
        self._spec = spec
        self._base = Checkpoint(folder)
        self.served: Weights = build(spec, self._base)
        self.spare: Weights | None = build(spec, self._base) if swaps else None

    def load(self, path: Path, *, lora: bool, over: Weights | None = None) -> Weights:
        given = Checkpoint(path)
        if lora:
            return build(self._spec, self._base, merged_with_adapter(self._spec, self._base, given), over=over)
        return build(self._spec, given, over=over)

    def digest(self, weights: Weights) -> str:
        return digest(weights)

    def runner(self, *, kv_tokens: int, max_len: int, max_rows: int) -> Runner:
        return NativeRunner(self.served, kv_tokens=kv_tokens, max_len=max_len, max_rows=max_rows)


def open_model(folder: Path, spec: ModelSpec | None, *, swaps: bool = False) -> Loader:
    """Raises ``ValueError`` where the folder holds no model that can be served.

    Args:
        spec: None for a family that is not ours.
        swaps: weights will be loaded: memory for a second set is made now, which takes longer than to write into it.
    """
    if spec is not None:
        return NativeLoader(folder, spec, swaps=swaps)
    from rllm_trainer.serving._local.fallback import FallbackLoader

    return FallbackLoader(folder)
