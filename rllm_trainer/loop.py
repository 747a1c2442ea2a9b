"""The order, and nothing else: rollouts, samples, credit, batch, update, export, swap, measure; again.

Every stage is a function of the record before it. A stop is honoured between stages and while rollouts run, never inside an update or
a swap, so what a checkpoint holds is always a whole step. Nothing waits on two things: the swap lies between steps.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Protocol

import msgspec
import numpy as np

from rllm_trace.routing import CallSites
from rllm_trainer.advantages import CreditCounters
from rllm_trainer.breaks import Decode
from rllm_trainer.checkpoint import Checkpoints
from rllm_trainer.config import Settings
from rllm_trainer.credit_log import CreditLog
from rllm_trainer.engine.base import Engine
from rllm_trainer.evaluation import Evaluation, Evaluator
from rllm_trainer.exceptions import BeyondLimits, RunStopped, TrainerError
from rllm_trainer.learning import Learner, learns
from rllm_trainer.measures import (
    batch_measures,
    continuation_measures,
    continuation_notes,
    evaluation_measures,
    rollout_measures,
    sample_measures,
)
from rllm_trainer.metrics import EVAL_SAMPLED, MetricsLog
from rllm_trainer.preparation import BatchEngine, make_samples, prepare
from rllm_trainer.report import Report, losses_of
from rllm_trainer.rollout.runner import RunInterrupted
from rllm_trainer.rollout.source import Collected, Source
from rllm_trainer.samples import Counters, SampleSet
from rllm_trainer.serving.base import Continues, Server
from rllm_trainer.state import State
from rllm_trainer.trainability import (
    WARN_EXCLUDED,
    excluded_share,
    require_replaced_names,
    require_signal,
    require_sound,
    role_findings,
    site_findings,
)
from rllm_trainer.trainability_report import TrainabilityReport, exceeded, trainability_report
from rllm_trainer.trainability_table import write_table
from rllm_trainer.types import Rollout

__all__ = ["Loop", "Parts", "TrainingEngine"]

_LIVENESS = np.zeros(2, np.int32)
"""A row that any server can score."""


class TrainingEngine(Engine, BatchEngine, Protocol):
    """Updates the weights, and runs what a batch is made with."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What the loop puts in order."""

    settings: Settings
    engine: TrainingEngine
    server: Server | None
    """None: a replay; nothing is served."""
    source: Source
    evaluator: Evaluator | None
    sites: CallSites | None
    metrics: MetricsLog
    checkpoints: Checkpoints
    report: Report
    stop: threading.Event
    credit: CreditLog | None = None
    """None: what gave replies their advantages is not put on file."""
    decode: Decode | None = None
    """Token ids to text, for the examples of the report; None: they are told as ids."""


