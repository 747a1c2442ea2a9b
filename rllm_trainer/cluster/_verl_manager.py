"""verl's prompts in, our rollouts on Ray workers, rows in verl's queue out: the agent-loop manager that verl's configuration names.

A rollout's step is that of the batch that its row was drawn with, whenever it runs: so its seed and its place on file stay the same
where an interrupted run is continued, and no batch has a task twice.

``generate_sequences`` only starts; a thread coordinates each batch with the same code as everywhere (deadlines, retries, quorum), and a
group's rows are written at once, when its last rollout has ended. verl's own bookkeeping never sees a rollout that is not whole.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

import numpy as np

from rllm_trace.types import Episode
from rllm_trainer.cluster._front import Front
from rllm_trainer.cluster._ray_api import GetTimeoutError, NodeAffinity, ray
from rllm_trainer.cluster._session import GroupRows, Session, current
from rllm_trainer.cluster._verl_v1_api import list_of_dict_to_tensordict, torch, tq
from rllm_trainer.cluster._verl_worker import TEMPERATURES
from rllm_trainer.cluster.app_worker import FrontAddress
from rllm_trainer.cluster.remote_runner import RemoteRunner
from rllm_trainer.cluster.verl_rows import QueueRow, group_rows
from rllm_trainer.exceptions import EngineError
from rllm_trainer.plan import limits_of
from rllm_trainer.preparation import make_samples
from rllm_trainer.rollout.attempt import Conditions, Job, Outcome
from rllm_trainer.rollout.dataset import Task
from rllm_trainer.rollout.runner import Listener, RunInterrupted
from rllm_trainer.rollout.source import rollout_seed
from rllm_trainer.types import Group, Rollout

__all__ = ["AgentLoopManager"]

_TRAIN = "train"
_UP = 300.0
_QUEUE = 300.0
"""Seconds that verl's queue has to take a group."""


