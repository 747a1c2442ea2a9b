"""The text of a reply in, its content, its thinking and its tool calls out; whole or piece by piece with the same result.

A ``Format`` says where a block of calls begins and ends, and reads one block; finding blocks in settled text, holding back what may
begin one, and keeping what is no valid call as text, with the reason, is the same for all and in here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import msgspec

__all__ = ["Call", "Format", "MalformedCall", "ToolParser", "held_back", "json_object", "one_json", "parameter_types"]

Tools = Sequence[Mapping[str, Any]]


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One tool call."""

    name: str
    arguments: str
    """A JSON object; as the model wrote it where it wrote JSON, so that a template that prints it back prints the same tokens."""


class MalformedCall(ValueError):
    """A block is no call; the message is the reason."""


class Format(msgspec.Struct, frozen=True, kw_only=True):
    """How a family of models writes tool calls."""

    name: str
    opens: tuple[str, ...]
    """Each begins a block wherever it stands; it is not part of the block."""
    close: str | None
    """Ends a block; None: the block goes to the end of the reply."""
    read: Callable[[str, Tools], list[Call]]
    """A block and the request's tools in, its calls out. Raises ``MalformedCall``."""
    bare: str | None = None
    """A block also begins where the whole reply begins with this, which is part of the block."""
    newline_before: bool = False
    """The template prints a newline before a block, which is not content."""
    marks: tuple[str, ...] = ()
    """Texts that must be seen even where the tokenizer has them as special tokens; what opens and closes is among them."""
    forced: Callable[[Tools, bool, Callable[[str], str]], str] | None = None
    """A grammar for one call, or several, of given functions (see ``grammar.py``); None: a call cannot be forced."""


class ToolParser:
    """Fed with settled text; gives back text and calls in order."""

    def __init__(self, form: Format, *, several: bool, tools: Tools = ()) -> None:
        self._form = form
        self._several = several
        self._tools = tools
        self._starts = (*(f"\n{mark}" for mark in form.opens if form.newline_before), *form.opens)
        self._pending = ""
        self._inside: str | None = None
        """What opened the block."""
        self._started = False
        self.calls = 0
        self.malformed: list[str] = []
        """Why a block was left as text, one reason each."""

    def feed(self, text: str) -> list[str | Call]:
        """What became certain with this text."""
        self._pending += text
        out: list[str | Call] = []
        while (done := self._step()) is not None:
            out += done
        return out

    def finish(self) -> list[str | Call]:
        """The reply is over: what was held back."""
        out = self.feed("")
        rest, self._pending = self._pending, ""
        if self._inside is None:
            return out + self._text(rest)
        return out + self._block(rest, closed="")

    def _step(self) -> list[str | Call] | None:
        """One move forward; None where more text is needed."""
        form = self._form
        if self._inside is not None:
            end = -1 if form.close is None else self._pending.find(form.close)
            if form.close is None or end < 0:
                return None
            block, self._pending = self._pending[:end], self._pending[end + len(form.close) :]
            return self._block(block, closed=form.close)
        if not self._started and form.bare is not None:
            begins = self._pending.lstrip()
            if not begins:
                return None
            if begins.startswith(form.bare):
                self._started, self._inside = True, ""
                return []
        if not self._pending:
            return None
        self._started = True
        found = [(at, mark) for mark in form.opens if (at := self._pending.find(mark)) >= 0]
        if found:
            at, mark = min(found)
            before, self._pending, self._inside = self._pending[:at], self._pending[at + len(mark) :], mark
            return self._text(before.removesuffix("\n") if form.newline_before else before)
        keep = held_back(self._pending, self._starts)
        settled, self._pending = self._pending[: len(self._pending) - keep], self._pending[len(self._pending) - keep :]
        return self._text(settled) if settled else None

    def _block(self, block: str, *, closed: str) -> list[str | Call]:
        opened, self._inside = self._inside or "", None
        try:
            read = self._form.read(block, self._tools)
        except MalformedCall as error:
            self.malformed.append(str(error))
            return [opened + block + closed]
        wanted = read if self._several else read[: max(1 - self.calls, 0)]
        self.calls += len(wanted)
        return list(wanted)

    def _text(self, text: str) -> list[str | Call]:
        return [text] if text and not (self.calls and not text.strip()) else []


def held_back(text: str, starts: Sequence[str]) -> int:
    """Length of the longest end of ``text`` that may begin one of ``starts``."""
    return max((n for start in starts for n in range(1, min(len(start), len(text) + 1)) if text.endswith(start[:n])), default=0)


def json_object(text: str) -> str:
    """The text, if it is a JSON object. Raises ``MalformedCall``."""
    text = text.strip()
    try:
        msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeError) as error:
        raise MalformedCall(f"arguments: {error}") from error
    return text


class _Written(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw()


def one_json(text: str, *, key: str) -> Call:
    """A JSON object with ``name`` and, under ``key``, an object of arguments. Raises ``MalformedCall``."""
    try:
        written = msgspec.json.decode(text.strip(), type=_Written)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise MalformedCall(str(error)) from error
    arguments = bytes(written.arguments if key == "arguments" else written.parameters)
    if not arguments.startswith(b"{"):
        raise MalformedCall(f"{key} is not an object" if arguments else f"Object missing required field `{key}`")
    return Call(name=written.name, arguments=arguments.decode())


def parameter_types(tools: Tools, name: str) -> dict[str, Any]:
    """Of a function among the tools, the JSON schema type of each parameter that has one."""
    for tool in tools:
        function: dict[str, Any] = tool.get("function") or {}
        if function.get("name") == name:
            parameters: dict[str, Any] = function.get("parameters") or {}
            properties: dict[str, Any] = parameters.get("properties") or {}
            return {key: cast("dict[str, Any]", schema).get("type") for key, schema in properties.items() if isinstance(schema, dict)}
    return {}
