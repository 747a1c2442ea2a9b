"""``configure(processes=True)``: what processes and pools of the standard library record inside a workflow is part of its record."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

METHODS = ["fork", "spawn"]

PROCESS = """
def child(n):
    with rllm.agent("solver"):
        ask(n)

@rllm.workflow
def parallel(method):
    context = multiprocessing.get_context(method)
    processes = [context.Process(target=child, args=(n,)) for n in (11, 12)]
    for process in processes:
        process.start()
        assert "run" not in vars(process)
    ask(10)
    for process in processes:
        process.join(60)
    return [process.exitcode for process in processes]

if __name__ == "__main__":
    rllm.configure(processes=True)
    environment = dict(os.environ)
    with rllm.collect() as episodes:
        parallel(sys.argv[1])
    assert dict(os.environ) == environment
    show(episodes)
    print(json.dumps(sorted([t.name, len(t.calls)] for t in episodes[0].trajectories)))
    print(rllm.stats()["dropped"], rllm.stats()["faults"])
"""


@pytest.mark.parametrize("method", METHODS)
def test_a_process_started_in_a_workflow_adds_to_its_record(app: Callable[..., str], method: str) -> None:
    """Every id and logprob of both children is in the one episode, under the agents that made the calls; nothing is lost."""
    shown, names, counted = app(PROCESS, method).splitlines()
    assert json.loads(shown) == [[[0, 0], [10, 11, 12], "completed"]]
    assert json.loads(names) == [["parallel", 1], ["solver", 1], ["solver", 1]]
    assert counted == "{} {}"


POOLS = """
def double(n):
    return 2 * ask(n)

@rllm.workflow
def with_pool(pool, first):
    return [
        pool.map(double, [first, first + 1]),
        pool.apply(double, (first + 2,)),
        list(pool.imap_unordered(double, [first + 3])),
        pool.starmap_async(double, [(first + 4,)]).get(60),
    ]

@rllm.workflow
def with_executor(pool, first):
    return [pool.submit(double, first).result(60), *pool.map(double, [first + 1, first + 2])]

if __name__ == "__main__":
    from concurrent.futures import ProcessPoolExecutor
    rllm.configure(processes=True)
    context = multiprocessing.get_context(sys.argv[1])
    with rllm.collect() as episodes, context.Pool(2) as pool, ProcessPoolExecutor(2, mp_context=context) as executor:
        with_pool(pool, 10)
        with_executor(executor, 20)
        with_pool(pool, 30)
        assert pool.map(double, [40]) + [executor.submit(double, 41).result(60)] == [80, 82]
    show(episodes)
    print(rllm.stats()["dropped"], rllm.stats()["faults"], rllm.stats()["late"])
"""


@pytest.mark.parametrize("method", METHODS)
def test_a_pool_runs_each_task_in_the_workflow_that_gave_it(app: Callable[..., str], method: str) -> None:
    """One pool serves two workflows and code outside any; each call is in the record of its own workflow before the result is there."""
    shown, counted = app(POOLS, method).splitlines()
    assert json.loads(shown) == [
        [[[20, 22], 24, [26], [28]], [10, 11, 12, 13, 14], "completed"],
        [[40, 42, 44], [20, 21, 22], "completed"],
        [[[60, 62], 64, [66], [68]], [30, 31, 32, 33, 34], "completed"],
    ]
    assert counted == "{} {} {}"


INSIDE = """
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.pool import ThreadPool

@rllm.workflow
def own_pools(method):
    with multiprocessing.get_context(method).Pool(1) as pool, ThreadPool(1) as threads:
        return pool.map(ask, [10, 11]) + threads.map(ask, [12])

def grandchild():
    ask(21)

def child(method):
    ask(20)
    process = multiprocessing.get_context(method).Process(target=grandchild)
    process.start()
    process.join(60)

@rllm.workflow
def deep(method):
    process = multiprocessing.get_context(method).Process(target=child, args=(method,))
    process.start()
    process.join(60)

@rllm.workflow
def inner(n):
    return ask(n)

@rllm.workflow
def outer(method):
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context(method)) as pool:
        return pool.submit(inner, 30).result(60)

if __name__ == "__main__":
    rllm.configure(processes=True)
    with rllm.collect() as episodes:
        own_pools(sys.argv[1]), deep(sys.argv[1]), outer(sys.argv[1])
    show(episodes)
    print(rllm.stats()["dropped"], rllm.stats()["faults"], rllm.stats()["late"])
"""


@pytest.mark.parametrize("method", METHODS)
def test_pools_made_inside_grandchildren_and_workflows_in_a_child(app: Callable[..., str], method: str) -> None:
    """A pool that a workflow makes for itself, a child's own child, and a workflow that a child enters all add to the one record."""
    shown, counted = app(INSIDE, method).splitlines()
    assert json.loads(shown) == [[[10, 11, 12], [10, 11, 12], "completed"], [None, [20, 21], "completed"], [30, [30], "completed"]]
    assert counted == "{} {} {}"


OFF = """
def child(n):
    ask(n)

@rllm.workflow
def starts():
    process = multiprocessing.get_context("fork").Process(target=child, args=(11,))
    process.start()
    process.join(60)
    return process.exitcode

if __name__ == "__main__":
    from multiprocessing.pool import Pool
    from multiprocessing.process import BaseProcess
    from concurrent.futures import ProcessPoolExecutor
    before = [BaseProcess.start, ProcessPoolExecutor.submit, Pool.apply_async, Pool._map_async, Pool.imap, Pool.imap_unordered]
    with rllm.collect() as episodes:
        starts()
    rllm.configure(processes=True)
    assert BaseProcess.start is not before[0]
    rllm.configure()
    assert before == [BaseProcess.start, ProcessPoolExecutor.submit, Pool.apply_async, Pool._map_async, Pool.imap, Pool.imap_unordered]
    assert not [t.name for t in threading.enumerate() if "otlp" in t.name or "receiver" in t.name]
    show(episodes)
"""


