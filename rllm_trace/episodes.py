"""Finished spans of one trace in, one Episode out. Pure: no clock, no ids, no state.

Spans come in any order; each carries the ids of what it belongs to, and nothing else decides where it lands. Only rewards look at the
order: of two with one name in one scope the later one in the list counts. The same spans always give the same record.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, cast

import msgspec

from rllm_trace import attributes as A
from rllm_trace._calldata import CallData
from rllm_trace._plain import loads
from rllm_trace._spans import Span
from rllm_trace.exceptions import UnknownEpisodeError
from rllm_trace.types import Episode, ModelCall, Reward, ToolCall, Trajectory

__all__ = ["build_call", "build_episode", "total", "with_rewards"]

Json = dict[str, Any]

_NO_SAMPLING: Final = frozenset(
    {
        "model", "messages", "input", "prompt", "instructions", "tools", "functions", "stream", "stream_options", "logprobs",
        "return_token_ids", "return_tokens_as_token_ids", "user", "metadata", "store", "include", "previous_response_id",
    }
)  # fmt: skip
"""Request fields that do not say how to sample. All others are taken to do so, known or not."""


def build_episode(spans: Sequence[Span]) -> Episode:
    """The record of the episode whose spans these are.

    Example: a workflow span, an agent span under it and a chat span that names the agent as its trajectory give one Episode with one
    Trajectory that holds one ModelCall. Raises ValueError unless exactly one span is a workflow's that says how it ended.
    """
    roots = [span for span in spans if A.TERMINATION in span.facts]
    if len(roots) != 1:
        raise ValueError(f"an episode has one workflow span that says how it ended, got {len(roots)} among {len(spans)} spans")
    root = roots[0]
    facts = root.facts
    rewards = _rewards(spans)
    trajectories = _trajectories(root, spans, rewards)
    of_episode = _supersede(reward for reward in rewards if not _is_placed(reward, trajectories))
    return Episode(
        id=root.episode_id,
        trace_id=root.trace_id,
        span_id=root.span_id,
        task_id=facts.get(A.TASK_ID),
        workflow=root.name,
        input=facts.get(A.EPISODE_INPUT),
        output=facts.get(A.EPISODE_OUTPUT),
        error=root.error,
        termination=facts[A.TERMINATION],
        trajectories=trajectories,
        rewards=of_episode,
        reward=total(of_episode, None),
        started=root.started,
        ended=root.ended,
        session_id=facts.get(A.SESSION_ID),
        metadata=dict(facts.get(A.EPISODE_METADATA) or {}),
        parent_episode_id=facts.get(A.PARENT_EPISODE_ID),
        open_calls=facts.get(A.EPISODE_OPEN_CALLS, 0),
    )


def total(rewards: Iterable[Reward], target: str | None) -> float | None:
    """Sum of weight * value of what counts in one scope; None if nothing was given there."""
    values = [reward.weight * reward.value for reward in rewards if reward.target == target and not reward.superseded]
    return math.fsum(values) if values else None


def build_call(span: Span, data: CallData, *, like: Sequence[Json] = ()) -> ModelCall:
    """The record of one call. ``like``: messages of an earlier call; equal ones are shared, so a long chat is held once."""
    body = _body(data.request)
    exact, reason = data.exact, data.inexact_reason
    if body is None:
        body, exact, reason = {}, False, "the request body is no JSON object"
    sampling = {key: value for key, value in body.items() if key not in _NO_SAMPLING}
    no_train = span.no_train or span.in_reward
    return ModelCall(
        span_id=span.span_id,
        parent_id=span.parent_id,
        operation=data.operation,
        model=data.model,
        requested_model=data.requested_model,
        endpoint=data.endpoint,
        server=data.server,
        messages=_shared(_messages(data.operation, body), like),
        tools=_objects(body.get("tools", body.get("functions"))) or None,
        sampling=sampling,
        requested_sampling=_requested(data.requested, sampling),
        choices=data.choices,
        prompt_token_ids=data.prompt_token_ids,
        usage=data.usage,
        response_id=data.response_id,
        response_model=data.response_model,
        attempts=data.attempts,
        error=data.error,
        exact=exact,
        inexact_reason=reason,
        complete=data.complete,
        streamed=data.streamed,
        no_train=no_train,
        late=span.late,
        multimodal=data.multimodal,
        trainable=exact and data.complete and data.error is None and data.status == "ok" and not no_train and not span.late,
        policy_version_start=data.policy_version_start,
        policy_version_end=data.policy_version_end,
        version_spans=data.version_spans,
        started=span.started,
        ended=span.ended,
        time_to_first_token=data.time_to_first_token,
    )


def with_rewards(episode: Episode, given: Sequence[Reward]) -> Episode:
    """The episode with rewards that came after its end. Raises UnknownEpisodeError if one scores a span that is none of its own."""
    trajectories = list(episode.trajectories)
    of_episode = list(episode.rewards)
    for reward in given:
        if reward.target is None:
            of_episode.append(reward)
            continue
        for position, trajectory in enumerate(trajectories):
            if reward.target == trajectory.id or any(reward.target == call.span_id for call in trajectory.calls):
                own = _supersede([*trajectory.rewards, reward])
                trajectories[position] = msgspec.structs.replace(trajectory, rewards=own, reward=total(own, trajectory.id))
                break
        else:
            raise UnknownEpisodeError(f"episode {episode.id!r} has no trajectory or call with the span id {reward.target!r}")
    of_episode = _supersede(of_episode)
    return msgspec.structs.replace(episode, trajectories=trajectories, rewards=of_episode, reward=total(of_episode, None))


class _Draft:
    """A trajectory while its spans are sorted in."""

    def __init__(self, id: str, name: str, parent_id: str | None, started: int, ended: int) -> None:
        self.id, self.name, self.parent_id, self.started, self.ended = id, name, parent_id, started, ended
        self.calls: list[ModelCall] = []
        self.tools: list[ToolCall] = []

    def finish(self, rewards: Sequence[Reward]) -> Trajectory:
        inside = {self.id, *(call.span_id for call in self.calls)}
        own = _supersede(reward for reward in rewards if reward.target in inside)
        return Trajectory(
            id=self.id,
            name=self.name,
            parent_id=self.parent_id,
            calls=self.calls,
            tools=self.tools,
            rewards=own,
            reward=total(own, self.id),
            started=self.started,
            ended=self.ended,
        )


def _trajectories(root: Span, spans: Sequence[Span], rewards: Sequence[Reward]) -> list[Trajectory]:
    default = _Draft(root.span_id, root.name, None, root.started, root.ended)
    drafts = {
        span.span_id: _Draft(span.span_id, span.name, span.parent_id, span.started, span.ended) for span in spans if span.kind == "agent"
    }
    drafts[root.span_id] = default
    for span in sorted(spans, key=lambda span: (span.started, span.number, span.span_id)):
        draft = drafts.get(span.trajectory_id)
        if draft is None:  # the agent's own span was lost on its way from another process
            draft = drafts[span.trajectory_id] = _Draft(span.trajectory_id, span.trajectory_name, None, span.started, span.ended)
        if span.call is not None:
            draft.calls.append(build_call(span, span.call, like=draft.calls[-1].messages if draft.calls else ()))
        elif span.kind == "tool":
            draft.tools.append(_tool(span))
    if not (default.calls or default.tools) and len(drafts) > 1 and not any(reward.target == root.span_id for reward in rewards):
        del drafts[root.span_id]
    return [draft.finish(rewards) for draft in sorted(drafts.values(), key=lambda draft: (draft.started, draft.id))]


def _tool(span: Span) -> ToolCall:
    return ToolCall(
        span_id=span.span_id,
        parent_id=span.parent_id,
        name=span.name,
        arguments=span.facts.get(A.TOOL_CALL_ARGUMENTS),
        result=span.facts.get(A.TOOL_CALL_RESULT),
        error=span.error,
        started=span.started,
        ended=span.ended,
    )


def _rewards(spans: Iterable[Span]) -> list[Reward]:
    return [reward for span in spans if span.kind == "reward" for reward in cast("list[Reward]", span.facts.get(A.REWARD_VALUES) or [])]


def _is_placed(reward: Reward, trajectories: Sequence[Trajectory]) -> bool:
    return reward.target is not None and any(reward.target == other.target for trajectory in trajectories for other in trajectory.rewards)


def _supersede(rewards: Iterable[Reward]) -> list[Reward]:
    """The rewards in order, all but the last of a name in a scope marked as superseded."""
    given = list(rewards)
    last = {(reward.target, reward.name): position for position, reward in enumerate(given)}
    return [
        msgspec.structs.replace(reward, superseded=last[reward.target, reward.name] != position) for position, reward in enumerate(given)
    ]


def _body(request: bytes) -> Json | None:
    try:
        body = loads(request)
    except ValueError:
        return None
    return cast("Json", body) if isinstance(body, dict) else None


def _messages(operation: str, body: Mapping[str, Any]) -> list[Json]:
    if operation == "text_completion":
        return [{"role": "prompt", "content": body.get("prompt")}]
    if operation == "responses":
        given = body.get("input")
        items = [{"role": "user", "content": given}] if isinstance(given, str) else _objects(given)
        instructions = body.get("instructions")
        return [{"role": "system", "content": instructions}, *items] if instructions is not None else items
    return _objects(body.get("messages"))


def _objects(value: Any) -> list[Json]:
    return [cast("Json", item) for item in cast("list[Any]", value) if isinstance(item, dict)] if isinstance(value, list) else []


def _shared(messages: list[Json], like: Sequence[Json]) -> list[Json]:
    for position, (message, earlier) in enumerate(zip(messages, like, strict=False)):
        if message != earlier:
            break
        messages[position] = earlier
    return messages


def _requested(requested: Mapping[str, Any] | None, sampling: Mapping[str, Any]) -> Json | None:
    if requested is None:
        return None
    changed = {key: value for key, value in requested.items() if key not in _NO_SAMPLING and sampling.get(key) != value}
    return changed or None
