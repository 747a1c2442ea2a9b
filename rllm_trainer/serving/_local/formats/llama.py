"""Llama 3: the whole reply is a JSON object with ``name`` and ``parameters``, or several with ``;`` between them, perhaps behind a tag."""

from __future__ import annotations

import json
from collections.abc import Callable

from rllm_trainer.serving._local.formats.base import Call, Format, MalformedCall, Tools, one_json

__all__ = ["LLAMA"]

_TAG = "<|python_tag|>"
_ENDS = ("<|eom_id|>", "<|eot_id|>")
_decoder = json.JSONDecoder()


def _read(block: str, tools: Tools) -> list[Call]:
    text = block.strip()
    for end in _ENDS:
        text = text.removesuffix(end).rstrip()
    calls: list[Call] = []
    while text:
        try:
            end = _decoder.raw_decode(text)[1]
        except ValueError as error:
            raise MalformedCall(str(error)) from error
        calls.append(_one(text[:end]))
        rest = text[end:].lstrip()
        if rest and not rest.startswith(";"):
            raise MalformedCall(f"expected ';' or the end of the reply after a call, got {rest[:40]!r}")
        text = rest.removeprefix(";").lstrip()
    if not calls:
        raise MalformedCall("expected a JSON object with name and parameters")
    return calls


def _one(text: str) -> Call:
    try:
        return one_json(text, key="parameters")
    except MalformedCall as error:
        try:
            return one_json(text, key="arguments")
        except MalformedCall:
            raise error from None


def _forced(tools: Tools, several: bool, mark: Callable[[str], str]) -> str:
    """One call: the templates refuse several in one message."""
    rules = [f"start: {' | '.join(f'f{i}' for i in range(len(tools)))}"]
    for index, tool in enumerate(tools):
        function = tool["function"]
        head = json.dumps('{"name": ' + json.dumps(function["name"]) + ', "parameters": ')
        rules.append(f'f{index}: {head} a{index} "}}"')
        rules.append(f"a{index}: %json {json.dumps(function.get('parameters') or {'type': 'object'})}")
    return "\n".join(rules)


LLAMA = Format(name="llama", opens=(_TAG,), close=None, read=_read, bare="{", marks=(_TAG,), forced=_forced)
