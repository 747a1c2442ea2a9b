"""An answer of the gateway's own, in the shape that the client's protocol has for errors."""

from __future__ import annotations

from typing import Any, Final

import msgspec

__all__ = ["Refusal", "error_body"]

_ANTHROPIC_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}


class Refusal(Exception):
    """The request is answered here, with this status. The message says what was got, what was expected and what to do."""

    def __init__(self, status: int, message: str, *, code: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


def error_body(status: int, message: str, code: str, *, anthropic: bool) -> bytes:
    """The JSON body of an error."""
    if anthropic:
        kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
        return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": message}})
    kind = "invalid_request_error" if status < 500 else "server_error"
    error: dict[str, Any] = {"message": message, "type": kind, "param": None, "code": code}
    return msgspec.json.encode({"error": error})
