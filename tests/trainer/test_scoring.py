"""Rewards that are called after the app: what they call is recorded under their span, goes to its own endpoint, and is never trained."""

import contextlib

import openai
import pytest

import rllm_trace as rllm
from rllm_trace._decorators import agent
from rllm_trace.exporters import MemoryExporter
from rllm_trace.routing import Route
from rllm_trace.testing import ScriptedServer
from rllm_trainer.rollout.attempt import Conditions, Job
from rllm_trainer.rollout.rewards import plan_rewards
from rllm_trainer.rollout.runner import Limits, Runner
from rllm_trainer.samples import build_samples

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
def policy():
    with ScriptedServer() as server:
        yield server


@pytest.fixture
def judge():
    with ScriptedServer(api_key="judge's own") as server:
        yield server


def client_of(server, key="own"):
    return openai.OpenAI(base_url=server.base_url, api_key=key, max_retries=0)


def say(client):
    return client.chat.completions.create(model="gpt", messages=MESSAGES).choices[0].message.content


def one_rollout(app, reward, policy):
    runner = Runner(app, plan_rewards(reward, app), Limits())
    route = Route(base_url=policy.base_url, api_key=policy.api_key, model="policy")
    try:
        (rollout,) = runner.run([Job(task_id="t", index=0, row={"n": 3}, seed=0)], Conditions(route=route))
    finally:
        runner.close()
    return rollout


def calls_by_kind(episode):
    return [(call.endpoint, call.no_train, call.trainable) for call in episode.calls]


def test_a_judge_called_after_the_app_is_recorded_and_not_trained(policy, judge):
    """Its call goes to its own endpoint, is in the episode under the reward's span, and no token of it is meant for training."""
    ours, theirs = client_of(policy), client_of(judge, "judge's own")

    def app(n):
        return say(ours)

    def judged(output):
        return len(say(theirs)) > 0

    rollout = one_rollout(app, judged, policy)
    assert (len(policy.calls()), len(judge.calls())) == (1, 1)
    assert calls_by_kind(rollout.episode) == [("policy", False, True), ("own", True, False)]
    (reward,) = rollout.episode.rewards
    assert (reward.name, reward.value) == ("judged", 1.0)
    assert rollout.episode.calls[1].parent_id == reward.span_id
    assert rollout.reward == 1.0
    samples = build_samples(rollout.episode)
    assert samples.counters.share_trained == 1
    assert [aside.reason for aside in samples.set_aside] == ["no_train"]


def test_an_async_judge_after_an_agent(policy, judge):
    """The same for an async reward; calls of the agent's trajectory stay where they are, the judge's are in the default one."""
    ours = client_of(policy)

    async def app(n):
        with agent("solver"):
            return say(ours)

    async def judged(output):
        async with openai.AsyncOpenAI(base_url=judge.base_url, api_key="judge's own", max_retries=0) as theirs:
            await theirs.chat.completions.create(model="gpt", messages=MESSAGES)
        return 0.5

    rollout = one_rollout(app, judged, policy)
    assert [(t.name.rpartition(".")[2], len(t.calls)) for t in rollout.episode.trajectories] == [("solver", 1), ("app", 1)]
    assert (rollout.reward, len(judge.calls())) == (0.5, 1)


def test_a_judge_that_fails_keeps_its_call(policy, judge):
    """A reward that raises is the reward's fault, told by its name."""
    ours, stranger = client_of(policy), client_of(judge, "not the judge's key")

    def judged(output):
        say(stranger)

    rollout = one_rollout(lambda n: say(ours), judged, policy)
    assert (rollout.fault, rollout.reward) == ("reward", None)
    assert rollout.reason.startswith("the reward judged raised AuthenticationError: ")


def test_the_span_is_exported_into_the_trace_of_the_episode(policy, judge):
    """Whoever exports sees the reward's span and its call in the trace of the app."""
    ours, theirs = client_of(policy), client_of(judge, "judge's own")
    seen = MemoryExporter()
    rllm.configure(exporters=[seen])
    with contextlib.ExitStack() as undo:
        undo.callback(rllm.shutdown)
        rollout = one_rollout(lambda n: say(ours), lambda output: len(say(theirs)), policy)
        assert rllm.flush(10)
    spans = {span.name: span for span in seen.spans}
    (scored,) = [span for name, span in spans.items() if name.startswith("rllm.reward")]
    judging = [span for span in seen.spans if span.name == "chat gpt"]
    assert {f"{span.context.trace_id:032x}" for span in [scored, *judging]} == {rollout.episode.trace_id}
    assert scored.context.span_id in {span.parent.span_id for span in judging}


def test_a_reward_inside_a_reward_gives_nothing(policy, recwarn):
    """Only what the outer reward returns scores the episode; that the inner one was called is said."""
    ours = client_of(policy)

    @rllm.reward
    def inner(output):
        return 5.0

    def outer(output):
        return inner(output) / 10

    rollout = one_rollout(lambda n: say(ours), outer, policy)
    assert (rollout.reward, rollout.rewards) == (0.5, {"outer": 0.5})
    assert any("'outer' called 'inner', which is a reward too" in str(warning.message) for warning in recwarn)
