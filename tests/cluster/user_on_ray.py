"""Runs whose own process, the one that called ``fit``, is stopped or killed, or whose disk is full; on one simulated cluster.

``python user_on_ray.py FOLDER``, in a mount namespace of its own, starts the cluster and each run as a process that attaches to it, and
prints what became of them, as JSON. ``python user_on_ray.py FOLDER SETTINGS`` is such a process.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "cluster"))

from app import bills
from cluster_apps import add_up_and_kill, varied
from simulated import left_on, two_nodes

from rllm_trainer import fit

GIVEN: dict[str, Any] = {
    "cluster": {"nodes": 2, "gpus_per_node": 1, "app_workers": 2, "app_cpus": 0},
    "batch_tasks": 2,
    "group_size": 3,
    "max_model_len": 512,
    "lr": 5e-4,
    "eps": 1e-5,
    "keep": 5,
}
RANKS = 2
_LIMIT = 900.0


def cluster(folder: Path) -> None:
    """Two folders, two runs; every process is a new one."""
    found: list[dict[str, Any]] = []
    disk, ahead = folder / "disk", folder / "ahead"
    for one in (disk, ahead):
        (one / "run").mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(disk / "run")], check=True)
    with two_nodes(gpus=1) as ray:
        whole = ray.cluster_resources()
        environment = os.environ | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}

        def run(
            at: Path, faults: Mapping[str, Sequence[str]], during: Callable[[subprocess.Popen[str]], None] | None = None, **given: Any
        ) -> None:
            (at / "faults.json").write_text(json.dumps(dict(faults)))
            command = [sys.executable, "-W", "ignore", __file__, str(at), json.dumps(GIVEN | given)]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
            if during is not None:
                during(process)
            try:
                out, err = process.communicate(timeout=_LIMIT)
            except subprocess.TimeoutExpired:
                process.kill()
                out, err = process.communicate()
            said = next(iter(out.splitlines()[-1:]), "")
            told = json.loads(said) if process.returncode == 0 else {}
            found.append({"code": process.returncode, "err": err[-6000:], "left": left_on(ray, whole), **told})

        run(disk, {"1": ["user SIGTERM"]}, steps=2, save_every=5)
        run(disk, {"1": ["fill"]}, steps=2, save_every=1, resume=True)
        (disk / "run" / "ballast").unlink(missing_ok=True)
        with half_written(disk / "run" / "checkpoints" / "global_step_2") as kill:
            run(disk, {}, kill, steps=2, save_every=1, resume=True)
        run(disk, {}, steps=2, save_every=1, resume=True)
        run(ahead, {"1": ["user SIGKILL"]}, steps=3, save_every=1, staleness=1, shuffle=False)
        run(ahead, {}, steps=3, save_every=1, staleness=1, shuffle=False, resume=True)
        kept = folder / "kept"
        subprocess.run(["cp", "-r", str(disk / "run"), str(kept)], check=True)
    print(json.dumps(found))


@contextlib.contextmanager
def half_written(folder: Path) -> Any:
    """A checkpoint that cannot be finished, because its last file is a pipe that nobody reads; and who kills a process that writes it."""
    pipe = folder / "data.pt"
    folder.mkdir(exist_ok=True)
    pipe.unlink(missing_ok=True)
    os.mkfifo(pipe)
    began = time.time_ns()
    weights = [folder / "actor" / f"{kind}_world_size_{RANKS}_rank_{rank}.pt" for kind in ("model", "optim") for rank in range(RANKS)]

    def kill(process: subprocess.Popen[str]) -> None:
        ends = time.monotonic() + _LIMIT
        while not all(file.exists() and file.stat().st_mtime_ns > began and file.stat().st_size for file in weights):
            if process.poll() is not None or time.monotonic() > ends:
                return
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)

    yield kill
    pipe.unlink()


def user(folder: Path, settings: str) -> None:
    """One run."""
    (folder / "user.pid").write_text(str(os.getpid()))
    rows = [{**row, "folder": str(folder), "number": number} for number, row in enumerate(bills(16, seed=0))]
    result = fit(
        add_up_and_kill, rows, reward=varied, engine="cluster", model="tiny-qwen2", output_dir=folder / "run", **json.loads(settings)
    )
    print(json.dumps({"metrics": result.metrics, "model": str(result.model_path), "warnings": result.warnings}))


if __name__ == "__main__":
    if len(sys.argv) == 2:
        cluster(Path(sys.argv[1]))
    else:
        user(Path(sys.argv[1]), sys.argv[2])