def test_without_the_option_processes_are_as_they_were(app: Callable[..., str]) -> None:
    """Nothing is wrapped before it is asked for, all is restored after, and no receiver is left over."""
    assert json.loads(app(OFF)) == [[0, [], "completed"]]


COLLECTED = """
from concurrent.futures import ProcessPoolExecutor

@rllm.reward
def right(n):
    return n / 100

@rllm.workflow(metadata={"where": "child"})
def solve(n):
    with rllm.agent("solver"):
        ask(n)
    right(n)
    return n

def deeper(method, n):
    with multiprocessing.get_context(method).Pool(1) as pool:
        return pool.map(solve, [n])

@rllm.workflow
def fails(n):
    ask(n)
    raise ValueError("boom")

if __name__ == "__main__":
    rllm.configure(processes=True)
    context = multiprocessing.get_context(sys.argv[1])
    with ProcessPoolExecutor(1, mp_context=context) as executor:
        assert executor.submit(solve, 9).result(200) == 9
        with rllm.collect() as episodes:
            assert list(executor.map(solve, range(10, 14))) == [10, 11, 12, 13]
            executor.submit(fails, 14).exception(200)
            executor.submit(deeper, sys.argv[1], 15).result(200)
            process = context.Process(target=solve, args=(16,))
            process.start()
            process.join(200)
        assert executor.submit(solve, 17).result(200) == 17
    rllm.add_reward(1.0, name="human", episode_id=episodes[0].id)
    show(sorted(episodes, key=lambda e: e.started))
    print(json.dumps(sorted((str(e.output), e.reward, e.metadata) for e in episodes if e.id != episodes[0].id)))
    print(episodes[0].rewards, len({e.id for e in episodes}), rllm.stats()["recorded"]["episode"])
    print(rllm.stats()["dropped"], rllm.stats()["faults"], rllm.stats()["late"])
"""


@pytest.mark.parametrize("method", METHODS)
def test_collect_has_the_episodes_that_processes_begin_outside_any_workflow(app: Callable[..., str], method: str) -> None:
    """Those that a pool is given, that a process starts with, and that a child's own pool is given: each is there whole, once."""
    shown, rewards, late_reward, counted = app(COLLECTED, method).splitlines()
    found = sorted(json.loads(shown), key=lambda episode: episode[1])
    assert found == [[None if n == 14 else n, [n], "failed" if n == 14 else "completed"] for n in range(10, 17)]
    assert all(metadata == {"where": "child"} for output, _, metadata in json.loads(rewards) if output != "None")
    assert all(reward == int(output) / 100 for output, reward, _ in json.loads(rewards) if output != "None")
    assert "human" in late_reward
    assert late_reward.endswith("7 7")
    assert counted == "{} {} {}"


SITES = """
from rllm_trace.rollouts import rollout
from rllm_trace.routing import CallSites, Route

def child(n):
    with rllm.no_train:
        ask(n)
    ask(n + 1)

@rllm.workflow
def app():
    process = multiprocessing.get_context("fork").Process(target=child, args=(11,))
    process.start()
    ask(10)
    process.join(200)

if __name__ == "__main__":
    rllm.configure(processes=True)
    sites = CallSites()
    route = Route(base_url=os.environ["APP_MODEL"], api_key="scripted", model="policy", sampling={"temperature": 0.5}, sites=sites)
    with rollout(route=route) as handle:
        app()
    (episode,) = handle.wait(60)
    print(json.dumps([[s.model, s.endpoint, s.trained, s.calls, dict(s.values["temperature"])] for s in sites.seen()]))
    print(json.dumps(sorted([c.model, c.endpoint] for c in episode.calls)))
"""


def test_call_sites_of_a_rollout_are_counted_wherever_its_calls_are_made(app: Callable[..., str]) -> None:
    """A child's calls are among those that the route of its rollout has seen, as sent."""
    sites, calls = app(SITES).splitlines()
    assert json.loads(sites) == [["m", "policy", True, 2, {"0.5": 2}], ["m", "own", False, 1, {"null": 1}]]
    assert json.loads(calls) == [["m", "own"], ["policy", "policy"], ["policy", "policy"]]


CONCURRENT = """
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

@rllm.workflow
def app(pool, n):
    with rllm.agent("solver"):
        first = pool.submit(ask, n)
    with rllm.agent("solver"):
        second = pool.submit(ask, n + 200)
    return [first.result(200), second.result(200)]

if __name__ == "__main__":
    rllm.configure(processes=True)
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork")) as pool:
        list(pool.map(abs, range(2)))  # the workers are forked while there is one thread
        with rllm.collect() as episodes, ThreadPoolExecutor(64) as threads:
            list(threads.map(lambda n: app(pool, n), range(100, 164)))
    show(sorted(episodes, key=lambda e: e.output))
    print(all(len(t.calls) == 1 for e in episodes for t in e.trajectories))
    print(rllm.stats()["dropped"], rllm.stats()["faults"], rllm.stats()["late"])
"""


def test_64_concurrent_workflows_through_one_pool(app: Callable[..., str]) -> None:
    """Two agents of one name in each, their calls made by the same two workers: every call is in its own record, under its own agent."""
    shown, apart, counted = app(CONCURRENT).splitlines()
    assert json.loads(shown) == [[[n, n + 200], [n, n + 200], "completed"] for n in range(100, 164)]
    assert (apart, counted) == ("True", "{} {} {}")
