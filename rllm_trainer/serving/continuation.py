"""The next request of a chat in; its prompt as the ids that were sampled and sent before, and the ids of what is new, out. Pure.

A chat template is free to print an earlier reply otherwise than it was sampled: without its thinking, with its tool calls serialised
again, with another tokenisation. What is continued here starts with the recorded ids, to the token. A request continues a recorded
reply if its messages are those of the recorded request, then that reply as the client was given it, then anything: of the reply only
what a client reads back counts (text and tool calls), space at its ends may be gone and a stop string that was cut be back, as
frameworks have it, and text may follow: on the reply's heels where it was cut, as a message of its own where it had ended by itself.
The new part is what the template prints after a mark that stands for the reply. Where the longest continuation cannot be used, the
next shorter one is, and the cause is told.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import msgspec
import numpy as np

from rllm_trainer.types import Int32

__all__ = ["CAUSES", "Conversations", "Prompt", "Reply", "Request"]

CAUSES = ("reply changed", "whitespace changed", "tools changed", "end of turn", "template", "too long", "not recorded")
"""Why a prompt does not continue all that was recorded of its chat."""
_CHANGED, _WHITESPACE, _TOOLS, _END, _TEMPLATE, _TOO_LONG, _UNKNOWN = CAUSES

_MARK = "rllm-continued-here-b1f9"
"""Stands in a rendered chat where the recorded reply is; plain, so that no template reads anything into it."""
_UNREAD = frozenset({"reasoning", "reasoning_content", "refusal", "annotations", "audio"})
"""Fields of a reply that clients leave out, or send back, as they like."""
_MOST_TOKENS = 16 * 2**20

Render = Callable[[Sequence[Mapping[str, Any]]], str]


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A chat request, as far as its prompt goes."""

    reference: str
    """``episode/trajectory``: prompts continue what is recorded under the same episode, of the same trajectory if they can choose."""
    messages: list[dict[str, Any]]
    setting: Any
    """What else the template was given, tools above all; equal for requests that may continue each other."""
    room: int
    """Most tokens that the prompt may have."""


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """What was sampled, and what the client was given of it."""

    ids: list[int]
    """Sampled ids, an end of turn included."""
    message: dict[str, Any]
    """As it was sent."""
    text: str
    """Of all ids but an end of turn, nothing cut and nothing parsed."""
    stop: str
    """The stop string that was cut from ``message``; "" if none was."""
    end: str | None
    """The text of the end of turn that was sampled; None where the reply ended otherwise."""


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """Where the prompt of a request comes from."""

    ids: list[int] | None
    """None: nothing recorded could be continued; the request is to be rendered whole."""
    reused: int = 0
    """Leading ids that were recorded."""
    cause: str | None = None
    """Why it is not all of the chat that was continued, one of ``CAUSES``; None where it is, or where nothing was there to continue."""


