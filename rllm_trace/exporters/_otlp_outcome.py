"""What became of one OTLP request, whichever way it went."""

from __future__ import annotations

from typing import Literal, Protocol

import msgspec

__all__ = ["Outcome", "Transport", "delivered"]


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """``retry``: the receiver may take it later; ``too_large``: it may take the parts; ``refused``: it never will."""

    kind: Literal["delivered", "retry", "too_large", "refused"]
    reason: str = ""
    after: float | None = None
    """Seconds that the receiver asked to wait."""
    rejected: int = 0
    """Spans of a delivered request that the receiver did not take."""


class Transport(Protocol):
    """One way to a receiver."""

    def send(self, body: bytes, timeout: float) -> Outcome:
        """Sends one serialized request; never raises for what the network or the receiver does."""
        ...

    def close(self) -> None:
        """Gives up connections."""
        ...


def delivered(answer: bytes, *, is_protobuf: bool) -> Outcome:
    """Reads how many spans the receiver rejected, where it says so in protobuf."""
    if not (is_protobuf and answer):
        return Outcome(kind="delivered")
    from google.protobuf.message import DecodeError
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

    try:
        partial = ExportTraceServiceResponse.FromString(answer).partial_success
    except DecodeError:
        return Outcome(kind="delivered")
    return Outcome(kind="delivered", rejected=partial.rejected_spans, reason=partial.error_message)
