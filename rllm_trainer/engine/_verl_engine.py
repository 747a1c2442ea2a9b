"""verl's FSDP engine over token tries, with the head computed only where a token is wanted: registered with verl, chosen by vendor.

The micro-batch says at which positions a token is predicted (``predict_at``) and which (``labels``); hidden states are picked there
before the output layer, so neither the matrix product with the vocabulary nor its softmax sees prompts, observations or pads. Who sees
whom follows from ``ends`` (shared_prefix.py). Every other step (loading, wrapping, optimizer, clipping, modes) is verl's. One rank is not
wrapped: sharding over one process only copies.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from rllm_trainer.engine._verl_api import (
    EngineRegistry,
    FSDPEngineWithLMHead,
    PrecisionType,
    get_device_id,
    get_device_name,
    torch,
    torch_functional,
)

__all__ = ["VENDOR", "TokenEngine"]

VENDOR = "rllm"
"""Value of ``VERL_ENGINE_VENDOR`` that makes verl's registry return this engine."""


class _Picked:
    """Positions that the output layer computes in the forward pass that is running; all of them outside of one."""

    def __init__(self) -> None:
        self.rows: Any = None
        self.positions: Any = None

    def __call__(self, module: Any, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if self.rows is None:
            return None
        hidden, *rest = args
        return (hidden[self.rows, self.positions], *rest)


class TokenEngine(FSDPEngineWithLMHead):  # type: ignore[misc]
    """Takes jagged ``input_ids``, ``position_ids``, ``ends`` (one entry a token of each trie) and ``predict_at``, ``labels``,
    ``label_temperatures`` (one a wanted token); gives jagged ``log_probs``, and ``entropy`` or ``sum_pi_squared`` where asked for."""

    tree_mask = True
    """False: each trie is one plain row, and the model makes its own causal mask from lengths."""

    def _build_fsdp_module(self, module: Any) -> Any:
        if torch.distributed.get_world_size() > 1:
            verls: Any = super()
            wrapped = verls._build_fsdp_module(module)
        else:
            self._autocast_dtype = PrecisionType.to_dtype(self.engine_config.mixed_precision["param_dtype"])
            self.scaler = None
            wrapped = module.to(get_device_id())
        self._picked = _Picked()
        wrapped.get_output_embeddings().register_forward_pre_hook(self._picked)
        return wrapped

    def forward_step(self, micro_batch: Any, loss_function: Any, forward_only: bool) -> tuple[Any, dict[str, Any]]:
        """One micro-batch: the loss, and what verl collects from it."""
        micro_batch = micro_batch.to(get_device_id())
        inputs, _ = self.prepare_model_inputs(micro_batch=micro_batch)
        if self.tree_mask:
            inputs["attention_mask"] = _tree_mask(micro_batch["ends"], inputs["input_ids"].shape[1])
        at = micro_batch["predict_at"]
        self._picked.rows = torch.repeat_interleave(torch.arange(at.shape[0], device=at.device), at.offsets().diff())
        self._picked.positions = at.values()
        try:
            with self._autocast():
                logits = self.module(**inputs, use_cache=False).logits
        finally:
            self._picked.rows = self._picked.positions = None
        outputs = _token_outputs(logits, micro_batch)
        nested = {name: torch.nested.nested_tensor_from_jagged(values, at.offsets()) for name, values in outputs.items()}
        loss, metrics = torch.tensor(0.0, device=logits.device), {}
        if loss_function is not None:
            loss, metrics = loss_function(model_output=nested, data=micro_batch, dp_group=self.get_data_parallel_group())
        detached = {name: values.detach() for name, values in nested.items()}
        return loss, {"model_output": detached, "loss": loss.detach().item(), "metrics": metrics}

    def _autocast(self) -> Any:
        if self._autocast_dtype == torch.float32:
            return nullcontext()
        return torch.autocast(device_type=get_device_name(), dtype=self._autocast_dtype)


EngineRegistry.register(model_type="language_model", backend=["fsdp2"], device=["cpu", "cuda"], vendor=VENDOR)(TokenEngine)


def _tree_mask(ends: Any, length: int) -> Any:
    """(sequences, 1, length, length), 0 where query i sees key j and -inf where not; a pad sees itself only."""
    places = torch.arange(length, device=ends.device)
    padded = torch.nested.to_padded_tensor(ends, padding=0, output_size=(ends.shape[0], length))
    padded = torch.where(padded == 0, places + 1, padded)
    sees = (places[None, None, :] <= places[None, :, None]) & (places[None, :, None] < padded[:, None, :])
    return torch.zeros(sees.shape, device=ends.device).masked_fill_(~sees, float("-inf")).unsqueeze(1)


def _token_outputs(logits: Any, micro_batch: Any) -> dict[str, Any]:
    """(N, vocabulary) logits -> (N) logprob of each label at its temperature, and what else of the distribution is asked for."""
    logits = logits.float()
    temperatures = micro_batch["label_temperatures"].values()
    if bool((temperatures != 1).any()):
        logits = logits / temperatures.unsqueeze(-1)
    outputs = {"log_probs": -torch.nn.functional.cross_entropy(logits, micro_batch["labels"].values(), reduction="none")}
    if micro_batch["calculate_entropy"]:
        outputs["entropy"] = torch_functional.entropy_from_logits(logits)
    if micro_batch["calculate_sum_pi_squared"]:
        outputs["sum_pi_squared"] = torch_functional.calculate_sum_pi_squared_from_logits(logits)
    return outputs
