"""Rollouts ahead of the updates: nothing older than the bound, nothing lost, nothing twice."""

import random
import threading
import time

import pytest

from rllm_trace.routing import Route
from rllm_trainer.exceptions import AppArgumentsError
from rllm_trainer.report import Report
from rllm_trainer.rollout.ahead import AheadSource
from rllm_trainer.rollout.dataset import FixedTasks, make_task
from rllm_trainer.rollout.record import RolloutLog
from rllm_trainer.rollout.rewards import plan_rewards
from rllm_trainer.rollout.runner import Limits, RunInterrupted, Runner
from rllm_trainer.state import Cursor, State
from rllm_trainer.types import Rollout

ROUTE = Route(base_url="http://127.0.0.1:9/v1", api_key="k", model="policy")


class Gates:
    """An app whose runs end when their gate is opened; those in ``open`` end at once."""

    def __init__(self, *closed):
        self.closed = {n: threading.Event() for n in closed}
        self.runs = []
        self.begun = threading.Semaphore(0)

    def wait_for(self, count):
        for _ in range(count):
            assert self.begun.acquire(timeout=60)

    def app(self, n):
        self.runs.append(n)
        self.begun.release()
        if n in self.closed:
            assert self.closed[n].wait(60)
        return n


def good(output):
    return 1.0


