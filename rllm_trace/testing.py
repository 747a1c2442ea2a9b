"""Public fakes: a scripted OpenAI-compatible server on loopback, a collector of spans, a fixed clock and fixed ids.

    with ScriptedServer() as server:
        client = openai.OpenAI(base_url=server.base_url, api_key=server.api_key)
        ...
    assert server.log[0].body["model"] == "m"

The server speaks real HTTP/1.1 on 127.0.0.1 with vLLM's wire fields, answers what its script says, and keeps what it was sent and what
it sent. Nothing leaves the machine, and everything it started is gone when the ``with`` block is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import itertools
import socket
import threading
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any, Final, cast

import msgspec

from rllm_trace import attributes as A
from rllm_trace._spans import use_sources
from rllm_trace._wire import Reply, ReplyChoice, stream_events, whole_body
from rllm_trace.exceptions import ConfigurationError
from rllm_trace.exporters.memory import MemoryExporter

__all__ = ["Exchange", "MemoryExporter", "Reply", "ReplyChoice", "ScriptedServer", "fixed_sources"]

_WAIT: Final = 10.0
_LAST_TURNS: Final = 5
"""Turns of the event loop in which connections that were closed last are let go."""
_HEAD_LIMIT: Final = 256 * 1024
_REASONS: Final = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found"}


class Exchange(msgspec.Struct, kw_only=True):
    """One request, and what the server did with it."""

    number: int
    """Of the request at this server, from 0."""
    method: str
    path: str
    """With the query string."""
    headers: dict[str, str]
    """Names in lower case."""
    body: dict[str, Any]
    raw: bytes
    """The body as it came."""
    reply: Reply | None = None
    """What the script said; None for paths that are not scripted."""
    status: int = 0
    sent: bytes = b""
    """The body that was sent so far, without compression and transfer coding."""
    finished: bool = False
    """All of it was sent."""


Script = Callable[[Exchange], Reply]


class ScriptedServer:
    """Answers chat completions and completions as its script says.

    ``script`` is a function of the exchange, or replies in their order (the last one repeats); None: always the default reply.
    ``refuses`` maps a request field to the (status, message) that a request with it gets, as strict providers do.
    """

    def __init__(
        self,
        script: Script | Iterable[Reply] | None = None,
        *,
        refuses: Mapping[str, tuple[int, str]] | None = None,
        api_key: str | None = "scripted",
    ) -> None:
        self.log: list[Exchange] = []
        self.api_key = api_key or "unused"
        """Other keys get a 401; with ``api_key=None`` every key is taken."""
        self._checks_key = api_key is not None
        self._script = _as_script(script)
        self._refuses = dict(refuses or {})
        self._numbers = itertools.count()
        self._served: dict[asyncio.Task[None], socket.socket] = {}
        self._port = 0
        self._listener: socket.socket
        self._loop: asyncio.AbstractEventLoop
        self._thread: threading.Thread

    @property
    def base_url(self) -> str:
        """With ``/v1``, as the clients expect it."""
        return f"http://127.0.0.1:{self._port}/v1"

    def calls(self) -> list[Exchange]:
        """The scripted exchanges: model calls, not ``/models`` and the like."""
        return [exchange for exchange in self.log if exchange.reply is not None]

    def __enter__(self) -> ScriptedServer:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
        self._listener.setblocking(False)
        self._port = self._listener.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="rllm-scripted-server", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(_WAIT)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_WAIT)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.add_reader(self._listener, self._accept)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # the client has gone away again
            return
        task = self._loop.create_task(self._serve(connection))
        self._served[task] = connection
        task.add_done_callback(self._served.pop)

    async def _stop(self) -> None:
        self._loop.remove_reader(self._listener)
        self._listener.close()
        served = dict(self._served)
        for task in served:
            task.cancel()
        await asyncio.gather(*served, return_exceptions=True)
        for _ in range(_LAST_TURNS):
            await asyncio.sleep(0)
        for connection in served.values():
            connection.close()  # of a task that was cancelled before its first step; else closed already

    async def _serve(self, connection: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=connection, limit=_HEAD_LIMIT)
        try:
            while await self._exchange(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the client has gone away, or the server is closing
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError, asyncio.CancelledError):
                await writer.wait_closed()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Serves one request; False if the connection is not to be used again."""
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, path, _ = lines[0].split(" ", 2)
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:] if line)}
        raw = await reader.readexactly(int(headers.get("content-length") or 0))
        exchange = Exchange(
            number=next(self._numbers), method=method, path=path, headers=headers, raw=raw, body=msgspec.json.decode(raw) if raw else {}
        )
        self.log.append(exchange)
        reply = self._reply(exchange)
        exchange.status = reply.status
        if reply.hold_after == 0:
            await reader.read(1)
            return False
        if reply.delay:
            await asyncio.sleep(reply.delay)
        if reply.disconnect_after == 0:
            writer.transport.abort()
            return False
        streams = bool(exchange.body.get("stream")) and reply.status == 200 and reply.raw is None and exchange.reply is not None
        compress = reply.gzip and "gzip" in headers.get("accept-encoding", "")
        await (_send_stream if streams else _send_whole)(writer, exchange, reply, compress=compress)
        if reply.hold_after is not None and not exchange.finished:
            await reader.read(1)
        return exchange.finished

    def _reply(self, exchange: Exchange) -> Reply:
        if self._checks_key and exchange.headers.get("authorization") != f"Bearer {self.api_key}":
            return _error(401, f"Incorrect API key provided: {exchange.headers.get('authorization', '')}.")
        path = exchange.path.partition("?")[0]
        if exchange.method == "POST" and path.endswith("/completions"):
            for field, (status, message) in self._refuses.items():
                if field in exchange.body:
                    exchange.reply = _error(status, message)
                    return exchange.reply
            exchange.reply = self._script(exchange)
            return exchange.reply
        if path.endswith("/models"):
            return Reply(raw=b'{"object":"list","data":[{"id":"m","object":"model","created":0,"owned_by":"scripted"}]}')
        if path.endswith("/embeddings"):
            vector = b'{"object":"list","data":[{"object":"embedding","index":0,"embedding":[0.5]}],"model":"m","usage":'
            return Reply(raw=vector + b'{"prompt_tokens":1,"total_tokens":1}}')
        if path.endswith("/responses"):
            exchange.reply = self._script(exchange)
            return exchange.reply
        return _error(404, f"no such path: {path}")


