"""What of a record may leave the process: a call, span or episode in, the part of it that may be written or sent out.

Three settings decide. Without ``content`` no text, no ids and no logprobs leave; counts, times, names, rewards and metadata do. Without
``tokens`` ids and logprobs stay behind. ``redact`` sees a plain copy of every record that has content and returns what may leave of it:

- ``{"kind": "call", "name": model, "request": {"messages": [...], ...}, "requested": {...}, "choices": [{"text": ...}], "error": str}``
- ``{"kind": "workflow", "name": ..., "input": ..., "output": ..., "metadata": {...}, "error": str}``
- ``{"kind": "tool", "name": ..., "arguments": ..., "result": ..., "error": str}``
- ``{"kind": "agent" | "reward" | "other", "name": ..., "facts": {attributes of other libraries}, "error": str}``

It may change the copy in place. A key that it removes is withheld, None or an exception withholds all content of the record. The ids of a
call spell the same text: where redaction changed a call, its ids and logprobs stay behind too, and the call is inexact.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final, cast

import msgspec

from rllm_trace import attributes as names
from rllm_trace._calldata import CallData
from rllm_trace._genai import body
from rllm_trace._guard import counters, guard
from rllm_trace._plain import dumps, from_plain, to_plain
from rllm_trace._spans import Span
from rllm_trace.types import Choice, Episode, ErrorInfo, ModelCall, ToolCall, Trajectory

__all__ = ["Disclosure", "Redact", "content_wanted", "disclose_episode", "redact_span"]

Redact = Callable[[dict[str, Any]], dict[str, Any] | None]

_CHOICE_FIELDS: Final = ("text", "tool_calls", "reasoning", "refusal")
_REDACTED: Final = "redacted"
_WITHHELD: Final = "content is not captured"
_NO_TOKENS: Final = "tokens were not exported"
_CONTENT_ON: Final = frozenset({"span_only", "span_and_event", "true", "1"})
_PROMPT_FIELDS: Final = ("messages", "tools")


class Disclosure(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one way out."""

    content: bool
    tokens: bool
    """Only with ``content``: ids are the same text in another spelling."""
    redact: Redact | None = None

    def __post_init__(self) -> None:
        if self.tokens and not self.content:
            raise ValueError(
                "tokens=True with capture_content=False: token ids spell the text; allow the content too, or ask for no tokens"
            )


def content_wanted(capture_content: bool | None, *, default: bool | None = None) -> bool:
    """The setting if there is one, else ``default``, else what the GenAI variable of OpenTelemetry says (no, if unset)."""
    if capture_content is not None:
        return capture_content
    if default is not None:
        return default
    return os.environ.get(names.ENV_CAPTURE_CONTENT, "").strip().lower() in _CONTENT_ON


def redact_span(span: Span, redact: Redact | None) -> Span:
    """The span with what ``redact`` lets through; the same object if there is no ``redact``."""
    return span if redact is None else _span_redacted(span, redact)


def disclose_episode(episode: Episode, disclosure: Disclosure) -> Episode:
    """The episode without what may not leave; the same object if all may."""
    if not disclosure.content:
        return _episode_withheld(episode)
    if disclosure.redact is not None:
        episode = _episode_redacted(episode, disclosure.redact)
    if not disclosure.tokens:
        episode = _each_call(episode, lambda call: _model_call_without_tokens(call, _NO_TOKENS))
    return episode


def _ask(redact: Redact, record: dict[str, Any]) -> dict[str, Any] | None:
    """What ``redact`` lets through; None if it lets nothing through, or failed."""
    with guard("redact"):
        answer: Any = redact(record)
        if isinstance(answer, dict):
            return cast("dict[str, Any]", answer)
        if answer is not None:
            raise TypeError(f"redact returned a {type(answer).__name__}; it must return the record as a dict, or None to withhold it")
    counters.add("dropped", "redacted content")
    return None


def _error(error: ErrorInfo | None, message: Any) -> ErrorInfo | None:
    return None if error is None else msgspec.structs.replace(error, message=message if isinstance(message, str) else "")


# Spans


def _span_withheld(span: Span) -> Span:
    facts = {key: value for key, value in span.facts.items() if not names.is_content(key)}
    call = None if span.call is None else _call_withheld(span.call, _WITHHELD)
    return msgspec.structs.replace(span, facts=facts, call=call, error=_error(span.error, ""))


