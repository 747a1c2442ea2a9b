"""Releases of ``openai`` before ``_send_request`` hand each request straight to their HTTP client: there, a redirected one is taken over.

``_client`` of the two classes then is a descriptor. It gives the app's HTTP client as ever, but while a redirected call of that very client
is under way one that sends past the app's ``auth``, hooks and proxies, as ``_send_request`` does it for newer releases.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, cast

from rllm_trace.clients._direct import async_sender, sender

__all__ = ["HttpClient"]

_ATTRIBUTE: Final = "_client"


class HttpClient:
    """Put on a class as ``_client``; the objects keep their own where they had it."""

    def __init__(self, is_redirected: Callable[[Any], bool], goes_out: Callable[[Any, Any], None], *, is_async: bool) -> None:
        self._is_redirected = is_redirected
        self._goes_out = goes_out
        self._sender = _AsyncSender if is_async else _Sender

    def __get__(self, client: Any, owner: type[Any] | None = None) -> Any:
        if client is None:
            return self
        try:
            http = cast("dict[str, Any]", vars(client))[_ATTRIBUTE]
        except KeyError:
            raise AttributeError(_ATTRIBUTE) from None
        return self._sender(client, http, self._goes_out) if self._is_redirected(client) else http

    def __set__(self, client: Any, http: Any) -> None:
        vars(client)[_ATTRIBUTE] = http


class _Sender:
    """The app's HTTP client, for one redirected request."""

    def __init__(self, client: Any, http: Any, goes_out: Callable[[Any, Any], None]) -> None:
        self._of = client
        self._http = http
        self._goes_out = goes_out

    def __getattr__(self, name: str) -> Any:
        return getattr(self._http, name)

    def send(self, request: Any, **kwargs: Any) -> Any:
        self._goes_out(self._of, request)
        return sender(self._http, request).send(request, **{**kwargs, "auth": None})


class _AsyncSender(_Sender):
    async def send(self, request: Any, **kwargs: Any) -> Any:
        self._goes_out(self._of, request)
        return await async_sender(self._http, request).send(request, **{**kwargs, "auth": None})
