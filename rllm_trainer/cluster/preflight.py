"""Is this cluster fit for a run? Asked of every node before the first step: ``python -m rllm_trainer.cluster.preflight --nodes 2 ...``.

A node is asked by a task of its own. What is checked is what would otherwise fail an hour in: versions that differ, a model or run
folder that a node cannot see, too little shared memory, ports that do not reach each other, fewer devices than the layout needs. Every
check has its time, and a node that says nothing in it is a finding like any other.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from rllm_trainer.cluster.last_words import words_of
from rllm_trainer.cluster.layout import ClusterLayout
from rllm_trainer.cluster.layout_rules import require_device, require_sizes
from rllm_trainer.cluster.loading import ray_api
from rllm_trainer.cluster.ray_session import device_of, on_ray, require_alone, require_room
from rllm_trainer.config import make_settings
from rllm_trainer.exceptions import EngineError, TrainerError

__all__ = ["Finding", "NodeFacts", "check_cluster", "findings", "look"]

_WHOLE = "all"
"""Host of a finding about the cluster."""
PACKAGES = ("rllm-trace", "verl", "torch", "transformers", "ray", "tensordict", "TransferQueue", "openai")
SHARED_MEMORY = 2 * 2**30
"""Bytes of ``/dev/shm`` that weights and Ray's store want at least."""
DISK = 10 * 2**30
_REACH = 5.0
_MOST_AT_ONCE = 64
"""Hosts that a node tries to reach at the same time."""
_ASK = 60.0
"""Seconds that a node has to answer."""


class NodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What one node says of itself."""

    node_id: str
    host: str
    gpus: int
    python: str
    versions: dict[str, str]
    shared_memory: int
    """Free bytes of ``/dev/shm``."""
    disk: int
    """Free bytes where the run folder is."""
    sees_model: bool
    sees_mark: bool
    """The run folder is the same one for all nodes."""
    unreachable: list[str]
    """Hosts of the cluster that this node could not connect to."""
    clock: float
    """Unix seconds."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong, and what to do."""

    host: str
    sentence: str


def findings(facts: Sequence[NodeFacts], layout: ClusterLayout, *, asked_at: float, answered_at: float) -> list[Finding]:
    """What is wrong with these nodes for that layout. Pure."""
    found: list[Finding] = []

    def say(host: str, sentence: str) -> None:
        found.append(Finding(host=host, sentence=sentence))

    if not facts:
        return found
    wanted = layout.ranks + (layout.rollout_nodes or 0) * (layout.rollout_gpus_per_node or 0)
    fitting = sum(one.gpus >= layout.gpus_per_node for one in facts)
    if fitting < layout.nodes:
        say(
            _WHOLE, f"{fitting} nodes have {layout.gpus_per_node} GPUs or more, and the layout needs {layout.nodes}; change cluster={{...}}"
        )
    if sum(one.gpus for one in facts) < wanted:
        say(_WHOLE, f"the cluster has {sum(one.gpus for one in facts)} GPUs, and the layout needs {wanted}")
    first = facts[0]
    for one in facts:
        for name, version in one.versions.items():
            if version != first.versions.get(name):
                say(one.host, f"{name} is {version} here and {first.versions.get(name)} on {first.host}; install the same on all nodes")
        if one.python != first.python:
            say(one.host, f"Python is {one.python} here and {first.python} on {first.host}; Ray needs the same")
        if one.shared_memory < SHARED_MEMORY:
            say(
                one.host,
                f"/dev/shm has {one.shared_memory / 2**30:.1f} GiB free; weights pass through it: give the container --shm-size=16g",
            )
        if one.disk < DISK:
            say(one.host, f"the run folder's disk has {one.disk / 2**30:.1f} GiB free; checkpoints need more")
        if not one.sees_model:
            say(
                one.host,
                "the model's folder cannot be read here; put it on a file system that all nodes share, or copy it to the same path",
            )
        if not one.sees_mark:
            say(one.host, "the run folder is not the one that this process sees; choose output_dir on a file system that all nodes share")
        for host in one.unreachable:
            say(one.host, f"{host} cannot be reached from here; open the ports between the nodes")
        if not asked_at - 30 <= one.clock <= answered_at + 30:
            say(one.host, "the clock is off by more than 30 s; set it, or spans of one episode lie apart")
    return found


def look(node_id: str, model: str, run_dir: str, mark: str, hosts: Sequence[tuple[str, int]], gpus: int) -> NodeFacts:
    """The node's own answer; runs there."""
    with ThreadPoolExecutor(_MOST_AT_ONCE) as pool:
        reached = list(pool.map(_reaches, hosts))
    unreachable = [host for (host, _), there in zip(hosts, reached, strict=True) if not there]
    folder = Path(run_dir)
    return NodeFacts(
        node_id=node_id,
        host=socket.gethostname(),
        gpus=gpus,
        python=sys.version.split()[0],
        versions={name: _version(name) for name in PACKAGES},
        shared_memory=shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0,
        disk=shutil.disk_usage(folder if folder.exists() else "/").free,
        sees_model=(Path(model) / "config.json").is_file(),
        sees_mark=(folder / mark).is_file(),
        unreachable=unreachable,
        clock=time.time(),
    )


