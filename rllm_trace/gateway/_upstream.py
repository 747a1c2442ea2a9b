"""Where requests go: the only file that speaks HTTP to the servers behind the gateway.

A transport of ``httpx`` is used without its client, so that nothing is added, followed, decoded, kept or sent through a proxy: a request
goes out as it was written, an answer comes back as bytes.
"""

from __future__ import annotations

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


class Upstreams:
    """The connections to all servers, on one event loop."""

    def __init__(self, *, connect_timeout: float, silence: float, max_connections: int) -> None:
        import httpx

        self._connect_timeout = connect_timeout
        self._silence = silence
        self._request: Any = httpx.Request
        limits = httpx.Limits(max_connections=max_connections, max_keepalive_connections=max_connections, keepalive_expiry=5.0)
        self._transport = httpx.AsyncHTTPTransport(limits=limits, trust_env=False, retries=0)

    def request(self, method: str, url: str, headers: Headers, body: bytes, timeout: float | None) -> httpx.Request:
        """``timeout``: seconds of silence; None or more than the gateway's own: that one."""
        silence = self._silence if timeout is None else min(timeout, self._silence)
        timeouts = {"connect": self._connect_timeout, "read": silence, "write": silence, "pool": silence}
        return self._request(method, url, headers=headers, content=body, extensions={"timeout": timeouts})

    async def send(self, request: httpx.Request) -> httpx.Response:
        """The head of the answer; its body is in ``stream``, which must be closed. Raises errors of ``httpx``."""
        return await self._transport.handle_async_request(request)

    async def close(self) -> None:
        """Ends all connections."""
        await self._transport.aclose()


def is_timeout(error: BaseException) -> bool:
    """Whether the server was silent for too long."""
    import httpx

    return isinstance(error, httpx.TimeoutException)


def is_unreachable(error: BaseException) -> bool:
    """Whether the server could not be reached, or broke the connection off."""
    import httpx

    return isinstance(error, httpx.TransportError)
