"""A way to tokenise chats in, what the chat template breaks out: does a longer chat start with the tokens of the shorter one?

Where it does, the calls of a conversation lie in one row and shared prefixes are computed once. Where a template rewrites earlier
turns (strips thinking, moves the tools) training stays exact, because only sampled ids are trained, but each call costs a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

__all__ = ["Tokenize", "template_breaks"]

Message = dict[str, str]
Tokenize = Callable[[list[Message]], Sequence[int]]
"""Messages -> token ids, with the prompt for the next reply at the end."""

_SYSTEM: Message = {"role": "system", "content": "Answer briefly."}
_TURNS: list[Message] = [
    {"role": "user", "content": "What is 2 + 3?"},
    {"role": "assistant", "content": "It is 5."},
    {"role": "user", "content": "And times 4?"},
    {"role": "assistant", "content": "That is 20."},
    {"role": "user", "content": "Thank you."},
]


def template_breaks(tokenize: Tokenize) -> list[str]:
    """One sentence for each way in which two and three turns do not extend what came before; none: the prefix property holds."""
    found: list[str] = []
    for name, head in (("without a system message", []), ("with a system message", [_SYSTEM])):
        before: Sequence[int] = tokenize([*head, *_TURNS[:1]])
        for turns in (2, 3):
            after = tokenize([*head, *_TURNS[: 2 * turns - 1]])
            if list(after[: len(before)]) != list(before):
                found.append(
                    f"{name}, {turns} turns do not start with the tokens of {turns - 1} (they part at token {_parting(before, after)})"
                )
            before = after
    return found


def _parting(one: Sequence[int], other: Sequence[int]) -> int:
    for i, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return i
    return min(len(one), len(other))