class Bench:
    """A source over rows 0, 1, 2 ..., in that order, with what it needs."""

    def __init__(self, folder, gates, *, rows, staleness=1, batch=2, group=1, steps=None, state=None, concurrency=16):
        folder.mkdir(exist_ok=True)
        self.tasks = [make_task({"n": n}, n, "rows") for n in range(rows)]
        self.runner = Runner(gates.app, plan_rewards(good, gates.app), Limits(concurrency=concurrency))
        self.log = RolloutLog(folder)
        self.stop = threading.Event()
        state = state or State(steps=steps)
        first = min([state.cursor.drawn + 1, *(b for b, _ in state.cursor.open)]) if state.cursor else state.step + 1
        self.source = AheadSource(
            FixedTasks(self.tasks).batches(batch, epochs=1, seed=0, shuffle=False, start=first - 1),
            self.runner,
            ROUTE,
            staleness=staleness,
            batch_tasks=batch,
            group_size=group,
            seed=0,
            log=self.log,
            report=Report(progress=False),
            stop=self.stop,
            state=state,
            begun=self.log.read(range(100)),
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.source.close()
        self.runner.close()
        self.log.close()

    def take(self, step, version):
        """The rows of one step, in order; None at the end."""
        found = self.source.collect(step, version)
        return None if found is None else sorted(group.rollouts[0].row["n"] for group in found.groups)

    def ids(self, *rows):
        return [self.tasks[n].id for n in rows]


def test_a_straggler_holds_no_step_until_it_is_due(tmp_path):
    """With staleness 1, rows that hang in step 1 are passed over by it and waited for by the next one."""
    gates = Gates(0, 3)
    with Bench(tmp_path, gates, rows=8) as bench:
        assert bench.take(1, 0) == [1, 2]
        for gate in gates.closed.values():
            threading.Timer(0.2, gate.set).start()
        assert bench.take(2, 1) == [0, 3]
        assert [bench.take(3, 2), bench.take(4, 3)] == [[4, 5], [6, 7]]
        assert bench.take(5, 4) is None


def test_no_more_is_begun_than_the_bound_allows(tmp_path):
    """Two batches of two are open before a step, and nothing new begins until the step after it."""
    gates = Gates()
    with Bench(tmp_path, gates, rows=12) as bench:
        bench.take(1, 0)
        gates.wait_for(4)
        assert sorted(gates.runs) == [0, 1, 2, 3]
        bench.take(2, 1)
        gates.wait_for(2)
        assert sorted(gates.runs) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("staleness", [1, 2, 3])
def test_nothing_is_older_than_the_bound(tmp_path, staleness):
    """However long each run takes, each row is trained once, at most so many updates after the weights it began under."""
    pauses = random.Random(staleness)

    class Slow(Gates):
        def app(self, n):
            time.sleep(pauses.choice([0, 0, 0.001, 0.03]))
            return n

    seen, ages = [], []
    with Bench(tmp_path, Slow(), rows=60, staleness=staleness, batch=4, concurrency=6) as bench:
        for step in range(1, 16):
            found = bench.source.collect(step, step - 1)
            assert len(found.groups) == 4
            seen += [r.row["n"] for r in found.rollouts]
            ages += [step - 1 - r.policy_version for r in found.rollouts]
        assert bench.source.collect(16, 15) is None
    assert sorted(seen) == list(range(60))
    assert 0 <= min(ages) <= max(ages) <= staleness


def test_equal_rows_are_never_open_twice(tmp_path):
    """Two passes over three rows, three ahead: a row comes again only when its first turn is over."""
    gates = Gates()
    tasks = FixedTasks([make_task({"n": n}, n, "rows") for n in range(3)])
    runner = Runner(gates.app, plan_rewards(good, gates.app), Limits())
    log = RolloutLog(tmp_path)
    source = AheadSource(
        tasks.batches(2, epochs=2, seed=0, shuffle=False),
        runner,
        ROUTE,
        staleness=3,
        batch_tasks=2,
        group_size=1,
        seed=0,
        log=log,
        report=Report(progress=False),
        stop=threading.Event(),
        state=State(),
    )
    taken = []
    for step in range(1, 5):
        found = source.collect(step, step - 1)
        if found is None:
            break
        rows = [r.row["n"] for r in found.rollouts]
        assert len(set(rows)) == len(rows)
        taken += rows
    assert source.collect(9, 9) is None
    assert sorted(taken) == [0, 0, 1, 1, 2, 2]
    runner.close()
    log.close()


def test_a_stop_leaves_a_cursor_that_goes_on(tmp_path):
    """A run that is stopped while row 0 hangs goes on with row 0 and the rows after it, and runs no row again that had ended."""
    gates = Gates(0, 3)
    with Bench(tmp_path, gates, rows=6) as bench:
        assert bench.take(1, 0) == [1, 2]
        gates.wait_for(4)
        bench.stop.set()
        with pytest.raises(RunInterrupted):
            bench.take(2, 1)
        cursor = bench.source.cursor()
    zero, three, four, five = bench.ids(0, 3, 4, 5)
    assert cursor == Cursor(drawn=3, open=[(1, zero), (2, three), (3, four), (3, five)])

    again = Gates()
    with Bench(tmp_path, again, rows=6, state=State(step=1, version=1, cursor=cursor)) as bench:
        found = [bench.take(2, 1), bench.take(3, 2), bench.take(4, 3)]
    assert sorted([*found[0], *found[1]]) == [0, 3, 4, 5]
    assert found[2] is None
    assert set(again.runs) <= {0, 3, 4, 5}
    assert {0, 3} <= set(again.runs)


def test_rollouts_of_lost_weights_are_made_again(tmp_path):
    """What weights sampled that no checkpoint holds is not taken over; what older ones sampled is, as old as it is."""
    gates = Gates()
    log = RolloutLog(tmp_path)
    tasks = [make_task({"n": n}, n, "rows") for n in range(4)]
    for n, version in ((0, 3), (1, 2), (2, 1), (3, 0)):
        log.write(
            Rollout(task_id=tasks[n].id, index=0, row={"n": n}, episode=None, reward=1.0, rewards={}, policy_version=version),
            step=1,
            split="train",
        )
    log.close()
    state = State(step=1, version=2, cursor=Cursor(drawn=1, open=[(1, task.id) for task in tasks]))
    with Bench(tmp_path, gates, rows=4, batch=4, state=state) as bench:
        found = bench.source.collect(2, 2)
    assert sorted((r.row["n"], r.policy_version) for r in found.rollouts) == [(0, 2), (1, 2), (2, 1), (3, 2)]
    assert sorted(gates.runs) == [0, 3]


def test_the_apps_arguments_are_refused_in_the_run(tmp_path):
    """What a group's thread raised is raised by the step that waits for it."""

    class Picky(Gates):
        def app(self, missing):
            return missing

    gates = Picky()
    with Bench(tmp_path, gates, rows=2) as bench, pytest.raises(AppArgumentsError, match="missing"):
        bench.take(1, 0)
