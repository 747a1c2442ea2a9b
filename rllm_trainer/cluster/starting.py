"""Options for ``ray.init`` in, Ray started or attached to out; of a start that fails, one sentence, and none of its processes.

Ray tells its own time-outs in its own words, and what it had started by then would stay until this process ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rllm_trainer.cluster.address import HERE, require_cluster_at
from rllm_trainer.cluster.last_words import words_of
from rllm_trainer.exceptions import EngineError, SettingError

__all__ = ["ADDRESS", "HERE", "start_ray"]

ADDRESS = "RAY_ADDRESS"
"""Where Ray's own environment says which cluster to attach to."""
_TASKS = Path("/proc/self/task")
_ENDS = 5.0
"""Seconds that a process of Ray's has to end by itself."""
_POLL = 0.05


def start_ray(ray: Any, options: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    """``ray.init`` with ``options``, of which ``asked`` are the user's.

    Raises:
        SettingError: Ray does not take them.
        EngineError: no cluster answers at the address, or Ray's processes did not come up.
    """
    address = options.get("address") or os.environ.get(ADDRESS) or HERE
    require_cluster_at(address)
    before = _children()
    try:
        ray.init(**options)
    except (TypeError, ValueError, RuntimeError) as error:
        _end(ray, before)
        raise SettingError(f"ray={dict(asked)!r}: Ray refuses it: {error}") from error
    except Exception as error:  # Ray has no class of its own for a start that takes too long
        _end(ray, before)
        there = address != HERE
        what = f"the cluster at {address!r} could not be attached to" if there else "Ray did not come up on this machine"
        do = (
            "look at it with `ray status`"
            if there
            else "it gives each of its processes some 30 s: end what keeps the machine busy, or start Ray before with `ray start --head` "
            "and attach with ray={'address': 'auto'}"
        )
        raise EngineError(f"{what} with ray={dict(asked)!r}: {words_of(error)}; {do}") from error


def _children() -> set[int]:
    """Of this process, by any of its threads; empty where the system does not say."""
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for task in _TASKS.iterdir():
            with contextlib.suppress(OSError):
                found |= {int(pid) for pid in (task / "children").read_text().split()}
    return found


def _end(ray: Any, before: set[int]) -> None:
    """End what Ray has started since: children of ours that run out of Ray's own folder."""
    with contextlib.suppress(Exception):
        ray.shutdown()
    folder = str(Path(str(ray.__file__)).parent).encode()
    left = {pid for pid in _children() - before if folder in _command(pid)}
    for number, seconds in ((signal.SIGTERM, _ENDS), (signal.SIGKILL, _ENDS)):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        ends = time.monotonic() + seconds
        while left and time.monotonic() < ends:
            left = {pid for pid in left if not _gone(pid)}
            time.sleep(_POLL)


def _command(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def _gone(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:  # Ray has waited for it
        return True
