"""A command in, a running server out, which ends with this process and whose end ends this process.

The server shares this process's group and log, so that whoever ends the group ends all of it: the parent when it closes or is gone, and
this process when the server has ended or does not answer any more. A process that has lost its engine may ignore TERM; KILL it cannot.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rllm_trainer.serving._door.upstream import Refused, Unreachable, Upstream

__all__ = ["Supervised", "end_group"]

_LOOKS_EVERY = 2.0
_ANSWERS_WITHIN = 20.0
_GRACE = 8.0
_DEATH_SPEAKS = 1.0
"""Seconds that the other processes of a dead server get to write what they have to say."""


class Supervised:
    """A child of this process. ``watch`` begins once it is up."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], folder: Path, *, name: str) -> None:
        self._name = name
        self._lifeline = _guarded_group()
        self._process = subprocess.Popen(command, env=dict(env), cwd=folder, stdin=subprocess.DEVNULL)
        threading.Thread(target=self._wait, name="rllm-server-end", daemon=True).start()
        self._watching = False

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    def end_with_grace(self) -> None:
        """This process was asked to end, and with it its group: the server gets a moment to put away what it shares with its children."""
        self._watching = False
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE)
        os._exit(0)

    async def watch(self, upstream: Upstream, path: str, *, hung_after: float) -> None:
        """For ever: ends the group when the server says that it is not well, or nothing for ``hung_after`` seconds."""
        self._watching = True
        well = time.monotonic()
        while True:
            await asyncio.sleep(min(_LOOKS_EVERY, hung_after))
            try:
                await upstream.call("GET", path, timeout=min(_ANSWERS_WITHIN, hung_after))
                well = time.monotonic()
            except Refused as error:
                end_group(f"{self._name} says that it is not well ({error})")
            except Unreachable:
                if time.monotonic() - well > hung_after:
                    end_group(f"{self._name} has not answered for {hung_after:g} s")

    def _wait(self) -> None:
        code = self._process.wait()
        if self._watching:
            end_group(f"{self._name} has ended ({code if code >= 0 else signal.Signals(-code).name})")


def _guarded_group() -> int:
    """A process that outlives this one for the moment that it takes to end the group: the descriptor is what it waits for the end of.

    This process may be killed at once with its parent, and would leave what it has started."""
    read_end, write_end = os.pipe()
    subprocess.Popen(["/bin/sh", "-c", "read _; kill -KILL 0"], stdin=read_end, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    os.close(read_end)
    return write_end


def end_group(why: str) -> None:
    """The last line of the log, and the end of every process of the group, this one included."""
    time.sleep(_DEATH_SPEAKS)
    print(f"rllm: {why}; all of its processes are ended", file=sys.stderr, flush=True)  # noqa: T201 - stderr is the log
    with contextlib.suppress(ProcessLookupError):
        if os.getpgrp() == os.getpid():
            os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(70)
