"""The text of a reply in; what stands between ``<think>`` and ``</think>`` at its beginning, and the rest, out, whole or piece by piece."""

from __future__ import annotations

import msgspec

from rllm_trainer.serving._local.formats.base import held_back

__all__ = ["THINK_CLOSE", "THINK_OPEN", "Thinking", "Thought"]

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"


class Thought(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of the thinking."""

    text: str


class Thinking:
    """``begun``: the prompt ended inside the thinking, as templates of thinking models have it."""

    def __init__(self, *, begun: bool) -> None:
        self._inside: bool | None = True if begun else None
        """None: it is not yet seen whether the reply thinks."""
        self._pending = ""

    def feed(self, text: str) -> list[str | Thought]:
        """What became certain with this text."""
        self._pending += text
        out: list[str | Thought] = []
        if self._inside is None:
            begins = self._pending.lstrip()
            if not begins or (len(begins) < len(THINK_OPEN) and THINK_OPEN.startswith(begins)):
                return out
            self._inside = begins.startswith(THINK_OPEN)
            if self._inside:
                self._pending = begins.removeprefix(THINK_OPEN)
        if self._inside:
            at = self._pending.find(THINK_CLOSE)
            if at >= 0:
                out.append(Thought(text=self._pending[:at]))
                self._pending, self._inside = self._pending[at + len(THINK_CLOSE) :], False
            else:
                keep = held_back(self._pending, (THINK_CLOSE,))
                settled, self._pending = self._pending[: len(self._pending) - keep], self._pending[len(self._pending) - keep :]
                out.append(Thought(text=settled))
        if not self._inside:
            out.append(self._pending)
            self._pending = ""
        return [part for part in out if (part if isinstance(part, str) else part.text)]

    def finish(self) -> list[str | Thought]:
        """The reply is over: what was held back."""
        rest, self._pending = self._pending, ""
        if not rest:
            return []
        return [Thought(text=rest) if self._inside else rest]
