"""Parts of a reply in, the whole reply out: ids and logprobs one after the other, and the version of each token.

An update cuts a reply short where the replica ends its requests for it; the reply is then asked for again from where it was. Replicas
that stand still during an update tell versions token by token themselves; those that end every request tell one for each part.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from rllm_trainer.cluster._replica import VERSIONS, Reply

__all__ = ["Ask", "Spans", "whole_reply"]

Ask = Callable[[list[int], int], Awaitable[Any]]
"""Tokens that are there, and how many more may come -> the next part, as verl's ``TokenOutput``."""
Spans = list[tuple[int, int, int]]
_CUT_SHORT = ("abort", "aborted")
_AGAIN = 1.0
"""Seconds after which a reply is asked on for; meanwhile the update goes on."""


async def whole_reply(ask: Ask, *, most: int, again: float = _AGAIN) -> Reply:
    """One reply of at most so many tokens, all its parts together."""
    ids: list[int] = []
    logprobs: list[float] = []
    spans: Spans = []
    while True:
        part = await ask(list(ids), most - len(ids))
        _add(spans, _spans_of(part), len(ids))
        ids += part.token_ids
        logprobs += part.log_probs or []
        cut_short = part.stop_reason in _CUT_SHORT
        if len(ids) >= most or not cut_short:
            break
        await asyncio.sleep(again)
    return Reply(
        token_ids=ids,
        log_probs=logprobs,
        stop_reason="length" if cut_short else part.stop_reason,
        extra_fields={VERSIONS: spans, "global_steps": max((version for version, _, _ in spans), default=None)},
    )


def _spans_of(part: Any) -> Spans:
    """What a replica told of one part of a reply; the whole of it has one version where it told only that."""
    told = part.extra_fields.get(VERSIONS)
    if told is not None:
        return [(int(version), int(start), int(end)) for version, start, end in told]
    return [(int(part.extra_fields["global_steps"]), 0, len(part.token_ids))] if part.token_ids else []


def _add(spans: Spans, more: Spans, at: int) -> None:
    """Append the spans of a part that begins at that token; what goes on under the same version is one span."""
    for version, start, end in more:
        if spans and spans[-1][0] == version:
            spans[-1] = (version, spans[-1][1], at + end)
        else:
            spans.append((version, at + start, at + end))
