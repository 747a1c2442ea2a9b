"""What an import loads and what it leaves alone, seen in a fresh interpreter."""

import json
import subprocess
import sys

import pytest

HEAVY_FOR_THE_SDK = [
    "torch",
    "pydantic",
    "httpx",
    "httpx2",
    "openai",
    "transformers",
    "ray",
    "verl",
    "vllm",
    "numpy",
    "pyarrow",
    "rllm_trainer",
]
HEAVY_FOR_THE_TRAINER = ["torch", "ray", "verl", "vllm", "transformers", "openai", "fastapi", "matplotlib"]


def after(code: str, expression: str) -> object:
    """The value of ``expression`` once ``code`` has run in a new interpreter."""
    program = f"import json, sys\n{code}\nprint(json.dumps({expression}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "module, heavy", [("rllm_trace", HEAVY_FOR_THE_SDK), ("rllm_trainer", HEAVY_FOR_THE_TRAINER)], ids=["rllm_trace", "rllm_trainer"]
)
def test_an_import_loads_none_of_the_heavy_packages(module: str, heavy: list[str]) -> None:
    """Importing a package loads no model library, client or server."""
    assert after(f"import {module}", f"sorted(set({heavy!r}) & set(sys.modules))") == []


def test_naming_fit_loads_no_model_library() -> None:
    """``from rllm_trainer import fit, evaluate`` leaves torch, verl, ray and transformers to the child processes."""
    assert after("from rllm_trainer import evaluate, fit", "sorted({'torch', 'verl', 'ray', 'transformers'} & set(sys.modules))") == []


def test_an_import_changes_nothing_of_the_process() -> None:
    """Importing both packages leaves environment, signal handlers, threads, logging, random state and the tracer provider as they were."""
    code = """
import logging, os, random, signal, threading
from opentelemetry import trace
random.seed(1)
def state():
    root = logging.getLogger()
    return [dict(os.environ), [str(signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)], threading.active_count(),
            [root.level, len(root.handlers)], str(random.getstate()), type(trace.get_tracer_provider()).__name__]
before = state()
import rllm_trace, rllm_trainer
"""
    assert after(code, "before == state()") is True


def test_an_import_patches_no_client() -> None:
    """The OpenAI classes are as they were after the import; they are patched when the first workflow starts."""
    code = "import openai; before = openai.OpenAI.request; import rllm_trace"
    assert after(code, "openai.OpenAI.request is before") is True
