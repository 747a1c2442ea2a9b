"""Foreign spans in, Episodes out: what every import has in common. Pure.

An import reads its own format into ``Imported`` spans; here each trace becomes an episode, through the same ``build_episode`` that makes
our own. Nothing of it is exact: other tools keep text, not the ids that a server sampled, so no call is trainable unless the user asks. A
span without a known parent hangs below the root; a trace with several roots gets one of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from rllm_trace import attributes as names
from rllm_trace._calldata import CallData
from rllm_trace._plain import dumps, to_plain
from rllm_trace._spans import Span
from rllm_trace.episodes import build_episode
from rllm_trace.types import Choice, Episode, ErrorInfo, Reward, Termination, Usage

__all__ = ["Call", "Imported", "ImportedKind", "Score", "episodes_of"]

ImportedKind = Literal["workflow", "agent", "tool", "chat", "other"]

_ROOT: Final = "imported"


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """What a foreign span knows of a model call."""

    model: str = ""
    messages: list[dict[str, Any]] = []
    """In the OpenAI shape, as far as the source tells."""
    tools: list[dict[str, Any]] | None = None
    sampling: dict[str, Any] = {}
    replies: list[dict[str, Any]] = []
    """Assistant messages in the OpenAI shape, ``finish_reason`` among their fields."""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    response_id: str | None = None
    response_model: str | None = None


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """A reward of the source's."""

    name: str
    value: float
    span_id: str | None = None
    """The span that it scores; None: the trace."""


class Imported(msgspec.Struct, frozen=True, kw_only=True):
    """One span of the source's."""

    kind: ImportedKind
    name: str
    trace_id: str
    span_id: str
    parent_id: str | None
    started: int
    """Unix time, nanoseconds."""
    ended: int
    """Unix time, nanoseconds."""
    input: Any = None
    output: Any = None
    call: Call | None = None
    error: ErrorInfo | None = None
    session_id: str | None = None
    metadata: dict[str, Any] = {}
    """Of the trace: metadata of its spans is joined."""


def episodes_of(spans: Iterable[Imported], scores: Mapping[str, Sequence[Score]], *, source: str) -> Iterator[Episode]:
    """One episode for each trace, in the order of their starts. ``scores``: by trace id. ``source`` is named in every record."""
    traces: dict[str, list[Imported]] = {}
    for span in spans:
        traces.setdefault(span.trace_id, []).append(span)
    for trace_id, found in sorted(traces.items(), key=lambda item: min(span.started for span in item[1])):
        yield _episode(trace_id, found, scores.get(trace_id, ()), source)


def _episode(trace_id: str, found: Sequence[Imported], scores: Sequence[Score], source: str) -> Episode:
    by_id = {span.span_id: span for span in found}
    roots = [span for span in found if span.parent_id not in by_id]
    single = roots[0] if len(roots) == 1 and roots[0].kind not in ("chat", "tool") else None
    root = _root(trace_id, found, single, source)
    made = [root]
    for span in found:
        if span is not single:
            made.append(_span(span, by_id, root))
    made += [_reward(score, root, by_id, single) for score in scores]
    return build_episode(made)


def _root(trace_id: str, found: Sequence[Imported], single: Imported | None, source: str) -> Span:
    error = single.error if single is not None else next((span.error for span in found if span.error is not None), None)
    termination: Termination = "completed" if error is None else "failed"
    facts: dict[str, Any] = {
        names.TERMINATION: termination,
        names.EPISODE_METADATA: {**{key: value for span in found for key, value in span.metadata.items()}, "imported_from": source},
    }
    if single is not None:
        facts |= {names.EPISODE_INPUT: single.input, names.EPISODE_OUTPUT: single.output}
    session = next((span.session_id for span in found if span.session_id is not None), None)
    if session is not None:
        facts[names.SESSION_ID] = session
    span_id = single.span_id if single is not None else f"root-{trace_id}"
    name = single.name if single is not None else _ROOT
    return Span(
        kind="workflow",
        name=name,
        trace_id=trace_id,
        span_id=span_id,
        parent_id=None,
        episode_id=trace_id,
        trajectory_id=span_id,
        trajectory_name=name,
        started=min(span.started for span in found),
        ended=max(span.ended for span in found),
        error=error,
        facts=facts,
    )


