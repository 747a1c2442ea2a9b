"""A planned run in, the same run done by verl's trainer on Ray out: this process starts actors, prints what they report, and waits.

It imports Ray, never torch or verl. The app and its rewards go to the workers as Ray carries functions: by name where they can be
imported there, else by value.
"""

from __future__ import annotations

import math
import shutil
import sys
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from rllm_trainer.checkpoint import require_same, write_json
from rllm_trainer.cluster.app_worker import AppWorker, packed_app
from rllm_trainer.cluster.dotted import dotted
from rllm_trainer.cluster.events import Mailbox, play
from rllm_trainer.cluster.head import Head, HeadPlan, HeadResult
from rllm_trainer.cluster.last_words import last_words, words_of
from rllm_trainer.cluster.layout import ClusterLayout
from rllm_trainer.cluster.layout_rules import require_device, require_micro_batch
from rllm_trainer.cluster.loading import ray_api
from rllm_trainer.cluster.ray_session import device_of, here, on_ray, require_alone, require_room
from rllm_trainer.cluster.rows import RowFeed, packed_rows
from rllm_trainer.cluster.verl_overrides import Facts, overrides
from rllm_trainer.exceptions import EngineError, SettingError, TrainerError
from rllm_trainer.plan import Ask, RunPlan
from rllm_trainer.report import Report
from rllm_trainer.rollout.dataset import FixedTasks
from rllm_trainer.rollout.runner import RunInterrupted

__all__ = ["app_workers", "model_length", "run_on_cluster"]

_FILE = "cluster.json"
_CONFIG = "verl.yaml"
_STARTS = 600.0
_WAIT = 0.5
_OWN_END = 20.0
"""Seconds in which the head ends once something has died that it needs."""
_ANSWER = 300.0
"""Seconds in which an actor that is up answers what takes it no time."""
_MAILBOX = "the run's mailbox"
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
    longest = model_length(plan.model, settings.max_model_len)
    require_micro_batch(settings.micro_batch_tokens, longest, dict(dotted(settings.verl)))
    steps = _steps(plan, report)
    feed = RowFeed(islice(plan.batches(), steps), report.warn, stop)
    with ExitStack() as open_:
        with report.doing("Ray attached to"):
            ray = open_.enter_context(on_ray(settings.ray, settings.cluster))
        device = device_of(ray, settings.cluster)
        require_device(settings.cluster, device)
        require_room(ray, settings.cluster, device)
        require_alone(ray)
        head_plan = _head_plan(plan, device, feed.size, steps, longest)
        mailbox = ray.remote(Mailbox).options(num_cpus=0, **here(ray)).remote()
        open_.callback(ray.kill, mailbox)
        held: list[Any] = []
        open_.callback(_give_back, ray, mailbox, held)
        environment = _ENVIRONMENT | (_CPU_ENVIRONMENT if device == "cpu" else _CUDA_ENVIRONMENT)
        head = ray.remote(Head).options(num_cpus=1, runtime_env={"env_vars": environment}, **here(ray)).remote(mailbox)
        open_.callback(ray.kill, head)
        with report.doing("verl's configuration composed"):
            (plan.run_dir / _CONFIG).write_text(_got(ray, head.check.remote(head_plan), _STARTS))
        workers = open_.enter_context(app_workers(ray, ask.app, plan.rewards, settings.cluster, settings.concurrency))
        result = _waited(ray, head.run.remote(head_plan, workers), mailbox, held, feed, report, stop, steps=steps)
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
    nodes = sorted(node["NodeID"] for node in ray.nodes() if node["Alive"])
    actor = ray.remote(AppWorker)
    options = {"num_cpus": layout.app_cpus, "max_concurrency": concurrency + 64, "max_restarts": -1}
    packed = packed_app(app, rewards)
    workers = [
        actor.options(**options, scheduling_strategy=_place(layout, nodes, number)).remote(packed, sys.path, several_nodes=len(nodes) > 1)
        for number in range(layout.app_workers or len(nodes))
    ]
    try:
        try:
            ray.get([worker.place.remote() for worker in workers], timeout=_STARTS)
        except ray_api().GetTimeoutError as error:
            raise EngineError(
                f"the app's {len(workers)} workers did not all come up within {_STARTS:g} s: Ray has started no process for some, or the "
                f"app's module takes that long to load; each sets aside {layout.app_cpus:g} CPUs, see cluster={{'app_cpus': ...}}"
            ) from error
        except Exception as error:  # Ray wraps whatever the worker raised
            raise SettingError(
                f"the app could not be loaded in a worker of Ray: {words_of(error)}; what it imports must be there on every node, "
                "as with ray={'runtime_env': {'working_dir': '.'}}"
            ) from error
        yield workers
    finally:
        for worker in workers:
            ray.kill(worker)


def _place(layout: ClusterLayout, nodes: Sequence[str], number: int) -> Any:
    """Ray spreads workers by the CPUs that they set aside; those that set none aside it would put on one node."""
    return "SPREAD" if layout.app_cpus else ray_api().NodeAffinity(node_id=nodes[number % len(nodes)], soft=False)