class _Turn(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One recorded prompt and its reply."""

    trajectory: str
    setting: bytes
    prompt: Int32
    reply: Reply
    said: tuple[str, bytes]


class _Episode(msgspec.Struct, kw_only=True, eq=False):
    turns: dict[bytes, list[_Turn]] = {}
    """By the digest of the request's messages."""
    tokens: int = 0


class Conversations:
    """Recorded chats by episode; the ones not used for longest are forgotten where there are too many tokens."""

    def __init__(self, *, encode: Callable[[str], list[int]], most_tokens: int = _MOST_TOKENS) -> None:
        self.continued = 0
        """Prompts that were made of recorded ids."""
        self.causes: Counter[str] = Counter()
        """Prompts that did not continue all that was recorded, by cause."""
        self._encode = encode
        self._most_tokens = most_tokens
        self._episodes: OrderedDict[str, _Episode] = OrderedDict()
        self._tokens = 0

    def prompt(self, request: Request, render: Render) -> Prompt:
        """The prompt of a request; ``render`` prints messages with the request's own tools and settings."""
        found = self._prompt(request, render)
        self.continued += found.ids is not None
        if found.cause is not None:
            self.causes[found.cause] += 1
        return found

    def _prompt(self, request: Request, render: Render) -> Prompt:
        name, _, trajectory = request.reference.partition("/")
        episode = self._episodes.get(name)
        if episode is None:
            return Prompt(ids=None)
        self._episodes.move_to_end(name)
        digests = _digests(request.messages)
        setting = _encoded(request.setting)
        cause: str | None = None
        for at in range(len(request.messages), 0, -1):
            turns = sorted(episode.turns.get(digests[at], ()), key=lambda turn: turn.trajectory == trajectory)
            same = [turn for turn in turns if turn.setting == setting]
            if turns and not same:
                cause = cause or _TOOLS
            if same and at == len(request.messages):
                return Prompt(ids=same[-1].prompt.tolist(), reused=len(same[-1].prompt))
            for turn in reversed(same):
                ids, why = self._continued(turn, request, at, render)
                if ids is not None:
                    return Prompt(ids=ids, reused=len(turn.prompt) + len(turn.reply.ids), cause=cause)
                cause = cause or why
        if cause is None and any(message.get("role") == "assistant" for message in request.messages):
            cause = _UNKNOWN
        return Prompt(ids=None, cause=cause)

    def record(self, request: Request, prompt_ids: Sequence[int], reply: Reply) -> None:
        """A reply that is about to be sent; from now on it can be continued."""
        name, _, trajectory = request.reference.partition("/")
        episode = self._episodes.setdefault(name, _Episode())
        self._episodes.move_to_end(name)
        turn = _Turn(
            trajectory=trajectory,
            setting=_encoded(request.setting),
            prompt=np.asarray(prompt_ids, np.int32),
            reply=reply,
            said=_said(reply.message),
        )
        episode.turns.setdefault(_digests(request.messages)[-1], []).append(turn)
        held = len(turn.prompt) + len(reply.ids)
        episode.tokens += held
        self._tokens += held
        while self._tokens > self._most_tokens and len(self._episodes) > 1:
            _, forgotten = self._episodes.popitem(last=False)
            self._tokens -= forgotten.tokens

    def _continued(self, turn: _Turn, request: Request, at: int, render: Render) -> tuple[list[int] | None, str | None]:
        """The prompt if message ``at`` is the recorded reply; else why it is not."""
        messages = request.messages
        if messages[at].get("role") != "assistant":
            return None, None
        added, cause = _added(turn, messages[at])
        if added is None:
            return None, cause
        end = turn.reply.end
        more: list[dict[str, Any]] = []
        if end is not None and added:
            more, added = [{"role": "assistant", "content": added}], ""
        try:
            text = render([*messages[:at], {"role": "assistant", "content": _MARK}, *more, *messages[at + 1 :]])
        except ValueError:
            return None, _TEMPLATE
        before, mark, new = text.partition(_MARK)
        if not mark or not before or _MARK in new:
            return None, _TEMPLATE
        if end is not None:
            if not new.startswith(end):
                return None, _END
            new = new.removeprefix(end)
        ids = [*turn.prompt.tolist(), *turn.reply.ids, *self._encode(added + new)]
        return (ids, None) if len(ids) <= request.room else (None, _TOO_LONG)


def _added(turn: _Turn, message: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """What the client put behind the reply, "" if nothing; or None and in what it is another message."""
    text, calls = _said(message)
    given, given_calls = turn.said
    if calls != given_calls:
        return None, _CHANGED
    reply = turn.reply
    forms = (reply.text, given + reply.stop, given)
    if text.strip() in [form.strip() for form in forms]:
        return "", None
    if not message.get("tool_calls"):
        for form in forms[:2]:
            if form.strip() and text.lstrip().startswith(form.strip()):
                after = text.lstrip()[len(form.strip()) :]
                return after.removeprefix(form[len(form.rstrip()) :]), None
    return None, _WHITESPACE if text.split() == given.split() else _CHANGED


def _said(message: Mapping[str, Any]) -> tuple[str, bytes]:
    """The text of a message, and its tool calls with their arguments as values."""
    calls: list[dict[str, Any]] = message.get("tool_calls") or []
    functions: list[dict[str, Any]] = [call.get("function") or {} for call in calls]
    return _text(message.get("content")), _encoded([[f.get("name"), _value(f.get("arguments"))] for f in functions])


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(
            _text(cast("dict[str, Any]", part).get("text") if isinstance(part, dict) else part) for part in cast("list[Any]", content)
        )
    return "" if content is None else str(content)


def _value(arguments: Any) -> Any:
    if isinstance(arguments, str):
        try:
            return msgspec.json.decode(arguments)
        except msgspec.DecodeError:
            return arguments
    return arguments


def _digests(messages: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """(len + 1) entry n stands for the first n messages."""
    digest, out = b"", [b""]
    for message in messages:
        others = {k: v for k, v in message.items() if k not in ("content", "tool_calls") and k not in _UNREAD and v is not None}
        digest = hashlib.blake2b(digest + _encoded([*_said(message), others]), digest_size=16).digest()
        out.append(digest)
    return out


def _encoded(value: Any) -> bytes:
    return msgspec.json.encode(value, order="deterministic", enc_hook=repr)
