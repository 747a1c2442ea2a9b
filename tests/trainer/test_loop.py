"""The loop on recorded groups, through the real engine: what it trains follows from the records alone."""

import math
import threading

import msgspec
import numpy as np
import pytest

from rllm_trace.routing import CallSites
from rllm_trace.types import ErrorInfo, Logprobs
from rllm_trainer.checkpoint import Checkpoints
from rllm_trainer.config import make_settings
from rllm_trainer.engine.verl import VerlEngine
from rllm_trainer.exceptions import BeyondLimits, DatasetError, ServerError, TooManyFaults
from rllm_trainer.learning import Learner
from rllm_trainer.loop import Loop, Parts
from rllm_trainer.metrics import MetricsLog, read_metrics
from rllm_trainer.models import resolve_model
from rllm_trainer.report import Report
from rllm_trainer.rollout.record import RolloutLog, read_rollouts
from rllm_trainer.rollout.runner import RunInterrupted
from rllm_trainer.rollout.source import RecordedSource
from rllm_trainer.serving.local import LocalServer
from rllm_trainer.state import State
from rllm_trainer.testing import make_call, make_choice, make_episode
from rllm_trainer.types import Rollout

STEPS, TASKS, GROUP = 6, 2, 4
GIVEN = {"lr": 1e-3, "batch_tasks": TASKS, "group_size": GROUP, "schedule": "linear", "threads": 1, "save_every": 100}


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    settings = make_settings(GIVEN | {"steps": STEPS})
    with VerlEngine.start(resolve_model("tiny-qwen2"), settings, tmp_path_factory.mktemp("engine")) as engine:
        yield engine


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Six steps of two groups of two-call episodes, written to a run folder and read back."""
    folder = tmp_path_factory.mktemp("recorded")
    random = np.random.default_rng(0)
    log = RolloutLog(folder)
    for step in range(1, STEPS + 1):
        for task in range(TASKS):
            for index in range(GROUP):
                log.write(_rollout(step, f"task-{step}-{task}", index, random), step=step, split="train")
    log.close()
    return read_rollouts(folder)


def _rollout(step, task_id, index, random):
    prompt = random.integers(0, 200, 12).tolist()
    first, tool, second = (random.integers(0, 200, size).tolist() for size in (6, 3, 4))
    replies = [make_choice(ids, logprobs=Logprobs([-math.log(260.0)] * len(ids))) for ids in (first, second)]
    calls = [make_call("a", prompt, replies[0]), make_call("b", prompt + first + tool, replies[1], started=1)]
    episode = make_episode(*calls, episode_id=f"{task_id}-{index}", task_id=task_id)
    reward = float(random.integers(0, 2))
    return Rollout(task_id=task_id, index=index, row={"q": task_id}, episode=episode, reward=reward, rewards={"r": reward})


@pytest.fixture
def loop_of(engine, tmp_path):
    """Makes loops over recorded groups, in folders of their own; closes what they open."""
    opened = []

    def make(source, folder, *, state=None, steps=STEPS, stop=None, sites=None, server=None, **given):
        settings = make_settings(GIVEN | {"steps": STEPS} | given)
        run_dir = tmp_path / folder
        run_dir.mkdir(exist_ok=True)
        opened.append(MetricsLog(run_dir))
        parts = Parts(
            settings=settings,
            engine=engine,
            server=server,
            source=source,
            evaluator=None,
            sites=sites,
            metrics=opened[-1],
            checkpoints=Checkpoints(run_dir, settings.keep),
            report=Report(progress=False),
            stop=stop or threading.Event(),
        )
        return Loop(parts, msgspec.structs.replace(state or State(), steps=steps))

    yield make
    for log in opened:
        log.close()


def restart(engine):
    engine.restart(make_settings(GIVEN | {"steps": STEPS}))


def test_three_steps_and_three_more_are_six(engine, recorded, loop_of, tmp_path):
    """Six steps on recorded episodes leave the weights that three, a resume and three more leave, bit for bit."""
    restart(engine)
    untouched = engine.export_weights(0).digest
    whole = loop_of(RecordedSource(recorded), "whole")
    assert whole.run().step == STEPS
    six = engine.export_weights(99).digest

    restart(engine)
    assert engine.export_weights(0).digest == untouched

    class StopsAfterThree(RecordedSource):
        def collect(self, step, version):
            if step == 3:
                stop.set()
            return super().collect(step, version)

    stop = threading.Event()
    half = loop_of(StopsAfterThree(recorded), "half", stop=stop)
    with pytest.raises(RunInterrupted):
        half.run()
    three = engine.export_weights(3).digest

    restart(engine)
    state, saved = Checkpoints(tmp_path / "half", 2).latest()
    assert (state.step, state.version) == (3, 3)
    engine.load(saved)
    assert engine.export_weights(3).digest == three
    resumed = loop_of(RecordedSource(recorded), "half", state=state)
    assert resumed.run().step == STEPS
    assert len({untouched, three, six}) == 3
    assert engine.export_weights(99).digest == six


def test_whatever_ends_a_run_its_last_whole_step_is_saved(engine, recorded, loop_of, tmp_path, monkeypatch):
    """A row that cannot be read in step 3 costs step 3; an update that breaks off leaves no checkpoint of weights that are of no step."""

    class EndsBadly(RecordedSource):
        def collect(self, step, version):
            if step == 3:
                raise DatasetError("row 17 is None")
            return super().collect(step, version)

    restart(engine)
    with pytest.raises(DatasetError, match="row 17 is None"):
        loop_of(EndsBadly(recorded), "rows").run()
    state, saved = Checkpoints(tmp_path / "rows", 2).latest()
    assert (state.step, state.version) == (2, 2)
    two = engine.export_weights(2).digest

    restart(engine)
    engine.load(saved)
    assert engine.export_weights(2).digest == two

    learn = Learner.learn

    def torn(*args, **kwargs):
        learn(*args, **kwargs)
        raise ServerError("it still serves the old weights")

    monkeypatch.setattr("rllm_trainer.learning.Learner.learn", torn)
    with pytest.raises(ServerError, match="old weights"):
        loop_of(RecordedSource(recorded), "rows", state=state).run()
    assert engine.export_weights(2).digest != two
    assert [p.name for p in (tmp_path / "rows" / "checkpoints").iterdir()] == ["step-000002"]


def test_the_schedule_and_the_metrics_follow_the_steps(engine, recorded, loop_of, tmp_path):
    """Every step is a line; the learning rate falls linearly; rewards and tokens are those of the records."""
    restart(engine)
    loop_of(RecordedSource(recorded), "run", steps=2).run()
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [(line["step"], line["lr"], line["version"]) for line in lines] == [(1, 1e-3, 1), (2, 5e-4, 2)]
    for line in lines:
        rewards = [r.reward for r in recorded[int(line["step"])]]
        assert line["reward/mean"] == sum(rewards) / len(rewards)
        assert (line["tokens/sampled"], line["tokens/trained"], line["rows"]) == (80, 80, 8)
        assert (line["episodes/multi_call_share"], line["episodes/one_row_share"]) == (1, 1)


class Seen:
    """A server, and what its swaps were proven with."""

    def __init__(self, server):
        self._server = server
        self.probes = []
        self.reports = []

    def __getattr__(self, name):
        return getattr(self._server, name)

    def swap(self, weights, *, probe=None):
        self.probes.append(probe)
        self.reports.append(self._server.swap(weights, probe=probe))
        return self.reports[-1]


@pytest.fixture
def server(tmp_path):
    server = LocalServer.start(resolve_model("tiny-qwen2"), run_dir=tmp_path / "served", threads=1, max_model_len=256)
    yield Seen(server)
    server.close()


def test_swaps_are_proven_on_tokens_that_stay_fixed(engine, recorded, loop_of, server):
    """While they move, swaps ask for the same tokens; what the engine said of them after an update is what it said before the next."""
    restart(engine)
    loop_of(RecordedSource(recorded), "run", steps=3, server=server, limits={"ratio_p99": None}).run()
    first, second, third = server.probes
    assert [report.proof for report in server.reports] == ["logprobs"] * 3
    assert [len(row) for row in first.rows] == [8, 8]
    for probe, before in ((second, first), (third, second)):
        for which in range(2):
            np.testing.assert_array_equal(probe.rows[which], first.rows[which])
            np.testing.assert_array_equal(probe.old[which], before.new[which])
    told = engine.logprobs(third.rows, temperatures=[1.0, 1.0])
    assert all(np.nanmax(np.abs(now - new)) < 1e-4 for now, new in zip(told, third.new, strict=True))


def test_tokens_that_no_longer_tell_are_replaced(engine, recorded, loop_of, server):
    """An update too small to be seen is proven by digest; the next swap is proven on tokens of its own batch."""
    restart(engine)
    loop_of(RecordedSource(recorded), "run", steps=2, server=server, lr=1e-9, limits={"ratio_p99": None}).run()
    first, second = server.probes
    assert [report.proof for report in server.reports] == ["digest", "digest"]
    assert any(not np.array_equal(one, other) for one, other in zip(first.rows, second.rows, strict=True))


def test_rows_that_run_out_end_the_run(engine, recorded, loop_of, tmp_path):
    """A source that has no more groups ends the run with a checkpoint of the last step."""
    restart(engine)
    loop = loop_of(RecordedSource({1: recorded[1]}), "run")
    assert loop.run().step == 1
    assert Checkpoints(tmp_path / "run", 2).latest()[0].step == 1


def test_equal_rewards_leave_the_weights(engine, recorded, loop_of):
    """A batch whose groups have equal rewards is counted and teaches nothing: the weights and their version stay."""
    restart(engine)
    before = engine.export_weights(0).digest
    equal = {1: [msgspec.structs.replace(r, reward=1.0) for r in recorded[1]]}
    loop = loop_of(RecordedSource(equal), "run")
    state = loop.run()
    assert (state.step, state.version) == (1, 0)
    assert engine.export_weights(0).digest == before


def test_lost_rollouts_stop_the_run(engine, recorded, loop_of):
    """More than half lost to faults ends the run before it trains on the rest."""
    restart(engine)
    before = engine.export_weights(0).digest
    lost = {
        1: [
            msgspec.structs.replace(r, fault="infrastructure", reason="boom", reward=None) if i % 4 else r
            for i, r in enumerate(recorded[1])
        ]
    }
    with pytest.raises(TooManyFaults, match=r"75% of 8 rollouts were lost .*boom \(6 times\)"):
        loop_of(RecordedSource(lost), "run").run()
    assert engine.export_weights(0).digest == before


def test_faults_that_are_trained_are_not_lost(engine, recorded, loop_of, tmp_path):
    """With ``faults`` a step of which most failed is trained, and its line counts none as excluded."""
    restart(engine)
    failed = [msgspec.structs.replace(r, fault="app", reason="boom", reward=None) if i % 4 else r for i, r in enumerate(recorded[1])]
    loop_of(RecordedSource({1: failed}), "run", steps=1, faults={"app": "train"}).run()
    (line,) = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert (line["faults/app"], line["rollouts/excluded"], line["tokens/trained"]) == (6, 0, 80)


def test_a_step_beyond_a_limit_ends_the_run_before_it_learns(engine, recorded, loop_of, tmp_path):
    """Where too few of the sampled tokens can be trained, the run stops with how few and why; the weights stay, the table is on file."""
    restart(engine)
    before = engine.export_weights(0).digest

    def inexact(rollout):
        (first, second) = rollout.episode.trajectories[0].calls
        second = msgspec.structs.replace(second, exact=False, inexact_reason="no ids at all", trainable=False)
        first = msgspec.structs.replace(first, error=ErrorInfo(type="x", message="gone"), trainable=False)
        trajectory = msgspec.structs.replace(rollout.episode.trajectories[0], calls=[first, second])
        return msgspec.structs.replace(rollout, episode=msgspec.structs.replace(rollout.episode, trajectories=[trajectory]))

    some = {1: [inexact(r) if r.index else r for r in recorded[1]]}
    with pytest.raises(
        BeyondLimits, match=r"step 1: 20 of 80 sampled tokens are trained \(25%\); at least 50% must be. Lost to failed: 36"
    ):
        loop_of(RecordedSource(some), "run").run()
    assert engine.export_weights(0).digest == before
    table = (tmp_path / "run" / "trainability.md").read_text()
    assert "| trainability/share_trained | 0.25 |" in table
    assert "| inexact | no ids at all | 6 | 24 |" in table


def test_call_sites_are_looked_at_once(engine, recorded, loop_of, capsys):
    """A live run's call sites are looked at before its first update only."""
    restart(engine)
    sites = CallSites()
    sites.saw(model="gpt", endpoint="policy", trained=True, settings={"temperature": 0})
    loop_of(RecordedSource(recorded), "run", steps=2, sites=sites).run()
    assert capsys.readouterr().err.count("use temperature 0 (1 of 1)") == 1
