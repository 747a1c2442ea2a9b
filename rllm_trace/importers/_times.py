"""Times as exports write them, to Unix nanoseconds."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final

__all__ = ["nanoseconds"]

_MILLISECONDS: Final = 10**11
"""Larger numbers than this are no seconds: they would lie beyond the year 5000."""
_MICROSECONDS: Final = 10**14
_NANOSECONDS: Final = 10**17


def nanoseconds(when: Any) -> int:
    """Unix nanoseconds of ISO 8601 text (without a zone: UTC) or of a number of seconds, milli-, micro- or nanoseconds.

    Raises ValueError if it is neither.
    """
    if isinstance(when, (int, float)) and not isinstance(when, bool):
        for limit, factor in ((_NANOSECONDS, 1), (_MICROSECONDS, 1_000), (_MILLISECONDS, 1_000_000)):
            if abs(when) >= limit:
                return int(when * factor)
        return int(when * 1_000_000_000)
    if not isinstance(when, str):
        raise ValueError(f"got {when!r}; expected a time as ISO 8601 text or a number")
    head, _, fraction = when.strip().replace("Z", "+00:00").partition(".")
    digits = fraction[: len(fraction) - len(fraction.lstrip("0123456789"))]
    moment = datetime.fromisoformat(head + fraction[len(digits) :])
    whole = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    return int(whole.timestamp()) * 1_000_000_000 + int(digits[:9].ljust(9, "0") or 0)
