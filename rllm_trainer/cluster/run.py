"""A planned run in, the same run done by verl's trainer on Ray out: this process starts actors, prints what they report, and waits.

It imports Ray, never torch or verl. The app and its rewards go to the workers as Ray carries functions: by name where they can be
imported there, else by value.
"""

from __future__ import annotations

import shutil
import sys
import threading
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from rllm_trainer.checkpoint import require_same, write_json
from rllm_trainer.cluster.app_worker import AppWorker, packed_app
from rllm_trainer.cluster.events import Mailbox, play
from rllm_trainer.cluster.head import Head, HeadPlan, HeadResult
from rllm_trainer.cluster.last_words import last_words, words_of
from rllm_trainer.cluster.layout import ClusterLayout
from rllm_trainer.cluster.loading import ray_api
from rllm_trainer.cluster.ray_session import device_of, here, on_ray, require_alone, require_room
from rllm_trainer.cluster.verl_overrides import Facts, overrides
from rllm_trainer.exceptions import DatasetError, EngineError, SettingError, TrainerError
from rllm_trainer.plan import Ask, RunPlan
from rllm_trainer.report import Report
from rllm_trainer.rollout.dataset import Task
from rllm_trainer.rollout.runner import RunInterrupted

__all__ = ["app_workers", "model_length", "run_on_cluster"]

_FILE = "cluster.json"
_CONFIG = "verl.yaml"
_LATEST = "latest_checkpointed_iteration.txt"
_STARTS = 600.0
_WAIT = 0.5
_MOST_LENGTH = 16_384
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".index.json")
_CPU_ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "rllm_trainer.engine._verl_cpu",
    "VERL_ENGINE_DEVICE": "cuda",  # verl's FSDP engine is registered for accelerators; on the CPU it is the same class
    "OMP_NUM_THREADS": "1",
}
_CUDA_ENVIRONMENT = {
    "NCCL_DEBUG": "WARN",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "true",
    "VLLM_DISABLE_COMPILE_CACHE": "1",
    "VLLM_LOGGING_LEVEL": "WARN",
}
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",  # the model is a folder by now
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFER_QUEUE_ENABLE": "1",
    "VERL_LOGGING_LEVEL": "WARN",
}


def run_on_cluster(ask: Ask, plan: RunPlan, report: Report, stop: threading.Event) -> HeadResult:
    """Start, train, and end everything that was started.

    Raises:
        RunInterrupted: the stop event was set; a checkpoint of the last whole step is there.
        TrainerError: what ended the run.
    """
    settings = plan.settings
    with ExitStack() as open_:
        with report.doing("Ray attached to"):
            ray = open_.enter_context(on_ray(settings.ray, settings.cluster))
        device = device_of(ray, settings.cluster)
        require_room(ray, settings.cluster, device)
        require_alone(ray)
        head_plan = _head_plan(plan, device, report)
        mailbox = ray.remote(Mailbox).options(num_cpus=0, **here(ray)).remote()
        open_.callback(ray.kill, mailbox)
        open_.callback(_give_back, ray, mailbox)
        environment = _ENVIRONMENT | (_CPU_ENVIRONMENT if device == "cpu" else _CUDA_ENVIRONMENT)
        head = ray.remote(Head).options(num_cpus=1, runtime_env={"env_vars": environment}, **here(ray)).remote(mailbox)
        open_.callback(ray.kill, head)
        with report.doing("verl's configuration composed"):
            (plan.run_dir / _CONFIG).write_text(_got(ray, head.check.remote(head_plan), _STARTS))
        workers = open_.enter_context(app_workers(ray, ask.app, plan.rewards, settings.cluster, settings.concurrency))
        result = _waited(ray, head.run.remote(head_plan, workers), mailbox, report, stop, steps=head_plan.facts.steps)
    _complete(plan.model, plan.run_dir / "model")
    if result.stopped:
        raise RunInterrupted
    return result


