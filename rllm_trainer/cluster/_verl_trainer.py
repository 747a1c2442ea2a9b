"""verl's trainers with our credit and our one optimizer step: what is overridden, and nothing else.

A step of verl is sample, balance, old logprobs, reference, advantages, update, weights. Advantages are ours (every group counted once,
however it was cut into rows), the update takes the whole batch once, and denominators are the batch's. Rollouts, queues, weight transfer
and checkpoints are verl's.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import add
from typing import Any

import msgspec
import numpy as np

from rllm_trainer.checkpoint import write_json
from rllm_trainer.cluster._ray_api import ray
from rllm_trainer.cluster._session import GroupRows, Session, current
from rllm_trainer.cluster._verl_client import CarryingClient
from rllm_trainer.cluster._verl_drawing import Drawing
from rllm_trainer.cluster._verl_head_engine import HeadEngine
from rllm_trainer.cluster._verl_loss import DENOMINATOR, GAP_MAX, IS_WEIGHTS, WEIGHTS, RowLoss
from rllm_trainer.cluster._verl_saving import Saving
from rllm_trainer.cluster._verl_v1_api import (
    KVBatchMeta,
    PPOTrainerColocateAsync,
    PPOTrainerSeparateAsync,
    PPOTrainerSync,
    Role,
    TensorDict,
    torch,
    tq,
)
from rllm_trainer.cluster._verl_worker import LR, DetachedRankWorker, RankWorker
from rllm_trainer.cluster.refusals import mode_of
from rllm_trainer.cluster.verl_rows import columns_of
from rllm_trainer.engine._verl_setup import make_loss
from rllm_trainer.engine.verl_settings import child_settings
from rllm_trainer.evaluation import Evaluation
from rllm_trainer.exceptions import EngineError
from rllm_trainer.measures import batch_measures, rollout_measures, sample_measures
from rllm_trainer.metrics import EVAL_SAMPLED, GAP_MEAN
from rllm_trainer.preparation import Prepared, make_samples, prepare
from rllm_trainer.report import losses_of
from rllm_trainer.rollout.record import read_rollouts
from rllm_trainer.samples import Counters
from rllm_trainer.schedule import learning_rate
from rllm_trainer.trainability import (
    WARN_EXCLUDED,
    excluded_share,
    require_replaced_names,
    require_signal,
    require_sound,
    role_findings,
    site_findings,
)
from rllm_trainer.trainability_report import TrainabilityReport, trainability_report
from rllm_trainer.trainability_table import write_table
from rllm_trainer.types import Float32, Group, Sample

__all__ = ["TRAINERS", "row_loss"]

_UPDATE_FIELDS = (
    "prompts",
    "responses",
    "response_mask",
    "loss_mask",
    "input_ids",
    "position_ids",
    "rollout_log_probs",
    "rllm_temperature",
    "multi_modal_inputs",
    "old_log_probs",
    "advantages",
    WEIGHTS,
    IS_WEIGHTS,
)


class _OurSteps(Drawing, Saving):
    """Mixed into verl's trainers, before them."""

    config: Any
    global_steps: int
    actor_rollout_wg: Any
    agent_loop_manager: Any
    llm_server_manager: Any
    standalone_server_manager: Any
    use_reference_policy: bool
    role_worker_mapping: dict[Any, Any]
    train_dataloader: Any
    timing_raw: dict[str, float]

    def __init__(self, config: Any) -> None:
        verls: Any = super()
        verls.__init__(config)
        self.session = current()
        self.trainability = TrainabilityReport()
        """What became of the calls and tokens of every step taken here."""
        self.before: Evaluation | None = None
        self.last_evaluation: Evaluation | None = None
        self._evaluator: Any = None
        self._looked = False
        self._groups: list[GroupRows] = []
        self._prepared: Prepared | None = None
        self._began = time.monotonic()

    def _init_resource_pool_mgr(self) -> None:
        verls: Any = super()
        verls._init_resource_pool_mgr()
        ours = DetachedRankWorker if mode_of(self.session.settings) == "separate_async" else RankWorker
        for role in (Role.Actor, Role.ActorRollout, Role.ActorRolloutRef, Role.RefPolicy):
            if role in self.role_worker_mapping:
                self.role_worker_mapping[role] = ray.remote(ours)

    def get_llm_client(self) -> Any:
        """What fronts ask for replies; where weights move meanwhile, it goes on with those that an update cut short."""
        mode = mode_of(self.session.settings)
        if mode == "sync":
            verls: Any = super()
            return verls.get_llm_client()
        manager = self.standalone_server_manager if mode == "separate_async" else self.llm_server_manager
        return manager.get_client(client_cls=CarryingClient)

    def on_init_end(self) -> None:
        self.actor_rollout_wg.set_loss_fn(row_loss(self.session))
        verls: Any = super()
        verls.on_init_end()
        self.session.version = self.global_steps

    def on_train_begin(self) -> None:
        self._step_is_whole(self.global_steps - 1)
        self._go_on_drawing()
        self._evaluator = self.session.events.evaluator(self.session)
        path = self.session.run_dir / "before.json"
        if self._evaluator is not None and path.exists():
            self.before = msgspec.json.decode(path.read_bytes(), type=Evaluation)
        elif self._evaluator is not None:
            self.before = self._evaluator.run(step=0, version=self.session.version, greedy=self.session.settings.eval_greedy)
            write_json(path, self.before)
            self.session.events.started_from(self.before)
        verls: Any = super()
        verls.on_train_begin()

    def on_step_begin(self) -> None:
        self.session.check()
        self._began = time.monotonic()
        self._require_rows()
        verls: Any = super()
        verls.on_step_begin()

    def on_step_end(self) -> None:
        verls: Any = super()
        verls.on_step_end()
        self.session.version = self.global_steps
        self._step_is_whole(self.global_steps)

    def end_with_the_rows(self) -> None:
        """What is due after the last step, which was not known to be the last one."""
        self.save_last_step()
        self.session.events.note(f"the rows ran out after step {self.global_steps}")
        if self._evaluator is not None:
            self.last_evaluation = found = self._evaluate_all(self.global_steps, greedy=True)
            self.session.events.ended_with(self.global_steps, found)

    def _get_required_batch_multiple(self, dp_size: int) -> int:
        """Rows are only made to fill the ranks: the whole batch is one optimizer step."""
        return dp_size

    def _compute_old_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """Turn by turn, the recorded logprobs are the policy's; else verl computes them at the start of the batch."""
        if mode_of(self.session.settings) == "sync":
            return batch
        verls: Any = super()
        return verls._compute_old_log_prob(_with(batch, fields=None), metrics)

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        session, step, version = self.session, self.global_steps, self.global_steps - 1
        self._groups = self._collected(batch)
        groups = [one.group for one in self._groups]
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        faults = session.settings.faults
        share = excluded_share(rollouts, faults=faults)
        if share > WARN_EXCLUDED:
            require_sound(rollouts, faults=faults)
            session.events.warn(f"{share:.0%} of step {step}'s rollouts were lost to faults that are not trained")
        samples = {episode: found for one in self._groups for episode, found in one.samples.items()}
        self._look(groups, samples)
        ids = {sample.id: sample for found in samples.values() for sample in found.samples}
        engine = HeadEngine(session, self._computed(batch, ids, "old_log_probs"), self._computed(batch, ids, "ref_log_prob"))
        self._prepared = prepared = prepare(groups, samples, step=step, version=version, settings=session.settings, engine=engine)
        session.credit.write(step, prepared.batch)
        metrics.update(prepared.credit.measures() | prepared.correction | batch_measures(prepared.batch))
        _write_columns(batch, prepared)
        return batch

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        settings, prepared = self.session.settings, self._prepared
        assert prepared is not None
        assert settings.lr is not None
        learns = any(row.advantages.any() for row in prepared.batch.rows) or bool(settings.kl_coef or settings.entropy_coef)
        if not prepared.batch.rows or not learns:
            self.session.notes["every advantage of the batch is 0: there was nothing to learn, and the weights stayed as they were"] += 1
            return batch
        lr = learning_rate(
            self.global_steps, peak=settings.lr, schedule=settings.schedule, warmup_steps=settings.warmup_steps, steps=self.session.steps
        )
        fields = [*_UPDATE_FIELDS, *(["ref_log_prob"] if self.use_reference_policy else [])]
        sent = _with(batch, fields=fields)
        sent.extra_info = {
            "calculate_entropy": bool(settings.entropy_coef),
            "global_batch_size": len(batch),
            "mini_batch_size": len(batch),
            "epochs": settings.ppo_epochs,
            "seed": settings.seed,
            "dataloader_kwargs": {"shuffle": False},
            "temperature": 1.0,
            DENOMINATOR: prepared.batch.denominator,
            LR: lr,
        }
        started = time.monotonic()
        output = self.actor_rollout_wg.update_actor(sent)
        found = dict(output["metrics"])
        metrics |= {name: _last(value) for name, value in found.items()}
        metrics |= {name: _first(found[name]) for name in (GAP_MEAN, GAP_MAX) if name in found}
        metrics |= {"lr": lr, "update/seconds": time.monotonic() - started, "update/rows": len(prepared.batch.rows)}
        return batch

    def _compute_metrics(self, batch: Any, metrics: dict[str, Any], timing_raw: dict[str, float], global_steps: int, epoch: int) -> None:
        """One line of the run's metrics, and what the step lost."""
        session = self.session
        groups = [one.group for one in self._groups]
        seconds = max((one.seconds for one in self._groups), default=0.0)
        counters = reduce(add, (found.counters for one in self._groups for found in one.samples.values()), Counters())
        found = self._trainability(version=global_steps - 1)
        line = rollout_measures(groups, seconds, faults=session.settings.faults) | sample_measures(counters, seconds) | found.metrics()
        line |= {name: float(value) for name, value in metrics.items() if hasattr(value, "__float__")}
        line |= {f"timing_s/{name}": float(value) for name, value in timing_raw.items()}
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        notes = [f"{sentence}: {count}" if count > 1 else sentence for sentence, count in session.notes.items()]
        session.notes.clear()
        try:
            line |= self._evaluate(global_steps)
        finally:
            line |= {"seconds": time.monotonic() - self._began, "version": float(session.version)}
            session.events.step(global_steps, line, losses_of(rollouts, counters, notes, found))

    def _trainability(self, *, version: int) -> TrainabilityReport:
        """What became of the step's tokens; the run's table is written anew."""
        assert self._prepared is not None
        credit = self._prepared.credit
        found = trainability_report(
            [samples for one in self._groups for samples in one.samples.values()],
            policy_version=version,
            groups=credit.groups + credit.groups_left_out,
            groups_without_signal=credit.groups_without_signal,
        )
        self.trainability += found
        write_table(self.session.run_dir, self.trainability)
        return found

    def _evaluate(self, step: int) -> dict[str, float]:
        every = self.session.settings.eval_every
        last = self.session.steps is not None and step >= self.session.steps
        if self._evaluator is None or not (last or (every is not None and step % every == 0)):
            return {}
        found = self._evaluate_all(step, greedy=last)
        if last:
            self.last_evaluation = found
        return {EVAL_SAMPLED: found.sampled.mean}

    def _evaluate_all(self, step: int, *, greedy: bool) -> Evaluation:
        settings = self.session.settings
        found: Evaluation = self._evaluator.run(step=step, version=self.session.version, greedy=greedy and settings.eval_greedy)
        return found

    def _collected(self, batch: Any) -> list[GroupRows]:
        """The groups of a batch, in the order of their tasks; those of before an interruption are read from file."""
        found: dict[str, GroupRows] = {}
        for tag in batch.tags:
            if not tag.get("is_padding", False):
                uid = tag["uid"]
                if uid not in found:
                    known = self.session.groups.pop(uid, None)
                    found[uid] = self._on_file(tag) if known is None else known
        return sorted(found.values(), key=lambda one: one.group.task_id)

    def _on_file(self, tag: Mapping[str, Any]) -> GroupRows:
        step, task = int(tag["global_steps"]), str(tag["task"])
        found = read_rollouts(self.session.run_dir, steps=[step]).get(step, [])
        group = Group(task_id=task, rollouts=sorted((one for one in found if one.task_id == task), key=lambda one: one.index))
        if not group.rollouts:
            raise EngineError(
                f"verl's queue was restored with rows of task {task}, and {self.session.run_dir} has no such rollouts of step {step}"
            )
        samples = make_samples(group.rollouts, settings=self.session.settings, vocab_size=self.session.vocab_size)
        return GroupRows(group=group, samples=samples, seconds=0.0)

    def _look(self, groups: Sequence[Group], samples: Mapping[str, Any]) -> None:
        """Once, before the first update: where calls went, and whether they can carry a gradient."""
        if self._looked:
            return
        self._looked = True
        sites = self.session.runner.seen_sites()
        self.session.events.routing(sites)
        require_replaced_names(self.session.settings.replaces, sites)
        require_signal(groups, samples, sites)
        for sentence in [*site_findings(sites), *role_findings(self.session.settings.algorithm, groups)]:
            self.session.events.warn(sentence)

    def _computed(self, batch: Any, samples: Mapping[str, Sample], field: str) -> dict[bytes, Float32]:
        """Token ids of each row -> logprobs that verl has computed for its response, NaN before it; empty where it has computed none."""
        wanted = self.use_reference_policy if field == "ref_log_prob" else mode_of(self.session.settings) != "sync"
        if not wanted:
            return {}
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=[field])
        found: dict[bytes, Float32] = {}
        for tag, values in zip(batch.tags, data[field].unbind(), strict=True):
            sample = None if tag.get("is_padding", False) else samples.get(tag["sample"])
            if sample is not None:
                whole = np.full(len(sample.token_ids), np.nan, np.float32)
                whole[len(whole) - len(values) :] = values.float().numpy()
                found[sample.token_ids.tobytes()] = whole
        return found


