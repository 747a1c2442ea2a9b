"""A JSON response and the members to take out of it, as bytes, in; the same response without them out.

A quoted key, its colon and its very value, byte for byte, stand nowhere in a JSON text but where that member is: inside a string the
quotes would be escaped. So a member is found by searching bytes, and what stays is passed on as it came. A layout in which it is not
found that way (unusual white space) is taken apart and put together again by ``without``, with the same result.
"""

from __future__ import annotations

from typing import Any, Final, cast

import msgspec

__all__ = ["CutError", "Member", "cut", "without"]

PROMPT_IDS: Final = "prompt_token_ids"
IDS: Final = ("token_ids", "response_token_ids")
"""Names of the sampled ids in a choice: vLLM's and SGLang's."""
LOGPROBS: Final = "logprobs"
METADATA: Final = "metadata"
"""Where our own server and SGLang tell the versions of the weights."""
VERSION_MARK: Final = b'"weight_version'

_NULLS_MARK: Final = b'"kv_transfer_params"'
"""vLLM writes this after all else, and each field that was not asked for as null: then null is what would have been there."""
_SPACE: Final = b" \t\r\n"
_COMMA: Final = 0x2C
_OPENING: Final = 0x7B
_NULL: Final = msgspec.Raw(b"null")
_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_objects = msgspec.json.Decoder(list[dict[str, msgspec.Raw]]).decode
_encode = msgspec.json.Encoder().encode

Member = tuple[bytes, bytes, bool | None]
"""The quoted key with its colon, the value, and what is to stand there: null (True), nothing (None), or whichever of the two the server
writes for a field that was not asked for (False)."""


class CutError(Exception):
    """A member is not laid out in a way that searching bytes can find."""


def cut(body: bytes, members: list[Member]) -> bytes:
    """``body`` without ``members``, which are given in the order of the body for each key. Raises ``CutError``."""
    found: list[tuple[int, int, int, bool | None]] = []
    after: dict[bytes, int] = {}
    for key, value, null in members:
        at = body.find(key, after.get(key, 0))
        while at >= 0:
            start = at + len(key)
            end = start + len(value)
            if body[start:end] == value:
                break
            if body[start : start + 1] == b" " and body[start + 1 : end + 1] == value:
                start, end = start + 1, end + 1
                break
            at = body.find(key, start)
        else:
            raise CutError(key)
        after[key] = end
        found.append((at, start, end, null))
    if len(found) > 1:
        found.sort()
    last = max((end for _, _, end, null in found if null is False), default=-1)
    spells_nulls = last >= 0 and body.find(_NULLS_MARK, last) >= 0
    return _joined(body, found, spells_nulls)


def _joined(body: bytes, found: list[tuple[int, int, int, bool | None]], spells_nulls: bool) -> bytes:
    pieces: list[bytes] = []
    done = 0
    for at, start, end, null in found:
        if null or (null is False and spells_nulls):
            pieces.append(body[done:start])
            pieces.append(b"null")
            done = end
            continue
        left = at - 1
        while body[left] in _SPACE:
            left -= 1
        if body[left] == _COMMA and left >= done:
            pieces.append(body[done:left])
        elif body[left] == _OPENING or left < done:
            pieces.append(body[done:at])
            while body[end] in _SPACE:
                end += 1
            if body[end] == _COMMA:
                end += 1
        else:
            raise CutError(body[at:start])
        done = end
    pieces.append(body[done:])
    return b"".join(pieces)


def without(body: bytes, *, ids: bool, logprobs: bool, versions: bool) -> bytes:
    """The same for any layout, by parsing. Raises ``msgspec.DecodeError`` if the body is no JSON object."""
    members = _object(body)
    spells_nulls = "kv_transfer_params" in members

    def take(item: dict[str, msgspec.Raw], name: str, *, as_null: bool) -> None:
        if name in item and item[name] != _NULL:
            if as_null:
                item[name] = _NULL
            else:
                del item[name]

    if ids:
        take(members, PROMPT_IDS, as_null=spells_nulls)
    if versions and VERSION_MARK in bytes(cast(Any, members.get(METADATA, b""))):
        del members[METADATA]
    raw = members.get("choices")
    if raw is not None and raw != _NULL:
        choices = _objects(raw)
        for choice in choices:
            for name in (PROMPT_IDS, *IDS) if ids else ():
                take(choice, name, as_null=spells_nulls)
            if logprobs:
                take(choice, LOGPROBS, as_null=True)
        members["choices"] = msgspec.Raw(_encode(choices))
    return _encode(members)
