"""The runner runs any app, ends every rollout, and lets none hold the others."""

import asyncio
import contextvars
import threading
import time

import openai
import pytest

from rllm_trace import _decorators as rllm
from rllm_trace._rewards import reward as rllm_reward
from rllm_trace.routing import Route
from rllm_trace.testing import Reply, ReplyChoice, ScriptedServer
from rllm_trainer.exceptions import AppArgumentsError
from rllm_trainer.rollout.attempt import Conditions, Job
from rllm_trainer.rollout.rewards import plan_rewards
from rllm_trainer.rollout.runner import Limits, Listener, RunInterrupted, Runner

MESSAGES = [{"role": "user", "content": "hi"}]


class Heard(Listener):
    def __init__(self):
        self.rollouts, self.extras, self.retries, self.hangs = [], [], [], []

    def ended(self, rollout, extra):
        self.rollouts.append(rollout)
        self.extras += extra

    def retried(self, job, outcome):
        self.retries.append((job.index, outcome.verdict.reason))

    def hung(self, job, reason, stack):
        self.hangs.append((job.index, reason, stack))


@pytest.fixture
def server():
    with ScriptedServer() as server:
        yield server


@pytest.fixture
def own():
    """The app's own endpoint: nothing may arrive here."""
    with ScriptedServer() as server:
        yield server
        assert server.log == []


def client_of(server, **settings):
    return openai.OpenAI(base_url=server.base_url, api_key="own", max_retries=0, **settings)


def say(client):
    return client.chat.completions.create(model="gpt", messages=MESSAGES).choices[0].message.content


def jobs(count, row=None):
    return [Job(task_id="t", index=i, row={"n": i} if row is None else row, seed=i) for i in range(count)]


def run(app, work, *, reward=(), route=None, heard=None, stop=None, version=0, **limits):
    runner = Runner(app, plan_rewards(reward, app), Limits(**limits))
    try:
        return runner.run(work, Conditions(route=route, version=version, metadata={"step": 7}), listener=heard, stop=stop)
    finally:
        runner.close()


def route_to(server):
    return Route(base_url=server.base_url, api_key=server.api_key, model="policy")


def one(output):
    return 1.0


def test_an_app_may_change_its_row(server):
    """Each rollout and each reward has a row of its own: what one appends to its messages, no other sees; on record is the row."""
    row = {"messages": [{"role": "user", "content": "hi"}]}
    seen = []

    def app(messages):
        seen.append(len(messages))
        messages.append({"role": "assistant", "content": say(client_of(server))})

    def appends(messages):
        messages.append("scored")
        return float(len(messages))

    found = run(app, jobs(3, row), reward=appends, route=route_to(server))
    assert seen == [1, 1, 1]
    assert [rollout.reward for rollout in found] == [2.0, 2.0, 2.0]
    assert [rollout.row for rollout in found] == [{"messages": [{"role": "user", "content": "hi"}]}] * 3


def test_a_row_that_cannot_be_copied_is_given_as_it_is(server):
    """A lock in a row is the same lock in every rollout."""
    lock = threading.Lock()

    def app(lock):
        say(client_of(server))
        return lock

    (found,) = run(
        app, jobs(1, {"lock": lock}), reward=lambda output, row: float(output is lock and row["lock"] is lock), route=route_to(server)
    )
    assert found.reward == 1.0


def test_sync_apps_run_in_as_many_threads_as_asked():
    """Forty sync apps that all wait for each other end: they are there at the same time."""
    together = threading.Barrier(40)

    def app(n):
        together.wait(20)
        return n

    rollouts = run(app, jobs(40), reward=lambda output: output, concurrency=40)
    assert [r.reward for r in rollouts] == [float(i) for i in range(40)]


def test_no_more_run_than_asked():
    """With a concurrency of 3, never more than 3 apps run."""
    lock, running, most = threading.Lock(), [0], [0]

    def app(n):
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        time.sleep(0.01)
        with lock:
            running[0] -= 1

    run(app, jobs(12), reward=one, concurrency=3)
    assert most == [3]


def test_async_apps_share_one_loop():
    """Async apps wait for each other in one loop, which stays the same from batch to batch."""
    loops = set()

    async def app(n, arrived=[], everyone=[None]):  # noqa: B006 - shared on purpose
        loops.add(asyncio.get_running_loop())
        everyone[0] = everyone[0] or asyncio.Event()
        arrived.append(n)
        if len(arrived) >= 10:
            everyone[0].set()
        await everyone[0].wait()
        return n

    runner = Runner(app, plan_rewards(lambda output: output, app), Limits(concurrency=10))
    for _ in range(2):
        assert [r.reward for r in runner.run(jobs(10), Conditions(route=None))] == [float(i) for i in range(10)]
    runner.close()
    assert len(loops) == 1


