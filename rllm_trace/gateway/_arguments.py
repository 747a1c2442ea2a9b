"""The arguments of tool calls as the model wrote them, by episode and id of the call: bounded, the oldest forgotten first."""

from __future__ import annotations

import collections
from typing import Any, Final

import msgspec

__all__ = ["Arguments"]

_MAX_KEPT: Final = 50_000
_MAX_BYTES: Final = 100_000


class Arguments:
    """What was passed on to apps that hand back parsed objects."""

    def __init__(self) -> None:
        self._texts: collections.OrderedDict[tuple[str, str], str] = collections.OrderedDict()

    def remember(self, episode_id: str, call_id: str, text: str) -> None:
        """Keeps the text; what has no id or is very large is not kept."""
        if not call_id or len(text) > _MAX_BYTES:
            return
        self._texts[episode_id, call_id] = text
        if len(self._texts) > _MAX_KEPT:
            self._texts.popitem(last=False)

    def recall(self, episode_id: str, call_id: str, parsed: Any) -> str | None:
        """The text, if it says what ``parsed`` says: an app may have changed it."""
        text = self._texts.get((episode_id, call_id))
        if text is None:
            return None
        try:
            same = (msgspec.json.decode(text) if text else {}) == parsed
        except msgspec.DecodeError:
            same = False
        return text if same else None
