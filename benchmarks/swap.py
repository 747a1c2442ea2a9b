"""How long a swap of weights takes, idle and with eight replies in flight: the embedded server, and vLLM beside it.

From the order to the first token under the new weights, in seconds, the median of the idle ones. The weights are handed over in a file in
shared memory, as in training.

    python benchmarks/swap.py                            # the embedded server
    python benchmarks/swap.py --vllm VENV/bin/python     # and vLLM
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import msgspec

from rllm_trainer._digest import file_digest
from rllm_trainer.engine.base import WeightsFile
from rllm_trainer.models import resolve_model
from rllm_trainer.serving.local import LocalServer
from rllm_trainer.serving.remote import DoorServer
from rllm_trainer.serving.vllm import start_vllm

SHARED_MEMORY = Path("/dev/shm")
IN_FLIGHT = 8
TOKENS = 100

Swap = Callable[[int], float]
"""Version -> seconds."""


def main() -> None:
    options = _options()
    model = resolve_model(options.model)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None)))
        source = next(model.glob("*.safetensors"))
        path = Path(shutil.copyfile(source, folder / "weights.safetensors"))
        file = WeightsFile(path=path, version=1, digest=file_digest(path), tensors=0, num_bytes=path.stat().st_size)
        report = {"local": _local(model, folder, file, options)}
        if options.vllm:
            report["vllm"] = _vllm(model, folder, file, options)
    print(json.dumps(report, indent=1))
    if options.out:
        Path(options.out).write_text(json.dumps(report, indent=1) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None, help="a model folder; default: the embedded model")
    parser.add_argument("--vllm", default=None, help="python of an environment with vLLM")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", default=None, help="write the report to this file too")
    return parser.parse_args()


def _local(model: Path, folder: Path, file: WeightsFile, options: argparse.Namespace) -> dict[str, float]:
    server = LocalServer.start(model, run_dir=folder, threads=options.threads, max_model_len=1024)
    try:
        return _measured(server, lambda version: server.swap_unproven(_as(file, version)).seconds, options.rounds)
    finally:
        server.close()


def _vllm(model: Path, folder: Path, file: WeightsFile, options: argparse.Namespace) -> dict[str, float]:
    server = start_vllm(model, run_dir=folder, python=options.vllm, threads=options.threads, max_model_len=1024)
    try:
        return _measured(server, lambda version: server.swap_unproven(_as(file, version)).seconds, options.rounds)
    finally:
        server.close()


def _as(file: WeightsFile, version: int) -> WeightsFile:
    return msgspec.structs.replace(file, version=version)


def _measured(server: LocalServer | DoorServer, swap: Swap, rounds: int) -> dict[str, float]:
    swap(1)  # the first one warms up
    idle = [swap(version) for version in range(2, rounds + 2)]
    return {"idle_s": round(statistics.median(idle), 3), "busy_s": round(asyncio.run(_busy(server, swap, rounds + 2)), 3)}


async def _busy(server: LocalServer | DoorServer, swap: Swap, version: int) -> float:
    body: dict[str, Any] = {"model": server.model, "prompt": "river stone " * 40, "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
    headers = {"authorization": f"Bearer {server.api_key}"}
    async with httpx.AsyncClient(base_url=server.base_url, headers=headers, timeout=600, trust_env=False) as client:
        begun = [asyncio.Event() for _ in range(IN_FLIGHT)]

        async def ask(number: int) -> None:
            async with client.stream("POST", "/completions", json={**body, "seed": number}) as response:
                response.raise_for_status()
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        begun[number].set()

        asking = [asyncio.create_task(ask(number)) for number in range(IN_FLIGHT)]
        await asyncio.gather(*(event.wait() for event in begun))
        seconds = await asyncio.to_thread(swap, version)
        await asyncio.gather(*asking)
        return seconds


if __name__ == "__main__":
    main()
