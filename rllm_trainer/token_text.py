"""A model folder in, a function from token ids to text out; the tokenizer is read when the first text is asked for."""

from __future__ import annotations

from pathlib import Path

from rllm_trainer.breaks import Decode
from rllm_trainer.serving._local.tokens import Tokenizer

__all__ = ["text_of_tokens"]


def text_of_tokens(model: Path) -> Decode | None:
    """None for a model without a ``tokenizer.json``: its tokens are told as ids."""
    if not (model / "tokenizer.json").is_file():
        return None
    read: list[Tokenizer] = []

    def decode(ids: list[int]) -> str:
        if not read:
            read.append(Tokenizer(model))
        return read[0].decode(ids, skip_special=False)

    return decode
