"""A scripted reply and the request it answers in; out come the bytes that an OpenAI-compatible server with vLLM's fields would send.

Ids and logprobs are sent where the request asks for them (``return_token_ids``, ``logprobs``), as vLLM does: ``prompt_token_ids`` at the
top, ``token_ids`` and ``logprobs.content`` in each choice; in a stream the prompt's ids with the first chunk and each chunk's own ids
with the chunk. Versions are sent as SGLang does, under ``metadata``. Pure: no clock, no network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import msgspec

__all__ = ["Reply", "ReplyChoice", "stream_events", "whole_body"]

_CREATED: Final = 1_700_000_000


class ReplyChoice(msgspec.Struct, kw_only=True):
    """One choice that the server sends."""

    text: str | None = "ok"
    token_ids: Sequence[int] = (104, 105, 2)
    logprobs: Sequence[float | None] = (-0.5, -0.25, -0.125)
    """Sent as they are, also where they do not fit ``token_ids``."""
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    """In the OpenAI shape; streamed in fragments."""
    finish_reason: str | None = "stop"
    stop_reason: int | str | None = None


class Reply(msgspec.Struct, kw_only=True):
    """What the server answers to one request."""

    choices: list[ReplyChoice] = []
    """Empty: ``n`` choices like the default one."""
    prompt_token_ids: Sequence[int] = (1, 72, 105)
    status: int = 200
    error: dict[str, Any] | None = None
    """Sent as ``{"error": ...}`` instead of a reply; with status 200 and a stream, as its last event."""
    headers: dict[str, str] = {}
    usage: dict[str, int] | None = None
    """None: counted from the ids."""
    weight_versions: list[tuple[int, int, int] | tuple[int, int, int, int]] = []
    """(version, first token, end token), of a choice above 0 with its index; also sent as ``x-rllm-policy-version``, the first one."""
    omit: frozenset[str] = frozenset()
    """Wire fields that are left out although asked for: ``prompt_token_ids``, ``token_ids``, ``logprobs``, ``usage``, ``done``."""
    tokens_per_chunk: int = 1
    chunk_bytes: int | None = None
    """Cut the stream into network writes of this many bytes, whatever the events; None: one write for each event."""
    delay: float = 0.0
    """Seconds before the first byte."""
    hold_after: int | None = None
    """Send this many events (0: nothing at all), then nothing more: the client's own timeout or cancellation ends the call."""
    disconnect_after: int | None = None
    """Drop the connection after this many events (0: before the first byte)."""
    gzip: bool = False
    """Compress, where the client accepts it."""
    raw: bytes | None = None
    """Sent as the whole body, whatever was asked."""
    spells_nulls: bool = False
    """Fields that were not asked for are sent as null, as vLLM does, instead of being left out."""


class _Asked(msgspec.Struct):
    ids: bool
    logprobs: bool
    usage: bool


def _asked(body: Mapping[str, Any], reply: Reply, *, chat: bool) -> _Asked:
    wants = body.get("logprobs")
    options = cast("Mapping[str, Any]", body.get("stream_options") or {})
    return _Asked(
        ids=bool(body.get("return_token_ids")),
        logprobs=(bool(wants) if chat else wants is not None) and "logprobs" not in reply.omit,
        usage="usage" not in reply.omit and (not body.get("stream") or bool(options.get("include_usage"))),
    )


def choices_of(body: Mapping[str, Any], reply: Reply) -> list[ReplyChoice]:
    """The choices that the request gets."""
    return reply.choices or [ReplyChoice() for _ in range(int(body.get("n") or 1))]


def _usage(choices: Sequence[ReplyChoice], reply: Reply) -> dict[str, int]:
    if reply.usage is not None:
        return reply.usage
    written = sum(len(choice.token_ids) for choice in choices)
    return {
        "prompt_tokens": len(reply.prompt_token_ids),
        "completion_tokens": written,
        "total_tokens": len(reply.prompt_token_ids) + written,
    }


def _metadata(reply: Reply) -> dict[str, Any]:
    if not reply.weight_versions:
        return {}
    spans = [
        {"version": str(version), "start": start, "end": end} | ({"choice": choice[0]} if choice else {})
        for version, start, end, *choice in reply.weight_versions
    ]
    return {"metadata": {"weight_version": spans[-1]["version"], "weight_versions": spans}}


def _chat_logprobs(values: Sequence[float | None], ids: Sequence[int]) -> dict[str, Any]:
    tokens = [*(f"t{token}" for token in ids), *("?" for _ in values[len(ids) :])]
    entries = [
        {"token": token, "logprob": value, "bytes": list(token.encode()), "top_logprobs": []}
        for token, value in zip(tokens, values, strict=False)
    ]
    return {"content": entries, "refusal": None}


def _legacy_logprobs(values: Sequence[float | None]) -> dict[str, Any]:
    return {"text_offset": [0] * len(values), "token_logprobs": list(values), "tokens": ["t"] * len(values), "top_logprobs": None}


def _ids_field(asked: _Asked, reply: Reply, name: str, ids: Sequence[int]) -> dict[str, Any]:
    if asked.ids and name not in reply.omit:
        return {name: list(ids)}
    return {name: None} if reply.spells_nulls else {}


