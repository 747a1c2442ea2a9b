"""Families that ``model.py`` does not compute: transformers' own forward, one cache per sequence. Right for every causal LM, and slow.

There is no prefix cache, no batching across sequences and no adapter; the rest of the server does not notice.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from rllm_trainer._digest import DigestBuilder
from rllm_trainer.serving._local.checkpoint import DTYPES, Checkpoint, WeightsError
from rllm_trainer.serving._local.kernels import all_finite
from rllm_trainer.serving._local.prefix_store import Ids
from rllm_trainer.serving._local.runner import Lane, Runner, StepResult

__all__ = ["FallbackLoader", "FallbackRunner"]


class FallbackLoader:
    """A model folder through ``AutoModelForCausalLM``, float32."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        auto: Any = AutoModelForCausalLM
        try:
            model = auto.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        except Exception as error:
            raise ValueError(f"got model folder {folder}, which transformers cannot load as a causal language model: {error}") from error
        config: Any = model.config.get_text_config()
        self.vocab: int = config.vocab_size
        self.max_positions: int = getattr(config, "max_position_embeddings", 2048)
        kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.kv_bytes_per_token: int = config.num_hidden_layers * 2 * kv_heads * head_dim * 4
        self._config = model.config
        self._class: Any = type(model)
        self._dtypes = Checkpoint(folder).dtypes
        self.served: Any = model.eval()
        self.spare: Any = None

    def load(self, path: Path, *, lora: bool, over: Any = None) -> Any:
        if lora:
            raise WeightsError(
                f"got an adapter for a {self._config.model_type} model; expected all weights (adapters are merged for llama and qwen)"
            )
        given = Checkpoint(path)
        tensors = {name: given.get(name).to(torch.float32) for name in given.shapes}
        bad = [name for name, tensor in tensors.items() if not all_finite(tensor)]
        if bad:
            raise WeightsError(f"got {bad[0]} with a value that is not finite in {path}; the weights before it stay served")
        model = self._class(self._config) if over is None else over
        try:
            missing, unknown = model.load_state_dict(tensors, strict=False, assign=False)
        except RuntimeError as error:
            raise WeightsError(f"got {path}, whose tensors have other shapes than this model's: {error}") from error
        model.tie_weights()
        tied: Mapping[str, Any] | list[str] = getattr(model, "_tied_weights_keys", None) or {}
        missing = [name for name in missing if name not in tied]
        if missing or unknown:
            raise WeightsError(f"got {path} with {len(missing)} tensors missing {missing[:3]} and {len(unknown)} unknown {unknown[:3]}")
        self._dtypes = given.dtypes
        return model.eval()

    def digest(self, weights: Any) -> str:
        builder = DigestBuilder()
        state: dict[str, Tensor] = weights.state_dict()
        for name in sorted(self._dtypes):
            plain = state[name].to(DTYPES[self._dtypes[name]]).contiguous()
            builder.add(name, self._dtypes[name], plain.shape, cast("Any", plain.reshape(-1).view(torch.uint8).numpy()).data)
        return builder.hexdigest()

    def runner(self, *, kv_tokens: int, max_len: int, max_rows: int) -> Runner:
        return FallbackRunner(self.served, vocab=self.vocab, kv_tokens=kv_tokens, max_len=max_len, max_rows=max_rows)


class FallbackRunner:
    """One transformers cache per lane."""

    def __init__(self, model: Any, *, vocab: int, kv_tokens: int, max_len: int, max_rows: int) -> None:
        self.vocab = vocab
        self.max_len = max_len
        self._model = model
        self._budget = kv_tokens
        self._max_rows = max_rows
        self._caches: dict[int, Any] = {}
        self._lanes: list[Lane] = []

    def fits(self, length: int) -> bool:
        return length <= min(self.max_len, self._budget)

    def begin(self, ids: list[int], *, decodes: bool, reuse: int) -> Lane | None:
        if len(self._lanes) >= self._max_rows or self._held() + len(ids) + 1 > self._budget:
            return None
        lane = Lane(ids=ids, decodes=decodes)
        self._lanes.append(lane)
        return lane

    def cached(self, ids: Ids, reuse: int) -> int:
        return 0

    def crowded_out(self) -> list[Lane]:
        given_up: list[Lane] = []
        while len(self._lanes) > 1 and self._held() > self._budget:
            given_up.append(self._lanes[-1])
            self.end(self._lanes[-1], keep=False)
        return given_up

    def step(self, chunks: list[tuple[Lane, int]]) -> StepResult:
        lanes: list[Lane] = []
        rows: list[Tensor] = []
        scored: list[tuple[Lane, int, Tensor]] = []
        for lane in [lane for lane in self._lanes if lane.row is not None]:
            lanes.append(lane)
            rows.append(self._forward(lane, 1)[-1])
        for lane, count in chunks:
            first = lane.computed + 1
            out = self._forward(lane, count)
            if not lane.decodes:
                kept = out[: len(lane.ids) - first]
                if len(kept):
                    scored.append((lane, first, kept))
            elif lane.computed == len(lane.ids):
                lane.row = 0
                lanes.append(lane)
                rows.append(out[-1])
        return StepResult(lanes=lanes, logits=torch.stack(rows) if rows else torch.empty(0, self.vocab), scored=scored)

    def end(self, lane: Lane, *, keep: bool) -> None:
        self._lanes.remove(lane)
        self._caches.pop(id(lane), None)
        lane.row = None

    def use(self, weights: Any) -> None:
        self._model = weights
        self._lanes.clear()
        self._caches.clear()

    def _forward(self, lane: Lane, count: int) -> Tensor:
        """Logits (count, vocab) of the lane's next tokens."""
        ids = torch.tensor([lane.ids[lane.computed : lane.computed + count]])
        out = self._model(input_ids=ids, past_key_values=self._caches.get(id(lane)), use_cache=True)
        self._caches[id(lane)] = out.past_key_values
        lane.computed += count
        return out.logits[0].float()

    def _held(self) -> int:
        return sum(len(lane.ids) + 1 for lane in self._lanes)
