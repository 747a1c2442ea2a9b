"""Span attributes of three spellings to what an import needs: the GenAI conventions, OpenInference, OpenLLMetry. Pure.

Attributes may be flat under dotted keys or nested; lists may be lists, or mappings with numbers as keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from rllm_trace import attributes as names
from rllm_trace._plain import dumps, loads
from rllm_trace.importers.base import Call, ImportedKind

__all__ = ["call_of", "input_of", "kind_of", "name_of", "nested", "output_of", "session_of"]

Json = dict[str, Any]

_BY_OPERATION: Final[dict[str, ImportedKind]] = {
    names.OP_CHAT: "chat",
    names.OP_COMPLETION: "chat",
    "generate_content": "chat",
    names.OP_AGENT: "agent",
    names.OP_TOOL: "tool",
    names.OP_WORKFLOW: "workflow",
}
_BY_KIND: Final[dict[str, ImportedKind]] = {
    "LLM": "chat",
    "AGENT": "agent",
    "TOOL": "tool",
    "CHAIN": "workflow",
    "WORKFLOW": "workflow",
}
_SAMPLING: Final = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "max_tokens": "max_tokens",
    "seed": "seed",
    "stop_sequences": "stop",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
}
_NAMES: Final = (
    ("gen_ai", "agent", "name"),
    ("gen_ai", "tool", "name"),
    ("gen_ai", "workflow", "name"),
    ("tool", "name"),
    ("agent", "name"),
    ("traceloop", "entity", "name"),
)


def nested(flat: Mapping[str, Any]) -> Json:
    """Dotted keys as nested mappings, at every depth; a value beside deeper keys stays under ``""``."""
    root: Json = {}
    for key, value in flat.items():
        at = root
        *path, last = str(key).split(".")
        for part in path:
            below = at.setdefault(part, {})
            if not isinstance(below, dict):
                below = at[part] = {"": below}
            at = cast("Json", below)
        deeper = nested(cast("Json", value)) if isinstance(value, dict) else value
        if isinstance(deeper, list):
            deeper = [nested(cast("Json", item)) if isinstance(item, dict) else item for item in cast("list[Any]", deeper)]
        known = at.get(last)
        at[last] = {**cast("Json", known), **cast("Json", deeper)} if isinstance(known, dict) and isinstance(deeper, dict) else deeper
    return root


def kind_of(found: Json) -> ImportedKind:
    """What the span is, by the first spelling that says it."""
    operation = _at(found, "gen_ai", "operation", "name")
    if operation in _BY_OPERATION:
        return _BY_OPERATION[operation]
    for path in (("openinference", "span", "kind"), ("traceloop", "span", "kind")):
        kind = _BY_KIND.get(str(_at(found, *path) or "").upper())
        if kind is not None:
            return kind
    return "chat" if _at(found, "llm", "request", "type") == "chat" else "other"


def name_of(found: Json, name: str) -> str:
    """The name of the agent, tool or workflow, where an attribute has it."""
    for path in _NAMES:
        value = _at(found, *path)
        if isinstance(value, str) and value:
            return value
    return name


def session_of(found: Json) -> str | None:
    """The user's session."""
    for path in (("session", "id"), ("gen_ai", "conversation", "id"), ("traceloop", "association", "properties", "session_id")):
        value = _at(found, *path)
        if isinstance(value, str):
            return value
    return None


def input_of(found: Json) -> Any:
    """What the span was given."""
    return _first(found, ("gen_ai", "tool", "call", "arguments"), ("input", "value"), ("traceloop", "entity", "input"))


def output_of(found: Json) -> Any:
    """What it gave back."""
    return _first(found, ("gen_ai", "tool", "call", "result"), ("output", "value"), ("traceloop", "entity", "output"))


def call_of(found: Json) -> Call:
    """The model call of a chat span."""
    gen_ai, llm = _mapping(found.get("gen_ai")), _mapping(found.get("llm"))
    return Call(
        model=str(_at(gen_ai, "request", "model") or llm.get("model_name") or _at(gen_ai, "response", "model") or ""),
        messages=_messages(gen_ai, llm),
        tools=_tools(gen_ai, llm),
        sampling=_sampling(gen_ai, llm),
        replies=_replies(gen_ai, llm),
        prompt_tokens=_count(gen_ai, llm, "input_tokens", "prompt"),
        completion_tokens=_count(gen_ai, llm, "output_tokens", "completion"),
        response_id=_text_or_none(_at(gen_ai, "response", "id")),
        response_model=_text_or_none(_at(gen_ai, "response", "model")),
    )


def _messages(gen_ai: Json, llm: Json) -> list[Json]:
    parts = _list(_opened(_at(gen_ai, "input", "messages")))
    if parts:
        return [_from_parts(message) for message in parts]
    spelled = _list(llm.get("input_messages"))
    if spelled:
        return [_from_openinference(message) for message in spelled]
    return [_from_openllmetry(message) for message in _list(gen_ai.get("prompt"))]


