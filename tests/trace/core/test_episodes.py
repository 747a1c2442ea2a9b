"""Finished spans become one episode; nothing but the ids in them decides where each lands."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from rllm_trace import attributes as A
from rllm_trace._calldata import CallData
from rllm_trace._spans import Span
from rllm_trace.episodes import build_call, build_episode, total, with_rewards
from rllm_trace.exceptions import UnknownEpisodeError
from rllm_trace.types import Choice, ErrorInfo, Reward, TokenIds


def span(
    kind: Any, span_id: str, *, started: int, trajectory: tuple[str, str] = ("w", "app"), parent: str | None = "w", **fields: Any
) -> Span:
    return Span(
        kind=kind,
        name=fields.pop("name", kind),
        trace_id="t",
        span_id=span_id,
        parent_id=parent,
        episode_id="e",
        trajectory_id=trajectory[0],
        trajectory_name=trajectory[1],
        started=started,
        ended=started + 1,
        **fields,
    )


def root(**facts: Any) -> Span:
    return span("workflow", "w", started=0, parent=None, name="app", facts={A.TERMINATION: "completed", **facts})


def data(content: str = "hi", **fields: Any) -> CallData:
    body = {"model": "m", "messages": [{"role": "user", "content": content}]}
    given: dict[str, Any] = {"request": msgspec.json.encode(body), "exact": True, "complete": True, **fields}
    return CallData(
        operation=fields.get("operation", "chat"), model="m", requested_model="m", **{k: v for k, v in given.items() if k != "operation"}
    )


def test_spans_in_any_order_give_the_same_episode() -> None:
    """Two parallel agents of one name and a call outside both: three trajectories, in order of their start."""
    spans = [
        root(),
        span("agent", "a1", started=1, trajectory=("a1", "solver"), name="solver"),
        span("agent", "a2", started=2, trajectory=("a2", "solver"), name="solver"),
        span("chat", "c1", started=5, trajectory=("a1", "solver"), call=data("first")),
        span("chat", "c2", started=4, trajectory=("a2", "solver"), call=data("second")),
        span("chat", "c3", started=9, call=data("outside")),
        span(
            "tool",
            "x1",
            started=6,
            trajectory=("a2", "solver"),
            name="search",
            facts={A.TOOL_CALL_ARGUMENTS: {"q": 1}, A.TOOL_CALL_RESULT: "r"},
        ),
    ]
    expected = build_episode(spans)
    assert [(t.id, t.name, [c.span_id for c in t.calls], [x.name for x in t.tools]) for t in expected.trajectories] == [
        ("w", "app", ["c3"], []),
        ("a1", "solver", ["c1"], []),
        ("a2", "solver", ["c2"], ["search"]),
    ]
    for seed in range(20):
        shuffled = random.Random(seed).sample(spans, len(spans))
        assert build_episode(shuffled) == expected


def test_a_workflow_without_calls_has_one_empty_trajectory() -> None:
    """Every episode has a trajectory; the default one goes only where agents did all the work."""
    alone = build_episode([root()])
    assert [(t.id, t.name, t.calls) for t in alone.trajectories] == [("w", "app", [])]
    with_agent = build_episode([root(), span("agent", "a", started=1, trajectory=("a", "solver"), name="solver")])
    assert [t.name for t in with_agent.trajectories] == ["solver"]


def test_a_call_whose_agent_span_was_lost_still_has_its_trajectory() -> None:
    """Its own ids and name are enough."""
    episode = build_episode([root(), span("chat", "c", started=1, trajectory=("gone", "solver"), call=data())])
    assert [(t.id, t.name, [c.span_id for c in t.calls]) for t in episode.trajectories] == [("gone", "solver", ["c"])]


def test_an_episode_needs_exactly_one_workflow_that_has_ended() -> None:
    """Without one, or with two, there is no telling what happened."""
    with pytest.raises(ValueError, match="an episode has one workflow span that says how it ended, got 0 among 1 spans"):
        build_episode([span("chat", "c", started=1, call=data())])
    with pytest.raises(ValueError, match="got 2 among 2 spans"):
        build_episode([root(), root()])


def test_the_workflows_facts_are_in_the_episode() -> None:
    """Input, output, ids, metadata and error come from the workflow's span."""
    error = ErrorInfo(type="ValueError", message="no")
    workflow = root(
        **{
            A.EPISODE_INPUT: {"x": 1},
            A.EPISODE_OUTPUT: "y",
            A.TASK_ID: "t7",
            A.SESSION_ID: "s",
            A.EPISODE_METADATA: {"k": [1]},
            A.PARENT_EPISODE_ID: "p",
            A.EPISODE_OPEN_CALLS: 2,
            A.TERMINATION: "failed",
        }
    )
    workflow.error = error
    e = build_episode([workflow])
    assert (e.id, e.trace_id, e.span_id, e.workflow, e.input, e.output, e.task_id) == ("e", "t", "w", "app", {"x": 1}, "y", "t7")
    assert (e.session_id, e.metadata, e.parent_episode_id, e.open_calls, e.termination, e.error) == (
        "s",
        {"k": [1]},
        "p",
        2,
        "failed",
        error,
    )


