"""A rank of the direct engine on Ray is killed in the middle of a run: ``python direct_faults.py FOLDER``.

Prints, as JSON: the error that the run ended with, the process that was killed, what the cluster still has set aside, and what the
preflight command says of the same cluster.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "cluster"))

import openai
import psutil
from app import bills, close
from simulated import two_nodes

from rllm_trainer import fit
from rllm_trainer.cluster.ray_session import on_ray
from rllm_trainer.config import make_settings
from rllm_trainer.exceptions import TrainerError
from rllm_trainer.models import resolve_model

GIVEN: dict[str, Any] = {
    "model": "tiny-qwen2",
    "reward": close,
    "engine": "direct-ray",
    "cluster": {"nodes": 2},
    "steps": 3,
    "batch_tasks": 2,
    "group_size": 2,
    "max_model_len": 512,
    "save_every": 1,
}


def main(folder: str) -> None:
    run_dir = Path(folder) / "run"
    killed: list[int] = []
    one_at_a_time = threading.Lock()

    def ask(bill: str) -> str:
        """One call; once, after the first step, a rank is killed before it."""
        with one_at_a_time:
            if (run_dir / "checkpoints").is_dir() and any((run_dir / "checkpoints").iterdir()) and not killed:
                killed.append(max(ranks()))
                os.kill(killed[0], signal.SIGKILL)
        with openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="unused") as client:
            done = client.chat.completions.create(model="gpt-4o-mini", messages=[{"role": "user", "content": bill}], max_tokens=6)
        return done.choices[0].message.content or ""

    found: dict[str, Any] = {}
    with two_nodes(cpus=8, gpus=1) as ray:
        whole = ray.cluster_resources()
        try:
            fit(ask, bills(8, seed=0), output_dir=run_dir, **GIVEN)
        except TrainerError as error:
            found["error"] = str(error)
        found |= {"killed": killed, "node": ray.util.get_node_ip_address(), "left": in_use(ray, whole)}
        address = ray.get_runtime_context().gcs_address
        found["preflight"] = [
            preflight(folder, address, layout) for layout in ({"nodes": 2}, {"nodes": 2, "app_workers": 64}, {"nodes": 3})
        ]
        ray.shutdown()
        found["refused"] = refusal({"address": address, "num_cpus": 4})
        with on_ray({"address": address, "namespace": "of-the-user"}, make_settings({}).cluster):
            found["namespace"] = ray.get_runtime_context().namespace
        found["shut"] = not ray.is_initialized()
    print(json.dumps(found))


def ranks() -> list[int]:
    """Processes of the cluster, which are this one's descendants, that are ranks of the engine."""
    found: list[int] = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if "RankActor" in "".join(process.cmdline()):
                found.append(process.pid)
    return found


def in_use(ray: Any, whole: dict[str, float]) -> dict[str, float]:
    """What of the cluster's CPUs and GPUs is still set aside, once Ray has had time to end the processes that held it."""
    ends = time.monotonic() + 60
    while True:
        free = ray.available_resources()
        left = {kind: whole[kind] - free.get(kind, 0.0) for kind in ("CPU", "GPU") if free.get(kind, 0.0) < whole[kind]}
        if not left or time.monotonic() > ends:
            return left
        time.sleep(0.2)


def preflight(folder: str, address: str, layout: dict[str, int]) -> tuple[int, str]:
    """The command's verdict: its status and what it says is wrong."""
    asked = [
        "--model",
        str(resolve_model("tiny-qwen2")),
        "--run-dir",
        f"{folder}/other",
        "--address",
        address,
        "--layout",
        json.dumps(layout),
    ]
    command = [sys.executable, "-W", "ignore", "-m", "rllm_trainer.cluster.preflight", *asked]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    return done.returncode, "\n".join(line for line in done.stdout.splitlines() if " free" not in line)


def refusal(options: dict[str, Any]) -> str:
    try:
        with on_ray(options, make_settings({}).cluster):
            return ""
    except TrainerError as error:
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main(sys.argv[1])
