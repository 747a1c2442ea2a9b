"""The headers of a request or an answer in; out come those that go on to the other side. Pure.

Hop-by-hop headers (also those that ``Connection`` names) end here, as do the client's credentials and cookies and what names the episode.
All else passes as it came, in its order: ``x-request-id``, ``traceparent``, rate limits, versions of an API.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from rllm_trace import attributes as A
from rllm_trace.routing import kept_header

__all__ = ["Headers", "credentials", "down", "plain", "up"]

Headers = list[tuple[bytes, bytes]]
"""Names in lower case."""

_HOP_BY_HOP: Final = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
_KEYS: Final = (b"authorization", b"x-api-key", b"api-key")
_ENDS_HERE: Final = _HOP_BY_HOP | {
    *_KEYS,
    b"host",
    b"content-length",
    b"accept-encoding",
    b"cookie",
    b"expect",
    A.HEADER_PARENT.encode(),
    A.HEADER_EPISODE.encode(),
}
_BAGGAGE: Final = A.HEADER_BAGGAGE.encode()
_OURS: Final = A.BAGGAGE_PREFIX.encode()
_ANTHROPIC: Final = b"anthropic-"
_BEARER: Final = b"bearer "


def plain(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """By name; of a name that comes twice the values are joined with a comma."""
    found: dict[str, str] = {}
    for name, value in headers:
        key, text = name.decode("latin-1"), value.decode("latin-1")
        found[key] = f"{found[key]},{text}" if key in found else text
    return found


def credentials(headers: Iterable[tuple[bytes, bytes]]) -> list[str]:
    """Every key that the client shows, in whichever header its protocol has for it."""
    found: list[str] = []
    for name, value in headers:
        if name in _KEYS:
            key = value[len(_BEARER) :] if value[: len(_BEARER)].lower() == _BEARER else value
            found.append(key.strip().decode("latin-1"))
    return found


def up(headers: Headers, *, policy: bool, translated: bool) -> Headers:
    """What of a client's headers goes to the server. To the policy only what holds no secret of the app's provider."""
    named = _named_by_connection(headers)
    kept: Headers = []
    for name, value in headers:
        if name in _ENDS_HERE or name in named or (policy and not kept_header(name.decode("latin-1"))):
            continue
        if translated and name.startswith(_ANTHROPIC):
            continue
        if name == _BAGGAGE:
            value = b",".join(entry.strip() for entry in value.split(b",") if entry.strip() and not entry.strip().startswith(_OURS))
            if not value:
                continue
        kept.append((name, value))
    kept.append((b"accept-encoding", b"identity"))
    return kept


def down(headers: Headers, *, decoded: bool) -> Headers:
    """What of a server's headers goes to the client. ``decoded``: the body that is sent is not the encoded one that came."""
    named = _named_by_connection(headers)
    return [
        (name, value)
        for name, value in headers
        if not (
            name in _HOP_BY_HOP
            or name in named
            or name == b"content-length"
            or name == b"set-cookie"
            or (decoded and name == b"content-encoding")
        )
    ]


def _named_by_connection(headers: Headers) -> frozenset[bytes]:
    return frozenset(part.strip().lower() for name, value in headers if name == b"connection" for part in value.split(b",") if part.strip())
