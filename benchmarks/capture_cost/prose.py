"""A tokenizer in, passages out: English prose, the ids that it is, and random float32 logprobs of its reply.

The prose is the language reference that every Python carries (``pydoc_data.topics``); no two passages of a size overlap, so that nothing
stored for one helps another. The same tokenizer always gives the same passages.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

__all__ = ["SIZES", "Passage", "logprobs", "passages", "tokenizer_file"]

SIZES: Final[dict[str, tuple[int, int, int]]] = {
    "200+100": (200, 100, 10),
    "200+256": (200, 256, 10),
    "2k+256": (2_048, 256, 40),
    "8k+2k": (8_192, 2_048, 10),
}
"""Name to (tokens of the prompt, tokens of the reply, how many passages)."""

_PLAIN: Final = str.maketrans("\u2018\u2019\u201c\u201d\u2013\u2014", "''\"\"--")
"""Typography as ASCII spells it: what a character weighs in memory does not depend on the passage."""

_APART: Final = 50
"""Tokens between the first passages of two sizes: no two passages begin alike."""


class Passage(msgspec.Struct, kw_only=True):
    """One prompt and its reply."""

    prompt: str
    prompt_ids: list[int]
    reply: str
    reply_ids: list[int]
    logprobs: list[float]
    """Of each id of the reply; each is exactly a float32."""


def tokenizer_file() -> Path:
    """The tokenizer of the embedded model, made once if it is not there."""
    from rllm_trainer.models import resolve_model

    return resolve_model() / "tokenizer.json"


def logprobs(count: int, draw: random.Random) -> list[float]:
    """Random ones, as hard to compress as a model's."""
    return list(struct.unpack(f"<{count}f", struct.pack(f"<{count}f", *(-draw.expovariate(1.0) for _ in range(count)))))


def passages(tokenizer: Path, sizes: Sequence[str] = tuple(SIZES)) -> dict[str, list[Passage]]:
    """The passages of each size, one after the other out of the text."""
    text, ids, ends = _encoded(tokenizer)
    draw = random.Random(7)
    found: dict[str, list[Passage]] = {}
    for number, name in enumerate(sizes):
        prompt, reply, count = SIZES[name]
        found[name] = []
        at = number * _APART
        for _ in range(count):
            middle, end = at + prompt, at + prompt + reply
            if end > len(ids):
                raise ValueError(f"the prose has {len(ids)} tokens with {tokenizer}; the passages need more")
            start = ends[at - 1] if at else 0
            found[name].append(
                Passage(
                    prompt=text[start : ends[middle - 1]],
                    prompt_ids=ids[at:middle],
                    reply=text[ends[middle - 1] : ends[end - 1]],
                    reply_ids=ids[middle:end],
                    logprobs=logprobs(reply, draw),
                )
            )
            at = end
    return found


def _encoded(tokenizer: Path) -> tuple[str, list[int], list[int]]:
    """The prose, its ids, and where in the prose each of them ends."""
    from pydoc_data.topics import topics

    from tokenizers import Tokenizer

    text = "\n".join(topics[name] for name in sorted(topics)).translate(_PLAIN)
    text = text.encode("ascii", "ignore").decode()
    encoded: Any = Tokenizer.from_file(str(tokenizer)).encode(text, add_special_tokens=False)
    return text, list(encoded.ids), [end for _, end in encoded.offsets]
