"""How processes end: what can be kept is kept, what cannot is counted where the record is made."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

ENDINGS = """
import signal

def raises(n):
    ask(n)
    raise ValueError("boom")

def exits(n):
    ask(n)
    sys.exit(3)

def terminated_politely(n):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    ask(n)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)

def raises_at_exit(n):
    import atexit
    from multiprocessing import util
    util.Finalize(None, lambda: 1 / 0, exitpriority=100)
    ask(n)

def gone(n):
    ask(n)
    os._exit(0)

def terminated(n):
    ask(n)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)

def broken_pool(n):
    from concurrent.futures import ProcessPoolExecutor
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        return repr(pool.submit(gone, n).exception(200))[:17]

@rllm.workflow
def ends(how, n):
    if how is broken_pool:
        return broken_pool(n)
    process = multiprocessing.get_context("fork").Process(target=how, args=(n,))
    process.start()
    process.join(200)
    return process.exitcode

if __name__ == "__main__":
    rllm.configure(processes=True)
    with rllm.collect() as episodes:
        for n, how in enumerate(map(globals().get, sys.argv[1:])):
            ends(how, 10 + n)
    show(episodes)
    print(json.dumps([e.metadata for e in episodes]))
    print(json.dumps(rllm.stats()["dropped"]))
    print(json.dumps(rllm.stats()["faults"]))
"""


def test_what_can_be_kept_is_kept(app: Callable[..., str]) -> None:
    """An exception, ``sys.exit``, a SIGTERM that the app handles, a finalizer that raises: the call is in the record, nothing is lost."""
    shown, metadata, dropped, faults = app(ENDINGS, "raises", "exits", "terminated_politely", "raises_at_exit").splitlines()
    assert json.loads(shown) == [[1, [10], "completed"], [3, [11], "completed"], [0, [12], "completed"], [0, [13], "completed"]]
    assert (json.loads(metadata), json.loads(dropped), json.loads(faults)) == ([{}] * 4, {}, {})


def test_what_cannot_be_kept_is_counted(app: Callable[..., str]) -> None:
    """``os._exit``, a SIGTERM that nobody handles, and a worker that takes its pool down: each counts, and its record says so."""
    shown, metadata, dropped, faults = app(ENDINGS, "gone", "terminated", "broken_pool").splitlines()
    assert [episode[0] for episode in json.loads(shown)] == [0, -15, "BrokenProcessPool"]
    assert all(call in (10, 11, 12) for episode in json.loads(shown) for call in episode[1])
    assert json.loads(metadata) == [{"rllm.missing": {"processes": 1}}] * 3
    assert (json.loads(dropped), json.loads(faults)) == ({"process that ended without a word": 3}, {})


POOLS = """
import signal
context = multiprocessing.get_context(sys.argv[1])

def killed(n):
    ask(n)
    os.kill(os.getpid(), signal.SIGKILL)

def stuck(path):
    with open(path, "w"):  # of a pipe that its reader waits at
        signal.pause()

@rllm.workflow
def loses(n):
    with context.Pool(1) as pool:
        worker = pool._pool[0]
        result = pool.apply_async(killed, (n,))
        worker.join(200)
        return result.ready()

@rllm.workflow
def breaks_off(path):
    with context.Pool(1) as pool:
        pool.map_async(stuck, [path])
        with open(path):
            pass

@rllm.workflow
def goes_well(n):
    with context.Pool(2, maxtasksperchild=1) as pool:
        return [*pool.map(ask, [n, n + 1]), *pool.imap(ask, [n + 2]), *pool.imap_unordered(ask, [n + 3])]

@rllm.workflow
def below(n):
    process = context.Process(target=loses, args=(n,))
    process.start()
    process.join(200)
    return process.exitcode

if __name__ == "__main__":
    rllm.configure(processes=True)
    os.mkfifo(sys.argv[2])
    found = []
    with rllm.collect() as episodes:
        for run, given in [(goes_well, 10), (loses, 20), (breaks_off, sys.argv[2]), (below, 30)]:
            run(given)
            found.append(rllm.stats()["dropped"].get("process that ended without a word", 0))
    print(json.dumps(found), episodes[0].output, len(episodes[0].calls), rllm.stats()["faults"])
