"""Apps that the runs on a simulated cluster train: one async, one whose calls are made by a child process, one that kills."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

import openai
import ray
from app import add_up

import rllm_trace as rllm

MODEL = "gpt-4o-mini"


@cache
def client() -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url="http://127.0.0.1:9/v1", api_key="unused")


@rllm.workflow
async def two_at_once(bill: str) -> str:
    """An async app: two calls at the same time, each in an agent of its own."""

    async def ask(name: str) -> str:
        with rllm.agent(name):
            done = await client().chat.completions.create(model=MODEL, messages=[{"role": "user", "content": bill}], max_tokens=12)
            return done.choices[0].message.content or ""

    return "".join(await asyncio.gather(ask("first"), ask("second")))


@rllm.workflow
def in_a_child(bill: str) -> str:
    """An app whose calls are made by a program that it starts."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, bill], env=rllm.child_env(), capture_output=True, text=True, timeout=300, check=True
    )
    return done.stdout


@rllm.workflow
def add_up_and_kill(bill: str, folder: str) -> str:
    """The example's app, which first kills what ``folder/kills.json`` names for the number of checkpoints that are there; each once."""
    latest = Path(folder) / "run" / "checkpoints" / "latest_checkpointed_iteration.txt"
    done = latest.read_text() if latest.exists() else "0"
    victim = json.loads((Path(folder) / "kills.json").read_text()).get(done)
    if victim is not None and _first(Path(folder) / f"killed-{victim}"):
        os.kill(os.getpid() if victim == "app worker" else _pid_of(victim), signal.SIGKILL)
    return add_up(bill)


def _first(mark: Path) -> bool:
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _pid_of(part: str) -> int:
    """The process of an actor that verl or its replica has given a name with this in it; the last of them."""
    name = sorted(found for found in ray.util.list_named_actors() if part in found)[-1]
    return ray.get(ray.get_actor(name).__ray_call__.remote(lambda _: os.getpid()))


_PROGRAM = f"""
import sys
import openai
import rllm_trace as rllm
with rllm.attach_env():
    client = openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="unused")
    done = client.chat.completions.create(model={MODEL!r}, messages=[{{"role": "user", "content": sys.argv[1]}}], max_tokens=12)
    print(done.choices[0].message.content)
"""
