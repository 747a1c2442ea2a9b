"""Text in, ids out, and back: the model's own tokenizer file, whole replies and one token at a time.

``TextStream`` is the one place where ids of a reply become text as they are sampled: it finds stop strings, holds back what may be the
start of one, and ends with the text that decoding all ids at once gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

__all__ = ["Piece", "TextStream", "Tokenizer"]


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """What one token stands for on its own."""

    text: str
    """Its bytes as text; incomplete characters become U+FFFD."""
    data: bytes


class Tokenizer:
    """``tokenizer.json`` of a model folder."""

    def __init__(self, folder: Path) -> None:
        import tokenizers

        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ValueError(
                f"got model folder {folder}, which has no tokenizer.json; expected a fast tokenizer (save it with transformers)"
            )
        backend: Any = tokenizers.Tokenizer
        self._backend: Any = backend.from_file(str(path))
        self._backend.no_truncation()
        self._backend.no_padding()
        self._pieces: dict[int, Piece] = {}
        described: dict[str, Any] = msgspec.json.decode(path.read_bytes())
        self._bytes = _byte_alphabet() if _is_byte_level(described.get("decoder")) else None
        self._added = {t["id"]: t["content"] for t in described.get("added_tokens", ())}
        self.special_ids = frozenset(t["id"] for t in described.get("added_tokens", ()) if t.get("special"))
        self.size: int = self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def backend(self) -> Any:
        """The ``tokenizers.Tokenizer``."""
        return self._backend

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], *, skip_special: bool) -> str:
        return self._backend.decode(list(ids), skip_special_tokens=skip_special)

    def piece(self, token_id: int) -> Piece:
        known = self._pieces.get(token_id)
        if known is None:
            data = self._piece_bytes(token_id)
            known = self._pieces[token_id] = Piece(text=data.decode(errors="replace"), data=data)
        return known

    def is_special_text(self, text: str) -> bool:
        """Whether some special token is exactly this text, so that decoding would hide it."""
        token_id = self._backend.token_to_id(text)
        return token_id is not None and token_id in self.special_ids

    def _piece_bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        token: str | None = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._bytes is not None:
            return bytes(self._bytes[c] for c in token) if all(c in self._bytes for c in token) else token.encode()
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace("▁", " ").encode()


def _is_byte_level(decoder: Any) -> bool:
    if not isinstance(decoder, dict):
        return False
    described: dict[str, Any] = decoder  # pyright: ignore[reportUnknownVariableType]
    return described.get("type") == "ByteLevel" or any(_is_byte_level(part) for part in described.get("decoders", ()))


def _byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level vocabularies."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(b): b for b in printable}
    others = [b for b in range(256) if b not in set(printable)]
    alphabet.update({chr(256 + n): b for n, b in enumerate(others)})
    return alphabet


class TextStream:
    """The text of one reply while it grows."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], *, include_stop: bool, skip_special: bool) -> None:
        from tokenizers.decoders import DecodeStream

        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._skip_special = skip_special
        self._decoder: Any = DecodeStream([], skip_special)
        self._text = ""
        self._taken = 0
        self._ended = False

    def push(self, token_id: int) -> str | None:
        """Add a token; returns the stop string that it completed, if any, and then the text ends there."""
        new: str | None = self._decoder.step(self._tokenizer.backend, token_id)
        if not new:
            return None
        scan_from = max(len(self._text) - max((len(s) for s in self._stops), default=1) + 1, 0)
        self._text += new
        found = [(at, stop) for stop in self._stops if (at := self._text.find(stop, scan_from)) >= 0]
        if not found:
            return None
        at, stop = min(found)
        self._text = self._text[: at + len(stop) if self._include_stop else at]
        self._ended = True
        return stop

    def finish(self, ids: Sequence[int]) -> None:
        """The reply is over; ``ids`` are those whose text counts. What the stream held back as incomplete is added."""
        if not self._ended:
            whole = self._tokenizer.decode(ids, skip_special=self._skip_special)
            if whole.startswith(self._text[: self._taken]):
                self._text = whole
        self._ended = True

    @property
    def text(self) -> str:
        return self._text

    def take(self) -> str:
        """Text that is settled and was not taken yet; before the end, what may be the start of a stop string stays back."""
        upto = len(self._text)
        if not self._ended:
            upto -= _held_back(self._text, self._stops)
        new = self._text[self._taken : upto]
        self._taken = max(self._taken, upto)
        return new


def _held_back(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of ``text`` that begins a stop string."""
    longest = 0
    for stop in stops:
        for n in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:n]):
                longest = n
                break
    return longest