def test_generators_are_drained():
    """What a generator or an async generator gave is the output, as a list."""

    def app(n):
        yield n
        yield n + 1

    async def stream(n):
        yield n
        yield n + 1

    for each in (app, stream):
        (rollout,) = run(each, jobs(1, {"n": 3}), reward=lambda output: sum(output))
        assert (rollout.reward, rollout.episode.output) == (7.0, [3, 4])


def test_calls_go_to_the_route_and_seeds_are_fixed(server, own):
    """Calls of the app's own client arrive at the policy, exact, with a seed that the rollout's seed fixes."""
    client = client_of(own)

    @rllm.workflow
    def app(n):
        return say(client)

    rollouts = run(app, jobs(2), reward=one, route=route_to(server), version=4)
    again = run(app, jobs(2), reward=one, route=route_to(server))
    calls = [r.episode.calls[0] for r in rollouts]
    assert [(c.endpoint, c.model, c.requested_model, c.trainable) for c in calls] == [("policy", "policy", "gpt", True)] * 2
    assert [c.sampling["seed"] for c in calls] == [r.episode.calls[0].sampling["seed"] for r in again]
    assert len({c.sampling["seed"] for c in calls}) == 2
    assert [(r.policy_version, r.episode.task_id, r.episode.metadata) for r in rollouts] == [
        (4, "t", {"step": 7, "index": 0, "attempt": 0}),
        (4, "t", {"step": 7, "index": 1, "attempt": 0}),
    ]


def test_rewards_are_in_the_episode():
    """Rewards given after the app are records of its episode, and its total."""

    def app(n):
        return n

    def right(output, n):
        return output == n

    (rollout,) = run(app, jobs(1), reward=[right, rllm_reward(name="style", weight=0.5)(lambda output: 3)])
    assert (rollout.reward, rollout.rewards) == (2.5, {"right": 1.0, "style": 3.0})
    assert [(r.name, r.value, r.weight) for r in rollout.episode.rewards] == [("right", 1.0, 1.0), ("style", 3.0, 0.5)]
    assert rollout.episode.reward == 2.5


def test_async_rewards_run_in_the_loop():
    """An async reward is awaited, after sync and async apps."""

    async def right(output):
        await asyncio.sleep(0)
        return output

    async def coroutine(n):
        return n

    for app in (lambda n: n, coroutine):
        assert run(app, jobs(1, {"n": 5}), reward=right)[0].reward == 5.0


def test_rewards_given_while_the_app_runs():
    """A reward called in the app scores it, and is not given again under its name."""
    calls = []

    @rllm_reward
    def right(output):
        calls.append(output)
        return output

    @rllm.workflow
    def app(n):
        right(0.5)
        return 9

    (rollout,) = run(app, jobs(1), reward=right)
    assert (rollout.reward, calls) == (0.5, [0.5])


@pytest.mark.parametrize(
    "bad, words",
    [
        (lambda output: None, "got None; return a finite number"),
        (lambda output: float("nan"), "got nan; return a finite number"),
        (lambda output: "1", "got '1' of type str; return a finite number"),
        (lambda output: 1 / 0, "raised ZeroDivisionError: division by zero"),
        (lambda solution: 1, "needs solution, and neither the reserved words"),
    ],
)
def test_a_bad_reward_is_a_record_of_its_task(bad, words):
    """What a reward function does wrong is the fault of that rollout, with the task's id; the others go on."""

    def app(n):
        return n

    def right(output, n):
        return bad(output=output) if n == 1 else 1.0

    def solution(output, n, solution=None):
        return 1.0

    if "needs" in words:
        (rollout,) = run(app, jobs(1), reward=bad)
    else:
        others, rollout = run(app, jobs(2), reward=right)
        assert others.reward == 1.0
    assert (rollout.fault, rollout.reward) == ("reward", None)
    assert words in rollout.reason
    assert rollout.reason.endswith("(task t)")


