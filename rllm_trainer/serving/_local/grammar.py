"""What a request forces its reply into (a JSON schema, a tool call) in, the tokens allowed next out; llguidance does the work.

Logprobs of forced tokens are the grammar's, not the policy's: whoever trains on them must know, so nothing here is ever applied unasked.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["Grammars", "Matcher", "json_grammar"]


def json_grammar(schema: Mapping[str, Any]) -> str:
    """A grammar for one JSON value under a schema."""
    return "start: %json " + json.dumps(schema)


class Matcher:
    """Where one reply stands in its grammar."""

    def __init__(self, matcher: Any, vocab: int) -> None:
        self._matcher = matcher
        self._vocab = vocab

    def allowed(self) -> Tensor:
        """(vocab) bool. Raises ``ValueError`` where the grammar cannot go on."""
        mask: bytes = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise ValueError(str(self._matcher.get_error()).splitlines()[0])
        bits = torch.frombuffer(bytearray(mask), dtype=torch.uint8)
        return (bits.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8)).bitwise_and_(1).flatten()[: self._vocab].bool()

    def consume(self, token_id: int) -> None:
        self._matcher.consume_token(token_id)


class Grammars:
    """Made once per model: the vocabulary as llguidance needs it."""

    def __init__(self, folder: Path, vocab: int, eos: Sequence[int]) -> None:
        self._folder = folder
        self._vocab = vocab
        self._eos = list(eos)
        self._tokenizer: Any = None

    def mark(self, tag: str) -> str:
        """A tag as the grammar spells it: a token of its own where the vocabulary has one, else its characters."""
        tokenizer = self._loaded()
        ids: list[int] = tokenizer.tokenize_str(tag, parse_special=True)
        return tag if len(ids) == 1 and tokenizer.is_special_token(ids[0]) else json.dumps(tag)

    def matcher(self, grammar: str) -> Matcher:
        """Raises ``ValueError`` where the grammar cannot be built, or the library is not there."""
        tokenizer = self._loaded()
        from llguidance import LLMatcher

        matcher_class: Any = LLMatcher
        compiled: str = matcher_class.grammar_from_lark(grammar)
        fault: str = matcher_class.validate_grammar(compiled, tokenizer)
        if fault and not fault.startswith("WARNING"):
            raise ValueError(fault.splitlines()[0])
        return Matcher(matcher_class(tokenizer, compiled, log_level=0), self._vocab)

    def _loaded(self) -> Any:
        if self._tokenizer is None:
            try:
                from llguidance import LLTokenizer
            except ImportError as error:
                raise ValueError("it needs the package llguidance, which is not installed: pip install llguidance") from error
            tokenizer_class: Any = LLTokenizer
            self._tokenizer = tokenizer_class(str(self._folder / "tokenizer.json"), n_vocab=self._vocab, eos_token=self._eos)
        return self._tokenizer
