"""Evaluation: fixed rows, failures count 0, before and after are paired."""

import threading

import openai

from rllm_trace.routing import Route
from rllm_trace.testing import ScriptedServer
from rllm_trainer.evaluation import Evaluation, Evaluator, rise_of, scores_of
from rllm_trainer.report import Report
from rllm_trainer.rollout.dataset import read_tasks
from rllm_trainer.rollout.record import RolloutLog, read_rollouts
from rllm_trainer.rollout.rewards import plan_rewards
from rllm_trainer.rollout.runner import Limits, Runner
from rllm_trainer.types import Rollout


def rollout(task_id, index, reward, fault=None):
    return Rollout(task_id=task_id, index=index, row={}, episode=None, reward=reward, rewards={}, fault=fault)


def test_failures_count_zero():
    """A failed rollout is worth 0 and stays in the denominator."""
    scores = scores_of(
        [rollout("a", 0, 1.0), rollout("a", 1, None, "infrastructure"), rollout("b", 0, 1.0), rollout("b", 1, 0.0, "policy")],
        seconds=1.0,
        seed=0,
    )
    assert (scores.tasks, scores.mean, scores.rollouts) == ({"a": 0.5, "b": 0.5}, 0.5, 4)
    assert scores.failures == {"infrastructure": 1, "policy": 1}


def test_a_rise_is_paired_by_task():
    """Before and after are compared task by task, sampled and greedy."""
    low = scores_of([rollout("a", 0, 0.0), rollout("b", 0, 0.5)], seconds=0, seed=0)
    high = scores_of([rollout("b", 0, 0.75), rollout("a", 0, 0.25)], seconds=0, seed=0)
    rise = rise_of(Evaluation(step=0, version=0, sampled=low, greedy=low), Evaluation(step=3, version=3, sampled=high, greedy=high), seed=0)
    assert (rise.sampled.mean, rise.sampled.low, rise.sampled.high) == (0.25, 0.25, 0.25)
    assert rise.greedy == rise.sampled
    assert rise_of(Evaluation(step=0, version=0, sampled=low), Evaluation(step=3, version=3, sampled=high), seed=0).greedy is None


def test_sampled_and_greedy_rollouts(tmp_path):
    """Sampled rollouts keep the app's sampling, greedy ones are sent temperature 0; both are on file, with the same seeds each time."""
    client = openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="own", max_retries=0)

    def app(q):
        return client.chat.completions.create(model="gpt", messages=[{"role": "user", "content": q}], temperature=0.7)

    tasks = read_tasks([{"q": "a"}, {"q": "b"}]).tasks
    with ScriptedServer() as server:
        route = Route(base_url=server.base_url, api_key=server.api_key, model="policy")
        runner = Runner(app, plan_rewards(lambda output: 1, app), Limits())
        log = RolloutLog(tmp_path)
        evaluator = Evaluator(tasks, runner, route, n=2, seed=5, log=log, report=Report(progress=False), stop=threading.Event())
        first = evaluator.run(step=0, version=0, greedy=True)
        second = evaluator.run(step=4, version=4, greedy=False)
        runner.close()
        log.close()
        sent = [exchange.body for exchange in server.calls()]
    assert (first.sampled.rollouts, first.greedy.rollouts, second.greedy) == (4, 2, None)
    assert sorted(body["temperature"] for body in sent) == [0, 0, 0.7, 0.7, 0.7, 0.7, 0.7, 0.7, 0.7, 0.7]
    seeds = [{body["seed"] for body in sent[:4]}, {body["seed"] for body in sent[6:]}]
    assert seeds[0] == seeds[1]
    assert len(seeds[0]) == 4
    on_file = read_rollouts(tmp_path, split="eval")
    assert {step: len(rollouts) for step, rollouts in on_file.items()} == {0: 4, 4: 4}
    assert read_rollouts(tmp_path, split="train") == {}


def test_own_endpoints_have_no_greedy_scores():
    """Where nothing is redirected, sampling cannot be overridden, so there is no greedy score."""
    tasks = read_tasks(["a"]).tasks
    runner = Runner(lambda q: q, plan_rewards(lambda output: output == "a", lambda q: q), Limits())
    evaluator = Evaluator(tasks, runner, None, n=1, seed=0, log=None, report=Report(progress=False), stop=threading.Event())
    evaluation = evaluator.run(step=0, version=0, greedy=True)
    runner.close()
    assert (evaluation.sampled.mean, evaluation.greedy) == (1.0, None)