def model_length(model: Path, asked: int | None) -> int:
    """Most tokens of prompt and reply together."""
    described = msgspec.json.decode((model / "config.json").read_bytes())
    most = int(described.get("text_config", described).get("max_position_embeddings", _MOST_LENGTH))
    return min(most, _MOST_LENGTH) if asked is None else min(asked, most)


def _head_plan(plan: RunPlan, device: str, batch_tasks: int, steps: int | None, longest: int) -> HeadPlan:
    settings = msgspec.structs.replace(plan.settings, batch_tasks=batch_tasks)
    asked = settings.cluster.rollout
    facts = Facts(
        model=str(plan.model),
        run_dir=str(plan.run_dir),
        steps=steps,
        device=device,
        rollout=asked if asked != "auto" else ("vllm" if device == "cuda" else "cpu"),
        resume=plan.resumed,
        max_model_len=longest,
    )
    path = plan.run_dir / _FILE
    fingerprint = {**plan.state.fingerprint, "ranks": settings.cluster.ranks, "strategy": settings.cluster.strategy}
    if plan.resumed and path.exists():
        require_same(msgspec.json.decode(path.read_bytes()), fingerprint)
    write_json(path, fingerprint)
    return HeadPlan(
        settings=settings,
        facts=facts,
        eval_tasks=plan.eval_tasks,
        overrides=overrides(settings, facts),
        done=plan.done,
    )


def _steps(plan: RunPlan, report: Report) -> int | None:
    """Whole batches of the run: verl takes no other; None: nobody knows how many there are."""
    settings, tasks, steps = plan.settings, plan.tasks, plan.state.steps
    if steps is None or settings.epochs is None or not isinstance(tasks, FixedTasks):
        return steps
    whole = settings.epochs * len(tasks) // min(settings.batch_tasks, len(tasks))
    if whole < steps:
        report.warn("the last batch has fewer rows than the others, and is left out: verl takes batches of one size")
    return whole


def _waited(
    ray: Any, reference: Any, mailbox: Any, held: list[Any], feed: RowFeed, report: Report, stop: threading.Event, *, steps: int | None
) -> HeadResult:
    """Print, draw and hand on what the head asks for, until it is done. What the user's iterable raises is raised once a step is saved.

    Where something has died that the run needs, the head has so many seconds to end: verl may wait for it without end.
    """
    told, failed = False, None
    died, over_at = None, math.inf
    wish = mailbox.wanted.remote(0)
    while True:
        ready, _ = ray.wait([reference] if failed else [wish, reference], timeout=_WAIT)
        said = play(_got(ray, mailbox.take.remote(), _ANSWER, of=_MAILBOX), report, steps=steps)
        if died is None and said is not None:
            died, over_at = said, time.monotonic() + _OWN_END
        held[:] = _got(ray, mailbox.held.remote(), _ANSWER, of=_MAILBOX)
        if reference in ready:
            play(_got(ray, mailbox.take.remote(), _ANSWER, of=_MAILBOX), report, steps=steps)
            if failed is not None:
                raise failed
            return _got(ray, reference, None)
        if died is not None and time.monotonic() > over_at:
            raise died
        if wish in ready:
            wanted = _got(ray, wish, _ANSWER, of=_MAILBOX)
            try:
                rows, over = feed.draw(wanted)
                packed = packed_rows(rows)
            except Exception as error:  # noqa: BLE001 - whatever the user's iterable raises
                failed = error
            else:
                mailbox.give.remote(packed, over)
                wish = mailbox.wanted.remote(wanted)
        if (stop.is_set() or failed) and not told:
            told = True
            mailbox.stop.remote()


def _give_back(ray: Any, mailbox: Any, held: list[Any]) -> None:
    """Remove what the head had set aside: Ray would keep it until the user's job ends. ``held``: what was known of it while it ran."""
    try:
        groups = ray.get(mailbox.held.remote(), timeout=_STARTS)
    except ray_api().RayActorError:
        groups = held
    except ray_api().RayError:  # the cluster is gone, and they with it
        return
    for group in groups:
        ray.util.remove_placement_group(group)


def _got(ray: Any, reference: Any, timeout: float | None, *, of: str = "verl's trainer") -> Any:
    """What an actor answered. Raises the error of ours that ended it, or an ``EngineError`` with its words."""
    try:
        return ray.get(reference, timeout=timeout)
    except ray_api().GetTimeoutError as error:
        raise EngineError(
            f"{of} on Ray did not answer within {timeout:g} s: Ray has started no process for it, or that does nothing; "
            "`ray status` and `ray list actors` say which"
        ) from error
    except ray_api().RayError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, (TrainerError, RunInterrupted)):
            raise cause from error
        words = f"{words_of(cause or error)}; Ray's logs have the whole of it.{last_words(error)}"
        raise EngineError(f"{of} on Ray ended: {words}") from error


def _complete(model: Path, target: Path) -> None:
    """Config and tokenizer beside the weights that the head has written."""
    for file in model.iterdir():
        if file.is_file() and not file.name.endswith(_WEIGHTS) and not (target / file.name).exists():
            shutil.copyfile(file, target / file.name)
