"""A JSON response in; out come the same response without its token arrays, and those arrays as bytes, found without parsing.

A quoted key followed by a colon cannot occur inside a JSON string (its quotes would be escaped), so the arrays are found by searching
bytes. Nothing here is trusted: the caller decodes every part, and each byte of the response is in exactly one of them, so a wrong cut
fails to decode and ``without`` does the same by parsing.
"""

from __future__ import annotations

import re
from typing import Any, Final, cast

import msgspec

__all__ = ["Cut", "cut", "without"]

PROMPT_IDS: Final = "prompt_token_ids"
IDS: Final = ("token_ids", "response_token_ids")
"""Names of the sampled ids in a choice: vLLM's and SGLang's."""
LOGPROBS: Final = "logprobs"
METADATA: Final = "metadata"
"""Where our own server and SGLang tell the versions of the weights."""

_PROMPT_KEY: Final = b'"prompt_token_ids"'
_ID_KEYS: Final = (b'"token_ids"', b'"response_token_ids"')
_LOGPROBS_KEY: Final = b'"logprobs"'
_METADATA_KEY: Final = b'"metadata"'
_VERSION_MARK: Final = b'"weight_version'
_LOGPROB_KEY: Final = b'"logprob"'
_NULLS_MARK: Final = b'"kv_transfer_params"'
"""vLLM writes this after all else, and each field that was not asked for as null: then null is what would have been there."""
_SPACE: Final = b" \t\r\n"
_STRUCTURE: Final = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)
_ENTRY_DEPTH: Final = 3
"""A logprob stands in an entry, in a list, in the logprobs object."""

_NULL: Final = msgspec.Raw(b"null")
_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_objects = msgspec.json.Decoder(list[dict[str, msgspec.Raw]]).decode
_encode = msgspec.json.Encoder().encode


class Cut(msgspec.Struct, gc=False):
    """A response in parts. Each list holds one array for each time that it was found, in the order of the response."""

    rest: bytes
    prompt_ids: list[bytes]
    ids: list[bytes]
    logprobs: list[bytes]
    metadata: bytes | None = None


class CutError(Exception):
    """The response is laid out in a way that searching bytes cannot cut."""


def cut(body: bytes, *, ids: bool, logprobs: bool, versions: bool = False) -> Cut:
    """Takes out what is asked for: id arrays and versions are removed with their keys, logprob objects replaced by null.

    Raises ``CutError``.
    """
    spans: list[tuple[int, int, int]] = []
    prompt_parts: list[bytes] = []
    id_parts: list[bytes] = []
    if ids:
        _find_arrays(body, _PROMPT_KEY, spans, prompt_parts)
        for key in _ID_KEYS:
            _find_arrays(body, key, spans, id_parts)
            if id_parts:
                break
    logprob_parts: list[bytes] = []
    if logprobs:
        _find_logprobs(body, spans, logprob_parts)
    metadata = _find_versions(body, spans) if versions else None
    if not spans:
        return Cut(body, prompt_parts, id_parts, logprob_parts)
    return Cut(_without_spans(body, spans), prompt_parts, id_parts, logprob_parts, metadata)


def _value_at(body: bytes, at: int) -> int:
    """Where the value begins whose key ends at ``at``; -1 if no colon follows."""
    size = len(body)
    while at < size and body[at] in _SPACE:
        at += 1
    if at >= size or body[at] != 0x3A:
        return -1
    at += 1
    while at < size and body[at] in _SPACE:
        at += 1
    return at


def _find_arrays(body: bytes, key: bytes, spans: list[tuple[int, int, int]], found: list[bytes]) -> None:
    at = body.find(key)
    while at >= 0:
        value = _value_at(body, at + len(key))
        end = at + len(key)
        if body[value : value + 1] == b"[" and value > 0:
            end = body.find(b"]", value) + 1
            if end == 0:
                raise CutError("array without end")
            spans.append((at, end, value))
            found.append(body[value:end])
        at = body.find(key, end)