"""


@pytest.mark.parametrize("method", ["fork"])
def test_workers_of_a_pool_that_die_at_their_work_are_counted(app: Callable[..., str], method: str, tmp_path: Path) -> None:
    """Killed, ended with their pool while they work, killed in a pool of a child: one each. Workers that owe nothing are none."""
    assert app(POOLS, method, str(tmp_path / "pipe")) == "[0, 1, 2, 3] [10, 11, 12, 13] 4 {}\n"


GRANDCHILDREN = """
def dies(n):
    ask(n)
    os._exit(0)

def child(n):
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=how, args=(n + m,)) for m, how in enumerate([dies, ask, dies])]
    for process in processes:
        process.start()
    for process in processes:
        process.join(200)

@rllm.workflow
def app():
    process = multiprocessing.get_context("fork").Process(target=child, args=(10,))
    process.start()
    process.join(200)
    return process.exitcode

if __name__ == "__main__":
    rllm.configure(processes=True)
    with rllm.collect() as episodes:
        app()
    print(11 in [int(call.messages[0]["content"]) for call in episodes[0].calls], json.dumps(rllm.stats()["dropped"]))
"""


def test_a_childs_children_are_counted_too(app: Callable[..., str]) -> None:
    """Two of three that a child started die without a word: the process that keeps the record knows of both."""
    assert app(GRANDCHILDREN) == 'True {"process that ended without a word": 2}\n'


FORK = """
@rllm.workflow
def forks(how):
    ask(10)
    pid = os.fork()
    if pid == 0:
        with rllm.agent("child"):
            ask(11)
        if how == "flush":
            assert rllm.flush(200)
        os._exit(0)
    return os.waitpid(pid, 0)[1]

if __name__ == "__main__":
    rllm.configure(processes=True)
    with rllm.collect() as episodes:
        forks("flush")
    show(episodes)
    from rllm_trace import _home
    print(json.dumps([rllm.stats()["dropped"], rllm.stats()["faults"], rllm.stats()["late"]]))
"""


def test_a_fork_inside_a_workflow_records_into_it(app: Callable[..., str]) -> None:
    """A child of plain ``os.fork`` sends its spans to its parent; leaving by ``os._exit`` it flushes first."""
    shown, counted = app(FORK).splitlines()
    assert json.loads(shown) == [[0, [10, 11], "completed"]]
    assert json.loads(counted) == [{}, {}, {}]


PRELOAD = """
import signal
from rllm_trace.exporters import JSONLExporter, read_episodes

@rllm.workflow
def serve(n):
    return ask(n)

if __name__ == "__main__":
    path = sys.argv[1]
    rllm.configure(exporters=[JSONLExporter(path)])
    serve(10)
    workers = []
    for n in (20, 30):
        pid = os.fork()
        if pid == 0:
            serve(n), serve(n + 1)
            assert rllm.flush(200)
            os.kill(os.getpid(), signal.SIGSTOP)
            serve(n + 2)
            sys.exit(0)
        workers.append(pid)
    for pid in workers:
        assert os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1])
    frozen = sorted(e.output for e in read_episodes(path))
    for pid in workers:
        os.kill(pid, signal.SIGCONT)
        assert os.waitpid(pid, 0)[1] == 0
    rllm.flush()
    print(json.dumps([frozen, sorted(e.output for e in read_episodes(path))]))
"""


def test_workers_forked_after_the_configuration_and_frozen(app: Callable[..., str], tmp_path: object) -> None:
    """As a server that preloads its app: each worker delivers what it records. After ``flush`` a freeze loses nothing."""
    assert json.loads(app(PRELOAD, f"{tmp_path}/episodes.jsonl")) == [[10, 20, 21, 30, 31], [10, 20, 21, 22, 30, 31, 32]]


NOTEBOOK = """
import asyncio
from concurrent.futures import ProcessPoolExecutor

@rllm.workflow
async def cell(pool, n):
    return await asyncio.get_running_loop().run_in_executor(pool, ask, n)

async def notebook():
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context(sys.argv[1])) as pool:
        async with rllm.collect() as episodes:
            await asyncio.gather(*(cell(pool, n) for n in range(10, 14)))
    show(sorted(episodes, key=lambda e: e.output))

if __name__ == "__main__":
    rllm.configure(processes=True)
    asyncio.run(notebook())
"""


@pytest.mark.parametrize("method", ["fork"])
def test_a_running_loop_as_in_a_notebook(app: Callable[..., str], method: str) -> None:
    """Cells run in a loop that is never left; ``run_in_executor`` with processes takes each cell's workflow along."""
    assert json.loads(app(NOTEBOOK, method)) == [[n, [n], "completed"] for n in (10, 11, 12, 13)]
