"""Hooks for HTTP clients that take the running workflow along to hosts that are listed, and to no other.

    hop = Hop(["127.0.0.1:8000", "agents.internal"])
    httpx.Client(event_hooks=hop.httpx())
    httpx.AsyncClient(event_hooks=hop.httpx_async())
    aiohttp.ClientSession(trace_configs=[hop.aiohttp()])
    session.mount("http://", hop.requests())

What is added is what ``rllm.headers()`` gives: ids and names. A ``traceparent`` and the baggage of the app's own are never changed. A
redirect to a host that is not listed loses what was added. No class of a client is patched: a client without a hook is as it was.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from typing import Any, Final, cast
from urllib.parse import urljoin, urlsplit

from rllm_trace import attributes as A
from rllm_trace._given import text
from rllm_trace._guard import guard
from rllm_trace._propagation import headers
from rllm_trace.exceptions import ConfigurationError

__all__ = ["Hop", "host_and_port"]

_PORTS: Final = {"http": 80, "https": 443, "ws": 80, "wss": 443}


class Hop:
    """``hosts``: ``"host"`` is every port of it, ``"host:port"`` that one; ``"[::1]:8000"`` for IPv6. No patterns: each host is meant.

    Raises ConfigurationError for what is none of these.
    """

    def __init__(self, hosts: Iterable[str]) -> None:
        if isinstance(hosts, str):
            raise ConfigurationError(f'got hosts={hosts!r}; expected a list, such as ["{hosts}"]')
        if not isinstance(cast("object", hosts), Iterable):
            raise ConfigurationError(f'got hosts={hosts!r}; expected a list of names, such as ["agents.internal:8000"]')
        named = list(hosts)
        for entry in named:
            text(entry, "host")
        self._hosts = frozenset(host_and_port(entry) for entry in named)

    def reaches(self, url: str) -> bool:
        """Whether requests to ``url`` take the workflow along."""
        try:
            parts = urlsplit(url)
            port = parts.port or _PORTS.get(parts.scheme)
        except ValueError:
            return False
        host = (parts.hostname or "").lower()
        return (host, None) in self._hosts or (host, port) in self._hosts

    def add_to(self, sent: MutableMapping[str, str], url: str) -> None:
        """Puts ours on the headers of one request, or takes them off where it goes elsewhere. Never raises."""
        with guard("hop"):
            if self.reaches(url):
                sent.update(headers(_those_of(sent)))
            else:
                _take_off(sent)

    def httpx(self) -> dict[str, list[Any]]:
        """``event_hooks`` of an ``httpx.Client``."""

        def on_request(request: Any) -> None:
            self.add_to(request.headers, str(request.url))

        return {"request": [on_request]}

    def httpx_async(self) -> dict[str, list[Any]]:
        """``event_hooks`` of an ``httpx.AsyncClient``."""

        async def on_request(request: Any) -> None:
            self.add_to(request.headers, str(request.url))

        return {"request": [on_request]}

    def aiohttp(self) -> Any:
        """One of the ``trace_configs`` of an ``aiohttp.ClientSession``."""
        import aiohttp

        async def on_start(session: Any, context: Any, params: Any) -> None:
            self.add_to(params.headers, str(params.url))

        async def on_redirect(session: Any, context: Any, params: Any) -> None:
            target = params.response.headers.get("location") or params.response.headers.get("uri") or ""
            self.add_to(params.headers, urljoin(str(params.url), target))

        config: Any = aiohttp.TraceConfig()
        config.on_request_start.append(on_start)
        config.on_request_redirect.append(on_redirect)
        return config

    def requests(self, **options: Any) -> Any:
        """A transport adapter to mount on a ``requests.Session``; ``options`` are those of ``HTTPAdapter``."""
        from requests.adapters import HTTPAdapter

        hop = self
        base: Any = HTTPAdapter

        class Adapter(base):
            def send(self, request: Any, *args: Any, **kwargs: Any) -> Any:
                carrying = request.copy()  # a redirect starts from the app's own request again
                hop.add_to(carrying.headers, carrying.url)
                response: Any = base.send(self, carrying, *args, **kwargs)
                response.request = request
                return response

        return Adapter(**options)


def host_and_port(entry: str) -> tuple[str, int | None]:
    """``"host:port"`` taken apart; None where no port is named. Raises ConfigurationError for what is neither."""
    try:
        parts = urlsplit(f"//{entry}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or _has_more(entry):
        raise ConfigurationError(f'got {entry!r} as a host; expected "host" or "host:port", without a scheme, a path or a pattern')
    return host.lower(), port


def _has_more(entry: str) -> bool:
    """Whether there is more than a host and a port."""
    return any(character in entry for character in "/*@?# ")


def _those_of(sent: MutableMapping[str, str]) -> dict[str, str]:
    """The baggage that is there, if any: what ours is added to."""
    baggage = sent.get(A.HEADER_BAGGAGE)
    return {} if baggage is None else {A.HEADER_BAGGAGE: baggage}


def _take_off(sent: MutableMapping[str, str]) -> None:
    sent.pop(A.HEADER_PARENT, None)
    baggage = sent.get(A.HEADER_BAGGAGE)
    if baggage is None or A.BAGGAGE_PREFIX not in baggage:
        return
    theirs = [entry for entry in baggage.split(",") if entry.strip() and not entry.strip().startswith(A.BAGGAGE_PREFIX)]
    if theirs:
        sent[A.HEADER_BAGGAGE] = ",".join(theirs)
    else:
        del sent[A.HEADER_BAGGAGE]
