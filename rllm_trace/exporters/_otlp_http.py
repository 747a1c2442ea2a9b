"""Serialized OTLP over HTTP: one POST, its outcome named."""

from __future__ import annotations

import gzip
import http.client
import ssl
import urllib.error
import urllib.request
import zlib
from email.message import Message
from typing import IO, Any, Final

from rllm_trace.exporters._otlp_outcome import Outcome, delivered
from rllm_trace.exporters._otlp_settings import OTLPSettings

__all__ = ["HTTPTransport"]

_PROTOBUF: Final = "application/x-protobuf"
_AGENT: Final = "rllm-trace-otlp"
_MAX_ANSWER: Final = 65_536
_RETRYABLE: Final = frozenset({408, 429, 502, 503, 504})
_TOO_LARGE: Final = 413


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirected POST would become a GET without its spans, and take the headers to another host."""

    def redirect_request(self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str) -> None:
        return None


class HTTPTransport:
    """Keeps no connection, so it is as good in a forked child as in its parent."""

    def __init__(self, settings: OTLPSettings) -> None:
        self._settings = settings
        handlers: list[Any] = [_NoRedirect()]
        if settings.loopback:
            handlers.append(urllib.request.ProxyHandler({}))
        if settings.secure:
            handlers.append(urllib.request.HTTPSHandler(context=_tls(settings)))
        self._opener = urllib.request.build_opener(*handlers)

    def send(self, body: bytes, timeout: float) -> Outcome:
        """Posts one serialized request. ``timeout``: seconds that the network may be silent."""
        headers = {"user-agent": _AGENT, **self._settings.headers, "content-type": _PROTOBUF}
        if self._settings.compression == "gzip":
            body, headers["content-encoding"] = gzip.compress(body, compresslevel=3), "gzip"
        elif self._settings.compression == "deflate":
            body, headers["content-encoding"] = zlib.compress(body, 3), "deflate"
        request = urllib.request.Request(self._settings.endpoint, data=body, headers=headers, method="POST")
        try:
            with self._opener.open(request, timeout=timeout) as answer:
                return delivered(answer.read(_MAX_ANSWER), is_protobuf=_PROTOBUF in answer.headers.get("content-type", ""))
        except urllib.error.HTTPError as error:
            with error:
                return _refused(error)
        except (OSError, http.client.HTTPException) as error:
            return Outcome(kind="retry", reason=f"{type(error).__name__}: {getattr(error, 'reason', error)}")

    def close(self) -> None:
        """Nothing is open between two requests."""


def _refused(error: urllib.error.HTTPError) -> Outcome:
    reason = f"HTTP {error.code}"
    if error.code == _TOO_LARGE:
        return Outcome(kind="too_large", reason=reason)
    if error.code in _RETRYABLE:
        after = error.headers.get("retry-after", "")
        return Outcome(kind="retry", reason=reason, after=float(after) if after.isdecimal() else None)
    return Outcome(kind="refused", reason=reason)


def _tls(settings: OTLPSettings) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=settings.certificate)
    if settings.client_certificate is not None:
        context.load_cert_chain(settings.client_certificate, settings.client_key)
    return context
