"""A peer's name in, the Python of an environment that has it and openai out; made where it is missing, one for each peer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from capture_cost.subjects import PEERS

__all__ = ["python_of", "versions_of"]

_DONE = ".done"


def python_of(peer: str, folder: Path) -> Path:
    """Raises CalledProcessError if the packages cannot be had."""
    home = folder / peer
    python = home / "bin" / "python"
    if not (home / _DONE).exists():
        print(f"making {home}", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "uv", "venv", "--quiet", "--clear", "--python", sys.executable, str(home)], check=True)
        command = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", str(python), "openai", *PEERS[peer]]
        subprocess.run(command, check=True)
        (home / _DONE).touch()
    return python


def versions_of(python: Path, peer: str) -> str:
    """``openai 3.57.0, langfuse 5.0.4``."""
    names = ["openai", PEERS[peer][0]]
    program = "import importlib.metadata as m, sys; print(', '.join(f'{name} {m.version(name)}' for name in sys.argv[1:]))"
    return subprocess.run([str(python), "-c", program, *names], check=True, capture_output=True, text=True).stdout.strip()
