"""Apps that the runs on a simulated cluster train: one that looks where it is, one async, one whose calls a child makes, one that kills."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import openai
import ray
from app import add_up
from simulated import at_work

import rllm_trace as rllm

MODEL = "gpt-4o-mini"


@cache
def client() -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url="http://127.0.0.1:9/v1", api_key="unused")


def varied(output: str | None) -> float:
    """A reward that hardly two replies have in common: no group of them is without anything to learn."""
    return zlib.crc32((output or "").encode()) % 1000 / 1000


@rllm.workflow
def add_up_and_look(bill: str, folder: str) -> str:
    """The example's app, which writes down the node that it is on, and once those of the ranks and replicas that it trains."""
    seen = Path(folder) / "nodes"
    seen.mkdir(exist_ok=True)
    (seen / f"app-{ray.get_runtime_context().get_node_id()}").touch()
    if _first(Path(folder) / "looked"):
        parts = [name for name in ray.util.list_named_actors() if "WorkerDict" in name or "rllm_cpu_replica" in name]
        (seen / "parts.json").write_text(json.dumps({name: _in_actor(name, _node()) for name in sorted(parts)}))
    return add_up(bill)


@rllm.workflow
async def two_at_once(bill: str, folder: str, number: int) -> str:
    """An async app: two calls at the same time, each in an agent of its own."""

    async def ask(name: str) -> str:
        with rllm.agent(name):
            done = await client().chat.completions.create(model=MODEL, messages=[{"role": "user", "content": bill}], max_tokens=12)
            return done.choices[0].message.content or ""

    await asyncio.to_thread(_until_others_have_ended, Path(folder), number)
    answer = "".join(await asyncio.gather(ask("first"), ask("second")))
    await asyncio.to_thread(_until_others_are_cut_short, Path(folder), number)
    return answer


@rllm.workflow
def in_a_child(bill: str, folder: str, number: int) -> str:
    """An app whose calls are made by a program that it starts."""
    _until_others_have_ended(Path(folder), number)
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, bill], env=rllm.child_env(), capture_output=True, text=True, timeout=300, check=True
    )
    _until_others_are_cut_short(Path(folder), number)
    return done.stdout


# The first and second bill of a run are those of its first update. Before they end, the calls of the third and the fourth have begun, and
# every replica stands still after a few of their tokens: as it does for an update, which is what lets them go on.

_ROLLOUTS = 6
_TOKENS_BEFORE = 4


def _until_others_have_ended(folder: Path, number: int) -> None:
    if number in (2, 3):
        _wait(lambda: (folder / "released").exists())


def _until_others_are_cut_short(folder: Path, number: int) -> None:
    if number > 1:
        return
    (folder / f"asked-{uuid.uuid4().hex}").touch()
    _wait(lambda: len(list(folder.glob("asked-*"))) >= _ROLLOUTS)
    if _first(folder / "stopping"):
        replicas = [name for name in ray.util.list_named_actors() if "rllm_cpu_replica" in name]
        stops = [_in_actor(name, _stop_after(_TOKENS_BEFORE)) for name in replicas]
        (folder / "released").touch()
        _wait(lambda: any(_in_actor(name, _sampled()) >= stop for name, stop in zip(replicas, stops, strict=True)))
        (folder / "stopped").touch()
    _wait(lambda: (folder / "stopped").exists())


def _stop_after(tokens: int) -> Callable[[Any], int]:
    """In a replica: stand still after so many more tokens; gives how many it has sampled then."""

    def stop(replica: Any) -> int:
        replica._scheduler.pause(tokens)
        return int(replica._scheduler.stats.sampled_tokens) + tokens

    return stop


def _sampled() -> Callable[[Any], int]:
    return lambda replica: int(replica._scheduler.stats.sampled_tokens)


def _wait(holds: Callable[[], bool]) -> None:
    ends = time.monotonic() + 300
    while not holds():
        if time.monotonic() > ends:
            raise TimeoutError("what another rollout does first was not done within 300 s")
        time.sleep(0.05)


@rllm.workflow
def add_up_and_kill(bill: str, folder: str) -> str:
    """The example's app, which first does what ``folder/faults.json`` names for the number of steps that are done; each once."""
    for fault in json.loads((Path(folder) / "faults.json").read_text()).get(_steps_done(Path(folder) / "run"), []):
        if _first(Path(folder) / f"done-{fault}"):
            _do(fault, Path(folder))
    return add_up(bill)


def _do(fault: str, folder: Path) -> None:
    """``worker and app``: another app worker is killed, and this app hangs. ``fill``: the disk has room for rollouts, and for half a
    checkpoint. ``user SIGTERM``, ``user SIGKILL``: to the process that called ``fit``. Else the part that is killed."""
    match fault.split():
        case ["worker", "and", "app"]:
            os.kill(next(pid for title, pid in at_work().items() if "AppWorker" in title and pid != os.getpid()), signal.SIGKILL)
            threading.Event().wait()
        case ["fill"]:
            _fill(folder / "run")
        case ["user", name]:
            os.kill(int((folder / "user.pid").read_text()), signal.Signals[name])
            threading.Event().wait()  # so that the step cannot end before the run does
        case _:
            os.kill(_pid_of(fault), signal.SIGKILL)


def _steps_done(run_dir: Path) -> str:
    metrics = run_dir / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return str(max([0, *(int(json.loads(line)["step"]) for line in lines)]))


def _fill(run_dir: Path) -> None:
    checkpoint = sum(file.stat().st_size for file in (run_dir / "checkpoints").rglob("*") if file.is_file())
    room = os.statvfs(run_dir)
    with (run_dir / "ballast").open("wb") as file:
        file.write(bytes(room.f_bavail * room.f_frsize - checkpoint // 2))


def _first(mark: Path) -> bool:
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _pid_of(part: str) -> int:
    """The process of an actor that has a name, or else a class, with this in it; the last of them."""
    names = sorted(found for found in ray.util.list_named_actors() if part in found)
    if names:
        return int(_in_actor(names[-1], lambda _: os.getpid()))
    return max((title, pid) for title, pid in at_work().items() if part in title)[1]


def _in_actor(name: str, function: Callable[[Any], Any]) -> Any:
    return ray.get(ray.get_actor(name).__ray_call__.remote(function))


def _node() -> Callable[[Any], str]:
    return lambda _: str(ray.get_runtime_context().get_node_id())


_PROGRAM = f"""
import sys
import openai
import rllm_trace as rllm
with rllm.attach_env():
    client = openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="unused")
    done = client.chat.completions.create(model={MODEL!r}, messages=[{{"role": "user", "content": sys.argv[1]}}], max_tokens=12)
    print(done.choices[0].message.content)
"""