def check_cluster(ray: Any, layout: ClusterLayout, *, model: Path, run_dir: Path) -> tuple[list[NodeFacts], list[Finding]]:
    """Ask every node of a running cluster, and the cluster as a whole what a run would ask of it.

    Raises:
        SettingError: the layout cannot work out on any cluster.
        EngineError: the run folder cannot be made, or not be written to.
    """
    mode = layout.mode or ("sync" if layout.rollout_nodes is None else "separate_async")
    require_sizes(layout, mode, {})
    device = device_of(ray, layout)
    require_device(layout, device)
    nodes = [node for node in ray.nodes() if node["Alive"]]
    hosts = [(str(node["NodeManagerAddress"]), int(node["NodeManagerPort"])) for node in nodes]
    mark = run_dir / f".preflight-{secrets.token_hex(8)}"
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        mark.touch()
    except OSError as error:
        raise EngineError(f"the run folder {run_dir} cannot be written to: {error.strerror}; choose another --run-dir") from error
    asked_at = time.time()
    try:
        asked: dict[Any, str] = {}
        for node in nodes:
            placed = ray_api().NodeAffinity(node_id=node["NodeID"], soft=False)
            task = ray.remote(look).options(num_cpus=0, scheduling_strategy=placed, max_retries=0)
            gpus = int(node["Resources"].get("GPU", 0))
            asked[task.remote(node["NodeID"], str(model), str(run_dir), mark.name, hosts, gpus)] = str(node["NodeManagerAddress"])
        facts, silent = _answers(ray, asked)
    finally:
        mark.unlink(missing_ok=True)
    found = findings(facts, layout, asked_at=asked_at, answered_at=time.time())
    whole = [] if any(one.host == _WHOLE for one in found) else _as_a_whole(ray, layout, device)
    return facts, [*silent, *found, *whole]


def _answers(ray: Any, asked: dict[Any, str]) -> tuple[list[NodeFacts], list[Finding]]:
    """What each node says, and a finding for each that says nothing."""
    facts: list[NodeFacts] = []
    silent: list[Finding] = []
    ready, late = ray.wait(list(asked), num_returns=len(asked), timeout=_ASK)
    for reference in ready:
        try:
            facts.append(ray.get(reference))
        except ray_api().RayError as error:
            words = words_of(getattr(error, "cause", None) or error)
            silent.append(
                Finding(host=asked[reference], sentence=f"it could not look at itself: {words}; install the same packages on all nodes")
            )
    for reference in late:
        ray.cancel(reference, force=True)
        sentence = f"it did not answer within {_ASK:g} s: Ray starts no process there, or a file system hangs; see `ray status`"
        silent.append(Finding(host=asked[reference], sentence=sentence))
    return facts, silent


def _as_a_whole(ray: Any, layout: ClusterLayout, device: str) -> list[Finding]:
    """What a run would be refused for at its start."""
    found: list[Finding] = []
    for check in (partial(require_room, ray, layout, device), partial(require_alone, ray)):
        try:
            check()
        except EngineError as error:
            found.append(Finding(host=_WHOLE, sentence=str(error)))
    return found


def main() -> int:
    """Prints what each node has and what is wrong; 1 where anything is."""
    parser = argparse.ArgumentParser(prog="python -m rllm_trainer.cluster.preflight", description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--layout", default="{}", help="as cluster={...}, in JSON")
    parser.add_argument("--address", default="auto", help="of the running cluster")
    asked = parser.parse_args()
    try:
        layout = make_settings({"engine": "cluster", "cluster": msgspec.json.decode(asked.layout)}).cluster
        with on_ray({"address": asked.address}, layout) as ray:
            facts, wrong = check_cluster(ray, layout, model=asked.model, run_dir=asked.run_dir.absolute())
    except msgspec.DecodeError as error:
        print(f'got --layout {asked.layout!r}, which is no JSON ({error}); expected {{"nodes": 2}} or the like', file=sys.stderr)  # noqa: T201
        return 1
    except TrainerError as error:
        print(error, file=sys.stderr)  # noqa: T201 - a command's own words
        return 1
    for one in facts:
        versions = ", ".join(f"{name} {version}" for name, version in one.versions.items())
        print(f"{one.host}: {one.gpus} GPUs, {one.shared_memory / 2**30:.1f} GiB shared memory free; {versions}")  # noqa: T201
    for finding in wrong:
        print(f"WRONG {finding.host}: {finding.sentence}")  # noqa: T201
    print("the cluster is fit for the run" if not wrong else f"{len(wrong)} to mend before the run")  # noqa: T201
    return 1 if wrong else 0


def _reaches(host: tuple[str, int]) -> bool:
    try:
        socket.create_connection(host, timeout=_REACH).close()
    except OSError:
        return False
    return True


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    # By its name: what Ray carries to the nodes must be of a module that they can import, and __main__ is none.
    from rllm_trainer.cluster import preflight

    sys.exit(preflight.main())
