"""An error of Ray's in, one line of it out, and what the process that died wrote last: the end of its log, read on the node it was on.

Ray tells a death in a page: here it is which process on which node, and by what, as far as Ray knows.
"""

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
_SIGNAL, _REASON = re.compile(r"receives a (SIG[A-Z]+)"), re.compile(r"The actor is dead because (.*)")
_WITHOUT_A_WORD = ("End of file", "connection error")
_TRACEBACK, _OF_A_TRACEBACK = '  File "', re.compile(r"\s|Traceback |The above exception|During handling|The actor died because|ray::")
_COLOUR = re.compile(r"\x1b\[\d*m")


def words_of(error: BaseException, *, most: int = 12) -> str:
    """Its kind and what it says, in one line: of a process that died which it was and how, of an exception its message alone."""
    process = _process(error)
    if process is not None:
        return f"{type(error).__name__}: process {process[0]} on node {process[1]} {_how(str(error))}"
    text = _COLOUR.sub("", str(error)).strip()
    lines = [line for line in text.splitlines() if line.strip() and not (_TRACEBACK in text and _OF_A_TRACEBACK.match(line))]
    return f"{type(error).__name__}: {' | '.join(line.strip() for line in lines[-most:])[-_MOST_CHARACTERS:]}"


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


def _how(text: str) -> str:
    signal, reason = _SIGNAL.search(text), _REASON.search(text)
    if signal is not None:
        return f"was ended by {signal[1]}"
    if any(words in text for words in _WITHOUT_A_WORD):
        return "ended without a word to Ray: it was killed (kill -9, or by the kernel for want of memory), it crashed, or it ended itself"
    return f"is dead because {reason[1][:300].rstrip('.')}" if reason is not None else "has died"


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
