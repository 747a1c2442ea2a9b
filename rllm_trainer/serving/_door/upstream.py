"""The server behind the door: the one file that speaks HTTP to it.

No proxy of the environment is used and nothing is followed. Over a unix socket each request has a connection of its own: vLLM closes
kept ones after an error, and a new one costs nothing there.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx
import msgspec

__all__ = ["Refused", "Unreachable", "Upstream"]

_CONNECT = 10.0
_SILENCE = 1800.0
"""Seconds without a byte after which a request has failed; calls have deadlines of their own."""
_SHOWN = 600


class Unreachable(Exception):
    """No connection, or it broke before the answer was whole."""


class Refused(Exception):
    """The server answered with an error."""

    def __init__(self, what: str, status: int, text: str) -> None:
        super().__init__(f"{what} was answered with {status}: {text[:_SHOWN]}")
        self.status = status
        self.text = text


class Upstream:
    """Requests to one server, on one event loop."""

    def __init__(self, base_url: str, *, uds: str | None = None, key: str | None = None, headers: Mapping[str, str] | None = None) -> None:
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self._headers = {**(headers or {}), **({"authorization": f"Bearer {key}"} if key else {})}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0 if uds else 64, keepalive_expiry=5.0)
        transport = httpx.AsyncHTTPTransport(uds=uds, limits=limits, trust_env=False)
        timeout = httpx.Timeout(_SILENCE, connect=_CONNECT)
        self._client = httpx.AsyncClient(base_url=self.base_url, transport=transport, timeout=timeout, trust_env=False)

    async def send(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> httpx.Response:
        """The head of an answer, whatever its status; the body is read by ``parts`` or ``httpx`` itself. Raises ``Unreachable``."""
        request = self._client.build_request(method, path, content=body, headers={**headers, **self._headers})
        try:
            return await self._client.send(request, stream=True)
        except httpx.HTTPError as error:
            raise Unreachable(f"{method} {path}: {error!r}") from error

    async def parts(self, response: httpx.Response) -> AsyncIterator[bytes]:
        """The body as it comes, its encoding untouched; the connection is given up when this ends, however it ends."""
        try:
            async for part in response.aiter_raw():
                yield part
        except httpx.HTTPError as error:
            raise Unreachable(f"the answer broke off: {error!r}") from error
        finally:
            await response.aclose()

    async def whole(self, response: httpx.Response) -> bytes:
        """The body, decoded, once it is all there. Raises ``Unreachable``."""
        try:
            return await response.aread()
        except httpx.HTTPError as error:
            raise Unreachable(f"the answer broke off: {error!r}") from error

    async def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        params: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float = _SILENCE,
    ) -> Any:
        """One control request: its JSON answer, or None for an empty one. Raises ``Refused`` and ``Unreachable``."""
        content = b"" if body is None else msgspec.json.encode(body)
        sent = {"content-type": "application/json", **self._headers, **(headers or {})}
        try:
            response = await self._client.request(method, path, content=content, params=params, headers=sent, timeout=timeout)
        except httpx.HTTPError as error:
            raise Unreachable(f"{method} {path}: {error!r}") from error
        if response.status_code >= 400:
            raise Refused(f"{method} {path}", response.status_code, response.text)
        try:
            return msgspec.json.decode(response.content) if response.content else None
        except msgspec.DecodeError:
            return response.text

    async def healthy(self, path: str, timeout: float) -> bool:
        """Whether ``GET path`` is answered well within ``timeout`` seconds."""
        with contextlib.suppress(Refused, Unreachable):
            await self.call("GET", path, timeout=timeout)
            return True
        return False

    async def until_healthy(self, path: str, deadline: float, alive: Any) -> bool:
        """Waits for health until ``deadline`` (``time.monotonic``), or until ``alive()`` is False."""
        while time.monotonic() < deadline and alive():
            if await self.healthy(path, 5.0):
                return True
            await asyncio.sleep(0.25)
        return False

    async def close(self) -> None:
        await self._client.aclose()
