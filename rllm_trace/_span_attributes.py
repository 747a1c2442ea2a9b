"""A finished span to its name and attributes, and back: everything except ids and times, which a span has by itself.

``span_from_attributes`` restores what ``span_attributes`` wrote, so that the spans of another process build the same episode there. Facts
that are not a plain string, bool or number travel as JSON text; reward records and calls come back as the records they were.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast

import msgspec

from rllm_trace import attributes as names
from rllm_trace._plain import dumps, from_plain, loads, to_plain
from rllm_trace._spans import Span, SpanKind
from rllm_trace._tokens import AttributeValue, call_attributes, call_from_attributes
from rllm_trace.types import ErrorInfo, Reward

__all__ = ["span_attributes", "span_from_attributes", "span_name"]

_OPERATION: Final = {
    "workflow": (names.OP_WORKFLOW, names.KIND_WORKFLOW, names.WORKFLOW_NAME),
    "agent": (names.OP_AGENT, names.KIND_AGENT, names.AGENT_NAME),
    "tool": (names.OP_TOOL, names.KIND_TOOL, names.TOOL_NAME),
    "chat": (names.OP_CHAT, names.KIND_CALL, names.REQUEST_MODEL),
}
_JSON_FACTS: Final = frozenset(
    {
        names.EPISODE_INPUT,
        names.EPISODE_OUTPUT,
        names.EPISODE_METADATA,
        names.TOOL_CALL_ARGUMENTS,
        names.TOOL_CALL_RESULT,
        names.REWARD_VALUES,
    }
)
"""Facts that are always written as JSON text, so that a string among them comes back as one."""

_MAX_INT: Final = 2**63 - 1
"""The largest that OTLP can carry."""

_CHAT_FACTS: Final = (names.TASK_ID, names.SESSION_ID)
"""All other attributes of a chat span come from its call."""

_FLAGS: Final = (("no_train", names.CALL_NO_TRAIN), ("in_reward", names.CALL_IN_REWARD), ("late", names.CALL_LATE))
_DERIVED: Final = frozenset(
    {
        names.OPERATION_NAME,
        names.OPENINFERENCE_KIND,
        names.PROVIDER_NAME,
        names.CONVERSATION_ID,
        names.WORKFLOW_NAME,
        names.AGENT_NAME,
        names.TOOL_NAME,
        names.EPISODE_ID,
        names.TRAJECTORY_ID,
        names.TRAJECTORY_NAME,
        names.SPAN_KIND,
        names.ERROR_TYPE,
        names.ERROR_MESSAGE,
        names.ERROR_STATUS,
        names.CALL_NUMBER,
        names.EVALUATION_NAME,
        names.EVALUATION_SCORE,
        names.INPUT_VALUE,
        names.OUTPUT_VALUE,
        names.USER_ID,
        names.TAGS,
        *(key for _, key in _FLAGS),
    }
)
"""Attributes that are no facts: they come from the span's own fields or from other facts."""


def span_name(span: Span) -> str:
    """The name by which back ends list it: ``invoke_agent solver``, ``chat gpt-4o-mini``, ``rllm.reward exact_match``."""
    if span.kind == "reward":
        return f"{names.SPAN_REWARD} {span.name}"
    if span.kind == "other":
        return span.name
    if span.call is not None:
        return f"{names.OP_COMPLETION if span.call.operation == 'text_completion' else names.OP_CHAT} {span.call.model}"
    return f"{_OPERATION[span.kind][0]} {span.name}"


def span_attributes(span: Span, *, content: bool, tokens: bool) -> dict[str, AttributeValue]:
    """Everything that the span says, as attributes. ``content`` and ``tokens`` as in ``call_attributes``."""
    session = span.facts.get(names.SESSION_ID)
    found: dict[str, AttributeValue] = {
        names.SPAN_KIND: span.kind,
        names.EPISODE_ID: span.episode_id,
        names.CONVERSATION_ID: session if isinstance(session, str) else span.episode_id,
        names.TRAJECTORY_ID: span.trajectory_id,
        names.TRAJECTORY_NAME: span.trajectory_name,
    }
    if span.kind in _OPERATION:
        operation, icon, name_key = _OPERATION[span.kind]
        found |= {names.OPERATION_NAME: operation, names.OPENINFERENCE_KIND: icon, name_key: span.name}
    if span.kind in ("chat", "agent"):
        found[names.PROVIDER_NAME] = names.PROVIDER_OPENAI if span.call is not None and span.call.endpoint == "own" else names.PROVIDER_OURS
    if span.kind == "chat":
        found[names.CALL_NUMBER] = span.number
    if span.kind == "reward":
        found |= _reward_summary(span)
    if span.kind == "workflow":
        found |= _labels(span.facts.get(names.EPISODE_METADATA))
    found |= {key: True for field, key in _FLAGS if getattr(span, field)}
    if span.error is not None:
        found |= _error_attributes(span.error, content=content)
    for key, value in span.facts.items():
        if value is not None and (content or not names.is_content(key)):
            found[key] = _fact_attribute(key, value)
    if span.call is not None:
        found |= call_attributes(span.call, content=content, tokens=tokens)
    return found


