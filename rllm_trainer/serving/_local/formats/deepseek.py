"""DeepSeek: one section of calls behind the content, each call between tags of its own; V3 and R1 fence the arguments, V3.1 does not."""

from __future__ import annotations

import re

from rllm_trainer.serving._local.formats.base import Call, Format, MalformedCall, Tools, json_object

__all__ = ["DEEPSEEK"]

_OPEN = "<｜tool▁calls▁begin｜>"
_CLOSE = "<｜tool▁calls▁end｜>"
_CALL, _SEPARATOR, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_FENCED = re.compile(r"([^\n]+)\n```json\n(.*)\n```\s*", re.DOTALL)


def _read(block: str, tools: Tools) -> list[Call]:
    calls: list[Call] = []
    rest = block.strip()
    while rest:
        if not rest.startswith(_CALL):
            raise MalformedCall(f"expected {_CALL} at {rest[:40]!r}")
        one, ended, rest = rest.removeprefix(_CALL).partition(_END)
        before, separated, after = one.partition(_SEPARATOR)
        if not separated:
            raise MalformedCall(f"expected {_SEPARATOR} in {one[:40]!r}")
        if before.strip() == "function":
            fenced = _FENCED.fullmatch(after)
            if fenced is None:
                raise MalformedCall("expected the name and a ```json block")
            before, after = fenced.groups()
        calls.append(Call(name=before.strip(), arguments=json_object(after)))
        if not ended and rest:
            raise MalformedCall(f"expected {_END}")
        rest = rest.strip()
    if not calls:
        raise MalformedCall("the section holds no call")
    return calls


DEEPSEEK = Format(name="deepseek", opens=(_OPEN,), close=_CLOSE, read=_read, marks=(_OPEN, _CLOSE, _CALL, _SEPARATOR, _END))
