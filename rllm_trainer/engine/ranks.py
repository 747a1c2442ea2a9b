"""Calls of ranks that meet inside in, the one that made the others fail out: a rank that dies breaks its peers' connections first."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from rllm_trainer._child import ChildDied

__all__ = ["DEATH_SEEN", "cause_of"]

DEATH_SEEN = 30.0
"""Seconds in which a rank's death is seen that made another rank fail."""


def cause_of(futures: Sequence[Future[Any]]) -> Future[Any] | None:
    """Of a rank that died, if one is seen to have, else the first that failed. None: none has.

    Waits for the others of one that failed, unless they have ended.
    """
    first = next((future for future in futures if future.done() and future.exception() is not None), None)
    ends = time.monotonic() + DEATH_SEEN
    left = set(futures) if first is not None else set[Future[Any]]()
    while left and time.monotonic() < ends:
        done, left = wait(left, timeout=max(0.0, ends - time.monotonic()), return_when=FIRST_COMPLETED)
        died = next((future for future in done if isinstance(future.exception(), ChildDied)), None)
        if died is not None:
            return died
    return first
