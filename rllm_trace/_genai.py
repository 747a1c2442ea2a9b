"""A request body, decoded, and its choices in the shape of the GenAI conventions, so that other people's viewers show them.

Messages become ``{"role", "parts": [{"type": "text", "content"}, ...]}``, tools become flat definitions. This is a view for display:
it may lose detail that the exact request under ``rllm.request.body`` keeps. What is not understood is passed on as it came, under its
own type, never dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast

from rllm_trace import attributes as names
from rllm_trace._plain import loads
from rllm_trace.types import Choice

__all__ = ["body", "input_messages", "output_messages", "request_options", "tool_definitions"]

Json = dict[str, Any]

_OPTIONS: Final[tuple[tuple[str, str, type], ...]] = (
    ("temperature", names.REQUEST_TEMPERATURE, float),
    ("top_p", names.REQUEST_TOP_P, float),
    ("top_k", names.REQUEST_TOP_K, int),
    ("max_tokens", names.REQUEST_MAX_TOKENS, int),
    ("max_completion_tokens", names.REQUEST_MAX_TOKENS, int),
    ("max_output_tokens", names.REQUEST_MAX_TOKENS, int),
    ("seed", names.REQUEST_SEED, int),
    ("frequency_penalty", names.REQUEST_FREQUENCY_PENALTY, float),
    ("presence_penalty", names.REQUEST_PRESENCE_PENALTY, float),
)
_MAX_INT: Final = 2**63 - 1


def body(request: bytes) -> Json:
    """The request as a dict; empty if it is not a JSON object."""
    try:
        decoded = loads(request)
    except ValueError:
        return {}
    return cast("Json", decoded) if isinstance(decoded, dict) else {}


def request_options(fields: Json) -> dict[str, Any]:
    """Attributes of the sampling fields that the conventions name; of content only the stop strings, under ``REQUEST_STOP``."""
    found: dict[str, Any] = {}
    for field, key, kind in _OPTIONS:
        value = fields.get(field)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= _MAX_INT:
            found[key] = kind(value)
    stop = fields.get("stop")
    if isinstance(stop, str):
        found[names.REQUEST_STOP] = [stop]
    elif isinstance(stop, list):
        found[names.REQUEST_STOP] = [str(item) for item in cast("list[Any]", stop)]
    count = fields.get("n")
    if isinstance(count, int) and count != 1:
        found[names.REQUEST_CHOICE_COUNT] = int(count)
    if fields.get("stream") is True:
        found[names.REQUEST_STREAM] = True
    return found


def input_messages(operation: str, fields: Json) -> tuple[list[Json], list[Json]]:
    """(system instructions given beside the history, messages), both in parts."""
    if operation == "text_completion":
        return [], [{"role": "user", "parts": [_prompt_part(fields.get("prompt"))]}]
    if operation == "responses":
        instructions = fields.get("instructions")
        system = [_text(instructions)] if isinstance(instructions, str) else []
        given = fields.get("input")
        items = [{"role": "user", "content": given}] if isinstance(given, str) else given
        return system, [_item(item) for item in _objects(items)]
    return [], [_message(message) for message in _objects(fields.get("messages"))]


def output_messages(choices: Sequence[Choice]) -> list[Json]:
    """One assistant message for each choice, its finish reason beside its parts."""
    made: list[Json] = []
    for choice in choices:
        parts: list[Json] = []
        if choice.reasoning:
            parts.append({"type": "reasoning", "content": choice.reasoning})
        parts += [_text(text) for text in (choice.text, choice.refusal) if text]
        parts += [_tool_call(call) for call in choice.tool_calls or []]
        made.append({"role": "assistant", "parts": parts, "finish_reason": choice.finish_reason or "error"})
    return made


def tool_definitions(fields: Json) -> list[Json]:
    """Tools as sent, each flat: type, name, description, parameters."""
    made: list[Json] = []
    for tool in _objects(fields.get("tools")):
        inner = tool.get("function")
        flat = cast("Json", inner) if isinstance(inner, dict) else {key: value for key, value in tool.items() if key != "type"}
        made.append({"type": tool.get("type", "function"), **flat})
    return made


def _objects(value: Any) -> list[Json]:
    return [cast("Json", item) for item in cast("list[Any]", value) if isinstance(item, dict)] if isinstance(value, list) else []


def _text(content: str) -> Json:
    return {"type": "text", "content": content}


def _prompt_part(prompt: Any) -> Json:
    return _text(prompt) if isinstance(prompt, str) else {"type": "prompt", "content": prompt}


def _message(message: Json) -> Json:
    role = message.get("role", "user")
    parts: list[Json] = []
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(reasoning, str) and reasoning:
        parts.append({"type": "reasoning", "content": reasoning})
    if role == "tool":
        parts.append({"type": "tool_call_response", "id": message.get("tool_call_id"), "response": message.get("content")})
    else:
        parts += _content_parts(message.get("content"))
    parts += [_tool_call(call) for call in _objects(message.get("tool_calls"))]
    made: Json = {"role": role, "parts": parts}
    if isinstance(message.get("name"), str):
        made["name"] = message["name"]
    return made


def _item(item: Json) -> Json:
    """One input item of the responses API: a message, a function call or its output."""
    if item.get("type") == "function_call":
        call = {"type": "tool_call", "id": item.get("call_id"), "name": item.get("name"), "arguments": _arguments(item.get("arguments"))}
        return {"role": "assistant", "parts": [call]}
    if item.get("type") == "function_call_output":
        return {"role": "tool", "parts": [{"type": "tool_call_response", "id": item.get("call_id"), "response": item.get("output")}]}
    return _message(item)


def _content_parts(content: Any) -> list[Json]:
    if content is None:
        return []
    if isinstance(content, str):
        return [_text(content)]
    return [_PARTS.get(str(part.get("type")), dict)(part) for part in _objects(content)]


def _tool_call(call: Mapping[str, Any]) -> Json:
    inner = cast("Json", call["function"]) if isinstance(call.get("function"), dict) else dict(call)
    arguments = inner.get("arguments", inner.get("input"))
    return {"type": "tool_call", "id": call.get("id"), "name": inner.get("name"), "arguments": _arguments(arguments)}


def _arguments(arguments: Any) -> Any:
    """Arguments as an object where they are one; a model may have written anything, which then stays text."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return loads(arguments)
    except ValueError:
        return arguments


def _text_part(part: Json) -> Json:
    return _text(str(part.get("text", "")))


def _image_part(part: Json) -> Json:
    image = part.get("image_url")
    url = cast("Json", image).get("url") if isinstance(image, dict) else image
    return _media(url, "image")


def _audio_part(part: Json) -> Json:
    audio = part.get("input_audio")
    fields = cast("Json", audio) if isinstance(audio, dict) else {}
    return {"type": "blob", "modality": "audio", "mime_type": f"audio/{fields.get('format', 'wav')}", "content": fields.get("data")}


def _media(url: Any, modality: str) -> Json:
    if isinstance(url, str) and url.startswith("data:"):
        head, _, data = url[len("data:") :].partition(",")
        return {"type": "blob", "modality": modality, "mime_type": head.removesuffix(";base64"), "content": data}
    return {"type": "uri", "modality": modality, "uri": url}


_PARTS: Final[dict[str, Callable[[Json], Json]]] = {
    "text": _text_part,
    "input_text": _text_part,
    "output_text": _text_part,
    "image_url": _image_part,
    "input_image": _image_part,
    "input_audio": _audio_part,
}