def span_from_attributes(
    attributes: Mapping[str, Any],
    *,
    name: str,
    trace_id: str,
    span_id: str,
    parent_id: str | None,
    started: int,
    ended: int,
    links: tuple[tuple[str, str], ...] = (),
) -> Span | None:
    """The span that was exported under ``name`` with these attributes; None if it is not one of ours.

    Raises ValueError if it is one of ours and malformed.
    """
    if names.SPAN_KIND not in attributes or names.EPISODE_ID not in attributes:
        return None
    kind = msgspec.convert(attributes[names.SPAN_KIND], SpanKind)
    call = call_from_attributes(attributes) if kind == "chat" else None
    return Span(
        kind=kind,
        name=_own_name(kind, name, attributes),
        trace_id=trace_id,
        span_id=span_id,
        parent_id=parent_id,
        episode_id=attributes[names.EPISODE_ID],
        trajectory_id=attributes.get(names.TRAJECTORY_ID, span_id),
        trajectory_name=attributes.get(names.TRAJECTORY_NAME, ""),
        started=started,
        ended=ended,
        error=_error(attributes) if call is None else None,
        call=call,
        number=attributes.get(names.CALL_NUMBER, 0),
        facts=_facts({key: attributes[key] for key in _CHAT_FACTS if key in attributes} if kind == "chat" else attributes),
        links=links,
        **{field: attributes.get(key, False) for field, key in _FLAGS},
    )


def _labels(metadata: Any) -> dict[str, AttributeValue]:
    """What back ends sort traces by, under their names for it: of the episode's metadata ``user_id`` and ``tags``."""
    told = cast("dict[str, Any]", metadata) if isinstance(metadata, dict) else {}
    user, tags = told.get("user_id"), told.get("tags")
    found: dict[str, AttributeValue] = {}
    if isinstance(user, (str, int)):
        found[names.USER_ID] = str(user)
    if isinstance(tags, (list, tuple)) and tags:
        found[names.TAGS] = [str(tag) for tag in cast("list[Any]", tags)]
    return found


def _reward_summary(span: Span) -> dict[str, AttributeValue]:
    given = cast("list[Reward]", span.facts.get(names.REWARD_VALUES) or [])
    found: dict[str, AttributeValue] = {names.OPENINFERENCE_KIND: names.KIND_REWARD, names.EVALUATION_NAME: span.name}
    if given:
        found[names.EVALUATION_SCORE] = float(sum(reward.weight * reward.value for reward in given))
    return found


def _error_attributes(error: ErrorInfo, *, content: bool) -> dict[str, AttributeValue]:
    found: dict[str, AttributeValue] = {names.ERROR_TYPE: error.type}
    if content:
        found[names.ERROR_MESSAGE] = error.message
    if error.status_code is not None:
        found[names.ERROR_STATUS] = error.status_code
    return found


def _fact_attribute(key: str, value: Any) -> AttributeValue:
    if key in _JSON_FACTS:
        return dumps(to_plain(value))
    plain = to_plain(value)
    if isinstance(plain, int) and plain > _MAX_INT:
        return str(plain)
    return plain if isinstance(plain, (str, bool, int, float)) else dumps(plain)


def _own_name(kind: SpanKind, name: str, attributes: Mapping[str, Any]) -> str:
    if kind == "other":
        return name
    if kind == "chat":
        return attributes.get(names.CALL_REQUESTED_MODEL, attributes[names.REQUEST_MODEL])
    return name.partition(" ")[2]


def _error(attributes: Mapping[str, Any]) -> ErrorInfo | None:
    if names.ERROR_TYPE not in attributes:
        return None
    return ErrorInfo(
        type=attributes[names.ERROR_TYPE],
        message=attributes.get(names.ERROR_MESSAGE, ""),
        status_code=attributes.get(names.ERROR_STATUS),
    )


def _facts(attributes: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in attributes.items():
        if key in _DERIVED:
            continue
        restored = from_plain(loads(value)) if key in _JSON_FACTS else value
        found[key] = msgspec.convert(restored, list[Reward]) if key == names.REWARD_VALUES else restored
    return found
