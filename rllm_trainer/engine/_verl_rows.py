"""Flat rows as they travel in, verl's TensorDict of some of them out: jagged, cut where no gradient is, one entry per wanted token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rllm_trainer._child import to_array
from rllm_trainer.engine._verl_api import tensordict_utils, torch
from rllm_trainer.engine.verl_batch import Columns

__all__ = ["FlatRows"]


class FlatRows:
    """Flat rows as they came, and verl's TensorDict of some of them."""

    def __init__(self, payload: dict[str, Any]) -> None:
        self.lengths = to_array(payload["lengths"])
        self.temperatures = to_array(payload["temperatures"])
        self.token_ids = to_array(payload["token_ids"]).astype(np.int64)
        self.offsets = np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])

    def columns(self, payload: dict[str, Any]) -> Columns:
        arrays: dict[str, Any] = {name: None if payload[name] is None else to_array(payload[name]) for name in Columns.__struct_fields__}
        return Columns(**arrays)

    def extents(self, wanted: Any) -> tuple[Any, Any]:
        """(B) tokens that go through the model, up to the one before the last wanted token; (B) wanted tokens."""
        counts = np.add.reduceat(wanted.astype(np.int64), self.offsets[:-1]) if len(self.lengths) else np.zeros(0, np.int64)
        inside = np.arange(len(wanted)) - np.repeat(self.offsets[:-1], self.lengths)
        last = np.maximum.reduceat(np.where(wanted, inside, 0), self.offsets[:-1]) if len(self.lengths) else np.zeros(0, np.int64)
        return last, counts

    def tensordict(self, rows: list[int], wanted: Any, fields: Mapping[str, Any], **settings: Any) -> tuple[Any, Any]:
        """The micro-batch, and where in the flat columns its wanted tokens stand."""
        parts = [self.offsets[row] + np.flatnonzero(wanted[self.offsets[row] : self.offsets[row + 1]]) for row in rows]
        begins = [self.offsets[row] for row in rows]
        places = np.concatenate(parts)
        inputs = [torch.from_numpy(self.token_ids[begin : part[-1]]) for begin, part in zip(begins, parts, strict=True)]
        tensors = {
            "input_ids": _jagged(inputs),
            "position_ids": _jagged([torch.arange(len(ids)) for ids in inputs]),
            "predict_at": _jagged([torch.from_numpy(part - begin - 1) for begin, part in zip(begins, parts, strict=True)]),
            "labels": _jagged([torch.from_numpy(self.token_ids[part]) for part in parts]),
            "loss_mask": _jagged([torch.ones(len(part), dtype=torch.int64) for part in parts]),
            "temperature": torch.from_numpy(self.temperatures[rows]),
            **{name: _jagged([torch.from_numpy(values[part]) for part in parts]) for name, values in fields.items()},
        }
        settings = {"calculate_entropy": False, "calculate_sum_pi_squared": False, **settings}
        flags = {
            "use_dynamic_bsz": False,
            "micro_batch_size_per_gpu": len(rows),
            "use_remove_padding": False,
            "pad_token_id": 0,  # pads are masked by length; any id will do
            "global_token_num": [len(ids) for ids in inputs],
            "global_batch_size": len(rows),
        }
        return tensordict_utils.get_tensordict(tensors, non_tensor_dict={**flags, **settings}), places


def _jagged(parts: list[Any]) -> Any:
    return torch.nested.as_nested_tensor(parts, layout=torch.jagged)
