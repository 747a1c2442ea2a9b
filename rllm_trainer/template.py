"""A way to tokenise chats in, what the chat template breaks out: does a longer chat start with the tokens of the shorter one?

Where it does, the calls of a conversation lie in one row and shared prefixes are computed once. Where a template rewrites earlier
turns (strips thinking, moves the tools) training stays exact, because only sampled ids are trained, but each call costs a row.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

from rllm_trainer.exceptions import ServerError
from rllm_trainer.serving.base import Server

__all__ = ["Tokenize", "template_breaks", "tokenize_with"]

Message = dict[str, str]
Tokenize = Callable[[list[Message]], Sequence[int]]
"""Messages -> token ids, with the prompt for the next reply at the end."""

_TIMEOUT = 60.0

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


def tokenize_with(server: Server) -> Tokenize:
    """The server's own template, asked over HTTP on its host, past any proxy. Calls raise ``ServerError`` where it refuses a chat."""
    parts = urlsplit(server.base_url)

    def tokenize(messages: list[Message]) -> list[int]:
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=_TIMEOUT)
        body = json.dumps({"messages": messages, "add_generation_prompt": True})
        headers = {"authorization": f"Bearer {server.api_key}", "content-type": "application/json"}
        try:
            connection.request("POST", parts.path.removesuffix("/v1") + "/tokenize", body, headers)
            response = connection.getresponse()
            answer = json.loads(response.read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ServerError(f"the server did not tokenise a chat: {error!r}") from error
        finally:
            connection.close()
        if response.status != 200:
            raise ServerError(f"the server refused to tokenise a chat: {answer}")
        return answer["tokens"]

    return tokenize


def _parting(one: Sequence[int], other: Sequence[int]) -> int:
    for i, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return i
    return min(len(one), len(other))
