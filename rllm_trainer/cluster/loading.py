"""Ray and verl by name: loaded where a run on a cluster asks for them, so that no import of the package leads to either."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["ray_api", "verl_compose", "verl_run"]


def ray_api() -> Any:
    """``_ray_api``: what is used of Ray."""
    return importlib.import_module("rllm_trainer.cluster._ray_api")


def verl_compose() -> Any:
    """``_verl_compose``: verl's configuration. In a process that has verl's environment."""
    return importlib.import_module("rllm_trainer.cluster._verl_compose")


def verl_run() -> Any:
    """``_verl_run``: one run of verl's trainer. In a process that has verl's environment."""
    return importlib.import_module("rllm_trainer.cluster._verl_run")