def _span_redacted(span: Span, redact: Redact) -> Span:
    if span.call is not None:
        call, answer = _call_redacted(span.call, redact)
    else:
        record = {"kind": span.kind, "name": span.name, "error": span.error and span.error.message, **_facts_record(span)}
        call, answer = None, _ask(redact, record)
    if answer is None:
        return msgspec.structs.replace(_span_withheld(span), call=call)
    facts = span.facts if span.call is not None else _facts(span, answer)
    return msgspec.structs.replace(span, call=call, facts=facts, error=_error(span.error, answer.get("error")))


_FACTS: Final[dict[str, dict[str, str]]] = {
    "workflow": {"input": names.EPISODE_INPUT, "output": names.EPISODE_OUTPUT, "metadata": names.EPISODE_METADATA},
    "tool": {"arguments": names.TOOL_CALL_ARGUMENTS, "result": names.TOOL_CALL_RESULT},
}


def _facts_record(span: Span) -> dict[str, Any]:
    shown = _FACTS.get(span.kind)
    if shown is None:
        return {"facts": {key: to_plain(value) for key, value in span.facts.items() if not key.startswith(names.BAGGAGE_PREFIX)}}
    return {field: to_plain(span.facts[key]) for field, key in shown.items() if key in span.facts}


def _facts(span: Span, answer: dict[str, Any]) -> dict[str, Any]:
    shown = _FACTS.get(span.kind)
    if shown is None:
        kept = {key: value for key, value in span.facts.items() if key.startswith(names.BAGGAGE_PREFIX)}
        found = answer.get("facts")
        return kept | {key: from_plain(value) for key, value in cast("dict[str, Any]", found if isinstance(found, dict) else {}).items()}
    kept = {key: value for key, value in span.facts.items() if key not in shown.values()}
    return kept | {key: from_plain(answer[field]) for field, key in shown.items() if field in answer and key in span.facts}


# Calls, as the client gave them


def _call_withheld(data: CallData, reason: str) -> CallData:
    return msgspec.structs.replace(
        _call_without_tokens(data, reason),
        request=dumps(_numbers(body(data.request))).encode(),
        requested=None if data.requested is None else _numbers(data.requested),
        choices=[_choice_withheld(choice) for choice in data.choices],
        error=_error(data.error, ""),
    )


def _call_without_tokens(data: CallData, reason: str) -> CallData:
    choices = [msgspec.structs.replace(choice, token_ids=None, logprobs=None) for choice in data.choices]
    found = msgspec.structs.replace(data, choices=choices, prompt_token_ids=None, exact=False)
    if data.exact:
        found.inexact_reason = reason
    return found


def _call_redacted(data: CallData, redact: Redact) -> tuple[CallData, dict[str, Any] | None]:
    request = body(data.request)
    record = _call_record(data.model, request, data.requested, data.choices, data.error)
    before = dumps([request, record["choices"]])
    answer = _ask(redact, record)
    if answer is None:
        return _call_withheld(data, _REDACTED), None
    request = cast("dict[str, Any]", answer.get("request") or {})
    changed = msgspec.structs.replace(
        data,
        requested=from_plain(answer.get("requested")),
        error=_error(data.error, answer.get("error")),
    )
    if dumps([request, answer.get("choices")]) == before:
        return changed, answer
    changed.request = dumps(request).encode()
    changed.choices = _choices_of(data.choices, answer)
    return _call_without_tokens(changed, _REDACTED), answer


def _call_record(
    model: str, request: dict[str, Any], requested: dict[str, Any] | None, choices: list[Choice], error: ErrorInfo | None
) -> dict[str, Any]:
    return {
        "kind": "call",
        "name": model,
        "request": request,
        "requested": to_plain(requested),
        "choices": [{field: to_plain(getattr(choice, field)) for field in _CHOICE_FIELDS} for choice in choices],
        "error": error and error.message,
    }


def _choices_of(choices: list[Choice], answer: dict[str, Any]) -> list[Choice]:
    """The choices with the texts of the answer; a choice that the answer left out keeps none."""
    texts: list[Any] = list(answer.get("choices") or [])
    texts += [{}] * (len(choices) - len(texts))
    return [
        msgspec.structs.replace(choice, **{field: from_plain(text.get(field)) for field in _CHOICE_FIELDS})
        for choice, text in zip(choices, texts, strict=False)
    ]


def _choice_withheld(choice: Choice) -> Choice:
    return msgspec.structs.replace(choice, text=None, tool_calls=None, reasoning=None, refusal=None, stop_reason=None)


