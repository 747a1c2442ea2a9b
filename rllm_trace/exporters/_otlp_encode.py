"""Finished spans in, the bytes of OTLP requests out: what OpenTelemetry's encoder would write, for a fraction of its time.

OpenTelemetry's makes an object of every value first; a chat span has forty. Each span is encoded once, whatever is sent together. Where one
says something that this does not write (events, trace state, attributes of a link or a scope, values of an unusual type), its batch is left
to OpenTelemetry's encoder.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, cast

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

__all__ = ["request_bytes", "span_bytes"]

_MAX_KEYS: Final = 4_096
_HAS_REMOTE: Final = 0x100
_IS_REMOTE: Final = 0x200
_fixed64: Final = struct.Struct("<Q").pack
_fixed32: Final = struct.Struct("<I").pack
_double: Final = struct.Struct("<d").pack
_SHORT: Final = 32
"""Characters of a text that may be said again: the name of a model, an id."""
_keys: Final[dict[str, bytes]] = {}
_pairs: Final[dict[tuple[bytes, str, type[Any], Any], bytes]] = {}
"""Whole attributes that were said before."""


class _UnusualError(Exception):
    """Something that only the general encoder writes."""


def span_bytes(spans: Sequence[ReadableSpan]) -> list[bytes] | None:
    """Each span as it stands in a request; None where one says something that this does not write."""
    try:
        return [_field(b"\x12", _span(span)) for span in spans]
    except (_UnusualError, UnicodeEncodeError, AttributeError, TypeError, OverflowError, struct.error):
        return None


def request_bytes(spans: Sequence[ReadableSpan], encoded: Sequence[bytes]) -> bytes | None:
    """The serialized ``ExportTraceServiceRequest`` of spans that ``span_bytes`` has encoded; None as there."""
    groups: dict[Any, dict[Any, list[bytes]]] = {}
    try:
        for span, data in zip(spans, encoded, strict=True):
            groups.setdefault(span.resource, {}).setdefault(span.instrumentation_scope, []).append(data)
        return b"".join(
            _field(
                b"\x0a",
                _field(b"\x0a", _attributes(b"\x0a", resource.attributes))
                + b"".join(_field(b"\x12", _scope(scope) + b"".join(told)) for scope, told in scopes.items())
                + _text(b"\x1a", resource.schema_url),
            )
            for resource, scopes in groups.items()
        )
    except (_UnusualError, UnicodeEncodeError, AttributeError, TypeError, OverflowError, struct.error):
        return None


_SMALL: Final = tuple(bytes((value,)) for value in range(0x80))


def _varint(value: int) -> bytes:
    if value < 0x80:
        return _SMALL[value]
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def _field(tag: bytes, data: bytes) -> bytes:
    return tag + _varint(len(data)) + data


def _text(tag: bytes, text: str | None) -> bytes:
    return _field(tag, text.encode()) if text else b""


def _scope(scope: Any) -> bytes:
    if scope is None:
        return b""
    if scope.attributes or scope.schema_url:
        raise _UnusualError
    return _field(b"\x0a", _text(b"\x0a", scope.name) + _text(b"\x12", scope.version))


def _span(span: ReadableSpan) -> bytes:
    context, parent = span.get_span_context(), span.parent
    if context is None or context.trace_state or span.events or span.dropped_attributes or span.dropped_links or span.dropped_events:
        raise _UnusualError
    if span.start_time is None or span.end_time is None:
        raise _UnusualError
    pieces = [
        b"\x0a\x10",
        context.trace_id.to_bytes(16, "big"),
        b"\x12\x08",
        context.span_id.to_bytes(8, "big"),
        b"" if parent is None else b"\x22\x08" + parent.span_id.to_bytes(8, "big"),
        _text(b"\x2a", span.name),
        b"\x30" + bytes((span.kind.value + 1,)),
        b"\x39" + _fixed64(span.start_time),
        b"\x41" + _fixed64(span.end_time),
        _attributes(b"\x4a", span.attributes),
        *(_field(b"\x6a", _link(link)) for link in span.links),
        _field(b"\x7a", _status(span.status)),
        b"\x85\x01" + _fixed32(_flags(parent)),
    ]
    return b"".join(pieces)


def _flags(parent: Any) -> int:
    return _HAS_REMOTE | (_IS_REMOTE if parent is not None and parent.is_remote else 0)


def _link(link: Any) -> bytes:
    context = link.context
    if link.attributes or context.trace_state:
        raise _UnusualError
    ids = b"\x0a\x10" + context.trace_id.to_bytes(16, "big") + b"\x12\x08" + context.span_id.to_bytes(8, "big")
    return ids + b"\x35" + _fixed32(_flags(context))


def _status(status: Any) -> bytes:
    code = status.status_code.value
    return _text(b"\x12", status.description) + (b"\x18" + bytes((code,)) if code else b"")


def _attributes(tag: bytes, attributes: Mapping[str, Any] | None) -> bytes:
    pieces: list[bytes] = []
    for key, value in (attributes or {}).items():
        kind = cast("type[Any]", type(value))
        if kind is str and len(value) > _SHORT:
            pieces += _long_text(tag, _key(key), value)
            continue
        is_short = kind is str or kind is bool
        known = _pairs.get((tag, key, kind, value)) if is_short else None
        if known is None:
            data, name = _value(value), _key(key)
            known = b"".join((tag, _varint(len(name) + len(data) + _sized(len(data))), name, b"\x12", _varint(len(data)), data))
            if is_short:
                if len(_pairs) >= _MAX_KEYS:
                    _pairs.clear()
                _pairs[tag, key, kind, value] = known
        pieces.append(known)
    return b"".join(pieces)


def _long_text(tag: bytes, name: bytes, value: str) -> tuple[bytes, ...]:
    text = value.encode()
    head = b"\x0a" + _varint(len(text))
    length = len(head) + len(text)
    return tag, _varint(len(name) + length + _sized(length)), name, b"\x12", _varint(length), head, text


def _key(key: str) -> bytes:
    known = _keys.get(key)
    if known is None:
        known = _text(b"\x0a", key)
        if len(_keys) < _MAX_KEYS:
            _keys[key] = known
    return known


def _sized(length: int) -> int:
    """Bytes of the tag and the length before so many bytes."""
    return 2 if length < 0x80 else 1 + -(-length.bit_length() // 7)


def _value(value: Any) -> bytes:
    write = _WRITERS.get(cast("type[Any]", type(value)))
    if write is None:
        raise _UnusualError
    return write(value)


def _integer(value: int) -> bytes:
    if not -(2**63) <= value < 2**63:
        raise _UnusualError
    return b"\x18" + _varint(value & 0xFFFF_FFFF_FFFF_FFFF)


def _sequence(values: Sequence[Any]) -> bytes:
    return _field(b"\x2a", b"".join(_field(b"\x0a", _value(value)) for value in values))


_WRITERS: Final[dict[type, Callable[[Any], bytes]]] = {
    str: lambda value: _field(b"\x0a", value.encode()),
    bool: lambda value: b"\x10\x01" if value else b"\x10\x00",
    int: _integer,
    float: lambda value: b"\x21" + _double(value),
    list: _sequence,
    tuple: _sequence,
}
