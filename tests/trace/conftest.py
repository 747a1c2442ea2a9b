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
            except Exception as error:  # noqa: BLE001 - an app may raise anything
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
        operation="text_completion",
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
                version_spans=[(3, 0, 2)],
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


@pytest.fixture
def spans() -> dict[str, Any]:
    """The finished spans of one small episode by kind: a workflow with an agent, its call and tool, and a reward."""
    from rllm_trace import attributes as A
    from rllm_trace._calldata import CallData
    from rllm_trace._spans import Span
    from rllm_trace.types import Choice, ErrorInfo, Logprobs, Reward, TokenIds, Usage

    common: dict[str, Any] = {"trace_id": "0123456789abcdef0123456789abcdef", "episode_id": "ep-1"}
    solver: dict[str, Any] = {"trajectory_id": "00000000000000a1", "trajectory_name": "solver", **common}
    root: dict[str, Any] = {"trajectory_id": "0000000000000001", "trajectory_name": "solve", **common}
    call = CallData(
        operation="chat",
        model="policy",
        requested_model="gpt-4o-mini",
        server="127.0.0.1:8000",
        request=b'{"model":"policy","messages":[{"role":"user","content":"What is 2+2?"}],"temperature":1.0}',
        choices=[Choice(index=0, token_ids=TokenIds([52, 2]), logprobs=Logprobs([-0.25, -0.5]), text="4", finish_reason="stop")],
        prompt_token_ids=TokenIds([1, 50, 10, 50]),
        usage=Usage(prompt_tokens=4, completion_tokens=2),
        exact=True,
        complete=True,
    )
    second = 1_700_000_000_000_000_000
    return {
        "workflow": Span(
            kind="workflow",
            name="solve",
            span_id="0000000000000001",
            parent_id=None,
            started=second,
            ended=second + 9_000_000,
            links=(("fedcba9876543210fedcba9876543210", "00000000000000ff"),),
            facts={
                A.TASK_ID: "t7",
                A.SESSION_ID: "s1",
                A.EPISODE_INPUT: {"question": "What is 2+2?", "n": (1,)},
                A.EPISODE_OUTPUT: "4",
                A.EPISODE_METADATA: {"index": 3},
                A.TERMINATION: "completed",
                A.REWARD_VALUE: 1.0,
            },
            **root,
        ),
        "agent": Span(
            kind="agent",
            name="solver",
            span_id="00000000000000a1",
            parent_id="0000000000000001",
            started=second + 1_000_000,
            ended=second + 8_000_000,
            **solver,
        ),
        "chat": Span(
            kind="chat",
            name="gpt-4o-mini",
            span_id="00000000000000c1",
            parent_id="00000000000000a1",
            started=second + 2_000_000,
            ended=second + 4_000_000,
            call=call,
            number=3,
            no_train=True,
            facts={A.TASK_ID: "t7", A.SESSION_ID: "s1"},
            **solver,
        ),
        "tool": Span(
            kind="tool",
            name="add",
            span_id="00000000000000d1",
            parent_id="00000000000000a1",
            started=second + 5_000_000,
            ended=second + 6_000_000,
            error=ErrorInfo(type="ValueError", message="no number in What is 2+2?"),
            facts={A.TOOL_CALL_ARGUMENTS: {"a": 2}, A.TOOL_CALL_RESULT: float("nan")},
            **solver,
        ),
        "reward": Span(
            kind="reward",
            name="exact",
            span_id="00000000000000e1",
            parent_id="0000000000000001",
            started=second + 7_000_000,
            ended=second + 7_500_000,
            in_reward=True,
            facts={
                A.REWARD_VALUES: [Reward(name="exact", value=1.0, weight=0.5, span_id="00000000000000e1")],
                A.REWARD_NAME: "exact",
                A.REWARD_VALUE: 1.0,
                A.REWARD_WEIGHT: 0.5,
            },
            **root,
        ),
    }


@pytest.fixture
def forked() -> Callable[..., None]:
    """Runs a function in several forked processes at once, one for each tuple of arguments, and waits until all have ended well."""
    import multiprocessing
    import warnings

    def run(function: Callable[..., None], *arguments: tuple[Any, ...]) -> None:
        context = multiprocessing.get_context("fork")
        processes = [context.Process(target=function, args=given) for given in arguments]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # forking beside threads is what is tested
            for process in processes:
                process.start()
        for process in processes:
            process.join(60)
        assert [process.exitcode for process in processes] == [0] * len(processes)

    return run
