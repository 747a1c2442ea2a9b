"""SGLang as the policy's server, where it runs already: given weights through a folder on a disk that both see.

Its calls are asked for ids under SGLang's names, its answers say token by token which version sampled. Never stopped by us.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rllm_trainer.serving.base import Capabilities
from rllm_trainer.serving.remote import HALF_NOISE, DoorServer
from rllm_trainer.serving_settings import InFlight

__all__ = ["attach_sglang"]

_ASKED_WITHIN = 60.0


def attach_sglang(
    base_url: str,
    *,
    run_dir: Path,
    model_folder: Path | None = None,
    key: str | None = None,
    swaps: bool = True,
    port: int = 0,
    in_flight: InFlight = "keep",
    version: int = 0,
    most_noise: float = HALF_NOISE,
    name: str = "sglang",
) -> DoorServer:
    """Use an SGLang server.

    Args:
        base_url: such as ``http://127.0.0.1:30000/v1``.
        model_folder: the model's folder; what in it is not weights goes beside each version's.
        key: its API key.
        swaps: it is to be given weights; False: it is only asked.
        most_noise: nats by which it may differ from the trainer before a swap.

    Raises:
        ServerError: it does not answer, or refuses to be told a version.
    """
    config: dict[str, Any] = {
        "kind": "sglang",
        "version": version,
        "port": port,
        "base_url": base_url,
        "upstream_key": key,
        "options": {
            "model_folder": None if model_folder is None else str(model_folder.resolve()),
            "staging": str((run_dir / name).resolve()),
            "swaps": swaps,
        },
        "start_timeout": _ASKED_WITHIN,
    }
    capabilities = Capabilities(
        token_ids=True, logprobs=True, processed_logprobs=True, swap=swaps, lora_swap=False, per_token_versions=True, token_prompts=True
    )
    return DoorServer.open(
        config,
        name=f"SGLang at {base_url}",
        log_path=run_dir / f"{name}.log",
        capabilities=capabilities,
        in_flight=in_flight,
        most_noise=most_noise,
    )