def test_a_reward_that_raises_inside_the_app():
    """A reward that raises in the app, which lets it through, is the reward's fault and not the policy's."""

    @rllm_reward
    def right(output):
        raise ValueError("no such column")

    @rllm.workflow
    def app(n):
        return right(n)

    (rollout,) = run(app, jobs(1), reward=[])
    assert rollout.fault == "reward"
    assert "the reward right failed" in rollout.reason
    assert "no such column" in rollout.reason


def test_no_reward_at_all():
    """An episode without any reward is named, not trained as zero."""

    def app(n):
        return n

    (rollout,) = run(app, jobs(1), reward=[])
    assert (rollout.fault, rollout.reward, rollout.reason) == ("reward", None, "no reward was given (task t)")


def test_failures_before_and_after_the_first_exact_call(server, own):
    """Before it a failure is the app's; after it the policy's, worth 0 or what a reward with ``error`` says."""
    client = client_of(own)

    def app(n):
        if n == 0:
            raise KeyError("config")
        text = say(client)
        raise ValueError(f"cannot parse {text}")

    def lenient(output, error):
        return 0.25 if error is not None and output is None else 1.0

    first, second = run(app, jobs(2), reward=one, route=route_to(server))
    assert (first.fault, first.reward) == ("app", None)
    assert (second.fault, second.reward, second.reason) == ("policy", 0.0, "the app raised ValueError: cannot parse ok")
    assert second.episode.termination == "failed"
    assert run(app, jobs(2), reward=lenient, route=route_to(server))[1].reward == 0.25


def test_infrastructure_faults_are_tried_again(own):
    """A 500 ends an attempt; the rollout gets another one, and the first is told."""
    client = client_of(own)

    def app(n):
        return say(client)

    heard = Heard()
    with ScriptedServer([Reply(status=500, error={"message": "boom"}), Reply()]) as server:
        (rollout,) = run(app, jobs(1), reward=one, route=route_to(server), heard=heard)
    assert (rollout.fault, rollout.reward, rollout.episode.metadata["attempt"]) == (None, 1.0, 1)
    assert [(index, reason.split(":")[0]) for index, reason in heard.retries] == [(0, "the app raised InternalServerError")]


def test_retries_end(own):
    """A server that always fails costs ``retries`` more attempts, then the rollout is lost to infrastructure."""
    client = client_of(own)

    def app(n):
        return say(client)

    with ScriptedServer([Reply(status=503, error={"message": "full"})]) as server:
        (rollout,) = run(app, jobs(1), reward=one, route=route_to(server), retries=2)
        assert len(server.calls()) == 3
    assert (rollout.fault, rollout.reward) == ("infrastructure", None)


def test_a_hung_sync_app_is_given_up(server, own):
    """At its deadline a rollout is given up with its stack; the others have ended, and its later calls reach nobody."""
    client = client_of(own)
    release, refused = threading.Event(), threading.Event()

    def wait_for_ever():
        release.wait(20)

    def app(n):
        say(client)
        if n == 1:
            wait_for_ever()
            try:
                say(client)
            except Exception:
                refused.set()
                raise
        return n

    heard = Heard()
    rollouts = run(app, jobs(3), reward=one, route=route_to(server), heard=heard, rollout_timeout=1.5)
    assert [r.fault for r in rollouts] == [None, "infrastructure", None]
    assert rollouts[1].reason == "it ran past rollout_timeout=1.5 s"
    assert (rollouts[1].episode.termination, len(rollouts[1].episode.calls)) == ("timeout", 1)
    ((index, _, stack),) = heard.hangs
    assert index == 1
    assert "wait_for_ever" in stack
    release.set()
    assert refused.wait(10)
    assert len(server.calls()) == 3


def test_a_hung_async_app_is_given_up():
    """An async app that waits for ever is cancelled at its deadline, and its stack told."""
    ended = threading.Event()

    async def wait_for_ever():
        await asyncio.Event().wait()

    async def app(n):
        try:
            if n == 0:
                await wait_for_ever()
        finally:
            ended.set()

    heard = Heard()
    rollouts = run(app, jobs(2), reward=one, heard=heard, rollout_timeout=1.0)
    assert [r.fault for r in rollouts] == ["infrastructure", None]
    assert "await wait_for_ever()" in heard.hangs[0][2]
    assert "await asyncio.Event().wait()" in heard.hangs[0][2]
    assert ended.is_set()