def _replies(gen_ai: Json, llm: Json) -> list[Json]:
    parts = _list(_opened(_at(gen_ai, "output", "messages")))
    if parts:
        return [_from_parts(message) for message in parts]
    spelled = _list(llm.get("output_messages"))
    if spelled:
        return [_from_openinference(message) for message in spelled]
    return [_from_openllmetry(message) for message in _list(gen_ai.get("completion"))]


def _from_parts(message: Json) -> Json:
    """A message of the GenAI conventions."""
    made: Json = {"role": message.get("role", "user")}
    texts: list[str] = []
    for part in _list(message.get("parts")):
        kind = part.get("type")
        if kind == "text":
            texts.append(str(part.get("content", "")))
        elif kind == "reasoning":
            made["reasoning_content"] = str(part.get("content", ""))
        elif kind == "tool_call":
            made.setdefault("tool_calls", []).append(_tool_call(part.get("id"), part.get("name"), part.get("arguments")))
        elif kind == "tool_call_response":
            response = part.get("response", part.get("result"))
            made |= {"role": "tool", "tool_call_id": part.get("id")}
            texts.append(response if isinstance(response, str) else dumps(response))
    made["content"] = "".join(texts) if texts else None
    return made | {key: message[key] for key in ("name", "finish_reason") if message.get(key)}


def _from_openinference(entry: Json) -> Json:
    message = _mapping(entry.get("message")) or entry
    made: Json = {"role": message.get("role", "user"), "content": message.get("content")}
    contents = _list(message.get("contents"))
    if made["content"] is None and contents:
        made["content"] = [_openinference_content(_mapping(part.get("message_content")) or part) for part in contents]
    calls = [_mapping(call.get("tool_call")) or call for call in _list(message.get("tool_calls"))]
    if calls:
        made["tool_calls"] = [
            _tool_call(call.get("id"), _at(call, "function", "name"), _at(call, "function", "arguments")) for call in calls
        ]
    return made | {key: message[key] for key in ("name", "tool_call_id", "finish_reason") if message.get(key)}


def _openinference_content(part: Json) -> Json:
    if part.get("type") == "image":
        return {"type": "image_url", "image_url": {"url": _at(part, "image", "image", "url") or _at(part, "image", "url")}}
    return {"type": "text", "text": part.get("text", "")}


def _from_openllmetry(message: Json) -> Json:
    made: Json = {"role": message.get("role", "assistant"), "content": message.get("content")}
    calls = _list(message.get("tool_calls"))
    if calls:
        made["tool_calls"] = [_tool_call(call.get("id"), call.get("name"), call.get("arguments")) for call in calls]
    return made | {key: message[key] for key in ("tool_call_id", "finish_reason") if message.get(key)}


def _tool_call(call_id: Any, name: Any, arguments: Any) -> Json:
    text = arguments if isinstance(arguments, str) else dumps({} if arguments is None else arguments)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}


def _tools(gen_ai: Json, llm: Json) -> list[Json] | None:
    flat = _list(_opened(_at(gen_ai, "tool", "definitions")))
    if flat:
        return [{"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}} for tool in flat]
    schemas = [_opened(_at(tool, "tool", "json_schema") or tool.get("json_schema")) for tool in _list(llm.get("tools"))]
    return [cast("Json", schema) for schema in schemas if isinstance(schema, dict)] or None


def _sampling(gen_ai: Json, llm: Json) -> Json:
    request = _mapping(gen_ai.get("request"))
    found = {ours: request[theirs] for theirs, ours in _SAMPLING.items() if theirs in request}
    given = _opened(llm.get("invocation_parameters"))
    if isinstance(given, dict):
        found |= {key: value for key, value in cast("Json", given).items() if key not in ("model", "messages", "tools", "stream")}
    return found


def _count(gen_ai: Json, llm: Json, ours: str, theirs: str) -> int | None:
    for value in (
        _at(gen_ai, "usage", ours),
        _at(gen_ai, "usage", f"{theirs}_tokens"),
        _at(llm, "token_count", theirs),
    ):
        if isinstance(value, dict):
            value = cast("Json", value).get("")
        if isinstance(value, (int, float)) and value == value:
            return int(value)
    return None


def _first(found: Json, *paths: tuple[str, ...]) -> Any:
    for path in paths:
        value = _at(found, *path)
        if value is not None:
            return _opened(value)
    return None


def _at(found: Any, *path: str) -> Any:
    for part in path:
        if not isinstance(found, dict):
            return None
        found = cast("Json", found).get(part)
    return found


def _mapping(value: Any) -> Json:
    return cast("Json", value) if isinstance(value, dict) else {}


def _list(value: Any) -> list[Json]:
    """The mappings of a list, or of a mapping whose keys are positions."""
    if isinstance(value, dict):
        numbered = cast("Json", value)
        value = [numbered[key] for key in sorted((key for key in numbered if key.isdecimal()), key=int)]
    return [cast("Json", item) for item in cast("Sequence[Any]", value) if isinstance(item, dict)] if isinstance(value, list) else []


def _opened(value: Any) -> Any:
    """The value of JSON text that holds an object or a list; anything else as it is."""
    if isinstance(value, str) and value[:1] in ("{", "["):
        try:
            return loads(value)
        except ValueError:
            return value
    return value


def _text_or_none(value: Any) -> str | None:
    return value if isinstance(value, str) else None
