"""The direct engine with its ranks on Ray: our own loop, credit and server, over as many devices as the cluster has.

For rules of credit and losses that verl's trainer cannot express. The ranks are the engine's own, behind the same calls; the first one
is on the user's node, because weights go from there to the server through shared memory. The run folder must be seen by all nodes.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import msgspec

from rllm_trainer import _child
from rllm_trainer._child import Child, ChildDied, ChildError
from rllm_trainer.cluster.last_words import last_words, words_of
from rllm_trainer.cluster.loading import ray_api
from rllm_trainer.cluster.rank import RankActor
from rllm_trainer.cluster.ray_session import device_of, here, on_ray, require_room
from rllm_trainer.config import Settings
from rllm_trainer.engine.memory import free_memory, model_shape, with_micro_batch
from rllm_trainer.engine.ranks import DEATH_SEEN
from rllm_trainer.engine.verl import VerlEngine
from rllm_trainer.engine.verl_settings import Objective, child_settings, require_supported
from rllm_trainer.exceptions import EngineError

__all__ = ["RayEngine", "RayRank"]

_CALL = 7200.0


class RayRank:
    """A rank's actor, spoken to like a child process."""

    def __init__(self, handle: Any, name: str) -> None:
        self._handle: Any = handle
        self.name = name
        self.ready: dict[str, Any] = {}

    def begin(self, config: Mapping[str, Any]) -> Any:
        """Send the configuration; the reference of its answer."""
        return self._handle.start.remote(_child._encoder.encode(config))

    def started(self, answer: bytes) -> None:
        """What it said when it was ready."""
        self.ready = msgspec.msgpack.decode(answer)

    def call(self, method: str, payload: Mapping[str, Any], timeout: float) -> dict[str, Any]:
        """One call. Raises as ``Child.call``; of a rank that died it says which process on which node, by what, and how its log ends."""
        if self._handle is None:
            raise ChildDied(f"{self.name} was closed; {method!r} was not sent")
        api = ray_api()
        try:
            answer = api.ray.get(self._handle.call.remote(method, _child._encoder.encode(payload)), timeout=timeout)
        except api.GetTimeoutError as error:
            raise TimeoutError(f"{self.name} did not answer {method!r} within {timeout:g} s") from error
        except api.RayError as error:
            raise _verdict(self.name, error) from error
        return msgspec.msgpack.decode(answer)

    def close(self) -> None:
        """End it; safe to call twice, also where Ray has gone since."""
        handle, self._handle = self._handle, None
        if handle is not None:
            ray_api().ray.kill(handle)


class RayEngine(VerlEngine):
    """``VerlEngine``, its ranks on Ray."""

    _open: ExitStack

    @classmethod
    def start_on_ray(
        cls, model_path: Path, settings: Settings, run_dir: Path, *, objective: Objective = "policy", start_timeout: float = 900.0
    ) -> RayEngine:
        """Attach to Ray or start it, start the ranks, and load the model on each.

        Raises:
            SettingError: a setting that verl, this machine or Ray cannot honour.
            EngineError: the cluster is too small, or a rank did not come up.
        """
        require_supported(settings)
        settings = with_micro_batch(model_shape(model_path), settings, available=free_memory())
        with ExitStack() as open_:
            ray = open_.enter_context(on_ray(settings.ray, settings.cluster))
            device = device_of(ray, settings.cluster)
            require_room(ray, settings.cluster, device, direct=True)
            meeting = Path(tempfile.mkdtemp(prefix=".ranks-", dir=run_dir))
            open_.callback(shutil.rmtree, meeting, ignore_errors=True)
            ranks = _ranks(ray, settings, device, open_)
            common = {
                **child_settings(settings, model_path, objective=objective),
                "ranks": len(ranks),
                "device": device,
                "meeting_file": str(meeting / "store"),
                "several_nodes": len([node for node in ray.nodes() if node["Alive"]]) > 1,
            }
            asked = {rank.begin({**common, "rank": number}): rank for number, rank in enumerate(ranks)}
            _come_up(ray, asked, start_timeout)
            engine = cls(cast("list[Child]", ranks), settings, model_path, run_dir, _CALL)
            engine._open = open_.pop_all()
        return engine

    def close(self) -> None:
        """End the ranks, and Ray where it was started for them; safe to call twice."""
        super().close()
        self._open.close()


def _come_up(ray: Any, asked: dict[Any, RayRank], timeout: float) -> None:
    """Wait for every rank. Raises ``EngineError`` for one that died, else for one that failed: its peers fail with it; or for the time."""
    ends = time.monotonic() + timeout
    failed: ChildDied | ChildError | None = None
    while asked and not isinstance(failed, ChildDied):
        ready, _ = ray.wait(list(asked), timeout=max(0.0, ends - time.monotonic()))
        if not ready:
            break
        rank = asked.pop(ready[0])
        try:
            rank.started(ray.get(ready[0]))
        except ray_api().RayError as error:
            failed = failed or _verdict(rank.name, error)
            if not isinstance(failed, ChildDied):
                ends = min(ends, time.monotonic() + DEATH_SEEN)
    if failed is not None:
        raise EngineError(f"the engine did not come up: {failed}") from failed
    if asked:
        raise EngineError(
            f"{', '.join(rank.name for rank in asked.values())} did not come up within {timeout:g} s: Ray has started no process for it, "
            "or it still loads the model or waits for the others; `ray status` says what Ray waits for, Ray's logs what the ranks do"
        )


def _verdict(name: str, error: Any) -> ChildDied | ChildError:
    """What became of a rank, by Ray's error."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, BaseException):
        return ChildError(f"{name}: {cause}", type(cause).__name__)
    return ChildDied(f"{name} has ended: {words_of(error)}.{last_words(error)}")


def _ranks(ray: Any, settings: Settings, device: str, open_: ExitStack) -> list[RayRank]:
    """Actors with a device each, the first on this node, the others spread."""
    found: list[RayRank] = []
    for number in range(settings.cluster.ranks):
        placed = here(ray) if number == 0 else {"scheduling_strategy": "SPREAD"}
        actor = ray.remote(RankActor).options(num_cpus=1, num_gpus=0 if device == "cpu" else 1, **placed)
        handle = actor.remote()
        open_.callback(ray.kill, handle)
        found.append(RayRank(handle, f"engine rank {number} on Ray"))
    return found