def _write_columns(batch: Any, prepared: Prepared) -> None:
    """Credit into verl's queue; rows that fill the ranks, and inert ones, get zeros."""
    columns = dict(columns_of(prepared.batch.rows))
    names = {"advantages": "advantages", WEIGHTS: "weights", "old_log_probs": "old_logprobs", IS_WEIGHTS: "is_weights"}
    rows: list[dict[str, Any]] = []
    for tag in batch.tags:
        found = None if tag.get("is_padding", False) else columns.get(tag["sample"])
        zeros = np.zeros(int(tag["response_len"]), np.float32)
        rows.append(
            {name: torch.from_numpy(np.ascontiguousarray(zeros if found is None else getattr(found, ours))) for name, ours in names.items()}
        )
    fields = TensorDict(
        {name: torch.nested.as_nested_tensor([row[name] for row in rows], layout=torch.jagged) for name in names}, batch_size=[len(rows)]
    )
    tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)


def _settings_of_loss(settings: Any) -> Any:
    """The settings as the loss's configuration reads them: entries for verl are the trainer's."""
    kept = {"actor": {"loss_scale_factor": settings.verl["actor"]["loss_scale_factor"]}} if "actor" in settings.verl else {}
    return msgspec.structs.replace(settings, verl=kept, micro_batch_tokens=settings.micro_batch_tokens or 1)


