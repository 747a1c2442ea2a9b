"""Two chat messages, compared: equal, or which kind of drift turned one into the other.

Pure functions over the plain dicts of a request. A message is compared by what a chat template renders: role, text, tool calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Literal, cast

from rllm_trace.types import Choice

__all__ = [
    "Drift",
    "Message",
    "common_length",
    "drift",
    "reply_message",
    "split_system",
    "text_of",
    "thinks",
    "view",
    "without_space",
    "without_thinking",
]

Message = dict[str, Any]

Drift = Literal["thinking stripped", "whitespace", '""/None', "tool arguments re-serialised", "stop string trimmed"]

_BLOCK = 64
_SYSTEM_ROLES = frozenset({"system", "developer"})
_THINK = re.compile(r"<think>.*?</think>", re.DOTALL)
_THINK_CLOSED = "</think>"
_THINK_OPEN = "<think>"
_REASONING_FIELDS = ("reasoning", "reasoning_content")


def reply_message(choice: Choice) -> Message:
    """The assistant message that an app would put into its history for this reply."""
    message: Message = {"role": "assistant", "content": choice.text}
    if choice.tool_calls:
        message["tool_calls"] = choice.tool_calls
    if choice.reasoning:
        message[_REASONING_FIELDS[0]] = choice.reasoning
    return message


def text_of(message: Message) -> str | None:
    """The text of a message, parts joined; None where it has no content at all."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(_part_text(part) for part in cast("list[Any]", content))
    return _json(content)


def view(message: Message) -> tuple[Any, ...]:
    """What makes two messages the same: equal views, equal messages."""
    return message.get("role"), text_of(message), _calls(message), message.get("tool_call_id"), message.get("name")


def split_system(messages: Sequence[Message]) -> int:
    """How many messages at the start are system messages."""
    count = 0
    while count < len(messages) and messages[count].get("role") in _SYSTEM_ROLES:
        count += 1
    return count


def common_length(left: Sequence[Message], right: Sequence[Message]) -> int:
    """Number of leading messages that are the same."""
    length = min(len(left), len(right))
    for start in range(0, length, _BLOCK):
        stop = min(length, start + _BLOCK)
        if left[start:stop] != right[start:stop]:
            for index in range(start, stop):
                if left[index] != right[index] and view(left[index]) != view(right[index]):
                    return index
    return length


def thinks(message: Message) -> bool:
    """Whether the message carries reasoning, in a field of its own or in its text."""
    text = text_of(message) or ""
    return any(message.get(field) for field in _REASONING_FIELDS) or _THINK_CLOSED in text or _THINK_OPEN in text


def without_thinking(text: str) -> str:
    """The text without its reasoning; also where the opening tag stood in the prompt."""
    text = _THINK.sub("", text)
    return text.rpartition(_THINK_CLOSED)[2]


def without_space(text: str) -> str:
    """The text without any whitespace."""
    return "".join(text.split())


def drift(recorded: Message, sent: Message, *, stops: Sequence[str] = ()) -> Drift | None:
    """How ``sent`` came out of ``recorded``, if it is the same message rendered differently; None: equal, or another message.

    Args:
        stops: the stop strings of the call that sampled ``recorded``.
    """
    if recorded.get("role") != sent.get("role"):
        return None
    before, after = text_of(recorded), text_of(sent)
    old, new = before or "", after or ""
    if thinks(recorded) and not thinks(sent) and without_space(without_thinking(old)) == without_space(new):
        return "thinking stripped"
    arguments_drifted = _calls(recorded) != _calls(sent)
    if arguments_drifted and not _same_calls(recorded, sent):
        return None
    if arguments_drifted and without_space(old) == without_space(new):
        return "tool arguments re-serialised"
    if before == after:
        return None
    if not old and not new:
        return '""/None'
    old, new = without_space(old), without_space(new)
    if any(tag and (old + tag == new or new + tag == old) for tag in map(without_space, stops)):
        return "stop string trimmed"
    return "whitespace" if old == new else None


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and isinstance(text := cast("dict[str, Any]", part).get("text"), str):
        return text
    return _json(part)


def _calls(message: Message) -> tuple[tuple[Any, Any], ...]:
    """Name and raw arguments of each tool call."""
    calls = cast("list[dict[str, Any]]", message.get("tool_calls") or [])
    functions = [cast("dict[str, Any]", call.get("function") or call.get("custom") or {}) for call in calls]
    return tuple((function.get("name"), function.get("arguments", function.get("input"))) for function in functions)


def _same_calls(left: Message, right: Message) -> bool:
    """Whether the tool calls mean the same, however their arguments are written."""
    mine, theirs = _calls(left), _calls(right)
    return [(name, _parsed(arguments)) for name, arguments in mine] == [(name, _parsed(arguments)) for name, arguments in theirs]


def _parsed(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments) if arguments.strip() else {}
    except ValueError:
        return arguments


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)
