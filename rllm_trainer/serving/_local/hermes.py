"""The text of a reply in, its content and its tool calls out, in the Hermes format; whole or piece by piece with the same result.

``<tool_call>`` + a JSON object with ``name`` and ``arguments`` + ``</tool_call>``. Arguments stay the bytes that the model wrote, so that a
template that prints them back prints the same tokens. What is not a valid call stays text, and the reason is kept.
"""

from __future__ import annotations

import msgspec

__all__ = ["CLOSE", "OPEN", "Call", "HermesParser"]

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
_STARTS = ("\n" + OPEN, OPEN)


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One tool call."""

    name: str
    arguments: str
    """A JSON object, as the model wrote it."""


class _Written(msgspec.Struct):
    name: str
    arguments: msgspec.Raw


class HermesParser:
    """Fed with settled text; gives back text and calls in order."""

    def __init__(self, *, several: bool) -> None:
        self._several = several
        self._pending = ""
        self._inside = False
        self.calls = 0
        self.malformed: list[str] = []
        """Why a block was left as text, one reason each."""

    def feed(self, text: str) -> list[str | Call]:
        """What became certain with this text."""
        self._pending += text
        out: list[str | Call] = []
        while True:
            if self._inside:
                end = self._pending.find(CLOSE)
                if end < 0:
                    return out
                block, self._pending = self._pending[:end], self._pending[end + len(CLOSE) :]
                self._inside = False
                out += self._block(block, closed=True)
            else:
                start = self._pending.find(OPEN)
                if start < 0:
                    keep = _held_back(self._pending)
                    settled, self._pending = self._pending[: len(self._pending) - keep], self._pending[len(self._pending) - keep :]
                    out += self._text(settled)
                    return out
                before, self._pending = self._pending[:start], self._pending[start + len(OPEN) :]
                out += self._text(before.removesuffix("\n"))
                self._inside = True

    def finish(self) -> list[str | Call]:
        """The reply is over: what was held back."""
        rest, self._pending = self._pending, ""
        if self._inside:
            self._inside = False
            return self._block(rest, closed=False)
        return self._text(rest)

    def _block(self, block: str, *, closed: bool) -> list[str | Call]:
        try:
            written = msgspec.json.decode(block.strip(), type=_Written)
            if not bytes(written.arguments).startswith(b"{"):
                raise msgspec.ValidationError("arguments is not an object")
        except (msgspec.DecodeError, UnicodeError) as error:
            self.malformed.append(str(error))
            return [OPEN + block + (CLOSE if closed else "")]
        if self.calls and not self._several:
            return []
        self.calls += 1
        return [Call(name=written.name, arguments=bytes(written.arguments).decode())]

    def _text(self, text: str) -> list[str | Call]:
        if not text or (self.calls and not text.strip()):
            return []
        return [text]


def _held_back(text: str) -> int:
    """Length of the longest end of ``text`` that may begin a call."""
    return max((n for start in _STARTS for n in range(1, min(len(start), len(text) + 1)) if text.endswith(start[:n])), default=0)