def whole_body(request: Mapping[str, Any], reply: Reply, *, chat: bool, number: int) -> bytes:
    """The body of an unstreamed answer."""
    asked = _asked(request, reply, chat=chat)
    choices = choices_of(request, reply)
    sent: list[dict[str, Any]] = []
    for index, choice in enumerate(choices):
        item: dict[str, Any] = {"index": index}
        if chat:
            message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": choice.refusal}
            if choice.reasoning is not None:
                message["reasoning_content"] = choice.reasoning
            if choice.tool_calls is not None:
                message["tool_calls"] = choice.tool_calls
            item["message"] = message
            item["logprobs"] = _chat_logprobs(choice.logprobs, choice.token_ids) if asked.logprobs else None
        else:
            item["text"] = choice.text
            item["logprobs"] = _legacy_logprobs(choice.logprobs) if asked.logprobs else None
        item["finish_reason"] = choice.finish_reason
        item["stop_reason"] = choice.stop_reason
        item.update(_ids_field(asked, reply, "token_ids", choice.token_ids))
        sent.append(item)
    body: dict[str, Any] = {
        "id": f"chatcmpl-{number}",
        "object": "chat.completion" if chat else "text_completion",
        "created": _CREATED,
        "model": request.get("model"),
        "choices": sent,
    }
    if asked.usage:
        body["usage"] = _usage(choices, reply)
    if reply.spells_nulls:
        body["prompt_logprobs"] = None
    body.update(_ids_field(asked, reply, "prompt_token_ids", reply.prompt_token_ids))
    if reply.spells_nulls:
        body["kv_transfer_params"] = None
    body.update(_metadata(reply))
    return msgspec.json.encode(body)


def _pieces(text: str | None, count: int) -> list[str]:
    """``text`` in at most ``count`` pieces of about equal length."""
    if not text:
        return []
    step = max(1, -(-len(text) // max(1, count)))
    return [text[start : start + step] for start in range(0, len(text), step)]


def _deltas(choice: ReplyChoice, count: int, *, chat: bool) -> list[dict[str, Any]]:
    if not chat:
        return [{"text": piece} for piece in _pieces(choice.text, count)]
    deltas: list[dict[str, Any]] = [{"reasoning_content": piece} for piece in _pieces(choice.reasoning, count)]
    deltas += [{"content": piece} for piece in _pieces(choice.text, count)]
    deltas += [{"refusal": piece} for piece in _pieces(choice.refusal, count)]
    for index, call in enumerate(choice.tool_calls or ()):
        function = call["function"]
        head = {"index": index, "id": call.get("id"), "type": "function", "function": {"name": function["name"], "arguments": ""}}
        deltas.append({"tool_calls": [head]})
        deltas += [{"tool_calls": [{"index": index, "function": {"arguments": part}}]} for part in _pieces(function["arguments"], 3)]
    return deltas


def _share(size: int, position: int, parts: int) -> slice:
    return slice(size * position // parts, size * (position + 1) // parts)


def _choice_chunks(index: int, choice: ReplyChoice, asked: _Asked, reply: Reply, *, chat: bool) -> list[dict[str, Any]]:
    """The choices of the chunks that carry one reply; ids and logprobs are spread over them in order."""
    steps = max(1, -(-len(choice.token_ids) // max(1, reply.tokens_per_chunk)))
    deltas = _deltas(choice, steps, chat=chat)
    deltas += [{"content": ""} if chat else {"text": ""} for _ in range(steps - len(deltas))]
    chunks: list[dict[str, Any]] = []
    for position, delta in enumerate(deltas):
        ids = choice.token_ids[_share(len(choice.token_ids), position, len(deltas))]
        values = choice.logprobs[_share(len(choice.logprobs), position, len(deltas))]
        logprobs = None if not asked.logprobs else _chat_logprobs(values, ids) if chat else _legacy_logprobs(values)
        item: dict[str, Any] = {"index": index, **({"delta": delta} if chat else delta), "logprobs": logprobs, "finish_reason": None}
        item.update(_ids_field(asked, reply, "token_ids", ids))
        chunks.append(item)
    chunks[-1]["finish_reason"] = choice.finish_reason
    if choice.stop_reason is not None:
        chunks[-1]["stop_reason"] = choice.stop_reason
    return chunks


def stream_events(request: Mapping[str, Any], reply: Reply, *, chat: bool, number: int) -> list[bytes]:
    """The events of a streamed answer; the choices of one answer take turns."""
    asked = _asked(request, reply, chat=chat)
    choices = choices_of(request, reply)
    head: dict[str, Any] = {
        "id": f"chatcmpl-{number}",
        "object": "chat.completion.chunk" if chat else "text_completion",
        "created": _CREATED,
        "model": request.get("model"),
    }
    prompt = _ids_field(asked, reply, "prompt_token_ids", reply.prompt_token_ids)
    events: list[dict[str, Any]] = []
    if chat:
        role = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        events += [{**head, "choices": [{"index": index, **role}], **(prompt if index == 0 else {})} for index in range(len(choices))]
    queues = [_choice_chunks(index, choice, asked, reply, chat=chat) for index, choice in enumerate(choices)]
    turns = [queue[turn] for turn in range(max(map(len, queues))) for queue in queues if turn < len(queue)]
    events += [{**head, "choices": [item]} for item in turns]
    if not chat:
        events[0].update(prompt)
    events[-1].update(_metadata(reply))
    if asked.usage:
        events.append({**head, "choices": [], "usage": _usage(choices, reply), **_metadata(reply)})
    if reply.error is not None:
        events.append({"error": reply.error})
    sent = [b"data: " + msgspec.json.encode(event) + b"\n\n" for event in events]
    return sent if "done" in reply.omit else [*sent, b"data: [DONE]\n\n"]
