"""Forks, exits and interpreters: what can be kept is kept, what cannot is counted."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

COMMON = """
import multiprocessing, os, sys
import rllm_trace as rllm
from rllm_trace._calls import open_call
from rllm_trace._calldata import CallData
from rllm_trace.exporters import JSONLExporter, read_episodes

def call(text="hi"):
    opened = open_call(operation="chat", requested_model="m")
    if opened is not None:
        opened.end(CallData(operation="chat", model="m", requested_model="m", request=b'{"messages":[]}'))

@rllm.workflow
def app(n):
    call()
    return n
"""


def run(code: str, *args: str, environment: dict[str, str] | None = None) -> str:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", COMMON + code, *args]
    ran = subprocess.run(command, env={**os.environ, **(environment or {})}, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_what_was_recorded_is_delivered_at_exit(tmp_path: Any) -> None:
    """Without a flush, also with an episode that still runs, whose record says so."""
    code = """
rllm.configure(exporters=[JSONLExporter(sys.argv[1])])
app(1)

@rllm.workflow
def steps():
    yield 1
running = steps()
next(running)
import atexit
"""
    run(code, str(tmp_path / "e.jsonl"))
    from rllm_trace.exporters import read_episodes

    assert [(e.workflow, e.termination) for e in read_episodes(tmp_path / "e.jsonl")] == [("app", "completed"), ("steps", "timeout")]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_starts_from_nothing_and_delivers_its_own(tmp_path: Any) -> None:
    """The parent's episodes stay the parent's; the child's writer, counters and exporters are its own; nothing hangs."""
    code = """
rllm.configure(exporters=[JSONLExporter(sys.argv[1] + "/%d.jsonl" % 0)])
app(1)
rllm.flush()

def child(path):
    assert rllm.stats()["recorded"] == {}
    rllm.configure(exporters=[JSONLExporter(path)])
    app(2)

with rllm.collect() as episodes:
    app(3)
    process = multiprocessing.get_context("fork").Process(target=child, args=(sys.argv[1] + "/1.jsonl",))
    process.start()
    process.join(30)
    assert process.exitcode == 0
    app(4)
assert [e.output for e in episodes] == [3, 4], episodes
rllm.flush()
print([e.output for e in read_episodes(sys.argv[1] + "/0.jsonl")], [e.output for e in read_episodes(sys.argv[1] + "/1.jsonl")])
"""
    assert run(code, str(tmp_path)) == "[1, 3, 4] [2]\n"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_inside_a_workflow_hangs_nothing_and_counts_its_calls() -> None:
    """The child cannot add to the parent's record: its calls are counted, and its headers still name the episode."""
    code = """
@rllm.workflow
def forks():
    call()
    pid = os.fork()
    if pid == 0:
        call()
        app(5)
        sys.stdout.write("%s %s\\n" % (rllm.stats()["orphan"], rllm.headers()["x-rllm-parent"][:3]))
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    return "parent"

with rllm.collect() as episodes:
    forks()
print([(e.output, len(e.calls)) for e in episodes])
"""
    assert run(code) == "{'call for another process': 2} 00-\n[('parent', 1)]\n"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_draws_ids_of_its_own() -> None:
    """Ids that the parent had ready are not used twice."""
    code = """
from rllm_trace._spans import sources
sources.span_id()
pid = os.fork()
if pid == 0:
    print(*(sources.span_id() for _ in range(300)), flush=True)
    os._exit(0)
os.waitpid(pid, 0)
print(*(sources.span_id() for _ in range(300)))
"""
    drawn = run(code).split()
    assert (len(drawn), len(set(drawn))) == (600, 600)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_worker_of_a_configured_process_exports_what_it_records(tmp_path: Any) -> None:
    """As servers do that load the app before they fork; ``multiprocessing`` children leave without ``atexit``."""
    code = """
class Lines:
    wishes = None
    def __init__(self, path): self.path = path
    def export(self, spans):
        from opentelemetry.sdk.trace.export import SpanExportResult
        with open(self.path, "a") as f:
            f.writelines("%d %s\\n" % (os.getpid() != PARENT, s.name) for s in spans)
        return SpanExportResult.SUCCESS
    def shutdown(self): pass

del Lines.wishes
PARENT = os.getpid()
rllm.configure(exporters=[Lines(sys.argv[1])])
app(1)
assert rllm.flush()
process = multiprocessing.get_context("fork").Process(target=app, args=(2,))
process.start(); process.join(30)
assert process.exitcode == 0
"""
    run(code, str(tmp_path / "lines"))
    assert sorted((tmp_path / "lines").read_text().splitlines()) == [
        "0 chat m",
        "0 invoke_workflow app",
        "1 chat m",
        "1 invoke_workflow app",
    ]


IMPORT = """
import sys, threading
import rllm_trace as rllm
heavy = {"torch", "pydantic", "httpx", "httpx2", "openai", "numpy", "opentelemetry", "transformers", "ray"}

def check():
    assert not heavy & set(sys.modules), heavy & set(sys.modules)
    assert threading.active_count() == 1
    assert not hasattr(threading.Thread.start, "__wrapped__")

check()
assert rllm.workflow(lambda: 1)() == 1
check()
"""


def test_importing_loads_nothing_heavy_and_patches_nothing() -> None:
    """Neither a client nor a model library, nor OpenTelemetry; no thread, no wrapped method. Running undisturbed code changes nothing."""
    ran = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