def test_an_async_app_that_blocks_the_loop():
    """A blocking call in an async app holds its loop; the stack names it, and the next batch gets another loop."""
    release = threading.Event()

    async def app(n):
        if n == 0:
            release.wait(20)
        return n

    heard = Heard()
    runner = Runner(app, plan_rewards(one, app), Limits(rollout_timeout=1.0))
    (blocked,) = runner.run(jobs(1), Conditions(route=None), listener=heard)
    assert blocked.fault == "infrastructure"
    assert "release.wait(20)" in heard.hangs[0][2]
    assert runner.run(jobs(1, {"n": 5}), Conditions(route=None))[0].reward == 1.0
    release.set()
    runner.close()


def test_a_quorum_gives_up_stragglers():
    """With a quorum, one straggler holds the batch no longer than its grace."""
    release = threading.Event()

    def app(n):
        if n == 3:
            release.wait(20)
        return n

    rollouts = run(app, jobs(4), reward=one, quorum=0.75, quorum_grace=0.3)
    release.set()
    assert [r.fault for r in rollouts] == [None, None, None, "infrastructure"]
    assert rollouts[3].reason == "its group had its quorum, and quorum_grace was over"


def test_a_batch_has_a_deadline():
    """At the batch's deadline what runs is given up and what waits is not started; all of it is told."""
    release = threading.Event()

    def app(n):
        release.wait(20)

    heard = Heard()
    rollouts = run(app, jobs(5), reward=one, heard=heard, concurrency=2, batch_timeout=0.5)
    release.set()
    assert [r.fault for r in rollouts] == ["infrastructure"] * 5
    assert [r.reason for r in rollouts[2:]] == ["it was not started: the batch ran past batch_timeout=0.5 s"] * 3
    assert len(heard.rollouts) == 5


def test_a_stop_gives_up_what_runs():
    """A stop ends the batch at once; what had ended was told."""
    release, stop = threading.Event(), threading.Event()

    def app(n):
        if n:
            stop.set()
            release.wait(20)
        return n

    heard = Heard()
    with pytest.raises(RunInterrupted):
        run(app, jobs(3), reward=one, heard=heard, stop=stop, concurrency=1)
    release.set()
    assert [r.index for r in heard.rollouts] == [0]


def test_rows_that_do_not_fit_end_the_run():
    """A row without the app's column is the caller's error, not a failed rollout."""

    def app(question):
        return question

    with pytest.raises(AppArgumentsError, match="needs the parameter 'question'"):
        run(app, jobs(1), reward=one)


def test_further_episodes_are_told():
    """An app that starts an episode of its own inside has one rollout, and the other episode is told."""

    @rllm.workflow(new_episode=True)
    def inner():
        return 1

    @rllm.workflow
    def app(n):
        return inner() + 1

    heard = Heard()
    (rollout,) = run(app, jobs(1), reward=one, heard=heard)
    assert (rollout.episode.workflow, rollout.episode.output) == ("app", 2)
    assert [e.workflow for e in heard.extras] == ["inner"]


def test_the_callers_context_is_seen():
    """Apps see the context variables of whoever made the runner, and cannot change them for the next one."""
    who = contextvars.ContextVar("who", default="nobody")
    who.set("caller")

    def app(n):
        seen = who.get()
        who.set("app")
        return seen

    assert [r.episode.output for r in run(app, jobs(2), reward=one, concurrency=1)] == ["caller", "caller"]


def test_streams_and_several_choices_are_recorded(server, own):
    """A streamed call and a call with several choices are exact records."""
    client = client_of(own)

    def app(n):
        for _ in client.chat.completions.create(model="gpt", messages=MESSAGES, stream=True):
            pass
        client.chat.completions.create(model="gpt", messages=MESSAGES, n=2)

    (rollout,) = run(app, jobs(1), reward=one, route=route_to(server))
    assert [(c.trainable, len(c.choices)) for c in rollout.episode.calls] == [(True, 1), (True, 2)]
    assert ReplyChoice().token_ids == tuple(rollout.episode.calls[0].choices[0].token_ids)


def test_a_task_that_exits_does_not_take_the_loop_along(server):
    """An async app whose inner task raises SystemExit fails by itself; the others, in the same loop, go on."""

    async def inner(n):
        await asyncio.sleep(0)
        if n == 1:
            raise SystemExit(3)

    async def app(n):
        await asyncio.gather(inner(n))
        await asyncio.sleep(0.05)
        return n

    rollouts = run(app, jobs(4), reward=one, rollout_timeout=20.0)
    assert [r.fault for r in rollouts] == [None, "app", None, None]
    assert rollouts[1].reason == "the app raised SystemExit: 3 before its first exact call"
