"""Hermes, also Qwen 2.5 and 3: ``<tool_call>`` + a JSON object with ``name`` and ``arguments`` + ``</tool_call>``, once for each call."""

from __future__ import annotations

import json
from collections.abc import Callable

from rllm_trainer.serving._local.formats.base import Call, Format, Tools, one_json

__all__ = ["CLOSE", "HERMES", "OPEN"]

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
_NEWLINE = r'"\n"'


def _read(block: str, tools: Tools) -> list[Call]:
    return [one_json(block, key="arguments")]


def _forced(tools: Tools, several: bool, mark: Callable[[str], str]) -> str:
    rules = [f"start: call{f' ({_NEWLINE} call)*' if several else ''}"]
    rules.append(f"call: {mark(OPEN)} {_NEWLINE} ({' | '.join(f'f{i}' for i in range(len(tools)))}) {_NEWLINE} {mark(CLOSE)}")
    for index, tool in enumerate(tools):
        function = tool["function"]
        # The spaces are those of the templates, so that the next turn renders the same text.
        head = json.dumps('{"name": ' + json.dumps(function["name"]) + ', "arguments": ')
        rules.append(f'f{index}: {head} a{index} "}}"')
        rules.append(f"a{index}: %json {json.dumps(function.get('parameters') or {'type': 'object'})}")
    return "\n".join(rules)


HERMES = Format(name="hermes", opens=(OPEN,), close=CLOSE, read=_read, newline_before=True, marks=(OPEN, CLOSE), forced=_forced)
