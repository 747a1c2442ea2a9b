"""The raw body of a response in; out come its choices, ids, logprobs and usage, and the body that the app is to see.

The token arrays are skipped when the body is decoded, each is then decoded once, straight into numbers, and neither pydantic nor
``json`` ever sees one that the app did not ask for, but in a body that nothing else can read. A streamed reply (``_events``) ends in the
same ``Reply``, field by field.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, cast

import msgspec

from rllm_trace import _exact
from rllm_trace.clients._cut import IDS, LOGPROBS, METADATA, PROMPT_IDS, VERSION_MARK, CutError, Member, cut, without
from rllm_trace.types import Choice, Logprobs, TokenIds, Usage

__all__ = ["UNREADABLE", "Keep", "Reply", "read_reply"]

UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What reading a body raises that is no reply: no JSON, other types, no UTF-8, nested too deeply."""

Operation = Literal["chat", "text_completion", "responses"]


class Keep(msgspec.Struct, frozen=True, kw_only=True):
    """Which added fields the app asked for itself, and so sees."""

    ids: bool
    logprobs: bool
    usage_chunk: bool = True
    """False: the usage chunk of a stream was asked for by us."""
    versions: bool = True
    """False: versions of the weights are told by a server that the app does not know of."""

    @property
    def everything(self) -> bool:
        """Nothing is taken out of a body or an event."""
        return self.ids and self.logprobs and self.versions


class Reply(msgspec.Struct, kw_only=True):
    """What a response says, streamed or not."""

    choices: list[Choice] = []
    prompt_token_ids: TokenIds | None = None
    usage: Usage | None = None
    response_id: str | None = None
    response_model: str | None = None
    version_spans: list[tuple[int, int, int]] | None = None
    fault: str | None = None
    """The first number that is missing, invalid or contradicts another; None: all there."""
    finished: bool = False
    """Every choice has its finish reason."""
    error: dict[str, Any] | None = None
    """An error object sent instead of a reply, or within a stream."""


class Entry(msgspec.Struct, gc=False):
    logprob: float | None = None
    sampling_logprob: float | None = None
    """Fireworks' name for what the token was sampled with, where ``logprob`` is the model's at temperature 1."""


class LogprobsBody(msgspec.Struct, gc=False):
    content: list[Entry] | None = None
    refusal: list[Entry] | None = None
    token_logprobs: list[float | None] | None = None
    """Legacy completions."""


class Message(msgspec.Struct, gc=False):
    content: Any = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: Any = None
    tool_calls: list[dict[str, Any]] | None = None
    function_call: dict[str, Any] | None = None


class Version(msgspec.Struct, gc=False):
    version: Any = None
    start: int = 0
    end: int = 0
    choice: int = 0


class Metadata(msgspec.Struct, gc=False):
    weight_version: Any = None
    weight_versions: list[Version] | None = None


class UsageBody(msgspec.Struct, gc=False):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None

    def usage(self) -> Usage | None:
        if self.prompt_tokens is None or self.completion_tokens is None:
            return None
        return Usage(prompt_tokens=self.prompt_tokens, completion_tokens=self.completion_tokens)


_ABSENT: Final = msgspec.Raw()
_NULL: Final = msgspec.Raw(b"null")
_ID_MARK: Final = b'"id":'
_IDS_MARK: Final = b'token_ids"'
_LOGPROBS_MARK: Final = b'"logprobs"'
_NO_LOGPROBS: Final = b'"logprobs":null'


class ChoiceBody(msgspec.Struct, gc=False):
    index: int = 0
    message: Message | None = None
    delta: Message | None = None
    """A stream's part of ``message``."""
    text: str | None = None
    """Legacy completions."""
    logprobs: msgspec.Raw = _ABSENT
    token_ids: msgspec.Raw = _ABSENT
    response_token_ids: msgspec.Raw = _ABSENT
    prompt_token_ids: msgspec.Raw = _ABSENT
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    matched_stop: int | str | None = None
    """SGLang's name of ``stop_reason``."""

    def ids(self) -> list[Any] | None:
        """The sampled ids, under either name, as ``ints`` gives them; else those beside llama.cpp's logprobs."""
        raw = self.token_ids or self.response_token_ids
        return ints(raw) if raw or _ID_MARK not in bytes(self.logprobs) else _beside(self.logprobs)

    def logprob_values(self) -> list[float | None] | None:
        """One number, or None, for each entry; None where there is no such list."""
        raw = self.logprobs
        if not raw or raw == _NULL:
            return None
        try:
            told = _logprobs(raw)
        except msgspec.ValidationError:
            return None
        entries = told.content if told.content is not None else told.refusal
        if entries is None:
            return told.token_logprobs
        return [entry.logprob if entry.sampling_logprob is None else entry.sampling_logprob for entry in entries]


