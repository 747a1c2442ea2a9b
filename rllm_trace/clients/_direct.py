"""Sends a redirected request past what the app put on its HTTP client for its own provider.

The app's ``http_client`` sends redirected calls too, so that its limits and TLS settings hold, but never its ``auth``. Where it has
request hooks (which may sign or add secrets), or would send a call for this machine through a proxy, a plain client of ours sends
instead; it keeps no connection open, so it leaves nothing behind on an event loop that ends.
"""

from __future__ import annotations

import asyncio
import importlib
import ipaddress
import socket
import threading
import weakref
from functools import lru_cache
from typing import Any, Final

__all__ = ["async_sender", "is_this_machine", "sender"]

_lock: Final = threading.Lock()
_sync: Final[dict[str, Any]] = {}
_async: Final[weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, Any]]] = weakref.WeakKeyDictionary()


def sender(http: Any, request: Any) -> Any:
    """What is to send ``request`` in place of the app's ``http``, an ``httpx.Client`` or ``httpx2.Client``: itself, or ours."""
    if not _is_needed(http, request):
        return http
    flavour = _flavour(http)
    with _lock:
        if flavour not in _sync:
            _sync[flavour] = _plain(flavour, "Client")
        return _sync[flavour]


def async_sender(http: Any, request: Any) -> Any:
    """The same for an ``AsyncClient``; ours is one for each event loop."""
    if not _is_needed(http, request):
        return http
    flavour = _flavour(http)
    with _lock:
        clients = _async.setdefault(asyncio.get_running_loop(), {})
        if flavour not in clients:
            clients[flavour] = _plain(flavour, "AsyncClient")
        return clients[flavour]


def _is_needed(http: Any, request: Any) -> bool:
    if getattr(http, "event_hooks", {}).get("request"):
        return True
    if not is_this_machine(request.url.host):
        return False
    choose = getattr(http, "_transport_for_url", None)
    return bool(getattr(http, "_mounts", None)) and choose is not None and choose(request.url) is not http._transport


@lru_cache(maxsize=256)
def is_this_machine(host: str) -> bool:
    """Loopback, or an address that one of this machine's interfaces has: only such a one can be bound."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    if address.is_loopback:
        return True
    try:
        with socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
    except OSError:
        return False
    return True


def _flavour(http: Any) -> str:
    return next(name for kind in type(http).__mro__ if (name := kind.__module__.partition(".")[0]) in ("httpx", "httpx2"))


def _plain(flavour: str, kind: str) -> Any:
    module = importlib.import_module(flavour)
    return getattr(module, kind)(trust_env=False, limits=module.Limits(max_connections=None, max_keepalive_connections=0))
