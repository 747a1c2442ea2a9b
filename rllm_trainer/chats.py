"""Chats in, rows to train out: tokenised by the model's own template, with what the assistant said marked.

A chat is ``{"messages": [...], "tools": [...]}`` as OpenAI writes it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np

from rllm_trainer.chat_tokens import ChatTokenizer, NotExact
from rllm_trainer.exceptions import DatasetError, ModelError
from rllm_trainer.types import Int32, Mask, Sample, SampledSpan

__all__ = ["Chat", "chats_of", "sample_of_row", "tokenize_chats"]

_EXPECTED = 'expected {"messages": [{"role": ..., "content": ...}, ...]}, with "tools" if the assistant has any'


class Chat(msgspec.Struct, frozen=True, kw_only=True):
    """One chat."""

    id: str
    """Made of its content, or of what recorded it."""
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    only_last: bool = False
    """Only the last message is trained; earlier ones of the assistant are context."""


def chats_of(rows: Iterable[Any], name: str) -> list[Chat]:
    """Chats of a data set's rows. Raises ``DatasetError`` for a row that is none, or in which the assistant says nothing."""
    chats: list[Chat] = []
    for number, one in enumerate(rows):
        row: Any = one
        if not isinstance(row, Mapping) or "messages" not in row:
            raise DatasetError(f"{name}: row {number} is {_short(one)}; {_EXPECTED}")
        given = cast("Mapping[str, Any]", row)
        messages: Any = given["messages"]
        if not isinstance(messages, (list, tuple)) or not all(isinstance(m, Mapping) and "role" in m for m in cast("list[Any]", messages)):
            raise DatasetError(f"{name}: the messages of row {number} are {_short(given['messages'])}; {_EXPECTED}")
        plain = [_without_none(message) for message in cast("Sequence[Mapping[str, Any]]", messages)]
        if not any(message["role"] == "assistant" for message in plain):
            raise DatasetError(f"{name}: row {number} has no message of the assistant, so there is nothing to train; leave it out")
        tools = cast("list[dict[str, Any]] | None", given.get("tools")) or None
        content = msgspec.json.encode({"messages": plain, "tools": tools}, enc_hook=str)
        chats.append(Chat(id=hashlib.sha256(content).hexdigest()[:16], messages=plain, tools=tools))
    return chats


def tokenize_chats(chats: Sequence[Chat], model: Path) -> list[list[tuple[Int32, Mask]]]:
    """For each chat its rows: ids, and which of them the assistant said.

    Raises:
        DatasetError: the template gives no exact mask for a chat, or refuses it.
        ModelError: the model has no tokenizer that can be read here.
    """
    try:
        tokenizer = ChatTokenizer(model)
    except ValueError as error:
        raise ModelError(str(error)) from error
    found: list[list[tuple[Int32, Mask]]] = []
    for number, chat in enumerate(chats):
        try:
            found.append(tokenizer.rows(chat.messages, chat.tools, only_last=chat.only_last))
        except NotExact as error:
            raise DatasetError(
                f"chat {number} cannot be trained exactly: {error}. Use a chat template that marks what the assistant says with "
                "{% generation %}, or whose prompt for a turn is what the turn follows in the chat"
            ) from error
        except ValueError as error:
            raise DatasetError(f"chat {number}: {error}; change it, or the model's chat template") from error
    return found


def sample_of_row(chat_id: str, number: int, ids: Int32, said: Mask) -> Sample:
    """One row of a chat, as the engine takes it: nothing of it was sampled by a policy."""
    said = said.copy()
    said[:1] = False  # nothing predicts the first token
    edges = np.flatnonzero(np.diff(np.concatenate([[False], said, [False]]).astype(np.int8)))
    spans = [
        SampledSpan(
            span_id=f"{chat_id}-{number}-{turn}", choice=0, trajectory_id=chat_id, role="assistant", start=int(start), stop=int(stop)
        )
        for turn, (start, stop) in enumerate(edges.reshape(-1, 2))
    ]
    return Sample(
        id=f"{chat_id}:{number}",
        episode_id=chat_id,
        task_id=chat_id,
        token_ids=ids.astype(np.int32),
        trained_mask=said,
        logprobs=np.full(len(ids), np.nan, np.float32),
        versions=np.full(len(ids), -1, np.int32),
        temperature=1.0,
        spans=spans,
    )


def _without_none(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as it was meant: tables fill the columns that a message lacks with None."""
    return {str(key): value for key, value in message.items() if value is not None or key == "content"}


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
