"""Requests pass one by one; a swap can hold new ones back, wait until those inside have left, and say which version each began under.

One event loop; every wait of a swap has a deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

__all__ = ["Flow"]


class Flow:
    """What is inside, and whether more may come in."""

    def __init__(self, version: int) -> None:
        self.version = version
        """Policy version of the weights that are served."""
        self.inside = 0
        self.passed = 0
        """Requests since the start."""
        self._open = asyncio.Event()
        self._open.set()
        self._empty = asyncio.Event()
        self._empty.set()

    @asynccontextmanager
    async def request(self) -> AsyncGenerator[int]:
        """Wait for the door to be open and be inside; gives the version at dispatch."""
        await self._open.wait()
        self.inside += 1
        self.passed += 1
        self._empty.clear()
        try:
            yield self.version
        finally:
            self.inside -= 1
            if self.inside == 0:
                self._empty.set()

    @asynccontextmanager
    async def held(self) -> AsyncGenerator[int]:
        """New requests wait outside; gives the number of those inside."""
        self._open.clear()
        try:
            yield self.inside
        finally:
            self._open.set()

    async def drained(self, timeout: float) -> bool:
        """Wait until nobody is inside; False after ``timeout`` seconds."""
        try:
            await asyncio.wait_for(self._empty.wait(), timeout)
        except TimeoutError:
            return False
        return True