def _find_logprobs(body: bytes, spans: list[tuple[int, int, int]], found: list[bytes]) -> None:
    at = body.find(_LOGPROBS_KEY)
    while at >= 0:
        value = _value_at(body, at + len(_LOGPROBS_KEY))
        following = body.find(_LOGPROBS_KEY, at + len(_LOGPROBS_KEY))
        if value > 0 and body[value : value + 1] == b"{":
            last = body.rfind(_LOGPROB_KEY, value, following if following >= 0 else len(body))
            end = _closed(body, value, 0) if last < 0 else _closed(body, last + len(_LOGPROB_KEY), _ENTRY_DEPTH)
            spans.append((value, end, value))
            found.append(body[value:end])
        at = following


def _find_versions(body: bytes, spans: list[tuple[int, int, int]]) -> bytes | None:
    at = body.find(_METADATA_KEY) if _VERSION_MARK in body else -1
    value = _value_at(body, at + len(_METADATA_KEY)) if at >= 0 else -1
    if value < 0 or body[value : value + 1] != b"{":
        return None
    end = _closed(body, value, 0)
    spans.append((at, end, -1))
    return body[value:end]


def _closed(body: bytes, at: int, depth: int) -> int:
    """Where the value ends that is ``depth`` levels open at ``at``."""
    for match in _STRUCTURE.finditer(body, at):
        mark = match[0]
        if mark in b"{[":
            depth += 1
        elif mark in b"}]":
            depth -= 1
            if depth == 0:
                return match.end()
    raise CutError("object without end")


def _without_spans(body: bytes, spans: list[tuple[int, int, int]]) -> bytes:
    """The body without the spans: a span is (start, end, where its value starts; -1 if it may not be null instead of gone).

    A span that starts with its value becomes null; others go with one comma, or become null where the server spells nulls out.
    """
    spans.sort()
    last = max((end for _, end, value in spans if value >= 0), default=-1)
    spells_nulls = last >= 0 and body.find(_NULLS_MARK, last) >= 0
    pieces: list[bytes] = []
    done = 0
    first = False
    for start, end, value in spans:
        if start < done:
            raise CutError("arrays within arrays")
        if value == start or (spells_nulls and value >= 0):
            pieces += (body[done:value], b"null")
            done, first = end, False
            continue
        before = body[done:start].rstrip(_SPACE)
        if before.endswith(b","):
            before = before[:-1]
            first = False
        elif before.endswith(b"{") or (first and not before):
            first = True
            while end < len(body) and body[end] in _SPACE:
                end += 1
            if body[end : end + 1] == b",":
                end += 1
        else:
            raise CutError("array that is no member of an object")
        pieces.append(before)
        done = end
    pieces.append(body[done:])
    return b"".join(pieces)


def without(body: bytes, *, ids: bool, logprobs: bool, versions: bool = False) -> bytes:
    """The same as ``cut(...).rest`` for any layout, by parsing. Raises ``msgspec.DecodeError`` if the body is no JSON object."""
    members = _object(body)
    spells_nulls = "kv_transfer_params" in members

    def take(item: dict[str, msgspec.Raw], name: str, *, as_null: bool) -> None:
        if name in item and bytes(cast(Any, item[name])) != b"null":
            if as_null:
                item[name] = _NULL
            else:
                del item[name]

    if ids:
        take(members, PROMPT_IDS, as_null=spells_nulls)
    if versions and _VERSION_MARK in bytes(cast(Any, members.get(METADATA, b""))):
        del members[METADATA]
    raw = members.get("choices")
    if raw is not None and bytes(cast(Any, raw)) != b"null":
        choices = _objects(raw)
        for choice in choices:
            for name in (PROMPT_IDS, *IDS) if ids else ():
                take(choice, name, as_null=spells_nulls)
            if logprobs:
                take(choice, LOGPROBS, as_null=True)
        members["choices"] = msgspec.Raw(_encode(choices))
    return _encode(members)
