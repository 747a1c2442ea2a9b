"""Chats in, rows of token ids and what the assistant said in them out, by the model's own tokenizer and chat template.

Where the template marks what the assistant says (``generation`` blocks), its marks decide, and every token must lie wholly inside or
outside of them. Where it marks nothing, a turn is what the template adds to the prompt for it, up to the end of turn; a chat whose
turns extend one another is one row, any other has a row for each turn. A chat for which neither is exact is refused with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rllm_trainer.serving._local.spec import eos_token_ids, read_config
from rllm_trainer.serving._local.template import ChatTemplate
from rllm_trainer.serving._local.tokens import Tokenizer
from rllm_trainer.types import Int32, Mask

__all__ = ["ChatTokenizer", "NotExact"]

_SAID, _OVER = "\ue0f0", "\ue0f1"
"""Characters for private use, which no chat has: put around what the template marks, and taken out again."""
_MARK = re.compile(f"[{_SAID}{_OVER}]")

Tools = Sequence[Mapping[str, Any]] | None
Message = Mapping[str, Any]


class NotExact(ValueError):
    """Why a chat has no exact mask."""


class ChatTokenizer:
    """Of a model folder. Raises ValueError for one without a fast tokenizer."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = Tokenizer(folder)
        self._template = ChatTemplate(folder)
        self._marking = ChatTemplate(folder, marks=(_SAID, _OVER))
        self._ends = np.array(eos_token_ids(folder, read_config(folder)), np.int32)

    def rows(self, messages: Sequence[Message], tools: Tools, *, only_last: bool = False) -> list[tuple[Int32, Mask]]:
        """Ids of each row, and which of them the assistant said.

        Raises:
            NotExact: that cannot be told exactly.
            ValueError: the template refuses the chat.
        """
        if only_last:
            return [self._turn(messages, len(messages) - 1, tools)]
        text = self._marking.render(messages, tools, add_generation_prompt=False)
        return [self._marked(text)] if _SAID in text else self._differences(messages, tools)

    def _marked(self, marked: str) -> tuple[Int32, Mask]:
        plain, spans = _spans(marked)
        found: Any = self._tokenizer.backend.encode(plain, add_special_tokens=False)
        offsets = np.array(found.offsets, np.int64).reshape(-1, 2)
        said = np.zeros(len(offsets), np.bool_)
        for start, end in spans:
            inside = (offsets[:, 0] >= start) & (offsets[:, 1] <= end) & (offsets[:, 1] > offsets[:, 0])
            across = (offsets[:, 0] < end) & (offsets[:, 1] > start) & ~inside
            if across.any():
                at = int(across.argmax())
                raise NotExact(f"token {at} lies across the border of what the template marks as the assistant's")
            said |= inside
        return np.array(found.ids, np.int32), said

    def _differences(self, messages: Sequence[Message], tools: Tools) -> list[tuple[Int32, Mask]]:
        whole = self._ids(messages, tools, prompt=False)
        turns = [self._turn(messages, number, tools) for number, message in enumerate(messages) if message.get("role") == "assistant"]
        if any(not np.array_equal(whole[: len(ids)], ids) for ids, _ in turns):
            return turns
        said = np.zeros(len(whole), np.bool_)
        for ids, of_turn in turns:
            said[: len(ids)] |= of_turn
        return [(whole, said)]

    def _turn(self, messages: Sequence[Message], number: int, tools: Tools) -> tuple[Int32, Mask]:
        """The chat up to the end of one turn of the assistant, and that turn."""
        before = self._ids(messages[:number], tools, prompt=True)
        ids = self._ids(messages[: number + 1], tools, prompt=False)
        shared = min(len(before), len(ids))
        parted = np.flatnonzero(before[:shared] != ids[:shared])
        if len(parted) or shared < len(before):
            at = int(parted[0]) if len(parted) else shared
            raise NotExact(
                f"message {number} does not continue the prompt that the template makes for it: they part at token {at} of {len(before)}"
            )
        ends = np.flatnonzero(np.isin(ids[len(before) :], self._ends))
        stop = len(before) + int(ends[-1]) + 1 if len(ends) else len(ids)
        return ids[:stop], np.arange(stop) >= len(before)

    def _ids(self, messages: Sequence[Message], tools: Tools, *, prompt: bool) -> Int32:
        text = self._template.render(messages, tools, add_generation_prompt=prompt)
        return np.array(self._tokenizer.encode(text, add_special_tokens=False), np.int32)


def _spans(marked: str) -> tuple[str, list[tuple[int, int]]]:
    """The text without marks, and where it was marked."""
    spans: list[tuple[int, int]] = []
    pieces: list[str] = []
    length, begun = 0, 0
    for part in re.split(f"({_MARK.pattern})", marked):
        if part == _SAID:
            begun = length
        elif part == _OVER:
            spans.append((begun, length))
        else:
            pieces.append(part)
            length += len(part)
    return "".join(pieces), spans