class Body(msgspec.Struct, gc=False):
    id: str | None = None
    model: str | None = None
    choices: list[ChoiceBody] | None = None
    usage: UsageBody | None = None
    metadata: msgspec.Raw = _ABSENT
    prompt_token_ids: msgspec.Raw = _ABSENT
    error: Any = None


class IdEntry(msgspec.Struct, gc=False):
    id: int


class IdsBody(msgspec.Struct, gc=False):
    content: list[IdEntry]


_logprobs = msgspec.json.Decoder(LogprobsBody).decode
_beside_logprobs = msgspec.json.Decoder(IdsBody).decode
_ints = msgspec.json.Decoder(list[int]).decode
_metadata = msgspec.json.Decoder(Metadata).decode

read_body = msgspec.json.Decoder(Body).decode
"""Decodes a response, or the data of one event of a stream. Raises ``msgspec.DecodeError`` where it is no such thing."""
read_bodies = msgspec.json.Decoder(list[Body]).decode
"""The same for an array of them."""


def ints(raw: msgspec.Raw) -> list[Any] | None:
    """An array of ids; None if it is absent or null. What is no array of integers is one text, which ``as_ids`` refuses."""
    if not raw or raw == _NULL:
        return None
    try:
        return _ints(raw)
    except msgspec.ValidationError:
        return [bytes(raw).decode()]


def _beside(logprobs: msgspec.Raw) -> list[Any] | None:
    try:
        return [entry.id for entry in _beside_logprobs(logprobs).content]
    except msgspec.ValidationError:
        return None


def shown(raw: bytes, body: Body, keep: Keep) -> bytes:
    """``raw``, which says ``body``, as the app is to see it: the same object where nothing is taken out."""
    members: list[Member] = []
    if not keep.ids and body.prompt_token_ids and body.prompt_token_ids != _NULL:
        members.append((b'"prompt_token_ids":', bytes(body.prompt_token_ids), False))
    for choice in body.choices or ():
        if not keep.logprobs and choice.logprobs and choice.logprobs != _NULL:
            members.append((b'"logprobs":', bytes(choice.logprobs), True))
        if not keep.ids:
            if choice.token_ids and choice.token_ids != _NULL:
                members.append((b'"token_ids":', bytes(choice.token_ids), False))
            if choice.response_token_ids and choice.response_token_ids != _NULL:
                members.append((b'"response_token_ids":', bytes(choice.response_token_ids), False))
            if choice.prompt_token_ids and choice.prompt_token_ids != _NULL:
                members.append((b'"prompt_token_ids":', bytes(choice.prompt_token_ids), False))
    if not keep.versions and body.metadata and VERSION_MARK in (metadata := bytes(body.metadata)):
        members.append((b'"metadata":', metadata, None))
    if not members:
        return raw
    try:
        return cut(raw, members)
    except (CutError, IndexError):
        return without(raw, ids=not keep.ids, logprobs=not keep.logprobs, versions=not keep.versions)


def shown_unread(raw: bytes, keep: Keep) -> bytes:
    """The same for a ``raw`` that could not be read: by ``json``, as the client reads it; what is no JSON object stays as it is."""
    if keep.everything:
        return raw
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        return raw
    if not isinstance(body, dict):
        return raw
    members = cast("dict[str, Any]", body)
    told = members.get("choices")
    choices = [cast("dict[str, Any]", item) for item in cast("list[Any]", told) if isinstance(item, dict)] if isinstance(told, list) else []
    taken = [item.pop(name, None) for item in (members, *choices) for name in (PROMPT_IDS, *IDS) if not keep.ids]
    for choice in choices:
        if not keep.logprobs and choice.get(LOGPROBS) is not None:
            taken.append(choice[LOGPROBS])
            choice[LOGPROBS] = None
    if not keep.versions and VERSION_MARK in raw:
        taken.append(members.pop(METADATA, None))
    return raw if all(value is None for value in taken) else json.dumps(members).encode()


def is_bare(raw: bytes, keep: Keep) -> bool:
    """True only if ``raw`` says nothing that would be taken out of it: found by searching bytes, where every key is spelled plainly."""
    if not keep.ids and raw.rfind(_IDS_MARK) >= 0:
        return False
    if not keep.logprobs and raw.count(_LOGPROBS_MARK) != raw.count(_NO_LOGPROBS):
        return False
    return keep.versions or raw.find(VERSION_MARK) < 0


def read_reply(raw: bytes, keep: Keep) -> tuple[Reply, bytes]:
    """The reply in an unstreamed body, and the body without what the app did not ask for. Raises one of ``UNREADABLE``."""
    body = read_body(raw)
    return reply_of(body), shown(raw, body, keep)


