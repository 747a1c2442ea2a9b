"""Fixtures that the tests of the SDK share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rllm_trace import _guard
from rllm_trace.types import Episode, ModelCall


@pytest.fixture
def no_faults() -> Iterator[None]:
    """Fails the test if a fault of ours was swallowed while it ran."""
    before = _guard.counters.snapshot()["faults"]
    yield
    after = _guard.counters.snapshot()["faults"]
    assert {kind: n - before.get(kind, 0) for kind, n in after.items() if n != before.get(kind, 0)} == {}


class Recording:
    """Runs code inside a workflow and gives what was recorded."""

    def __init__(self) -> None:
        self.value: Any = None
        """What the code returned."""
        self.error: BaseException | None = None
        """What it raised."""

    def episode(self, app: Callable[[], Any], *, timeout: float = 5.0, **options: Any) -> Episode:
        """One run of ``app``, recorded with tokens; options as for ``rollout``."""
        from rllm_trace._decorators import workflow
        from rllm_trace.clients import ensure
        from rllm_trace.rollouts import rollout

        ensure()
        with rollout(**options) as handle:
            try:
                self.value = workflow(app)()
            except Exception as error:
                self.error = error
        (episode,) = handle.wait(timeout)
        return episode

    def calls(self, app: Callable[[], Any], **options: Any) -> list[ModelCall]:
        """The calls of one run of ``app``, in order of their start."""
        return list(self.episode(app, **options).calls)

    def call(self, app: Callable[[], Any], **options: Any) -> ModelCall:
        """The one call of one run of ``app``."""
        (call,) = self.calls(app, **options)
        return call


@pytest.fixture
def recording(no_faults: None) -> Recording:
    return Recording()


@pytest.fixture
def full_episode() -> Episode:
    """An episode in which every field of every record has a value that is not its default."""
    from rllm_trace.types import Choice, ErrorInfo, Logprobs, Reward, TokenIds, ToolCall, Trajectory, Usage

    error = ErrorInfo(type="openai.APIError", message="ümlaut", status_code=500)
    call = ModelCall(
        span_id="00000000000000c1",
        parent_id="00000000000000a1",
        operation="chat",
        model="policy",
        requested_model="gpt-4o-mini",
        endpoint="policy",
        server="127.0.0.1:8000",
        messages=[{"role": "user", "content": [{"type": "text", "text": "2+2?"}]}],
        tools=[{"type": "function", "function": {"name": "add", "parameters": {"$ref": "#/x"}}}],
        sampling={"temperature": 0.7, "stop": ["</code>"]},
        requested_sampling={"tool_choice": "required"},
        choices=[
            Choice(
                index=0,
                token_ids=TokenIds([52, 2]),
                logprobs=Logprobs([-0.25, float("-inf")]),
                text="4",
                tool_calls=[{"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}],
                reasoning="easy",
                refusal="no",
                finish_reason="stop",
                stop_reason=2,
            ),
            Choice(index=1, token_ids=TokenIds(), logprobs=None, finish_reason="length"),
        ],
        prompt_token_ids=TokenIds([1, 50, 10, 50]),
        usage=Usage(prompt_tokens=4, completion_tokens=2),
        response_id="chatcmpl-1",
        response_model="policy-1",
        attempts=2,
        error=error,
        exact=False,
        inexact_reason="test",
        complete=True,
        streamed=True,
        no_train=True,
        late=True,
        multimodal=True,
        trainable=False,
        policy_version_start=3,
        policy_version_end=4,
        version_spans=[(3, 0, 1), (4, 1, 2)],
        started=1_700_000_000_000_000_001,
        ended=1_700_000_000_000_000_009,
        time_to_first_token=7,
    )
    tool = ToolCall(
        span_id="00000000000000d1",
        parent_id="00000000000000a1",
        name="add",
        arguments={"a": (1, 2)},
        result=b"\x00\xff",
        error=error,
        started=1_700_000_000_000_000_002,
        ended=1_700_000_000_000_000_003,
    )
    of_solver = Reward(name="format", value=0.5, weight=2.0, target="00000000000000a1", span_id="00000000000000e1", superseded=True)
    solver = Trajectory(
        id="00000000000000a1",
        name="solver",
        parent_id="0000000000000001",
        calls=[call],
        tools=[tool],
        rewards=[of_solver],
        reward=1.0,
        started=1_700_000_000_000_000_001,
        ended=1_700_000_000_000_000_010,
    )
    return Episode(
        id="ep-1",
        trace_id="0123456789abcdef0123456789abcdef",
        span_id="0000000000000001",
        task_id="t7",
        workflow="solve",
        input={"question": "2+2?", "options": {3: "three"}},
        output=("4", {1, 2}, 2**70),
        error=error,
        termination="failed",
        trajectories=[solver],
        rewards=[Reward(name="exact", value=1.0)],
        reward=1.0,
        started=1_700_000_000_000_000_000,
        ended=1_700_000_000_000_000_011,
        session_id="s1",
        metadata={"index": 3, "tags": ("a",)},
        parent_episode_id="ep-0",
        open_calls=1,
    )