@contextmanager
def app_workers(ray: Any, app: Any, rewards: Any, layout: ClusterLayout, concurrency: int) -> Generator[list[Any]]:
    """Actors that run the app, spread over the cluster's nodes, and ready.

    Raises:
        SettingError: the app cannot be carried to a worker, or not be loaded there.
    """
    nodes = sum(bool(node["Alive"]) for node in ray.nodes())
    actor = ray.remote(AppWorker).options(
        num_cpus=layout.app_cpus, max_concurrency=concurrency + 64, max_restarts=-1, scheduling_strategy="SPREAD"
    )
    packed = packed_app(app, rewards)
    workers = [actor.remote(packed, sys.path, several_nodes=nodes > 1) for _ in range(layout.app_workers or nodes)]
    try:
        try:
            ray.get([worker.place.remote() for worker in workers], timeout=_STARTS)
        except Exception as error:  # Ray wraps whatever the worker raised
            raise SettingError(
                f"the app could not be loaded in a worker of Ray: {words_of(error)}; what it imports must be there on every node, "
                "as with ray={'runtime_env': {'working_dir': '.'}}"
            ) from error
        yield workers
    finally:
        for worker in workers:
            ray.kill(worker)


def model_length(model: Path, asked: int | None) -> int:
    """Most tokens of prompt and reply together."""
    described = msgspec.json.decode((model / "config.json").read_bytes())
    most = int(described.get("text_config", described).get("max_position_embeddings", _MOST_LENGTH))
    return min(most, _MOST_LENGTH) if asked is None else min(asked, most)


def _head_plan(plan: RunPlan, device: str, report: Report) -> HeadPlan:
    batches = _batches(plan, report)
    settings = msgspec.structs.replace(plan.settings, batch_tasks=len(batches[0]))
    asked = settings.cluster.rollout
    facts = Facts(
        model=str(plan.model),
        run_dir=str(plan.run_dir),
        steps=len(batches),
        device=device,
        rollout=asked if asked != "auto" else ("vllm" if device == "cuda" else "cpu"),
        resume=plan.resumed,
        max_model_len=model_length(plan.model, settings.max_model_len),
    )
    done = _done(plan)
    path = plan.run_dir / _FILE
    fingerprint = {**plan.state.fingerprint, "ranks": settings.cluster.ranks, "strategy": settings.cluster.strategy}
    if plan.resumed and path.exists():
        require_same(msgspec.json.decode(path.read_bytes()), fingerprint)
    write_json(path, fingerprint)
    return HeadPlan(
        settings=settings,
        facts=facts,
        order=[task for batch in batches for task in batch],
        eval_tasks=plan.eval_tasks,
        overrides=overrides(settings, facts),
        done=done,
    )


def _batches(plan: RunPlan, report: Report) -> list[list[Task]]:
    """Every batch of the run: verl draws from a list that is as long as the run."""
    batches = list(islice(plan.batches(), plan.state.steps))
    whole = [batch for batch in batches if len(batch) == len(batches[0])]
    if not whole:
        raise DatasetError("there is no row to train on; expected at least one")
    if len(whole) < len(batches):
        report.warn(f"{len(batches) - len(whole)} batches at the end have fewer rows than the others, and are left out")
    return whole


def _done(plan: RunPlan) -> int:
    latest = plan.run_dir / "checkpoints" / _LATEST
    return int(latest.read_text()) if plan.resumed and latest.exists() else 0


def _waited(ray: Any, reference: Any, mailbox: Any, report: Report, stop: threading.Event, *, steps: int) -> HeadResult:
    told = False
    while True:
        ready, _ = ray.wait([reference], timeout=_WAIT)
        play(ray.get(mailbox.take.remote()), report, steps=steps)
        if ready:
            play(ray.get(mailbox.take.remote()), report, steps=steps)
            return _got(ray, reference, None)
        if stop.is_set() and not told:
            told = True
            mailbox.stop.remote()


def _give_back(ray: Any, mailbox: Any) -> None:
    """Remove what the head had set aside: Ray would keep it until the user's job ends."""
    try:
        groups = ray.get(mailbox.held.remote(), timeout=_STARTS)
    except ray_api().RayError:  # the cluster is gone, and they with it
        return
    for group in groups:
        ray.util.remove_placement_group(group)


def _got(ray: Any, reference: Any, timeout: float | None) -> Any:
    """What the head answered. Raises the error of ours that ended it, or an ``EngineError`` with its words."""
    try:
        return ray.get(reference, timeout=timeout)
    except ray_api().RayError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, (TrainerError, RunInterrupted)):
            raise cause from error
        words = f"{words_of(cause or error)}; Ray's logs have the whole of it.{last_words(error)}"
        raise EngineError(f"verl's trainer on Ray ended: {words}") from error


def _complete(model: Path, target: Path) -> None:
    """Config and tokenizer beside the weights that the head has written."""
    for file in model.iterdir():
        if file.is_file() and not file.name.endswith(_WEIGHTS) and not (target / file.name).exists():
            shutil.copyfile(file, target / file.name)
