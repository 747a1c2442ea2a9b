"""A request of Anthropic's Messages API in, the chat completion that asks for the same out. Pure.

What a chat completion cannot say is refused by name; hints that change no token of the prompt are left out, and which ones is told. The
arguments of a tool call are sent as the bytes that the model wrote, where the gateway has passed them on before: an app hands back the
parsed object, and another spacing of the same JSON would be another prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, cast

import msgspec

from rllm_trace.gateway._refusal import Refusal

__all__ = ["Recall", "chat_request"]

Recall = Callable[[str, Any], "str | None"]
"""(id of a tool call, its parsed arguments) -> their text as the model wrote it, if it is known."""

_SAME: Final = ("model", "max_tokens", "temperature", "top_p", "top_k", "stream")
_READ: Final = frozenset({*_SAME, "messages", "system", "tools", "tool_choice", "stop_sequences", "metadata"})
_HINTS: Final = frozenset({"thinking", "service_tier", "context_management", "output_config", "speed", "inference_geo"})
_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}
_encode = msgspec.json.encode


def chat_request(body: Mapping[str, Any], recall: Recall) -> tuple[dict[str, Any], list[str]]:
    """The chat request, and the fields that were left out. Raises Refusal for what cannot be translated."""
    unknown = sorted(field for field in body if field not in _READ and field not in _HINTS and body[field] is not None)
    if unknown:
        raise _untranslatable(f"the fields {unknown}")
    chat: dict[str, Any] = {field: body[field] for field in _SAME if body.get(field) is not None}
    system = _system(body.get("system"))
    chat["messages"] = system + [message for given in _list(body.get("messages")) for message in _messages(given, recall)]
    if body.get("stop_sequences"):
        chat["stop"] = body["stop_sequences"]
    if body.get("tools"):
        chat["tools"] = [_tool(tool) for tool in _list(body["tools"])]
    choice = body.get("tool_choice")
    if isinstance(choice, dict):
        _choose(cast("dict[str, Any]", choice), chat)
    user = cast("dict[str, Any]", body.get("metadata") or {}).get("user_id")
    if user:
        chat["user"] = user
    if chat.get("stream"):
        chat["stream_options"] = {"include_usage": True}
    return chat, sorted(field for field in body if field in _HINTS and body[field] is not None)


def _untranslatable(what: str) -> Refusal:
    return Refusal(
        400,
        f"{what} of a Messages request cannot be said in a chat completion, which is what the server behind this gateway speaks; "
        "leave them out, or give the gateway an upstream that speaks Anthropic's protocol",
        code="untranslatable",
    )


def _list(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in cast("list[Any]", value)):
        raise Refusal(400, f"got {type(cast('object', value)).__name__} where a list of objects was expected", code="bad_request")
    return cast("list[dict[str, Any]]", value)


def _system(system: Any) -> list[dict[str, Any]]:
    if not system:
        return []
    if isinstance(system, str):
        return [{"role": "system", "content": system}]
    return [{"role": "system", "content": "\n".join(_text(block) for block in _list(system))}]


def _text(block: Mapping[str, Any]) -> str:
    if block.get("type") != "text":
        raise _untranslatable(f"a block of type {block.get('type')!r} here")
    return str(block.get("text") or "")


def _messages(message: dict[str, Any], recall: Recall) -> list[dict[str, Any]]:
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise Refusal(400, f"got the role {role!r}; expected 'user' or 'assistant'", code="bad_request")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    blocks = _list(content)
    return [_assistant(blocks, recall)] if role == "assistant" else _user(role, blocks)


def _assistant(blocks: list[dict[str, Any]], recall: Recall) -> dict[str, Any]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in blocks:
        kind = block.get("type")
        if kind == "text":
            texts.append(str(block.get("text") or ""))
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking") or ""))
        elif kind == "tool_use":
            id, given = str(block.get("id") or ""), block.get("input")
            arguments = recall(id, given)
            if arguments is None:
                arguments = _encode(given if given is not None else {}).decode()
            calls.append({"id": id, "type": "function", "function": {"name": block.get("name"), "arguments": arguments}})
        else:
            raise _untranslatable(f"a block of type {kind!r} in an assistant message")
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts) if texts else None if calls else ""}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _user(role: str, blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Results of tools first, each a message; then the rest, as text where it is nothing but text."""
    results = [_tool_result(block) for block in blocks if block.get("type") == "tool_result"]
    rest = [_part(block) for block in blocks if block.get("type") != "tool_result"]
    if not rest:
        return results
    if all(part["type"] == "text" for part in rest):
        return [*results, {"role": role, "content": "\n".join(part["text"] for part in rest)}]
    return [*results, {"role": role, "content": rest}]


def _part(block: dict[str, Any]) -> dict[str, Any]:
    kind = block.get("type")
    if kind == "text":
        return {"type": "text", "text": str(block.get("text") or "")}
    source = block.get("source")
    if kind == "image" and isinstance(source, dict):
        source = cast("dict[str, Any]", source)
        if source.get("type") == "base64":
            return {"type": "image_url", "image_url": {"url": f"data:{source.get('media_type')};base64,{source.get('data')}"}}
        if source.get("type") == "url":
            return {"type": "image_url", "image_url": {"url": source.get("url")}}
    raise _untranslatable(f"a block of type {kind!r}")


def _tool_result(block: dict[str, Any]) -> dict[str, Any]:
    content = block.get("content")
    text = content if isinstance(content, str) else "\n".join(_text(part) for part in _list(content or []))
    return {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text}


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise _untranslatable(f"the server tool {tool.get('type')!r}")
    function: dict[str, Any] = {"name": tool.get("name"), "parameters": tool.get("input_schema") or {"type": "object"}}
    if tool.get("description"):
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _choose(choice: dict[str, Any], chat: dict[str, Any]) -> None:
    kind = choice.get("type")
    if kind == "tool":
        chat["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    elif kind in _CHOICES:
        chat["tool_choice"] = _CHOICES[kind]
    else:
        raise _untranslatable(f"tool_choice {kind!r}")
    if choice.get("disable_parallel_tool_use"):
        chat["parallel_tool_calls"] = False
