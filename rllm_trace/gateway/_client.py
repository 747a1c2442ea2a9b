"""One HTTP exchange with a client, over ASGI: its body in, bounded; the answer out, as fast as the client takes it.

While the answer is awaited the client is watched: once it has hung up, the work for it is cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, cast

from rllm_trace.gateway._headers import Headers
from rllm_trace.gateway._refusal import Refusal

__all__ = ["Client", "ClientGoneError", "Receive", "Send"]

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

_DISCONNECT: Final = "http.disconnect"


class ClientGoneError(Exception):
    """The client went away before it had its answer."""


class Client:
    """The client of one request."""

    def __init__(self, scope: dict[str, Any], receive: Receive, send: Send, *, max_body: int, patience: float) -> None:
        self.method: str = scope["method"]
        self.path: str = scope.get("raw_path", scope["path"].encode()).decode("latin-1").partition("?")[0]
        """As sent, still quoted."""
        self.query: bytes = scope["query_string"]
        self.headers: Headers = list(scope["headers"])
        self.gone = False
        """It has hung up."""
        self.started = False
        """The head of the answer has been sent."""
        self.finished = False
        self._receive = receive
        self._send = send
        self._max_body = max_body
        self._patience = patience
        """Seconds that it may take over reading what is sent, or over sending its body."""
        self._watcher: asyncio.Task[None] | None = None
        self._writing: float | None = None
        """Since when, on the loop's clock, a part that was sent has not been taken."""
        self._stalled = False
        self._clock: asyncio.TimerHandle | None = None

    async def body(self) -> bytes:
        """The whole body of the request. Raises Refusal for one that is too large, ClientGoneError."""
        declared = next((value for name, value in self.headers if name == b"content-length"), b"0")
        if declared.isdigit() and int(declared) > self._max_body:
            raise self._too_large()
        pieces: list[bytes] = []
        size = 0
        async with asyncio.timeout(self._patience):
            while True:
                message = await self._receive()
                if message["type"] == _DISCONNECT:
                    self.gone = True
                    raise ClientGoneError("the client hung up while it sent its request")
                piece = message.get("body", b"")
                size += len(piece)
                if size > self._max_body:
                    raise self._too_large()
                pieces.append(piece)
                if not message.get("more_body"):
                    return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _too_large(self) -> Refusal:
        return Refusal(413, f"the body is larger than {self._max_body} bytes, the most that this gateway takes", code="too_large")

    def watch(self) -> None:
        """From here on the running task is cancelled once the client hangs up."""
        task = asyncio.current_task()
        assert task is not None
        self._watcher = asyncio.create_task(self._wait_for_end(task))

    async def _wait_for_end(self, task: asyncio.Task[Any]) -> None:
        while (await self._receive())["type"] != _DISCONNECT:
            pass
        if not self.finished:
            self.gone = True
            task.cancel()

    async def close(self) -> None:
        """The exchange is over; nobody is watched any more."""
        watcher, self._watcher = self._watcher, None
        if watcher is not None and not watcher.done():
            watcher.cancel()
        if self._clock is not None:
            self._clock.cancel()

    async def start(self, status: int, headers: Headers) -> None:
        """Sends the head."""
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, data: bytes, *, more: bool) -> None:
        """Sends a part of the body; waits while the client does not read. Raises TimeoutError, ClientGoneError."""
        if self.gone:
            raise ClientGoneError("the client hung up")
        if not more:
            self.finished = True
        loop = asyncio.get_running_loop()
        if self._clock is None:
            self._look(loop, cast("asyncio.Task[Any]", asyncio.current_task()))
        self._writing = loop.time()
        try:
            await self._send({"type": "http.response.body", "body": data, "more_body": more})
        except asyncio.CancelledError:
            if not self._stalled:
                raise
            cast("asyncio.Task[Any]", asyncio.current_task()).uncancel()
            raise TimeoutError(f"the client has read nothing for {self._patience:g} s") from None
        finally:
            self._writing = None

    def _look(self, loop: asyncio.AbstractEventLoop, task: asyncio.Task[Any]) -> None:
        """Every now and then: a part that is not taken for too long ends the exchange. A timer for each part costs more than the part."""
        since = self._writing
        if since is not None and loop.time() - since >= self._patience:
            self._stalled = True
            task.cancel()
        else:
            self._clock = loop.call_later(self._patience / 4, self._look, loop, task)

    async def answer(self, status: int, headers: Headers, body: bytes) -> None:
        """Sends a whole answer. That to a HEAD says the length that the server said, if it did."""
        length = [] if self.method == "HEAD" else [(b"content-length", str(len(body)).encode())]
        await self.start(status, [*headers, *length])
        await self.write(body, more=False)