class AgentLoopManager:
    """Made by verl (or by our head in its stead) with ``create``."""

    @classmethod
    def create(cls, config: Any, llm_client: Any, teacher_client: Any = None, reward_loop_worker_handles: Any = None) -> AgentLoopManager:
        """A front on each node that has app workers, and the runner over them."""
        session = current()
        nodes = {place["node_id"] for place in _answers([worker.place.remote() for worker in session.workers], "app workers")}
        alive = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
        fronts: dict[str, Any] = {}
        for node in sorted(nodes):
            host = "127.0.0.1" if len(alive) == 1 else alive[node]
            options = {"num_cpus": 0, "scheduling_strategy": NodeAffinity(node_id=node, soft=False)}
            fronts[node] = (
                ray.remote(Front)
                .options(**options)
                .remote(
                    str(session.model),
                    name=session.model.name,
                    max_len=session.max_model_len,
                    client=llm_client,
                    host=host,
                    exact=session.settings.continuation == "exact",
                    reads=session.settings.local,
                )
            )
        addresses: list[FrontAddress] = _answers([front.start.remote() for front in fronts.values()], "fronts of the nodes")
        session.runner = RemoteRunner(session.workers, limits_of(session.settings), fronts=dict(zip(fronts, addresses, strict=True)))
        return cls(session, list(fronts.values()))

    def __init__(self, session: Session, fronts: list[Any]) -> None:
        self._session = session
        self.fronts = fronts
        """Actors live as long as somebody holds them."""
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="rllm-queue", daemon=True).start()

    def generate_sequences(self, prompts: Any) -> None:
        """Start the rollouts of these prompts; verl waits for their rows."""
        size = self._session.settings.batch_tasks
        batches: dict[int, list[tuple[str, Task]]] = {}
        for uid, position in zip(_column(prompts, "uid"), map(int, _column(prompts, "position")), strict=True):
            batches.setdefault(position // size + 1, []).append((str(uid), self._session.rows.take(position)))
        for batch, part in batches.items():
            threading.Thread(target=self._run, args=(part, batch), name=f"rllm-rollouts-{batch}", daemon=True).start()

    def _run(self, prompts: Sequence[tuple[str, Task]], step: int) -> None:
        session = self._session
        try:
            for uid, _ in prompts:
                self._await(tq.async_kv_put(key=uid, partition_id=_TRAIN, tag={"status": "running"}))
            size, seed = session.settings.group_size, session.settings.seed
            jobs = [
                Job(task_id=task.id, index=index, row=task.row, seed=rollout_seed(seed, task.id, index, step))
                for _, task in prompts
                for index in range(size)
            ]
            conditions = Conditions(route=session.route, version=lambda: session.version, metadata={"step": step, "split": "train"})
            listener = _Groups(self, {task.id: uid for uid, task in prompts}, step)
            session.runner.run(jobs, conditions, listener=listener, stop=session.stop)
        except RunInterrupted:
            session.stop.set()
        except BaseException as error:  # noqa: BLE001 - raised again by the trainer, which waits for these rows
            session.fail(error)

    def publish(self, uid: str, group: Group, step: int, seconds: float) -> None:
        """A group has ended: its rows go to verl."""
        session = self._session
        samples = make_samples(group.rollouts, settings=session.settings, vocab_size=session.vocab_size)
        session.groups[uid] = GroupRows(group=group, samples=samples, seconds=seconds)
        version = min((rollout.policy_version for rollout in group.rollouts), default=session.version)
        rows = group_rows(group, samples, version=version, pad=0)
        fields, tags = zip(*[(_fields(row, uid, step), _tag(row, uid, step, group.task_id)) for row in rows], strict=True)
        self._await(
            tq.async_kv_batch_put(
                keys=[f"{uid}_{row.session}_{row.index}" for row in rows],
                fields=list_of_dict_to_tensordict(list(fields)),
                tags=list(tags),
                partition_id=_TRAIN,
            )
        )
        self._await(tq.async_kv_put(key=uid, partition_id=_TRAIN, tag={"status": "finished"}))

    def _await(self, work: Coroutine[Any, Any, Any]) -> Any:
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result(_QUEUE)
        except TimeoutError as error:
            raise EngineError(f"verl's queue did not take the rows of a group within {_QUEUE:g} s; Ray's logs say what it does") from error


class _Groups(Listener):
    """Puts every rollout on file, and hands a group over when it is whole."""

    def __init__(self, manager: AgentLoopManager, uids: Mapping[str, str], step: int) -> None:
        self._manager = manager
        self._session = current()
        self._uids = uids
        self._step = step
        self._began = time.monotonic()
        self._rollouts: dict[str, list[Rollout]] = {}

    def ended(self, rollout: Rollout, extra: Sequence[Episode]) -> None:
        self._session.log.write(rollout, step=self._step, split="train")
        self._session.log.extra(rollout, extra, step=self._step, split="train")
        if extra:
            self._session.notes["further episodes that the app started on its own, recorded and not trained"] += len(extra)
        group = self._rollouts.setdefault(rollout.task_id, [])
        group.append(rollout)
        if len(group) == self._session.settings.group_size:
            whole = Group(task_id=rollout.task_id, rollouts=sorted(group, key=lambda one: one.index))
            self._manager.publish(self._uids[rollout.task_id], whole, self._step, time.monotonic() - self._began)

    def retried(self, job: Job, outcome: Outcome) -> None:
        self._session.notes["rollouts tried again after an infrastructure fault"] += 1

    def hung(self, job: Job, reason: str, stack: str) -> None:
        self._session.events.hung(job, reason, stack)


def _answers(asked: list[Any], what: str) -> list[Any]:
    try:
        return ray.get(asked, timeout=_UP)
    except GetTimeoutError as error:
        raise EngineError(
            f"the {len(asked)} {what} did not all answer within {_UP:g} s; `ray list actors` says which do nothing"
        ) from error


def _fields(row: QueueRow, uid: str, step: int) -> dict[str, Any]:
    """As verl's queue has a row."""
    ids, mask = torch.from_numpy(row.token_ids), torch.from_numpy(row.mask)
    scores = np.zeros(len(row.mask), np.float32)
    scores[-1] = row.reward
    return {
        "prompts": ids[: row.prompt_len],
        "responses": ids[row.prompt_len :],
        "response_mask": mask,
        "loss_mask": mask,
        "input_ids": ids,
        "position_ids": torch.arange(len(ids)),
        "rollout_log_probs": torch.from_numpy(row.logprobs),
        "rm_scores": torch.from_numpy(scores),
        TEMPERATURES: torch.tensor([row.temperature], dtype=torch.float32),
        "num_turns": 0,
        "uid": uid,
        "session_id": row.session,
        "global_steps": step,
        "multi_modal_inputs": {},
        "extra_fields": {"min_global_steps": row.min_version, "max_global_steps": row.max_version, "reward_extra_info": {}},
        "data_source": "rllm",
        "reward_model": {},
    }


def _tag(row: QueueRow, uid: str, step: int, task_id: str) -> dict[str, Any]:
    return {
        "status": "success",
        "uid": uid,
        "task": task_id,
        "sample": row.sample_id,
        "prompt_len": row.prompt_len,
        "response_len": len(row.mask),
        "seq_len": len(row.token_ids),
        "global_steps": step,
        "min_global_steps": row.min_version,
        "max_global_steps": row.max_version,
    }


def _column(prompts: Any, name: str) -> list[Any]:
    """The values of a column of verl's batch, whatever holds them."""
    column = prompts[name]
    values = column.tolist() if hasattr(column, "tolist") else list(column)
    return [getattr(value, "data", value) if not isinstance(value, (int, str)) else value for value in values]
