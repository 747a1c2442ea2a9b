"""Any server that speaks OpenAI's API: recorded and evaluated with, never given weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rllm_trainer.serving.base import Capabilities
from rllm_trainer.serving.remote import DoorServer

__all__ = ["attach_openai_compatible"]

_ASKED_WITHIN = 60.0


def attach_openai_compatible(
    base_url: str, *, run_dir: Path, model: str | None = None, key: str | None = None, port: int = 0
) -> DoorServer:
    """Lead calls to a server.

    Args:
        base_url: such as ``http://127.0.0.1:8000/v1``.
        model: its name there; None: the only one that the server lists.
        key: its API key.

    Raises:
        ServerError: it does not say which model it has, and none is named.
    """
    config: dict[str, Any] = {
        "kind": "openai-compatible",
        "version": 0,
        "port": port,
        "base_url": base_url,
        "upstream_key": key,
        "options": {"model": model},
        "start_timeout": _ASKED_WITHIN,
        "versions": False,
    }
    nothing = Capabilities(
        token_ids=False,
        logprobs=False,
        processed_logprobs=False,
        swap=False,
        lora_swap=False,
        per_token_versions=False,
        token_prompts=False,
    )
    return DoorServer.open(config, name=f"the server at {base_url}", log_path=run_dir / "server.log", capabilities=nothing)
