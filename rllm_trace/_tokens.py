"""Token ids and logprobs to packed text and back; a finished call to the attributes of its span and back.

Arrays travel as base64 of little-endian int32 or float32, so they come back bit for bit, and 32,768 of them cost one string.
``call_from_attributes(call_attributes(data, content=True, tokens=True)) == data`` for every ``CallData``: a span exported with its
tokens is enough to rebuild the call exactly. Without tokens, counts and a digest stay; without content, no text stays either.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from rllm_trace import attributes as names
from rllm_trace._calldata import CallData
from rllm_trace._genai import body, input_messages, output_messages, request_options, tool_definitions
from rllm_trace._plain import dumps, loads
from rllm_trace.types import Choice, ErrorInfo, Logprobs, TokenIds, Usage

__all__ = [
    "AttributeValue",
    "call_attributes",
    "call_from_attributes",
    "pack_ids",
    "pack_logprobs",
    "token_digest",
    "unpack_ids",
    "unpack_logprobs",
]

AttributeValue = str | bool | int | float | list[str]

_BINARY_BODY: Final = "base64:"
"""Marks a request body that is not UTF-8; a JSON body never begins so."""

_OPERATIONS: Final = {"chat": names.OP_CHAT, "text_completion": names.OP_COMPLETION, "responses": names.OP_CHAT}

_SCALARS: Final = (
    ("operation", names.CALL_OPERATION),
    ("model", names.REQUEST_MODEL),
    ("requested_model", names.CALL_REQUESTED_MODEL),
    ("endpoint", names.CALL_ENDPOINT),
    ("server", names.CALL_SERVER),
    ("response_id", names.RESPONSE_ID),
    ("response_model", names.RESPONSE_MODEL),
    ("attempts", names.CALL_ATTEMPTS),
    ("status", names.CALL_STATUS),
    ("exact", names.CALL_EXACT),
    ("inexact_reason", names.CALL_INEXACT_REASON),
    ("complete", names.CALL_COMPLETE),
    ("streamed", names.CALL_STREAMED),
    ("multimodal", names.CALL_MULTIMODAL),
    ("policy_version_start", names.POLICY_VERSION_START),
    ("policy_version_end", names.POLICY_VERSION_END),
    ("time_to_first_token", names.CALL_TIME_TO_FIRST_TOKEN),
)
"""Fields of CallData that are one attribute each; None is an absent attribute."""


class _ChoiceText(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A choice without its arrays, as it is written under ``rllm.response.choices``."""

    index: int
    text: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    reasoning: str | None = None
    refusal: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    version_spans: list[tuple[int, int, int]] | None = None


def pack_ids(ids: TokenIds) -> str:
    """Base64 of little-endian int32."""
    return base64.b64encode(ids.packed()).decode("ascii")


def unpack_ids(text: str) -> TokenIds:
    """Raises ValueError if ``text`` is not base64 of whole 4-byte numbers."""
    return TokenIds(base64.b64decode(text, validate=True))


def pack_logprobs(logprobs: Logprobs) -> str:
    """Base64 of little-endian float32."""
    return base64.b64encode(logprobs.packed()).decode("ascii")


def unpack_logprobs(text: str) -> Logprobs:
    """Raises ValueError if ``text`` is not base64 of whole 4-byte numbers."""
    return Logprobs(base64.b64decode(text, validate=True))


def token_digest(prompt: TokenIds | None, choices: Sequence[Choice]) -> str | None:
    """Sha256, in hex, of all arrays of a call, each preceded by its length; None if it has no array at all."""
    arrays = [prompt, *(array for choice in choices for array in (choice.token_ids, choice.logprobs))]
    if all(array is None for array in arrays):
        return None
    digest = hashlib.sha256()
    for array in arrays:
        digest.update((-1 if array is None else len(array)).to_bytes(8, "little", signed=True))
        digest.update(b"" if array is None else array.packed())
    return digest.hexdigest()


