"""Where requests go: the only file that speaks HTTP to the servers behind the gateway.

``aiohttp`` speaks it, at half the CPU that ``httpx`` takes for a stream. Nothing is added, followed, decoded, kept or sent through a proxy:
a request goes out as it was written, an answer comes back as bytes. What is given out are responses and errors of ``httpx``.
"""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Final, Literal
from urllib.parse import urlsplit

import msgspec

from rllm_trace.clients._ask import is_strict
from rllm_trace.clients._call import Destination
from rllm_trace.exceptions import ConfigurationError
from rllm_trace.gateway._headers import Headers

if TYPE_CHECKING:
    import httpx

__all__ = ["Upstream", "UpstreamStatusError", "Upstreams", "is_timeout", "is_unreachable"]

_ANTHROPIC_VERSION: Final = (b"anthropic-version", b"2023-06-01")
_NOT_ADDED: Final = ("Accept", "Accept-Encoding", "User-Agent", "Content-Type")
_BODILESS: Final = ("GET", "HEAD", "OPTIONS")
_KEEP_ALIVE: Final = 3.0
"""Seconds that an idle connection is kept: fewer than the five after which servers such as uvicorn close theirs."""
_LARGE: Final = 2**20
"""Bytes from which on ``aiohttp`` wants a body that it can take in pieces."""
_LONGEST: Final = 2**16
"""Bytes of a line of an answer's head."""