def _numbers(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields that cannot hold text."""
    return {key: value for key, value in fields.items() if isinstance(value, (bool, int, float))}


# Episodes


def _episode_withheld(episode: Episode) -> Episode:
    bare = msgspec.structs.replace(episode, input=None, output=None, error=_error(episode.error, ""))
    bare = _each_call(bare, lambda call: _model_call_withheld(call, _WITHHELD))
    return _each_tool(bare, _tool_withheld)


def _model_call_withheld(call: ModelCall, reason: str) -> ModelCall:
    return msgspec.structs.replace(
        _model_call_without_tokens(call, reason),
        messages=[],
        tools=None,
        sampling=_numbers(call.sampling),
        requested_sampling=None if call.requested_sampling is None else _numbers(call.requested_sampling),
        choices=[_choice_withheld(msgspec.structs.replace(choice, token_ids=None, logprobs=None)) for choice in call.choices],
        error=_error(call.error, ""),
    )


def _model_call_without_tokens(call: ModelCall, reason: str) -> ModelCall:
    return msgspec.structs.replace(
        call,
        choices=[msgspec.structs.replace(choice, token_ids=None, logprobs=None) for choice in call.choices],
        prompt_token_ids=None,
        exact=False,
        trainable=False,
        inexact_reason=reason if call.exact else call.inexact_reason,
    )


def _tool_withheld(tool: ToolCall) -> ToolCall:
    return msgspec.structs.replace(tool, arguments=None, result=None, error=_error(tool.error, ""))


def _episode_redacted(episode: Episode, redact: Redact) -> Episode:
    record = {
        "kind": "workflow",
        "name": episode.workflow,
        "input": to_plain(episode.input),
        "output": to_plain(episode.output),
        "metadata": to_plain(episode.metadata),
        "error": episode.error and episode.error.message,
    }
    answer = _ask(redact, record) or {"metadata": record["metadata"]}
    changed = msgspec.structs.replace(
        episode,
        input=from_plain(answer.get("input")),
        output=from_plain(answer.get("output")),
        metadata=from_plain(answer.get("metadata") or {}),
        error=_error(episode.error, answer.get("error")),
    )
    changed = _each_call(changed, lambda call: _model_call_redacted(call, redact))
    return _each_tool(changed, lambda tool: _tool_redacted(tool, redact))


def _model_call_redacted(call: ModelCall, redact: Redact) -> ModelCall:
    request = cast("dict[str, Any]", to_plain({"messages": call.messages, "tools": call.tools, **call.sampling}))
    record = _call_record(call.model, request, call.requested_sampling, call.choices, call.error)
    before = dumps([request, record["choices"]])
    answer = _ask(redact, record)
    if answer is None:
        return _model_call_withheld(call, _REDACTED)
    changed = msgspec.structs.replace(
        call,
        requested_sampling=from_plain(answer.get("requested")),
        error=_error(call.error, answer.get("error")),
    )
    request = cast("dict[str, Any]", answer.get("request") or {})
    if dumps([request, answer.get("choices")]) == before:
        return changed
    changed = msgspec.structs.replace(
        changed,
        messages=from_plain(request.get("messages") or []),
        tools=from_plain(request.get("tools")),
        sampling={key: from_plain(value) for key, value in request.items() if key not in _PROMPT_FIELDS},
        choices=_choices_of(call.choices, answer),
    )
    return _model_call_without_tokens(changed, _REDACTED)


def _tool_redacted(tool: ToolCall, redact: Redact) -> ToolCall:
    record = {
        "kind": "tool",
        "name": tool.name,
        "arguments": to_plain(tool.arguments),
        "result": to_plain(tool.result),
        "error": tool.error and tool.error.message,
    }
    answer = _ask(redact, record) or {}
    return msgspec.structs.replace(
        tool,
        arguments=from_plain(answer.get("arguments")),
        result=from_plain(answer.get("result")),
        error=_error(tool.error, answer.get("error")),
    )


def _each_trajectory(episode: Episode, change: Callable[[Trajectory], Trajectory]) -> Episode:
    return msgspec.structs.replace(episode, trajectories=[change(trajectory) for trajectory in episode.trajectories])


def _each_call(episode: Episode, change: Callable[[ModelCall], ModelCall]) -> Episode:
    return _each_trajectory(episode, lambda found: msgspec.structs.replace(found, calls=[change(call) for call in found.calls]))


def _each_tool(episode: Episode, change: Callable[[ToolCall], ToolCall]) -> Episode:
    return _each_trajectory(episode, lambda found: msgspec.structs.replace(found, tools=[change(tool) for tool in found.tools]))
