"""Where and how OTLP goes: arguments and the standard ``OTEL_EXPORTER_OTLP_*`` variables in, one checked record out. Pure.

An argument wins over the variable of traces, that one over the variable of all signals. A timeout of 1,000 or more is milliseconds, as the
specification says; a smaller one is seconds, as the Python SDK reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, cast
from urllib.parse import unquote, urlsplit

import msgspec

from rllm_trace import attributes as names
from rllm_trace.exceptions import ConfigurationError

__all__ = ["Compression", "OTLPSettings", "Protocol", "otlp_settings"]

Protocol = Literal["http/protobuf", "grpc"]
Compression = Literal["none", "gzip", "deflate"]

_DEFAULT_ENDPOINT: Final[dict[str, str]] = {"http/protobuf": "http://localhost:4318", "grpc": "http://localhost:4317"}
_TRACES_PATH: Final = "v1/traces"
_DEFAULT_TIMEOUT: Final = 10.0
_LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})


class OTLPSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One way to a receiver."""

    protocol: Protocol
    endpoint: str
    """HTTP: the whole URL. gRPC: ``host:port``."""
    secure: bool
    headers: dict[str, str]
    """Lower-case names. Holds keys: never shown."""
    timeout: float
    """Seconds for one batch, retries included."""
    compression: Compression
    certificate: str | None
    client_key: str | None
    client_certificate: str | None
    loopback: bool
    """The receiver is on this machine: proxies are left aside."""

    def __repr__(self) -> str:
        return f"OTLPSettings({self.protocol} to {self.endpoint})"


def otlp_settings(
    environ: Mapping[str, str],
    *,
    protocol: str | None = None,
    endpoint: str | None = None,
    headers: Mapping[str, str] | None = None,
    timeout: float | None = None,
    compression: str | None = None,
) -> OTLPSettings:
    """The settings in force. Raises ConfigurationError that names the variable and the values it may have."""

    def variable(name: str) -> tuple[str, str]:
        for key in (names.ENV_OTLP + names.ENV_OTLP_TRACES_PART + name, names.ENV_OTLP + name):
            if environ.get(key, "").strip():
                return key, environ[key].strip()
        return names.ENV_OTLP + name, ""

    chosen = cast("Protocol", _one_of("protocol", protocol, variable("PROTOCOL"), "http/protobuf", ("http/protobuf", "grpc")))
    url = endpoint or _endpoint(environ, chosen)
    parts = urlsplit(url if "//" in url else f"//{url}")
    if not parts.hostname:
        raise ConfigurationError(f"OTLP endpoint {url!r}: expected a URL such as {_DEFAULT_ENDPOINT[chosen]}")
    if parts.username or parts.password:
        raise ConfigurationError(f"OTLP endpoint at {parts.hostname} with credentials in its URL: put them into {names.ENV_OTLP}HEADERS")
    return OTLPSettings(
        protocol=chosen,
        endpoint=url if chosen == "http/protobuf" else parts.netloc,
        secure=_secure(chosen, parts.scheme, variable("INSECURE")[1]),
        headers={**_headers(variable("HEADERS")), **{key.lower(): value for key, value in (headers or {}).items()}},
        timeout=_timeout(timeout, variable("TIMEOUT")),
        compression=cast("Compression", _one_of("compression", compression, variable("COMPRESSION"), "none", ("none", "gzip", "deflate"))),
        certificate=variable("CERTIFICATE")[1] or None,
        client_key=variable("CLIENT_KEY")[1] or None,
        client_certificate=variable("CLIENT_CERTIFICATE")[1] or None,
        loopback=parts.hostname in _LOOPBACK,
    )


def _endpoint(environ: Mapping[str, str], protocol: Protocol) -> str:
    of_traces = environ.get(f"{names.ENV_OTLP}{names.ENV_OTLP_TRACES_PART}ENDPOINT", "").strip()
    if of_traces:
        return of_traces
    base = environ.get(f"{names.ENV_OTLP}ENDPOINT", "").strip() or _DEFAULT_ENDPOINT[protocol]
    return f"{base.rstrip('/')}/{_TRACES_PATH}" if protocol == "http/protobuf" else base


def _one_of(what: str, given: str | None, variable: tuple[str, str], default: str, allowed: tuple[str, ...]) -> str:
    value = given or variable[1].lower() or default
    if value not in allowed:
        where = f"{what}={value!r}" if given else f"{variable[0]}={value!r}"
        raise ConfigurationError(f"{where}: expected {' or '.join(allowed)}")
    return value


def _secure(protocol: Protocol, scheme: str, insecure: str) -> bool:
    if protocol == "http/protobuf":
        if scheme not in ("http", "https"):
            raise ConfigurationError(f"OTLP endpoint of scheme {scheme!r}: expected http or https")
        return scheme == "https"
    if scheme:
        return scheme != "http"
    return insecure.lower() != "true"


def _headers(variable: tuple[str, str]) -> dict[str, str]:
    key, text = variable
    found: dict[str, str] = {}
    for position, entry in enumerate(part for part in text.split(",") if part.strip()):
        name, separator, value = entry.partition("=")
        if not separator or not name.strip():
            raise ConfigurationError(f"{key}: entry {position + 1} is no name=value; separate entries with commas")
        found[unquote(name).strip().lower()] = unquote(value).strip()
    return found


def _timeout(given: float | None, variable: tuple[str, str]) -> float:
    key, text = variable
    try:
        value = given if given is not None else float(text or _DEFAULT_TIMEOUT)
    except ValueError:
        raise ConfigurationError(f"{key}={text!r}: expected a number of milliseconds") from None
    if not value > 0:
        raise ConfigurationError(f"OTLP timeout {value:g}: expected a number above 0")
    return value / 1000 if given is None and value >= 1000 else value