class Loop:
    """One run, from a state to the state after its last step."""

    def __init__(self, parts: Parts, state: State) -> None:
        self.state = state
        self.last_evaluation: Evaluation | None = None
        """The one after the last step, where there are rows for it."""
        self.trainability = TrainabilityReport()
        """What became of the calls and tokens of every step taken here."""
        self._parts = p = parts
        self._learner = Learner(settings=p.settings, engine=p.engine, server=p.server, report=p.report)
        self._looked = False
        self._continued = Counter[str]()
        self._whole = True
        """The engine's weights are those of ``state``."""

    def run(self) -> State:
        """Take every step that is left. Whatever ends it, the last whole step is saved, unless an update broke off halfway.

        Raises:
            RunInterrupted: the stop event was set.
            RunStopped: going on would train nothing or the wrong thing.
        """
        try:
            while self.state.steps is None or self.state.step < self.state.steps:
                if self._parts.stop.is_set():
                    raise RunInterrupted
                step = self.state.step + 1
                collected = self._parts.source.collect(step, self.state.version)
                if collected is None:
                    self._parts.report.note(f"the rows ran out after step {self.state.step}")
                    break
                self._step(step, collected)
        except Exception as error:
            self._save_after(error)
            raise
        self._save()
        self._last_evaluation()
        return self.state

    def _step(self, step: int, collected: Collected) -> None:
        started = time.monotonic()
        rollouts = collected.rollouts
        notes = list(collected.notes)
        self._require_sound(step, rollouts)
        samples = make_samples(rollouts, settings=self._parts.settings, vocab_size=self._parts.engine.vocab_size, decode=self._parts.decode)
        self._look(collected, samples)
        counters = reduce(add, (s.counters for s in samples.values()), Counters())
        line = rollout_measures(collected.groups, collected.seconds, faults=self._parts.settings.faults) | sample_measures(
            counters, collected.seconds
        )
        line |= continuation_measures(continued := self._continuations())
        notes += continuation_notes(continued)
        prepared = prepare(
            collected.groups,
            samples,
            step=step,
            version=self.state.version,
            settings=self._parts.settings,
            engine=self._parts.engine,
            trusted=self._parts.server is not None,
        )
        batch = prepared.batch
        if self._parts.credit is not None:
            self._parts.credit.write(step, batch)
        line |= prepared.credit.measures() | prepared.correction | batch_measures(batch)
        found = self._trainability(samples, prepared.credit)
        if learns(batch, self._parts.settings):
            self._whole = False
            learnt = self._learner.learn(batch, steps=self.state.steps)
            line |= learnt.measures
            found = msgspec.structs.replace(found, ratio=learnt.ratio)
            self.trainability += TrainabilityReport(ratio=learnt.ratio)
            self.state = msgspec.structs.replace(self.state, version=self.state.version + 1)
        else:
            notes.append("every advantage of the batch is 0: there was nothing to learn, and the weights stayed as they were")
        line |= found.metrics()
        self.state, self._whole = msgspec.structs.replace(self.state, step=step), True
        if step % self._parts.settings.save_every == 0:
            self._save()
        try:
            line |= self._evaluate(step)
        finally:
            line["seconds"] = collected.seconds + time.monotonic() - started
            line["version"] = self.state.version
            written = self._parts.metrics.write(step, line)
            self._parts.report.step(written, losses_of(rollouts, counters, notes, found), steps=self.state.steps)

    def _require_sound(self, step: int, rollouts: Sequence[Rollout]) -> None:
        """Stops where too much was lost; a server that is gone is the better reason."""
        faults = self._parts.settings.faults
        share = excluded_share(rollouts, faults=faults)
        if share <= WARN_EXCLUDED:
            return
        if self._parts.server is not None:
            self._parts.server.prompt_logprobs([_LIVENESS])
        require_sound(rollouts, faults=faults)
        self._parts.report.warn(f"{share:.0%} of step {step}'s rollouts were lost to faults that are not trained")

    def _look(self, collected: Collected, samples: dict[str, SampleSet]) -> None:
        """Once, before the first update: where calls went, and whether they can carry a gradient."""
        if self._looked or self._parts.sites is None:
            return
        self._looked = True
        sites = self._parts.sites.seen()
        self._parts.report.routing(sites)
        require_replaced_names(self._parts.settings.replaces, sites)
        require_signal(collected.groups, samples, sites)
        for sentence in [*site_findings(sites), *role_findings(self._parts.settings.algorithm, collected.groups)]:
            self._parts.report.warn(sentence)

    def _trainability(self, samples: Mapping[str, SampleSet], credit: CreditCounters) -> TrainabilityReport:
        """What became of the step's tokens. Raises ``BeyondLimits``, before anything is learnt, where that is too little."""
        found = trainability_report(
            samples.values(),
            policy_version=self.state.version,
            groups=credit.groups + credit.groups_left_out,
            groups_without_signal=credit.groups_without_signal,
        )
        self.trainability += found
        write_table(self._parts.metrics.path.parent, self.trainability)
        beyond = exceeded(found, self._parts.settings.limits)
        if beyond:
            raise BeyondLimits(f"step {self.state.step + 1}: {'; '.join(beyond)}. limits={{...}} says where a run stops")
        return found

    def _continuations(self) -> Counter[str]:
        """What became of the prompts of recorded chats since the last step; nothing where the server continues none."""
        server = self._parts.server
        now = server.continuations() if isinstance(server, Continues) else Counter[str]()
        new, self._continued = now - self._continued, now
        return new

    def _evaluate(self, step: int) -> dict[str, float]:
        """The held-out scores of this step, where they are due between the first and the last."""
        every, evaluator = self._parts.settings.eval_every, self._parts.evaluator
        if evaluator is None or every is None or step % every or step == self.state.steps:
            return {}
        return {EVAL_SAMPLED: evaluator.run(step=step, version=self.state.version, greedy=False).sampled.mean}

    def _last_evaluation(self) -> None:
        evaluator, state = self._parts.evaluator, self.state
        if evaluator is None:
            return
        self.last_evaluation = found = evaluator.run(step=state.step, version=state.version, greedy=self._parts.settings.eval_greedy)
        self._parts.metrics.write(state.step, evaluation_measures(found))

    def _save_after(self, error: Exception) -> None:
        """Nothing is saved where the weights are of no step. What ended the run is told, even where the engine has gone with it."""
        try:
            if self._whole or isinstance(error, RunStopped):
                self._save()
        except TrainerError as second:
            self._parts.report.warn(f"no checkpoint of step {self.state.step} could be written: {second}")

    def _save(self) -> None:
        if self.state.step > 0:
            state = msgspec.structs.replace(self.state, cursor=self._parts.source.cursor())
            self._parts.checkpoints.save(state, self._parts.engine)