def call_attributes(data: CallData, *, content: bool, tokens: bool) -> dict[str, AttributeValue]:
    """The attributes of a chat span that its call gives.

    ``content`` adds request, messages and replies. ``tokens`` adds ids and logprobs, and is refused without ``content``: ids are
    the same text in another spelling.
    """
    assert content or not tokens, "tokens are content"
    fields = body(data.request)
    found = _always(data, fields)
    if content:
        found |= _content(data, fields)
    else:
        found.pop(names.REQUEST_STOP, None)
    if tokens:
        found |= _arrays(data)
    return found


def _always(data: CallData, fields: dict[str, Any]) -> dict[str, AttributeValue]:
    found: dict[str, AttributeValue] = {
        names.OPERATION_NAME: _OPERATIONS[data.operation],
        names.OPENINFERENCE_KIND: names.KIND_CALL,
        **request_options(fields),
    }
    found |= {key: value for field, key in _SCALARS if (value := getattr(data, field)) is not None}
    host, separator, port = data.server.rpartition(":")
    if separator and port.isdecimal():
        found |= {names.SERVER_ADDRESS: host, names.SERVER_PORT: int(port)}
    reasons = [choice.finish_reason for choice in data.choices if choice.finish_reason]
    if reasons:
        found[names.RESPONSE_FINISH_REASONS] = reasons
    if data.time_to_first_token is not None:
        found[names.TIME_TO_FIRST_CHUNK] = data.time_to_first_token / 1e9
    if data.version_spans is not None:
        found[names.POLICY_VERSION_SPANS] = dumps(data.version_spans)
    if data.error is not None:
        found[names.ERROR_TYPE] = data.error.type
        if data.error.status_code is not None:
            found[names.ERROR_STATUS] = data.error.status_code
    return found | _counts(data)


def _counts(data: CallData) -> dict[str, AttributeValue]:
    found: dict[str, AttributeValue] = {}
    sampled = [choice.token_ids for choice in data.choices if choice.token_ids is not None]
    if data.prompt_token_ids is not None:
        found[names.PROMPT_TOKEN_COUNT] = len(data.prompt_token_ids)
    if sampled:
        found[names.RESPONSE_TOKEN_COUNT] = sum(map(len, sampled))
    digest = token_digest(data.prompt_token_ids, data.choices)
    if digest is not None:
        found[names.TOKENS_SHA256] = digest
    if data.usage is not None:
        found[names.USAGE_INPUT_TOKENS] = data.usage.prompt_tokens
        found[names.USAGE_OUTPUT_TOKENS] = data.usage.completion_tokens
    elif found:
        found[names.CALL_USAGE_REPORTED] = False
        if data.prompt_token_ids is not None:
            found[names.USAGE_INPUT_TOKENS] = len(data.prompt_token_ids)
        if sampled:
            found[names.USAGE_OUTPUT_TOKENS] = sum(map(len, sampled))
    finite = [value for choice in data.choices for value in choice.logprobs or ()]
    if finite and not math.isfinite(sum(finite)):
        finite = [value for value in finite if math.isfinite(value)]
    if finite:
        found[names.LOGPROB_MEAN] = math.fsum(finite) / len(finite)
        found[names.LOGPROB_MIN] = min(finite)
    return found


def _content(data: CallData, fields: dict[str, Any]) -> dict[str, AttributeValue]:
    found: dict[str, AttributeValue] = {names.REQUEST_BODY: _body_text(data.request)}
    if data.requested is not None:
        found[names.REQUEST_ORIGINAL] = dumps(data.requested)
    found[names.RESPONSE_CHOICES] = dumps([_without_arrays(choice) for choice in data.choices])
    if data.error is not None:
        found[names.ERROR_MESSAGE] = data.error.message
    system, messages = input_messages(data.operation, fields)
    if system:
        found[names.SYSTEM_INSTRUCTIONS] = dumps(system)
    found[names.INPUT_MESSAGES] = dumps(messages)
    found[names.OUTPUT_MESSAGES] = dumps(output_messages(data.choices))
    tools = tool_definitions(fields)
    if tools:
        found[names.TOOL_DEFINITIONS] = dumps(tools)
    return found


