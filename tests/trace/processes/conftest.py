"""What these tests share: a model server whose ids say what was asked, and an app in a file, run by an interpreter of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import rllm_trace as rllm
from rllm_trace._guard import counters
from rllm_trace.testing import Reply, ReplyChoice, ScriptedServer

APP = '''
import json, multiprocessing, os, subprocess, sys, threading, time
import openai
import rllm_trace as rllm

def client():
    return openai.OpenAI(base_url=os.environ["APP_MODEL"], api_key="scripted", max_retries=0, timeout=300)

def ask(n):
    """One call to the model about the number n; gives n back."""
    return int(client().chat.completions.create(model="m", messages=[{"role": "user", "content": str(n)}]).choices[0].message.content)

def show(episodes):
    """What the collecting process has: for each episode its output, its calls by what they asked, and whether each is whole."""
    found = []
    for e in episodes:
        calls = []
        for c in e.calls:
            n = int(c.messages[0]["content"])
            whole = c.exact and c.trainable and list(c.prompt_token_ids) == [1, n] and list(c.choices[0].token_ids) == [n, 2]
            whole = whole and list(c.choices[0].logprobs) == [-n / 1024, -0.5]
            calls.append(n if whole else ["broken", n, c.inexact_reason, c.late])
        found.append([e.output, sorted(calls, key=str), e.termination])
    print(json.dumps(found, sort_keys=True))
'''


def answer(exchange: Any) -> Reply:
    """Ids and logprobs that say which number was asked about."""
    n = int(re.findall(r"\d+", exchange.body["messages"][-1]["content"])[-1])
    choice = ReplyChoice(text=str(n), token_ids=[n, 2], logprobs=[-n / 1024, -0.5])
    return Reply(choices=[choice], prompt_token_ids=[1, n])


@pytest.fixture(autouse=True)
def quiet_process() -> Iterator[None]:
    """Nothing recorded, configured or counted is left over from another test."""
    counters.clear()
    yield
    rllm.shutdown(timeout=5)
    rllm.configure()
    counters.clear()


@pytest.fixture
def model() -> Iterator[ScriptedServer]:
    """Answers a number with the number."""
    with ScriptedServer(answer) as server:
        yield server


@pytest.fixture
def app(tmp_path: Path, model: ScriptedServer) -> Callable[..., str]:
    """Runs the code, after the app's common part, as a file of its own; gives what it printed."""

    def run(code: str, *args: str, timeout: float = 240) -> str:
        path = tmp_path / "app_under_test.py"
        path.write_text(APP + code)
        environment = {**os.environ, "APP_MODEL": model.base_url, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
        command = [sys.executable, "-W", "ignore::DeprecationWarning", str(path), *args]
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)
        assert ran.returncode == 0, ran.stderr[-4000:]
        return ran.stdout

    return run
