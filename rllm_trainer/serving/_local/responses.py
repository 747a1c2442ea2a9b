"""The Responses API: its request in, the chat request that means the same out; the reply's tokens in, its items and events out.

Stateless: nothing is stored, so ``previous_response_id`` is refused by name. Ids, logprobs and weight versions stand beside OpenAI's fields
in every response (``prompt_token_ids``, ``token_ids``, ``token_logprobs``, ``weight_versions``), streamed ones in the last event.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, cast

import msgspec

from rllm_trainer.serving._local.formats.base import Call
from rllm_trainer.serving._local.formats.reading import Part
from rllm_trainer.serving._local.formats.thinking import Thought
from rllm_trainer.serving._local.jobs import Update
from rllm_trainer.serving._local.protocol import ApiError, ChatRequest, ResponseFormat
from rllm_trainer.serving._local.replies import chat_logprobs, usage, version_metadata
from rllm_trainer.serving._local.requests import Asked
from rllm_trainer.serving._local.tokens import Tokenizer

__all__ = ["ResponsesReply", "ResponsesRequest", "as_chat"]

_LOGPROBS = "message.output_text.logprobs"

Event = dict[str, Any]


class _TextOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: dict[str, Any] | None = None


class ResponsesRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/responses``. None: the default."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=50)] | None = None
    include: list[Literal["message.output_text.logprobs"]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: _TextOptions | None = None
    truncation: Literal["disabled"] | None = None
    stream: bool | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None


def as_chat(request: ResponsesRequest) -> ChatRequest:
    """Raises ``ApiError`` 400 where it has an item or tool that chat has no word for."""
    choice = request.tool_choice
    if isinstance(choice, dict):
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    body: dict[str, Any] = {
        "messages": _messages(request),
        "logprobs": True,
        "return_token_ids": True,
        "max_completion_tokens": request.max_output_tokens,
        "tools": [_tool(tool) for tool in request.tools] if request.tools else None,
        "tool_choice": choice,
        "response_format": _format(request.text.format if request.text is not None else None),
    }
    same = ("model", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "top_logprobs", "parallel_tool_calls", "stream")
    try:
        return msgspec.convert({**body, **{name: getattr(request, name) for name in same}}, ChatRequest)
    except msgspec.ValidationError as error:
        raise ApiError(400, str(error), code="invalid_value") from error


def _format(given: Mapping[str, Any] | None) -> Any:
    if given is None:
        return None
    if given.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": {"name": given.get("name"), "schema": given.get("schema")}}
    return msgspec.to_builtins(msgspec.convert(given, ResponseFormat))


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise ApiError(400, f"got a tool of type {tool.get('type')!r}; expected 'function'", param="tools", code="unsupported")
    return {
        "type": "function",
        "function": {k: tool[k] for k in ("name", "description", "parameters", "strict") if tool.get(k) is not None},
    }


def _messages(request: ResponsesRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if request.instructions is not None:
        messages.append({"role": "system", "content": request.instructions})
    items = [{"role": "user", "content": request.input}] if isinstance(request.input, str) else request.input
    thought = ""
    for item in items:
        kind = item.get("type", "message")
        if kind == "reasoning":
            thought = _thought(item)
            continue
        before = len(messages)
        if kind == "message":
            role = "system" if item.get("role") == "developer" else item.get("role")
            messages.append({"role": role, "content": item.get("content")})
        elif kind == "function_call":
            _add_call(messages, item)
        elif kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
        else:
            raise ApiError(400, f"got an input item of type {kind!r}, which is not implemented", param="input", code="unsupported")
        if thought and len(messages) > before and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"] = thought
        thought = ""
    return messages


def _thought(item: Mapping[str, Any]) -> str:
    text = "".join(str(part.get("text", "")) for part in item.get("content") or ())
    if not text:
        raise ApiError(400, "got a reasoning item without its text in content; leave it out", param="input", code="unsupported")
    return text


def _add_call(messages: list[dict[str, Any]], item: Mapping[str, Any]) -> None:
    """A call belongs to the assistant's message before it, if there is one."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    function = {"name": item.get("name"), "arguments": item.get("arguments")}
    messages[-1].setdefault("tool_calls", []).append({"id": item.get("call_id"), "type": "function", "function": function})


