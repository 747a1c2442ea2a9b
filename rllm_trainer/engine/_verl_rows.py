"""Flat rows as they travel in, verl's TensorDict of some of their tries out: jagged, with one entry per wanted token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rllm_trainer._child import to_array
from rllm_trainer.engine._verl_api import tensordict_utils, torch
from rllm_trainer.engine.shared_prefix import Trie
from rllm_trainer.engine.verl_batch import Columns

__all__ = ["FlatRows"]

_FLAGS = {
    "use_dynamic_bsz": False,
    "use_remove_padding": False,
    "pad_token_id": 0,  # pads are masked by length; any id will do
    "calculate_entropy": False,
    "calculate_sum_pi_squared": False,
}


class FlatRows:
    """B rows of S tokens in all."""

    def __init__(self, payload: dict[str, Any]) -> None:
        self.token_ids = to_array(payload["token_ids"]).astype(np.int64)
        lengths = to_array(payload["lengths"])
        self.offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        self.temperatures = np.repeat(to_array(payload["temperatures"]), lengths).astype(np.float32)
        """(S)"""

    def columns(self, payload: dict[str, Any]) -> Columns:
        arrays: dict[str, Any] = {name: None if payload[name] is None else to_array(payload[name]) for name in Columns.__struct_fields__}
        return Columns(**arrays)

    def tensordict(self, tries: Sequence[Trie], fields: Mapping[str, Any], **settings: Any) -> Any:
        """The micro-batch of these tries; ``fields`` are flat columns of the loss."""
        per_token = {name: _jagged([values[trie.places] for trie in tries]) for name, values in fields.items()}
        tensors = {
            "input_ids": _jagged([trie.token_ids for trie in tries]),
            "position_ids": _jagged([trie.depths for trie in tries]),
            "ends": _jagged([trie.ends for trie in tries]),
            "predict_at": _jagged([trie.predict_at for trie in tries]),
            "labels": _jagged([self.token_ids[trie.places] for trie in tries]),
            "label_temperatures": _jagged([self.temperatures[trie.places] for trie in tries]),
            "loss_mask": _jagged([np.ones(trie.wanted, np.int64) for trie in tries]),
            **per_token,
        }
        sizes = {
            "micro_batch_size_per_gpu": len(tries),
            "global_batch_size": len(tries),
            "global_token_num": [trie.tokens for trie in tries],
            "temperature": 1.0,
        }
        return tensordict_utils.get_tensordict(tensors, non_tensor_dict={**_FLAGS, **sizes, **settings})


def _jagged(parts: list[Any]) -> Any:
    return torch.nested.as_nested_tensor([torch.from_numpy(np.ascontiguousarray(part)) for part in parts], layout=torch.jagged)
