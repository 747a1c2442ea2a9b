"""An error of Ray's in, what the process that died wrote last out: the end of its log, read on the node that it was on."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from rllm_trainer.cluster.loading import ray_api

__all__ = ["last_words", "words_of"]

_MOST = 8
_MOST_CHARACTERS = 1200
_READ = 64 * 1024
_ANSWER = 30.0
_PID, _ADDRESS = re.compile(r"^\s*pid: (\d+)", re.MULTILINE), re.compile(r"^\s*ip: (\S+)", re.MULTILINE)
"""How Ray tells which process it was."""


def words_of(error: BaseException, *, most: int = 12) -> str:
    """Its kind and the end of its message, in one line."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {' | '.join(lines[-most:])[-_MOST_CHARACTERS:]}"


def last_words(error: BaseException) -> str:
    """`` Its last log lines (FILE on HOST): ...``, to be added to a message; empty where no process died or nothing can be read."""
    found = next(filter(None, map(_process, _causes(error))), None)
    if found is None:
        return ""
    pid, address = found
    ray = ray_api().ray
    node = next((one["NodeID"] for one in ray.nodes() if one["Alive"] and one["NodeManagerAddress"] == address), None)
    if node is None:
        return f" Its node, {address}, is no longer in the cluster."
    where = {"num_cpus": 0, "scheduling_strategy": ray_api().NodeAffinity(node_id=node, soft=False)}
    try:
        name, lines = ray.get(ray.remote(_tail).options(**where).remote(pid), timeout=_ANSWER)
    except Exception as failure:  # noqa: BLE001 - the first error is what matters
        return f" Its log on {address} could not be read: {words_of(failure, most=1)}."
    return f" Its last log lines ({name} on {address}): {' | '.join(lines)[-_MOST_CHARACTERS:]}" if lines else ""


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    for _ in range(8):
        if error is None:
            return
        yield error
        cause = getattr(error, "cause", None)
        error = cause if isinstance(cause, BaseException) else error.__cause__


def _process(error: BaseException) -> tuple[int, str] | None:
    if not isinstance(error, ray_api().RayActorError):
        return None
    pid, address = _PID.search(str(error)), _ADDRESS.search(str(error))
    return (int(pid[1]), address[1]) if pid and address else None


def _tail(pid: int) -> tuple[str, list[str]]:
    """Runs on the node: name and last lines of the newest log of that process that has any. Its own says where logs are."""
    folder = Path(os.readlink("/proc/self/fd/2")).parent
    for path in sorted(folder.glob(f"worker-*-{pid}.*"), key=lambda one: one.suffix != ".err"):
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _READ))
            text = file.read().decode(errors="replace")
        lines = [line.rstrip() for line in text.splitlines() if line.strip() and not line.startswith(":")]
        if lines:
            return path.name, lines[-_MOST:]
    return "", []