class ResponsesReply:
    """One request's answer, fed with the updates of its one choice."""

    def __init__(self, request: ResponsesRequest, asked: Asked, tokenizer: Tokenizer, *, model: str, version: int) -> None:
        self.id = "resp_" + secrets.token_hex(12)
        self._request = request
        self._asked = asked
        self._tokenizer = tokenizer
        self._model = model
        self._version = version
        self._created = time.time()
        self._reader = asked.reader()
        self._sampled: list[Any] = []
        self._items: list[dict[str, Any]] = []
        self._number = 0

    def whole(self, update: Update) -> dict[str, Any]:
        """The response to the choice's one update."""
        for _ in self._take(update):
            pass
        return self._response(update)

    def message(self) -> dict[str, Any]:
        """What the reply has come to, as a message of a chat."""
        texts = [item["content"][0]["text"] for item in self._items if item["type"] == "message"]
        calls = [item for item in self._items if item["type"] == "function_call"]
        message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
        if calls:
            functions = [{"name": call["name"], "arguments": call["arguments"]} for call in calls]
            message["tool_calls"] = [{"type": "function", "function": function} for function in functions]
        return message

    def start(self) -> Iterator[Event]:
        """The events before the first token."""
        yield self._event("response.created", response=self._response(None))
        yield self._event("response.in_progress", response=self._response(None))

    def events(self, update: Update) -> Iterator[Event]:
        """What one update adds; after the last one, the whole response."""
        yield from self._take(update)
        if update.finish_reason is not None:
            response = self._response(update)
            yield self._event(f"response.{response['status']}", response=response)

    def _take(self, update: Update) -> Iterator[Event]:
        self._sampled += update.sampled
        ended = update.finish_reason is not None
        for part in self._reader.feed(update.text, last=ended):
            yield from self._part(part)
        if ended:
            if not self._items:
                yield from self._text("")
            yield from self._close()

    def _part(self, part: Part) -> Iterator[Event]:
        if isinstance(part, str):
            yield from self._text(part)
        elif isinstance(part, Thought):
            yield from self._thought(part)
        else:
            yield from self._call(part)

    def _thought(self, thought: Thought) -> Iterator[Event]:
        if not self._items or self._items[-1]["type"] != "reasoning":
            item: dict[str, Any] = {"type": "reasoning", "id": "rs_" + secrets.token_hex(12), "summary": [], "status": "in_progress"}
            yield from self._open({**item, "content": [{"type": "reasoning_text", "text": ""}]})
        self._items[-1]["content"][0]["text"] += thought.text
        yield self._event("response.reasoning_text.delta", **self._where(), content_index=0, delta=thought.text)

    def _text(self, text: str) -> Iterator[Event]:
        if not self._items or self._items[-1]["type"] != "message":
            part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item: dict[str, Any] = {"type": "message", "id": "msg_" + secrets.token_hex(12), "role": "assistant", "status": "in_progress"}
            yield from self._open({**item, "content": []})
            self._items[-1]["content"].append(part)
            yield self._event("response.content_part.added", **self._where(), content_index=0, part=part)
        if text:
            self._items[-1]["content"][0]["text"] += text
            yield self._event("response.output_text.delta", **self._where(), content_index=0, delta=text, logprobs=[])

    def _call(self, call: Call) -> Iterator[Event]:
        ids = {"id": "fc_" + secrets.token_hex(12), "call_id": "call_" + secrets.token_hex(12)}
        yield from self._open({"type": "function_call", **ids, "name": call.name, "arguments": "", "status": "in_progress"})
        self._items[-1]["arguments"] = call.arguments
        yield self._event("response.function_call_arguments.delta", **self._where(), delta=call.arguments)
        yield self._event("response.function_call_arguments.done", **self._where(), name=call.name, arguments=call.arguments)

    def _open(self, item: dict[str, Any]) -> Iterator[Event]:
        yield from self._close()
        self._items.append(item)
        yield self._event("response.output_item.added", output_index=len(self._items) - 1, item=item)

    def _close(self) -> Iterator[Event]:
        """The item being written is done."""
        if not self._items or self._items[-1]["status"] == "completed":
            return
        item = self._items[-1]
        item["status"] = "completed"
        if item["type"] == "message":
            part = item["content"][0]
            yield self._event("response.output_text.done", **self._where(), content_index=0, text=part["text"], logprobs=[])
            yield self._event("response.content_part.done", **self._where(), content_index=0, part=part)
        elif item["type"] == "reasoning":
            yield self._event("response.reasoning_text.done", **self._where(), content_index=0, text=item["content"][0]["text"])
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _where(self) -> dict[str, Any]:
        return {"output_index": len(self._items) - 1, "item_id": self._items[-1]["id"]}

    def _event(self, kind: str, **fields: Any) -> Event:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        # Items go on changing after the event that shows them; the event does not.
        return cast("Event", msgspec.to_builtins(event))

    def _response(self, last: Update | None) -> dict[str, Any]:
        request, cut = self._request, last is not None and last.finish_reason == "length"
        body: dict[str, Any] = {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": "in_progress" if last is None else "incomplete" if cut else "completed",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "model": self._model,
            "output": self._items,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "temperature": 1.0 if request.temperature is None else request.temperature,
            "text": {"format": (request.text.format if request.text is not None else None) or {"type": "text"}},
            "tool_choice": request.tool_choice or "auto",
            "tools": request.tools or [],
            "top_p": 1.0 if request.top_p is None else request.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": request.user,
            "metadata": request.metadata or {},
        }
        return body if last is None else {**body, **self._tokens()}

    def _tokens(self) -> dict[str, Any]:
        if _LOGPROBS in (self._request.include or ()):
            for item in self._items:
                if item["type"] == "message":
                    item["content"][0]["logprobs"] = chat_logprobs(self._tokenizer, self._sampled)
                    break
        counts = usage([self._asked])
        return {
            "usage": {
                "input_tokens": counts["prompt_tokens"],
                "input_tokens_details": counts["prompt_tokens_details"],
                "output_tokens": counts["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": counts["total_tokens"],
            },
            "prompt_token_ids": self._asked.prompt_ids,
            "token_ids": [s.token_id for s in self._sampled],
            "token_logprobs": [round(s.logprob, 8) for s in self._sampled],
            **version_metadata({0: self._asked.jobs[0].versions}, self._version),
        }
