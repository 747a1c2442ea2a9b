"""What supervised fine-tuning is given in, units of rows out: an episode or a chat each, with everything left out counted.

Episodes give the tokens that were sampled, each once, by the token tree. One whose calls were recorded without ids gives their texts,
tokenised as chats: the best there is, and counted as such. Rows are at temperature 1, whatever they were sampled at: likelihood is the
model's own.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np

from rllm_trace.store import Store
from rllm_trace.types import Episode, ModelCall
from rllm_trainer.chats import Chat, chats_of, sample_of_row
from rllm_trainer.config import Settings
from rllm_trainer.exceptions import DatasetError, SettingError
from rllm_trainer.rollout.dataset import read_rows
from rllm_trainer.rollout.record import ROLLOUTS_FILE
from rllm_trainer.rollout.stored import read_recorded
from rllm_trainer.samples import build_samples
from rllm_trainer.trainability import training_view
from rllm_trainer.types import Int32, Mask, Rollout, Row, Sample

__all__ = ["TokenizeChats", "Unit", "Units", "read_units", "require_apart"]

TokenizeChats = Callable[[Sequence[Chat]], list[list[tuple[Int32, Mask]]]]
"""Chats -> for each its rows, as ids and what the assistant said of them."""

_TEXT_ONLY = "trained on their texts, because no token ids were recorded"
_SHORTEST = 2


class Unit(msgspec.Struct, frozen=True, kw_only=True):
    """One episode or chat."""

    id: str
    """Made of its tokens and of what of them is trained."""
    rows: list[Row]

    @property
    def trained_tokens(self) -> int:
        return sum(int(row.sample.trained_mask.sum()) for row in self.rows)


class Units(msgspec.Struct, frozen=True, kw_only=True):
    """All of them."""

    units: list[Unit]
    what: str
    """``episodes`` or ``chats``."""
    set_aside: dict[str, int]
    """Why -> episodes or chats that are not trained."""
    notes: dict[str, int] = {}
    """What else should be known -> how many."""


def read_units(source: Any, name: str, *, min_reward: float | None, settings: Settings, tokenize: TokenizeChats) -> Units:
    """The units of a store, a run folder, episodes, or chats.

    Raises:
        DatasetError: it is none of these, holds nothing that can be trained, or a chat has no exact mask.
        SettingError: a row is longer than ``max_model_len``, and ``overlong`` says to refuse that; or ``min_reward`` for chats.
    """
    aside: Counter[str] = Counter()
    notes: Counter[str] = Counter()
    if _holds_episodes(source):
        what, units = "episodes", _of_episodes(source, min_reward, settings, tokenize, aside, notes)
    else:
        if min_reward is not None:
            raise SettingError(f"min_reward={min_reward} would have no effect: chats have no rewards; leave it out")
        what, units = "chats", _of_chats(chats_of(read_rows(source, name), name), settings, tokenize, aside)
    if not units:
        why = ", ".join(f"{reason}: {count}" for reason, count in (+aside).items()) or "it is empty"
        raise DatasetError(f"{name}: there is nothing to train on ({why}); lower min_reward, or record episodes with token ids")
    return Units(units=units, what=what, set_aside=dict(+aside), notes=dict(+notes))


def require_apart(training: Iterable[Unit], held_out: Iterable[Unit]) -> None:
    """Raises ``DatasetError`` where a unit is in both."""
    ids = {unit.id for unit in training}
    shared = sum(unit.id in ids for unit in held_out)
    if shared:
        raise DatasetError(f"{shared} of the evaluation's units are trained too; a better likelihood of them shows memory, not skill")


def _holds_episodes(source: Any) -> bool:
    if isinstance(source, Store):
        return True
    if isinstance(source, (list, tuple)):
        given = cast("Sequence[Any]", source)
        return bool(given) and isinstance(given[0], Episode)
    if not isinstance(source, (str, Path)):
        return False
    path = Path(source)
    if path.is_dir() or (path / ROLLOUTS_FILE).exists():
        return True
    if path.suffix.lower() not in (".jsonl", ".ndjson") or not path.is_file():
        return False
    with path.open("rb") as file:
        return b'"rllm.episode"' in file.readline()[:200]


def _of_episodes(
    source: Any, min_reward: float | None, settings: Settings, tokenize: TokenizeChats, aside: Counter[str], notes: Counter[str]
) -> list[Unit]:
    rollouts, _, found = read_recorded(source, grouped=False)
    aside += found
    units: list[Unit] = []
    as_text: list[Chat] = []
    for rollout in rollouts:
        why = _left_out(rollout, min_reward)
        if why is not None:
            aside[why] += 1
            continue
        assert rollout.episode is not None
        (episode,) = training_view([rollout.episode])
        samples = build_samples(
            episode,
            mode=settings.sample_mode,
            max_len=settings.max_model_len,
            overlong=settings.overlong,
            mask_truncated=settings.mask_truncated,
        )
        if samples.counters.trained_tokens:
            units.append(_unit(list(samples.samples)))
            notes["sampled tokens that are not trained"] += samples.counters.sampled_tokens - samples.counters.trained_tokens
            continue
        texts = [_as_chat(call) for call in episode.calls if _has_text(call)]
        if texts:
            as_text += texts
            notes[f"episodes {_TEXT_ONLY}"] += 1
        else:
            aside["nothing in it can be trained"] += 1
    return units + _of_chats(as_text, settings, tokenize, aside)


def _left_out(rollout: Rollout, min_reward: float | None) -> str | None:
    if rollout.episode is None:
        return "no episode was recorded"
    if rollout.fault in ("infrastructure", "app"):
        return f"it failed, and not because of the policy ({rollout.fault})"
    if min_reward is None:
        return None
    if rollout.reward is None:
        return "it has no reward"
    return None if rollout.reward >= min_reward else f"its reward is below {min_reward:g}"


def _of_chats(chats: Sequence[Chat], settings: Settings, tokenize: TokenizeChats, aside: Counter[str]) -> list[Unit]:
    if not chats:
        return []
    if settings.overlong == "split":
        raise SettingError("overlong='split' cuts the rows of episodes; for chats use 'refuse' or 'mask' (leave the chat out, counted)")
    units: list[Unit] = []
    for chat, rows in zip(chats, tokenize(chats), strict=True):
        longest = max(len(ids) for ids, _ in rows)
        if settings.max_model_len is not None and longest > settings.max_model_len:
            if settings.overlong == "refuse":
                raise SettingError(
                    f"chat {chat.id} is {longest} tokens long, max_model_len is {settings.max_model_len}; raise it, or set overlong='mask' "
                    "to leave such chats out, counted"
                )
            aside["longer than max_model_len"] += 1
            continue
        samples = [sample_of_row(chat.id, number, ids, said) for number, (ids, said) in enumerate(rows)]
        samples = [sample for sample in samples if len(sample.token_ids) >= _SHORTEST and sample.trained_mask.any()]
        if samples:
            units.append(_unit(samples))
        else:
            aside["the assistant says nothing in it"] += 1
    return units


def _unit(samples: Sequence[Sample]) -> Unit:
    content = hashlib.sha256()
    for sample in samples:
        content.update(sample.token_ids.tobytes() + b"|" + np.packbits(sample.trained_mask).tobytes() + b"|")
    return Unit(id=content.hexdigest()[:16], rows=[_row(sample) for sample in samples])


def _row(sample: Sample) -> Row:
    zeros = np.zeros(len(sample.token_ids), np.float32)
    return Row(
        sample=msgspec.structs.replace(sample, temperature=1.0),
        advantages=zeros,
        weights=sample.trained_mask.astype(np.float32),
        old_logprobs=np.where(sample.trained_mask, np.float32(0), np.float32(np.nan)),
        group=sample.episode_id,
    )


def _has_text(call: ModelCall) -> bool:
    """Whether a call can be trained on what it said, though not on the ids that it sampled."""
    if call.no_train or call.error is not None or call.late or not call.complete or call.multimodal or call.operation != "chat":
        return False
    return bool(call.messages) and any(choice.text or choice.tool_calls for choice in call.choices[:1])


def _as_chat(call: ModelCall) -> Chat:
    reply: dict[str, Any] = {"role": "assistant", "content": call.choices[0].text}
    if call.choices[0].tool_calls:
        reply["tool_calls"] = call.choices[0].tool_calls
    return Chat(id=call.span_id, messages=[*call.messages, reply], tools=call.tools, only_last=True)