def _span(span: Imported, by_id: Mapping[str, Imported], root: Span) -> Span:
    agent = _agent(span, by_id, root)
    facts: dict[str, Any] = {}
    if span.kind == "tool":
        facts = {names.TOOL_CALL_ARGUMENTS: span.input, names.TOOL_CALL_RESULT: span.output}
    return Span(
        kind="other" if span.kind == "workflow" else span.kind,
        name=span.name,
        trace_id=span.trace_id,
        span_id=span.span_id,
        parent_id=span.parent_id if span.parent_id in by_id else root.span_id,
        episode_id=span.trace_id,
        trajectory_id=root.span_id if agent is None else agent.span_id,
        trajectory_name=root.name if agent is None else agent.name,
        started=span.started,
        ended=span.ended,
        error=span.error,
        call=_call_data(span, root) if span.kind == "chat" else None,
        facts=facts,
    )


def _agent(span: Imported, by_id: Mapping[str, Imported], root: Span) -> Imported | None:
    """The innermost agent that the span is, or runs in; None: the default trajectory. A chain that comes back to itself ends."""
    seen: set[str] = set()
    at: Imported | None = span
    while at is not None and at.span_id not in seen and at.span_id != root.span_id:
        if at.kind == "agent":
            return at
        seen.add(at.span_id)
        at = by_id.get(at.parent_id or "")
    return None


def _call_data(span: Imported, root: Span) -> CallData:
    call = span.call or Call()
    source = root.facts[names.EPISODE_METADATA]["imported_from"]
    request = {"model": call.model, "messages": call.messages, **({"tools": call.tools} if call.tools else {}), **call.sampling}
    usage = None
    if call.prompt_tokens is not None and call.completion_tokens is not None:
        usage = Usage(prompt_tokens=call.prompt_tokens, completion_tokens=call.completion_tokens)
    return CallData(
        operation="chat",
        model=call.model,
        requested_model=call.model,
        request=dumps(to_plain(request)).encode(),
        choices=[_choice(position, reply) for position, reply in enumerate(call.replies)],
        usage=usage,
        response_id=call.response_id,
        response_model=call.response_model,
        error=span.error,
        status="ok" if span.error is None else "error",
        inexact_reason=f"imported from {source}: it keeps no token ids",
        complete=span.error is None and bool(call.replies),
    )


def _choice(position: int, reply: Mapping[str, Any]) -> Choice:
    content = reply.get("content")
    return Choice(
        index=position,
        token_ids=None,
        logprobs=None,
        text=content if isinstance(content, str) or content is None else dumps(to_plain(content)),
        tool_calls=reply.get("tool_calls") or None,
        reasoning=reply.get("reasoning_content"),
        refusal=reply.get("refusal"),
        finish_reason=reply.get("finish_reason"),
    )


def _reward(score: Score, root: Span, by_id: Mapping[str, Imported], single: Imported | None) -> Span:
    """A reward's span: of the trace, of the call it scores, or of the trajectory that the scored span belongs to."""
    scored = by_id.get(score.span_id or "")
    target = None
    if scored is not None and scored is not single:
        agent = _agent(scored, by_id, root)
        target = scored.span_id if scored.kind == "chat" else agent.span_id if agent is not None else None
    return Span(
        kind="reward",
        name=score.name,
        trace_id=root.trace_id,
        span_id=f"score-{score.name}-{score.span_id or root.trace_id}",
        parent_id=root.span_id,
        episode_id=root.episode_id,
        trajectory_id=root.span_id,
        trajectory_name=root.name,
        started=root.ended,
        ended=root.ended,
        in_reward=True,
        facts={names.REWARD_VALUES: [Reward(name=score.name, value=score.value, target=target)]},
    )