def _as_script(script: Script | Iterable[Reply] | None) -> Script:
    if callable(script):
        return script
    if script is not None and not isinstance(cast("object", script), Iterable):
        raise ConfigurationError(f"got script={script!r}; expected a function of the exchange, or replies")
    replies = [Reply()] if script is None else list(script)
    if not replies or not all(isinstance(cast("object", reply), Reply) for reply in replies):
        raise ConfigurationError(f"got script={replies!r}; expected at least one reply, each a rllm_trace.testing.Reply")
    turn = itertools.count()
    return lambda _: replies[min(next(turn), len(replies) - 1)]


def _error(status: int, message: str) -> Reply:
    return Reply(status=status, error={"message": message, "type": "invalid_request_error", "param": None, "code": None})


def _head(reply: Reply, content_type: str, framing: str, *, compress: bool) -> bytes:
    lines = [f"HTTP/1.1 {reply.status} {_REASONS.get(reply.status, 'Status')}", f"content-type: {content_type}", framing]
    if compress:
        lines.append("content-encoding: gzip")
    if reply.weight_versions:
        lines.append(f"{A.HEADER_POLICY_VERSION}: {reply.weight_versions[0][0]}")
    lines += [f"{name}: {value}" for name, value in reply.headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def _is_chat(exchange: Exchange) -> bool:
    return exchange.path.partition("?")[0].endswith("/chat/completions")


async def _send_whole(writer: asyncio.StreamWriter, exchange: Exchange, reply: Reply, *, compress: bool) -> None:
    content_type = "application/json"
    if reply.raw is not None:
        body = reply.raw
        content_type = "text/event-stream" if exchange.body.get("stream") else content_type
    elif reply.error is not None:
        body = msgspec.json.encode({"error": reply.error})
    else:
        body = whole_body(exchange.body, reply, chat=_is_chat(exchange), number=exchange.number)
    exchange.sent = body
    packed = gzip.compress(body) if compress else body
    writer.write(_head(reply, content_type, f"content-length: {len(packed)}", compress=compress) + packed)
    await writer.drain()
    exchange.finished = True


async def _send_stream(writer: asyncio.StreamWriter, exchange: Exchange, reply: Reply, *, compress: bool) -> None:
    events = stream_events(exchange.body, reply, chat=_is_chat(exchange), number=exchange.number)
    if reply.chunk_bytes is not None:
        whole = b"".join(events)
        events = [whole[start : start + reply.chunk_bytes] for start in range(0, len(whole), reply.chunk_bytes)]
    buffer = _Buffer()
    packer = gzip.GzipFile(fileobj=buffer, mode="wb") if compress else None
    writer.write(_head(reply, "text/event-stream", "transfer-encoding: chunked", compress=compress))
    for position, event in enumerate(events):
        if position == reply.disconnect_after:
            await writer.drain()
            writer.transport.close()
            return
        if position == reply.hold_after:
            return
        exchange.sent += event
        if packer is not None:
            packer.write(event)
            packer.flush()
            event = buffer.take()
        writer.write(b"%x\r\n%s\r\n" % (len(event), event))
        await writer.drain()
    if packer is not None:
        packer.close()
        rest = buffer.take()
        writer.write(b"%x\r\n%s\r\n" % (len(rest), rest))
    writer.write(b"0\r\n\r\n")
    await writer.drain()
    exchange.finished = True


class _Buffer:
    """A file to write to, emptied by ``take``."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def write(self, data: bytes) -> int:
        self._parts.append(bytes(data))
        return len(data)

    def flush(self) -> None:
        return None

    def take(self) -> bytes:
        parts, self._parts = self._parts, []
        return b"".join(parts)


@contextlib.contextmanager
def fixed_sources(*, start: int = 1_700_000_000_000_000_000, step: int = 1_000_000) -> Generator[None]:
    """Times count up from ``start`` by ``step`` nanoseconds, ids from 1, process-wide while it is open."""
    times, spans, traces = itertools.count(start, step), itertools.count(1), itertools.count(1)
    with use_sources(now=lambda: next(times), span_id=lambda: f"{next(spans):016x}", trace_id=lambda: f"{next(traces):032x}"):
        yield
