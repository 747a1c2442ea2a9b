"""A policy's server that is overloaded, fails, answers nonsense, or dies: the rollout is tried again, or left out with the cause."""

import itertools

import openai
import pytest

from rllm_trace.routing import Route
from rllm_trace.testing import Reply, ScriptedServer
from rllm_trainer.rollout.attempt import Conditions, Job
from rllm_trainer.rollout.rewards import plan_rewards
from rllm_trainer.rollout.runner import Limits, Runner

WHOLE = {
    "429": (Reply(status=429, error={"message": "slow down"}), "the app raised RateLimitError: Error code: 429"),
    "500": (Reply(status=500, error={"message": "busy"}), "the app raised InternalServerError: Error code: 500"),
    "no JSON": (Reply(raw=b"<html>oops</html>"), "after an answer of the policy's server that is none: response unreadable"),
    "no choices": (Reply(raw=b"{}"), "after an answer of the policy's server that is none: no choices"),
    "no answer": (Reply(disconnect_after=0), "the app raised APIConnectionError: Connection error."),
}
STREAMED = {
    "429": WHOLE["429"],
    "500": WHOLE["500"],
    "no JSON": (WHOLE["no JSON"][0], "without the reply of a call that failed: the stream ended before its last event"),
    "no choices": (WHOLE["no choices"][0], "without the reply of a call that failed: the stream ended before its last event"),
    "no answer": WHOLE["no answer"],
    "cut off": (Reply(disconnect_after=1), "the app raised RemoteProtocolError: peer closed connection"),
}
CASES = [pytest.param(False, *case, id=name) for name, case in WHOLE.items()]
CASES += [pytest.param(True, *case, id=f"{name}, streamed") for name, case in STREAMED.items()]


def one_rollout(bad, *, stream, times):
    """One rollout at a server that answers so ``times`` times, and then well; with the number of its requests."""
    number = itertools.count()
    with ScriptedServer(lambda _: bad if next(number) < times else Reply()) as server:
        client = openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="own", max_retries=0)

        def app(n):
            answer = client.chat.completions.create(model="gpt", messages=[{"role": "user", "content": "hi"}], stream=stream)
            if not stream:
                return answer.choices[0].message.content
            return "".join(chunk.choices[0].delta.content or "" for chunk in answer if chunk.choices)

        runner = Runner(app, plan_rewards(lambda output: float(output == "ok"), app), Limits())
        route = Route(base_url=server.base_url, api_key=server.api_key, model="policy")
        try:
            (rollout,) = runner.run([Job(task_id="t", index=0, row={"n": 3}, seed=0)], Conditions(route=route))
        finally:
            runner.close()
            client.close()
        return rollout, len(server.log)


@pytest.mark.parametrize("stream, bad, reason", CASES)
def test_a_bad_answer_costs_an_attempt(stream, bad, reason):
    """The next attempt is the rollout."""
    rollout, requests = one_rollout(bad, stream=stream, times=1)
    assert (rollout.fault, rollout.reward, requests) == (None, 1.0, 2)
    assert [(call.exact, call.trainable) for call in rollout.episode.calls] == [(True, True)]


@pytest.mark.parametrize("stream, bad, reason", CASES)
def test_a_server_that_stays_bad_is_no_fault_of_the_policys(stream, bad, reason):
    """The rollout leaves the gradient, and the cause is told."""
    rollout, requests = one_rollout(bad, stream=stream, times=99)
    assert (rollout.fault, rollout.reward, requests) == ("infrastructure", None, 2)
    assert reason in rollout.reason