class Upstream(msgspec.Struct, frozen=True, kw_only=True):
    """A server behind the gateway."""

    base_url: str
    """OpenAI-compatible: with ``/v1``. Anthropic: without, such as ``https://api.anthropic.com``."""
    api_key: str | None = None
    """Sent to this server and never shown to a client."""
    protocol: Literal["openai", "anthropic"] = "openai"

    def __post_init__(self) -> None:
        parts = urlsplit(self.base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query:
            raise ConfigurationError(f"got the upstream {_shown(self.base_url)!r}; expected a URL such as http://127.0.0.1:8000/v1")
        if self.protocol not in ("openai", "anthropic"):
            raise ConfigurationError(f"got the protocol {self.protocol!r}; expected 'openai' or 'anthropic'")

    def __repr__(self) -> str:
        return f"Upstream(base_url={self.base_url!r}, protocol={self.protocol!r})"

    def url(self, path: str) -> str:
        """The address of ``path``, which begins with a slash and has no version in it: ``/chat/completions``."""
        base = self.base_url.rstrip("/")
        return f"{base}/v1{path}" if self.protocol == "anthropic" and not base.endswith("/v1") else base + path

    def keys(self) -> Headers:
        """The headers that show the key."""
        if self.api_key is None:
            return []
        if self.protocol == "anthropic":
            return [(b"x-api-key", self.api_key.encode())]
        return [(b"authorization", b"Bearer " + self.api_key.encode())]

    def needed(self, headers: Headers) -> Headers:
        """What the protocol asks for and the client did not give."""
        if self.protocol == "anthropic" and all(name != _ANTHROPIC_VERSION[0] for name, _ in headers):
            return [_ANTHROPIC_VERSION]
        return []

    def destination(self) -> Destination:
        """As a record names it."""
        parts = urlsplit(self.base_url)
        host = parts.hostname or ""
        port = parts.port or (443 if parts.scheme == "https" else 80)
        strict = self.protocol == "anthropic" or is_strict(host)
        return Destination(f"{parts.scheme}://{host}:{port}{parts.path}", host, f"{host}:{port}", strict)


def _shown(url: str) -> str:
    """Without what may be a secret."""
    return url.rpartition("@")[2].partition("?")[0]


class UpstreamStatusError(Exception):
    """The server answered with an error."""

    def __init__(self, response: httpx.Response, body: bytes) -> None:
        text = body[:4_000].decode("utf-8", "replace")
        super().__init__(f"Error code: {response.status_code} - {text}")
        self.status_code = response.status_code


class Request(msgspec.Struct, frozen=True):
    """What goes out."""

    method: str
    url: str
    headers: Headers
    content: bytes
    silence: float
    """Seconds that the server may say nothing."""


class Upstreams:
    """The connections to all servers, on one event loop."""

    def __init__(self, *, connect_timeout: float, silence: float, max_connections: int) -> None:
        import aiohttp
        import httpx
        import yarl

        self._connect_timeout = connect_timeout
        self._silence = silence
        self._max_connections = max_connections
        self._aiohttp: Any = aiohttp
        self._httpx: Any = httpx
        self._url: Any = yarl.URL
        self._session: Any = None
        self._body: Any = _body_class(self)

    def request(self, method: str, url: str, headers: Headers, body: bytes, timeout: float | None) -> Request:
        """``timeout``: seconds of silence; None or more than the gateway's own: that one."""
        return Request(method, url, headers, body, self._silence if timeout is None else min(timeout, self._silence))

    async def send(self, request: Request) -> httpx.Response:
        """The head of the answer; its body is in ``stream``, which must be closed. Raises errors of ``httpx``."""
        content, silence, kind = request.content, request.silence, self._aiohttp
        if self._session is None:
            self._session = self._opened()
        try:
            answer = await self._session.request(
                request.method,
                self._url(request.url, encoded=True),
                headers=[(_text(name), _text(value)) for name, value in request.headers],
                data=_sendable(request.method, content),
                skip_auto_headers=_NOT_ADDED,
                allow_redirects=False,
                timeout=kind.ClientTimeout(total=None, connect=silence, sock_connect=self._connect_timeout, sock_read=silence),
            )
        except (kind.ClientError, TimeoutError, OSError, ValueError) as error:
            raise self.error_of(error) from error
        return self._httpx.Response(answer.status, headers=answer.raw_headers, stream=self._body(answer))

    def _opened(self) -> Any:
        kind = self._aiohttp
        connector = kind.TCPConnector(limit=self._max_connections, keepalive_timeout=_KEEP_ALIVE)
        return kind.ClientSession(
            connector=connector,
            cookie_jar=kind.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,
            max_line_size=_LONGEST,
            max_field_size=_LONGEST,
        )

    def error_of(self, error: Exception) -> Exception:
        """The error of ``httpx`` that says the same."""
        kind, given = self._aiohttp, str(error) or type(error).__name__
        if isinstance(error, kind.ConnectionTimeoutError):
            return self._httpx.ConnectTimeout(given)
        if isinstance(error, TimeoutError):
            return self._httpx.ReadTimeout(given)
        if isinstance(error, kind.ClientConnectorError):
            return self._httpx.ConnectError(given)
        if isinstance(error, kind.ClientPayloadError):
            return self._httpx.ReadError(given)
        if isinstance(error, kind.InvalidURL):
            return self._httpx.UnsupportedProtocol(given)
        return self._httpx.RemoteProtocolError(given)

    async def close(self) -> None:
        """Ends all connections."""
        if self._session is not None:
            await self._session.close()


def _body_class(upstreams: Upstreams) -> type[Any]:
    """The class of the streams that read a body as it comes."""
    import aiohttp
    import httpx

    class Body(httpx.AsyncByteStream):
        def __init__(self, answer: Any) -> None:
            self._answer = answer

        async def __aiter__(self) -> AsyncIterator[bytes]:
            try:
                async for data in self._answer.content.iter_any():
                    yield data
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                raise upstreams.error_of(error) from error

        async def aclose(self) -> None:
            if self._answer.content.at_eof():
                self._answer.release()
            else:
                self._answer.close()

    return Body


def _sendable(method: str, content: bytes) -> Any:
    if not content and method in _BODILESS:
        return None
    return content if len(content) < _LARGE else io.BytesIO(content)


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data.decode("latin-1")


def is_timeout(error: BaseException) -> bool:
    """Whether the server was silent for too long."""
    import httpx

    return isinstance(error, httpx.TimeoutException)


def is_unreachable(error: BaseException) -> bool:
    """Whether the server could not be reached, or broke the connection off."""
    import httpx

    return isinstance(error, httpx.TransportError)
