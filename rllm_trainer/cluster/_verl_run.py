"""One run of verl's trainer, in the head's process: verl's queue is started, verl's trainer and our manager are made, and verl trains."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from omegaconf import OmegaConf, open_dict

from rllm_trace.routing import CallSites, Route
from rllm_trainer.cluster._ray_api import ray
from rllm_trainer.cluster._session import Session, begin
from rllm_trainer.cluster._verl_compose import compose
from rllm_trainer.cluster._verl_manager import AgentLoopManager
from rllm_trainer.cluster._verl_trainer import TRAINERS
from rllm_trainer.cluster._verl_v1_api import tq
from rllm_trainer.cluster.events import EventReport, watch_stop
from rllm_trainer.cluster.head import HeadPlan, HeadResult
from rllm_trainer.cluster.liveness import Watch
from rllm_trainer.cluster.ray_session import QUEUE
from rllm_trainer.cluster.refusals import mode_of
from rllm_trainer.cluster.rows import Rows, RowsRanOut
from rllm_trainer.credit_log import CreditLog
from rllm_trainer.exceptions import EngineError, TooManyFaults, TrainerError
from rllm_trainer.metrics import MetricsLog
from rllm_trainer.rollout.record import RolloutLog
from rllm_trainer.rollout.runner import RunInterrupted

__all__ = ["train"]

WEIGHTS_FILE = "model.safetensors"
_STORE = "TransferQueueStorageUnit"
"""Beginning of the names of the queue's actors that hold rows."""
_DEATH_SEEN = 5.0
"""Seconds in which a death that made something else fail is seen."""


def train(plan: HeadPlan, workers: Sequence[Any], mailbox: Any) -> HeadResult:
    """Train. Raises what ended the run."""
    config = compose(plan.overrides, validate=False)
    session = begin(_session(plan, workers, mailbox))
    session.rows = Rows(mailbox, ray.get, session.check)
    watch_stop(mailbox, ray.get, session.stop)
    with open_dict(config):
        config.transfer_queue.enable = True
    OmegaConf.resolve(config)
    tq.init(config.transfer_queue)
    watch: Watch | None = None
    stopped = False
    try:
        trainer = TRAINERS[mode_of(plan.settings)](config=config)
        try:
            trainer.init()
        finally:
            ray.get(mailbox.hold.remote(_placed(trainer)))
        manager = AgentLoopManager.create(
            config=config, llm_client=trainer.get_llm_client(), teacher_client=None, reward_loop_worker_handles=trainer.get_reward_handles()
        )
        watch = Watch(_needed(trainer, manager), partial(_died, session))
        try:
            trainer.fit(manager)
        except RunInterrupted:
            stopped = True
            trainer.save_last_step()
        except RowsRanOut:
            trainer.end_with_the_rows()
        target = Path(plan.facts.run_dir) / "model"
        target.mkdir(parents=True, exist_ok=True)
        trainer.actor_rollout_wg.export_weights(str(target / WEIGHTS_FILE))
        return HeadResult(
            lines=session.events.lines,
            trainability=trainer.trainability,
            before=trainer.before,
            last_evaluation=trainer.last_evaluation,
            stopped=stopped,
            versions=_versions(),
        )
    except Exception as error:
        if watch is not None and (isinstance(error, TooManyFaults) or not isinstance(error, TrainerError)):
            watch.wait(_DEATH_SEEN)
        if session.failure is not None and session.failure is not error:
            raise session.failure from error
        raise
    finally:
        if watch is not None:
            watch.close()
        session.stop.set()
        session.log.close()
        tq.close()


def _died(session: Session, error: EngineError) -> None:
    session.fail(error)
    session.events.died(error)


def _placed(trainer: Any) -> list[Any]:
    """The placement groups that verl has made: of the ranks, and of replicas that have devices of their own."""
    manager: Any = getattr(trainer, "resource_pool_manager", None)
    own: Any = getattr(trainer, "standalone_server_manager", None)
    pools: list[Any] = []
    if manager is not None:
        pools += list(manager.resource_pool_dict.values())
    if own is not None:
        pools += [replica.resource_pool for replica in own.get_replicas()]
    found: list[Any] = []
    for pool in pools:
        if pool.pgs:
            found += pool.pgs
    return found


def _needed(trainer: Any, manager: AgentLoopManager) -> dict[str, Any]:
    """Every actor without which the run cannot go on, under the name that its end is told by."""
    name, namespace = QUEUE
    managers = trainer._rollout_server_managers()
    replicas = [handle for servers in managers for handle in servers.server_handles]
    own: Any = getattr(trainer, "standalone_server_manager", None)
    ranks = [rank for replica in own.get_replicas() for rank in replica.workers] if own is not None else []
    balancers = [servers.global_load_balancer for servers in managers if getattr(servers, "global_load_balancer", None) is not None]
    stores = sorted(found for found in ray.util.list_named_actors() if found.startswith(_STORE))
    return {
        **{f"training rank {rank} on Ray": handle for rank, handle in enumerate(trainer.actor_rollout_wg.workers)},
        **{f"rollout replica {number} on Ray": handle for number, handle in enumerate(replicas)},
        **{f"rollout rank {rank} on Ray": handle for rank, handle in enumerate(ranks)},
        **{f"load balancer {number} on Ray": handle for number, handle in enumerate(balancers)},
        **{f"front {number} on Ray": handle for number, handle in enumerate(manager.fronts)},
        **{f"store {number} of verl's queue on Ray": ray.get_actor(found) for number, found in enumerate(stores)},
        "verl's queue on Ray": ray.get_actor(name, namespace=namespace),
    }


def _session(plan: HeadPlan, workers: Sequence[Any], mailbox: Any) -> Any:
    settings, facts = plan.settings, plan.facts
    run_dir = Path(facts.run_dir)
    vocab = _vocab_size(Path(facts.model))
    resume_after = plan.done if facts.resume else None
    return Session(
        settings=msgspec.structs.replace(settings, max_model_len=facts.max_model_len),
        model=Path(facts.model),
        run_dir=run_dir,
        eval_tasks=plan.eval_tasks,
        steps=facts.steps,
        vocab_size=vocab,
        max_model_len=facts.max_model_len,
        workers=workers,
        route=Route(
            base_url="http://the-front-of-each-node.invalid/v1",  # workers put their own front here
            api_key="of the front",
            model=Path(facts.model).name,
            replaces=frozenset(settings.replaces) if settings.replaces is not None else None,
            sampling=settings.sampling or {},
            constrained=settings.constrained,
            call_timeout=settings.call_timeout,
            sites=CallSites(),  # marks calls to be counted; each worker counts its own
        ),
        events=EventReport(mailbox, MetricsLog(run_dir, resume_after=resume_after)),
        log=RolloutLog(run_dir),
        credit=CreditLog(run_dir, resume_after=resume_after),
        stop=threading.Event(),
    )


def _vocab_size(model: Path) -> int:
    described: Mapping[str, Any] = msgspec.json.decode((model / "config.json").read_bytes())
    return int(described.get("text_config", described)["vocab_size"])


def _versions() -> dict[str, str]:
    import importlib.metadata as metadata

    return {name: metadata.version(name) for name in ("ray", "torch", "transformers", "verl")} | {"pid": str(os.getpid())}
