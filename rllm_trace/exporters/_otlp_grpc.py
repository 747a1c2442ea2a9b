"""Serialized OTLP over gRPC: one unary call, its outcome named. The only file that imports grpc to send."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

from rllm_trace.exporters._otlp_outcome import Outcome, delivered
from rllm_trace.exporters._otlp_settings import OTLPSettings

__all__ = ["GRPCTransport"]

_EXPORT: Final = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
_RETRYABLE: Final = frozenset({"UNAVAILABLE", "CANCELLED", "DEADLINE_EXCEEDED", "ABORTED", "DATA_LOSS"})
_TOO_LARGE: Final = frozenset({"RESOURCE_EXHAUSTED", "OUT_OF_RANGE"})
"""Also said by a receiver that is only busy: the parts of the batch are then tried once each, and fail without a wait."""


class GRPCTransport:
    """Opens its channel with the first request, and a new one in a forked child."""

    def __init__(self, settings: OTLPSettings) -> None:
        import grpc

        self._grpc: Any = grpc
        self._settings = settings
        self._channel: Any = None
        self._owner = 0

    def send(self, body: bytes, timeout: float) -> Outcome:
        """Makes one call that may take ``timeout`` seconds."""
        if self._channel is None or self._owner != os.getpid():
            self._channel, self._owner = self._open(), os.getpid()
        export = self._channel.unary_unary(_EXPORT)
        try:
            answer = export(body, timeout=timeout, metadata=list(self._settings.headers.items()))
        except self._grpc.RpcError as error:
            return _refused(error)
        return delivered(answer, is_protobuf=True)

    def close(self) -> None:
        """Closes the channel, which ends a call that is under way."""
        channel, self._channel = self._channel, None
        if channel is not None and self._owner == os.getpid():
            channel.close()

    def _open(self) -> Any:
        grpc, settings = self._grpc, self._settings
        options = [("grpc.enable_http_proxy", 0)] if settings.loopback else []
        compression = {"gzip": grpc.Compression.Gzip, "deflate": grpc.Compression.Deflate}.get(settings.compression)
        if not settings.secure:
            return grpc.insecure_channel(settings.endpoint, options=options, compression=compression)
        credentials = grpc.ssl_channel_credentials(
            root_certificates=_bytes(settings.certificate),
            private_key=_bytes(settings.client_key),
            certificate_chain=_bytes(settings.client_certificate),
        )
        return grpc.secure_channel(settings.endpoint, credentials, options=options, compression=compression)


def _refused(error: Any) -> Outcome:
    code = error.code().name
    if code in _TOO_LARGE:
        return Outcome(kind="too_large", reason=f"gRPC {code}")
    return Outcome(kind="retry" if code in _RETRYABLE else "refused", reason=f"gRPC {code}")


def _bytes(path: str | None) -> bytes | None:
    return None if path is None else Path(path).read_bytes()
