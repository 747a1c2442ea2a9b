"""Around a server's app: a request that carries a workflow runs in it, and is answered once what it recorded is on its way home.

    app = ASGIMiddleware(app)        # Starlette, FastAPI, Quart, ...
    app = WSGIMiddleware(app)        # Flask, Django, ...

A request without our headers passes through untouched. Before the last byte of an answer leaves, the exporters of this process are flushed,
so that a client that has the answer finds the calls in its record; ``flush_timeout`` bounds that wait, and 0 leaves it out.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Iterable, MutableMapping
from typing import Any, Final

from rllm_trace import attributes as A
from rllm_trace._configure import flush
from rllm_trace._guard import guard
from rllm_trace._propagation import attach

__all__ = ["ASGIMiddleware", "WSGIMiddleware"]

_FLUSH: Final = 5.0
_BODY: Final = "http.response.body"
_WSGI_PREFIX: Final = "HTTP_"

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[MutableMapping[str, Any], Callable[[], Awaitable[Message]], Send], Awaitable[None]]


class ASGIMiddleware:
    """Takes the place of an ASGI app; websockets and lifespans pass through, a websocket inside the workflow of its handshake."""

    def __init__(self, app: ASGIApp, *, flush_timeout: float = _FLUSH) -> None:
        self.app = app
        self._flush_timeout = flush_timeout

    async def __call__(self, scope: MutableMapping[str, Any], receive: Callable[[], Awaitable[Message]], send: Send) -> None:
        sent: list[tuple[bytes, bytes]] = list(scope.get("headers") or ())
        if not any(name.lower() == A.HEADER_PARENT.encode() for name, _ in sent):
            await self.app(scope, receive, send)
            return

        async def send_last_after_flush(message: Message) -> None:
            if message.get("type") == _BODY and not message.get("more_body", False):
                await self._flush()
            await send(message)

        with attach(sent):
            await self.app(scope, receive, send_last_after_flush)

    async def _flush(self) -> None:
        if self._flush_timeout > 0:
            import asyncio

            with guard("flush"):
                await asyncio.to_thread(flush, self._flush_timeout)


class WSGIMiddleware:
    """Takes the place of a WSGI app. An answer that is produced bit by bit runs in the workflow too, and only while it is produced."""

    def __init__(self, app: Callable[..., Iterable[bytes]], *, flush_timeout: float = _FLUSH) -> None:
        self.app = app
        self._flush_timeout = flush_timeout

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        key = _WSGI_PREFIX + A.HEADER_PARENT.upper().replace("-", "_")
        if key not in environ:
            return self.app(environ, start_response)
        baggage = environ.get(_WSGI_PREFIX + A.HEADER_BAGGAGE.upper(), "")
        sent = {A.HEADER_PARENT: environ[key], A.HEADER_BAGGAGE: baggage}
        with attach(sent):
            body = self.app(environ, start_response)
        if isinstance(body, (list, tuple)):
            self._flush()
            return body
        return _Body(body, sent, self._flush)

    def _flush(self) -> None:
        if self._flush_timeout > 0:
            with guard("flush"):
                flush(self._flush_timeout)


class _Body:
    """The chunks of an answer, each produced inside the workflow."""

    def __init__(self, body: Iterable[bytes], sent: dict[str, str], done: Callable[[], None]) -> None:
        self._body = body
        self._sent = sent
        self._done = done

    def __iter__(self) -> Generator[bytes]:
        with attach(self._sent):
            chunks = iter(self._body)
        while True:
            with attach(self._sent):
                try:
                    chunk = next(chunks)
                except StopIteration:
                    break
            yield chunk
        self._done()

    def close(self) -> None:
        """The server's word that it wants no more."""
        close = getattr(self._body, "close", None)
        if close is not None:
            with attach(self._sent):
                close()