def reply_of(body: Body) -> Reply:
    """What an unstreamed response says."""
    choices: list[Choice] = []
    fault: str | None = None
    for choice in body.choices or ():
        record, choice_fault = _choice(choice)
        fault = fault or choice_fault
        choices.append(record)
    prompts = [body.prompt_token_ids, *(choice.prompt_token_ids for choice in body.choices or ())]
    prompt_ids, prompt_fault = prompt_of([ints(prompt) for prompt in prompts])
    usage = body.usage.usage() if body.usage is not None else None
    versions = version_spans(body.metadata)
    return Reply(
        choices=with_versions(choices, versions),
        prompt_token_ids=prompt_ids,
        usage=usage,
        response_id=body.id,
        response_model=body.model,
        version_spans=versions.get(0),
        fault=prompt_fault or fault or _exact.contradiction(choices, prompt_ids, usage),
        finished=bool(choices) and all(choice.finish_reason is not None for choice in choices),
        error=error_of(body.error),
    )


def _choice(choice: ChoiceBody) -> tuple[Choice, str | None]:
    message = choice.message or Message(content=choice.text)
    ids = choice.ids()
    token_ids, wrong = _exact.as_ids(ids)
    logprobs, fault = _exact.aligned(token_ids, choice.logprob_values())
    record = make_choice(
        index=choice.index,
        token_ids=token_ids,
        logprobs=logprobs,
        text=message.content if isinstance(message.content, str) else _text_of(message.content),
        tool_calls=[tool_call(call) for call in message.tool_calls or ()] + legacy_call(message.function_call),
        reasoning=message.reasoning_content or (message.reasoning if isinstance(message.reasoning, str) else None),
        refusal=message.refusal,
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason if choice.stop_reason is not None else choice.matched_stop,
    )
    return record, wrong or fault


def make_choice(
    *,
    index: int,
    token_ids: TokenIds | None,
    logprobs: Logprobs | None,
    text: str | None,
    tool_calls: list[dict[str, Any]],
    reasoning: str | None,
    refusal: str | None,
    finish_reason: str | None,
    stop_reason: int | str | None,
) -> Choice:
    """One form for both ways of sending it: an empty text beside tool calls, reasoning or a refusal is None, alone it is ``""``."""
    other = bool(tool_calls or reasoning or refusal)
    return Choice(
        index=index,
        token_ids=token_ids,
        logprobs=logprobs,
        text=text or (None if other else ""),
        tool_calls=tool_calls or None,
        reasoning=reasoning or None,
        refusal=refusal or None,
        finish_reason=finish_reason,
        stop_reason=stop_reason,
    )


def tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """A tool call without a stream's bookkeeping: no ``index``, no fields that are None, ``type`` always there."""
    return {"type": "function", **{key: value for key, value in call.items() if key != "index" and value is not None}}


def legacy_call(call: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """The deprecated ``function_call`` as a tool call without id."""
    return [{"type": "function", "function": dict(call)}] if call else []


def _text_of(content: Any) -> str | None:
    if not isinstance(content, list):
        return None
    parts = [cast("dict[str, Any]", part) for part in cast("list[Any]", content) if isinstance(part, dict)]
    return "".join(str(part.get("text") or "") for part in parts)


def prompt_of(reported: Sequence[list[Any] | None]) -> tuple[TokenIds | None, str | None]:
    """The prompt's ids out of everywhere that a server reports them; they must be the same everywhere."""
    there = [ids for ids in reported if ids]
    if not there:
        return None, None
    if any(ids != there[0] for ids in there[1:]):
        return None, _exact.PROMPT_IDS_DIFFER
    return _exact.as_ids(there[0])


def version_spans(metadata: msgspec.Raw) -> dict[int, list[tuple[int, int, int]]]:
    """Choice -> ``[(version, first token, end token), ...]`` from a response's ``metadata``; empty where it tells no version."""
    found: dict[int, list[tuple[int, int, int]]] = {}
    if not metadata or VERSION_MARK not in bytes(metadata):
        return found
    try:
        told = _metadata(metadata)
        for span in told.weight_versions or ():
            found.setdefault(span.choice, []).append((int(span.version), span.start, span.end))
        if not found and told.weight_version is not None:
            found[0] = [(int(told.weight_version), 0, 0)]
    except (msgspec.DecodeError, TypeError, ValueError):
        return {}
    return found


def with_versions(choices: list[Choice], versions: Mapping[int, list[tuple[int, int, int]]]) -> list[Choice]:
    """The choices, those above 0 with their own version spans; choice 0's are told for the call."""
    return [
        msgspec.structs.replace(choice, version_spans=versions[choice.index]) if choice.index and choice.index in versions else choice
        for choice in choices
    ]


def error_of(error: Any) -> dict[str, Any] | None:
    if not error:
        return None
    return cast("dict[str, Any]", error) if isinstance(error, dict) else {"message": str(error)}