def test_the_request_as_sent_is_split_into_messages_tools_and_sampling() -> None:
    """Fields that do not say how to sample are left out of ``sampling``; unknown ones stay in it."""
    request = {
        "model": "policy",
        "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "u"}]}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "temperature": 0.7,
        "tool_choice": "auto",
        "min_p": 0.1,
        "stream": True,
        "logprobs": True,
        "return_token_ids": True,
    }
    call = build_call(
        span("chat", "c", started=1),
        data(request=msgspec.json.encode(request), requested={"model": "gpt", "tool_choice": "required", "temperature": 0.7}),
    )
    assert call.messages == request["messages"]
    assert call.tools == request["tools"]
    assert call.sampling == {"temperature": 0.7, "tool_choice": "auto", "min_p": 0.1}
    assert call.requested_sampling == {"tool_choice": "required"}


@pytest.mark.parametrize(
    "operation, body, messages",
    [
        ("text_completion", {"prompt": [1, 2]}, [{"role": "prompt", "content": [1, 2]}]),
        ("responses", {"input": "hi", "instructions": "be"}, [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}]),
        ("responses", {"input": [{"role": "user", "content": "a"}]}, [{"role": "user", "content": "a"}]),
        ("chat", {}, []),
    ],
)
def test_every_operation_gives_messages(operation: str, body: dict[str, Any], messages: list[Any]) -> None:
    """Prompts, instructions and input items take the shape of messages."""
    assert build_call(span("chat", "c", started=1), data(request=msgspec.json.encode(body), operation=operation)).messages == messages


@pytest.mark.parametrize("request_body", [b"", b"[1]", b"\xff", b"{"])
def test_a_request_that_is_no_json_object_is_a_call_that_is_not_exact(request_body: bytes) -> None:
    """It is recorded with the reason, and not trained."""
    call = build_call(span("chat", "c", started=1), data(request=request_body))
    assert (call.messages, call.exact, call.inexact_reason, call.trainable) == ([], False, "the request body is no JSON object", False)


@pytest.mark.parametrize(
    "of_span, of_data, trainable",
    [
        ({}, {}, True),
        ({"no_train": True}, {}, False),
        ({"in_reward": True}, {}, False),
        ({"late": True}, {}, False),
        ({}, {"exact": False, "inexact_reason": "no ids"}, False),
        ({}, {"complete": False}, False),
        ({}, {"status": "abandoned"}, False),
        ({}, {"error": ErrorInfo(type="E", message="m")}, False),
    ],
)
def test_what_makes_a_call_trainable(of_span: dict[str, Any], of_data: dict[str, Any], trainable: bool) -> None:
    """Exact, complete, successful, in time, and neither under ``no_train`` nor in a reward."""
    assert build_call(span("chat", "c", started=1, **of_span), data(**of_data)).trainable is trainable


