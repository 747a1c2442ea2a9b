"""What the trainer needs beside the SDK: there, or one sentence that says what to install."""

from __future__ import annotations

import importlib.util
from typing import Final

__all__ = ["require_extra"]

_NEEDED: Final = ("numpy", "rich", "torch", "transformers", "verl", "ray")
"""One of each kind of what the extra brings; looked for, not imported."""


def require_extra() -> None:
    """Raises ImportError, which names the first package that is missing and the command that installs it."""
    for name in _NEEDED:
        if importlib.util.find_spec(name) is None:
            raise ImportError(f"rllm_trainer needs {name}, which is not installed: pip install 'rllm-trace[trainer]'", name=name)