def _arrays(data: CallData) -> dict[str, AttributeValue]:
    found: dict[str, AttributeValue] = {names.TOKENS_ENCODING: names.TOKENS_ENCODING_VALUE}
    if data.prompt_token_ids is not None:
        found[names.PROMPT_TOKEN_IDS] = pack_ids(data.prompt_token_ids)
    for position, choice in enumerate(data.choices):
        if choice.token_ids is not None:
            found[names.response_key(names.RESPONSE_TOKEN_IDS, position)] = pack_ids(choice.token_ids)
        if choice.logprobs is not None:
            found[names.response_key(names.RESPONSE_LOGPROBS, position)] = pack_logprobs(choice.logprobs)
    return found


def call_from_attributes(attributes: Mapping[str, Any]) -> CallData | None:
    """The call of a span that was exported by ``call_attributes``; None if the span is not one of ours.

    What was not exported is absent: without tokens the arrays are None and the call is inexact, without content the request is
    ``{}`` and the choices are empty. Raises ValueError if an attribute of ours is malformed.
    """
    if names.CALL_OPERATION not in attributes:
        return None
    fields = {field: attributes[key] for field, key in _SCALARS if key in attributes}
    packed = attributes.get(names.TOKENS_ENCODING) == names.TOKENS_ENCODING_VALUE
    choices = _choices(attributes, packed=packed)
    prompt = attributes.get(names.PROMPT_TOKEN_IDS) if packed else None
    lost = [key for key in attributes.get(names.OMITTED_ATTRIBUTES, ()) if key not in names.VIEW_KEYS]
    if fields["exact"] and (lost or not packed):
        reason = f"too large to be exported: {', '.join(lost)}" if lost else "tokens were not exported"
        fields |= {"exact": False, "inexact_reason": reason}
    return msgspec.convert(
        {
            **fields,
            "request": _body_bytes(attributes.get(names.REQUEST_BODY, "{}")),
            "requested": _optional_json(attributes, names.REQUEST_ORIGINAL),
            "choices": choices,
            "prompt_token_ids": None if prompt is None else unpack_ids(prompt),
            "usage": _usage(attributes),
            "error": _error(attributes),
            "version_spans": _optional_json(attributes, names.POLICY_VERSION_SPANS),
        },
        CallData,
        strict=True,
    )


def _choices(attributes: Mapping[str, Any], *, packed: bool) -> list[Choice]:
    found = msgspec.convert(loads(attributes.get(names.RESPONSE_CHOICES, "[]")), list[_ChoiceText])
    made: list[Choice] = []
    for position, choice in enumerate(found):
        ids = attributes.get(names.response_key(names.RESPONSE_TOKEN_IDS, position)) if packed else None
        logprobs = attributes.get(names.response_key(names.RESPONSE_LOGPROBS, position)) if packed else None
        made.append(
            Choice(
                **{name: getattr(choice, name) for name in _ChoiceText.__struct_fields__},
                token_ids=None if ids is None else unpack_ids(ids),
                logprobs=None if logprobs is None else unpack_logprobs(logprobs),
            )
        )
    return made


def _without_arrays(choice: Choice) -> dict[str, Any]:
    return {name: value for name in _ChoiceText.__struct_fields__ if (value := getattr(choice, name)) is not None}


def _usage(attributes: Mapping[str, Any]) -> Usage | None:
    if attributes.get(names.CALL_USAGE_REPORTED) is False or names.USAGE_INPUT_TOKENS not in attributes:
        return None
    return Usage(prompt_tokens=attributes[names.USAGE_INPUT_TOKENS], completion_tokens=attributes[names.USAGE_OUTPUT_TOKENS])


def _error(attributes: Mapping[str, Any]) -> ErrorInfo | None:
    if names.ERROR_TYPE not in attributes:
        return None
    return ErrorInfo(
        type=attributes[names.ERROR_TYPE],
        message=attributes.get(names.ERROR_MESSAGE, ""),
        status_code=attributes.get(names.ERROR_STATUS),
    )


def _optional_json(attributes: Mapping[str, Any], key: str) -> Any:
    return loads(attributes[key]) if key in attributes else None


def _body_text(body: bytes) -> str:
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError:
        return _BINARY_BODY + base64.b64encode(body).decode("ascii")


def _body_bytes(text: str) -> bytes:
    return base64.b64decode(text[len(_BINARY_BODY) :]) if text.startswith(_BINARY_BODY) else text.encode("utf-8")