def row_loss(session: Session) -> RowLoss:
    """The engine's loss, on verl's rows."""
    loss: Any = make_loss(child_settings(_settings_of_loss(session.settings), session.model))
    return RowLoss.of(loss)


def _with(batch: Any, *, fields: Sequence[str] | None) -> Any:
    return KVBatchMeta(
        keys=list(batch.keys),
        tags=list(batch.tags),
        partition_id=batch.partition_id,
        fields=None if fields is None else list(fields),
        extra_info=dict(batch.extra_info or {}),
    )


def _last(value: Any) -> float:
    """Of a metric with one value an epoch, the last one's."""
    values: Any = value
    return float(values[-1] if isinstance(value, list) else values)


def _first(value: Any) -> float:
    values: Any = value
    return float(values[0] if isinstance(value, list) else values)


class SyncTrainer(_OurSteps, PPOTrainerSync):
    """Rollouts and updates take turns."""


class ColocateAsyncTrainer(_OurSteps, PPOTrainerColocateAsync):
    """Rollouts that an update cuts short go on after it."""


class SeparateAsyncTrainer(_OurSteps, PPOTrainerSeparateAsync):
    """Rollouts have devices of their own."""


TRAINERS: dict[str, Any] = {"sync": SyncTrainer, "colocate_async": ColocateAsyncTrainer, "separate_async": SeparateAsyncTrainer}