def test_a_long_chat_holds_each_message_once() -> None:
    """Equal messages at the start of the next call of a trajectory are the same objects; what differs is not shared."""

    def turn(span_id: str, started: int, *contents: str) -> Span:
        body = {"messages": [{"role": "user", "content": content} for content in contents]}
        return span("chat", span_id, started=started, call=data(request=msgspec.json.encode(body)))

    first, second, third = build_episode([root(), turn("c1", 1, "a"), turn("c2", 2, "a", "b"), turn("c3", 3, "x", "b")]).calls
    assert second.messages[0] is first.messages[0]
    assert [message["content"] for message in second.messages] == ["a", "b"]
    assert [message["content"] for message in third.messages] == ["x", "b"]


def test_the_arrays_of_a_call_are_the_clients_own_objects() -> None:
    """Ids are neither copied nor converted on their way."""
    prompt, ids = TokenIds([1]), TokenIds([2])
    call = build_call(span("chat", "c", started=1), data(prompt_token_ids=prompt, choices=[Choice(index=0, token_ids=ids, logprobs=None)]))
    assert call.prompt_token_ids is prompt
    assert call.choices[0].token_ids is ids


def reward_span(span_id: str, started: int, *rewards: Reward) -> Span:
    return span("reward", span_id, started=started, facts={A.REWARD_VALUES: list(rewards)})


def test_rewards_land_in_the_scope_that_they_name() -> None:
    """Totals are weight times value, summed in each scope alone."""
    episode = build_episode(
        [
            root(),
            span("agent", "a", started=1, trajectory=("a", "solver"), name="solver"),
            span("chat", "c", started=2, trajectory=("a", "solver"), call=data()),
            reward_span("r1", 3, Reward(name="whole", value=1.0, weight=0.5), Reward(name="style", value=0.5)),
            reward_span("r2", 4, Reward(name="part", value=0.25, target="a")),
            reward_span("r3", 5, Reward(name="step", value=9.0, target="c")),
            reward_span("r4", 6, Reward(name="lost", value=7.0, target="nowhere")),
        ]
    )
    (solver,) = episode.trajectories
    assert episode.reward == 1.0
    assert [reward.name for reward in episode.rewards] == ["whole", "style", "lost"]
    assert solver.reward == 0.25
    assert [(reward.name, reward.target) for reward in solver.rewards] == [("part", "a"), ("step", "c")]
    assert total(solver.rewards, "c") == 9.0


def test_of_two_rewards_of_one_name_in_one_scope_the_later_counts() -> None:
    """The earlier is kept, marked; the same name in another scope is another reward."""
    episode = build_episode(
        [
            root(),
            span("agent", "a", started=1, trajectory=("a", "solver"), name="solver"),
            reward_span("r1", 3, Reward(name="right", value=0.0)),
            reward_span("r2", 4, Reward(name="right", value=0.5, target="a")),
            reward_span("r3", 5, Reward(name="right", value=1.0)),
        ]
    )
    assert [(reward.value, reward.superseded) for reward in episode.rewards] == [(0.0, True), (1.0, False)]
    assert episode.reward == 1.0
    assert episode.trajectories[0].reward == 0.5


def test_no_reward_is_none_and_never_zero() -> None:
    """An episode that was given nothing has no reward; an agent inherits none."""
    episode = build_episode(
        [root(), span("agent", "a", started=1, trajectory=("a", "s"), name="s"), reward_span("r", 2, Reward(name="x", value=0.0))]
    )
    assert episode.reward == 0.0
    assert episode.trajectories[0].reward is None
    assert build_episode([root()]).reward is None


def test_rewards_that_come_after_the_end_give_a_new_record() -> None:
    """The old one is left as it was; a reward for a span that is not there is refused."""
    episode = build_episode([root(), span("chat", "c", started=2, call=data()), reward_span("r", 3, Reward(name="x", value=1.0))])
    changed = with_rewards(episode, [Reward(name="x", value=0.0), Reward(name="step", value=2.0, target="c")])
    assert (changed.reward, [reward.superseded for reward in changed.rewards]) == (0.0, [True, False])
    assert changed.trajectories[0].rewards == [Reward(name="step", value=2.0, target="c")]
    assert episode.reward == 1.0
    with pytest.raises(UnknownEpisodeError, match="episode 'e' has no trajectory or call with the span id 'zz'"):
        with_rewards(episode, [Reward(name="x", value=0.0, target="zz")])
