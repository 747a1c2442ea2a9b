"""The settled text of one reply in; text, thinking and tool calls out, in order, as the request wants them told apart."""

from __future__ import annotations

from collections.abc import Sequence

from rllm_trainer.serving._local.formats.base import Call, ToolParser
from rllm_trainer.serving._local.formats.thinking import Thinking, Thought

__all__ = ["Part", "ReplyReader"]

Part = str | Thought | Call


class ReplyReader:
    """``tools``: None where calls stay text; ``thinking``: None where thinking does."""

    def __init__(self, *, tools: ToolParser | None, thinking: Thinking | None) -> None:
        self._tools = tools
        self._thinking = thinking

    @property
    def calls(self) -> int:
        """Tool calls so far."""
        return self._tools.calls if self._tools is not None else 0

    @property
    def malformed(self) -> list[str]:
        """Why blocks were left as text."""
        return self._tools.malformed if self._tools is not None else []

    def feed(self, text: str, *, last: bool) -> list[Part]:
        """What became certain with this text; ``last``: the reply is over."""
        parts: list[str | Thought] = [text] if text else []
        if self._thinking is not None:
            parts = self._thinking.feed(text) + (self._thinking.finish() if last else [])
        out: list[Part] = []
        for part in parts:
            out += self._said(part) if isinstance(part, str) else [part]
        return out + (self._tools.finish() if last and self._tools is not None else [])

    def _said(self, text: str) -> Sequence[Part]:
        return [text] if self._tools is None else self._tools.feed(text)
