"""Qwen3-Coder: ``<tool_call>`` + ``<function=name>`` with a ``<parameter=key>`` for each argument + ``</tool_call>``, values as plain text.

A value becomes what the tool's schema says it is: text stays text, anything else is read as JSON where it is JSON.
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from rllm_trainer.serving._local.formats.base import Call, Format, MalformedCall, Tools, one_json, parameter_types
from rllm_trainer.serving._local.formats.hermes import CLOSE, OPEN

__all__ = ["QWEN"]

_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>(.*?)</parameter>\s*", re.DOTALL)


def _read(block: str, tools: Tools) -> list[Call]:
    if block.lstrip().startswith("{"):
        return [one_json(block, key="arguments")]
    found = _FUNCTION.fullmatch(block)
    if found is None:
        raise MalformedCall("expected <function=name> ... </function>")
    name, body = found.groups()
    types = parameter_types(tools, name)
    arguments: dict[str, Any] = {}
    at = 0
    while at < len(body.rstrip()):
        parameter = _PARAMETER.match(body, at)
        if parameter is None:
            raise MalformedCall(f"expected <parameter=key> ... </parameter> at {body[at : at + 40]!r}")
        key, value = parameter.groups()
        arguments[key] = _value(value.removeprefix("\n").removesuffix("\n"), types.get(key))
        at = parameter.end()
    return [Call(name=name, arguments=json.dumps(arguments, ensure_ascii=False))]


def _value(text: str, kind: Any) -> Any:
    if kind == "string":
        return text
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


QWEN = Format(name="qwen", opens=(OPEN,), close=CLOSE, read=_read, newline_before=True, marks=(OPEN, CLOSE))
