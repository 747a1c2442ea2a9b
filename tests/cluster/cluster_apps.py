"""Apps that the runs on a simulated cluster train: one async, one whose calls are made by a child process."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from functools import cache

import openai

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


_PROGRAM = f"""
import sys
import openai
import rllm_trace as rllm
with rllm.attach_env():
    client = openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="unused")
    done = client.chat.completions.create(model={MODEL!r}, messages=[{{"role": "user", "content": sys.argv[1]}}], max_tokens=12)
    print(done.choices[0].message.content)
"""
