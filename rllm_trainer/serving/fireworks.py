"""A hot-load deployment of Fireworks as the policy's server: weights go into its bucket, and calls end before they are loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rllm_trainer.serving.base import Capabilities
from rllm_trainer.serving.remote import HALF_NOISE, DoorServer
from rllm_trainer.serving_settings import FireworksSettings

__all__ = ["attach_fireworks"]

_ASKED_WITHIN = 60.0
_POLL = 2.0


def attach_fireworks(
    deployment: FireworksSettings,
    *,
    run_dir: Path,
    key: str,
    model_folder: Path | None = None,
    port: int = 0,
    version: int = 0,
    most_noise: float = HALF_NOISE,
    poll: float = _POLL,
) -> DoorServer:
    """Use a deployment that was made with hot load enabled.

    Args:
        deployment: which, and where its bucket is mounted.
        key: of the account.
        model_folder: the model's folder; what in it is not weights goes into each snapshot.
        most_noise: nats by which it may differ from the trainer before a swap.
        poll: seconds between looks at the replicas while they load.
    """
    config: dict[str, Any] = {
        "kind": "fireworks",
        "version": version,
        "port": port,
        "base_url": deployment.base_url,
        "upstream_key": key,
        "options": {
            "model": deployment.model,
            "deployment": deployment.deployment,
            "bucket": deployment.bucket,
            "model_folder": None if model_folder is None else str(model_folder.resolve()),
            "run": run_dir.resolve().parent.name,
            "poll": poll,
        },
        "start_timeout": _ASKED_WITHIN,
    }
    swaps = deployment.bucket is not None
    capabilities = Capabilities(
        token_ids=True, logprobs=True, processed_logprobs=True, swap=swaps, lora_swap=False, per_token_versions=False, token_prompts=True
    )
    return DoorServer.open(
        config,
        name="Fireworks",
        log_path=run_dir / "fireworks.log",
        capabilities=capabilities,
        in_flight="wait",
        most_noise=most_noise,
    )
