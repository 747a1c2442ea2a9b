"""The engine's process: its environment is set before verl is imported, then it serves calls until the parent is gone.

Started by ``VerlEngine``, one process a rank. What verl reads from the environment is set here, in our own process, and nowhere else.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

from rllm_trainer._child import child_config, serve

__all__ = ["DEVICE_VARIABLE", "main"]

DEVICE_VARIABLE = "RLLM_ENGINE_DEVICE"
"""Of this process: what ``auto`` came to."""


def main() -> None:
    config = child_config()
    _prepare_environment(config)
    warnings.filterwarnings("ignore", message=".* engine is not available.*")  # verl's other back ends, which nobody asked for
    # verl reads its platform from the environment when it is imported
    from rllm_trainer.engine._verl_trainer import VerlTrainer

    trainer = VerlTrainer(config)
    serve(trainer.handlers(), ready=trainer.ready())


def _prepare_environment(config: dict[str, Any]) -> None:
    threads = str(config["threads"])
    os.environ.update(
        RANK=str(config["rank"]),
        WORLD_SIZE=str(config["ranks"]),
        LOCAL_RANK=str(config["rank"]),
        LOCAL_WORLD_SIZE=str(config["ranks"]),
        MASTER_ADDR="127.0.0.1",  # verl's worker reads both; our process group meets in a file
        MASTER_PORT="0",
        OMP_NUM_THREADS=threads,
        MKL_NUM_THREADS=threads,
        TOKENIZERS_PARALLELISM="false",
        HF_HUB_OFFLINE="1",  # the model is a folder by now
        VERL_ENGINE_VENDOR="rllm",
        VERL_USE_EXTERNAL_PLUGINS="none",  # other plug-ins of the user's machine stay out
        VERL_DISABLE_FLASH_ATTN_CE="1",
    )
    device = _found_device() if config["device"] == "auto" else config["device"]
    os.environ[DEVICE_VARIABLE] = device
    if device == "cpu":
        os.environ.update(
            VERL_PLATFORM="cpu", VERL_USE_EXTERNAL_MODULES="rllm_trainer.engine._verl_cpu", GLOO_SOCKET_IFNAME="lo", CUDA_VISIBLE_DEVICES=""
        )


def _found_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


if __name__ == "__main__":
    main()
