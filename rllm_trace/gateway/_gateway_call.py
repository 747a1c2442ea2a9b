"""A ``ClientCall`` whose app is at the other end of a connection: the same record, made from bytes that pass through."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from rllm_trace import _exact
from rllm_trace._calls import Operation, open_call
from rllm_trace._context import enter, leave
from rllm_trace._guard import guard
from rllm_trace.clients._call import ClientCall, Destination
from rllm_trace.clients._decode import UNREADABLE, Reply
from rllm_trace.gateway._binding import Bound
from rllm_trace.gateway._client import ClientGoneError
from rllm_trace.gateway._messages_read import MessagesReader, read_message
from rllm_trace.routing import redirects, use_route
from rllm_trace.types import ErrorInfo

__all__ = ["GatewayCall", "goes_to_policy", "open_gateway_call"]

_RETRIES: Final = "x-stainless-retry-count"
"""How often the app's client has tried this call before, as the official clients of OpenAI and Anthropic say it."""
_GONE: Final = f"{ClientGoneError.__module__}.{ClientGoneError.__qualname__}"


class GatewayCall(ClientCall):
    """A call of a client of the gateway."""

    defers = False
    """Its record is committed before its client has the answer."""

    @property
    def has_ended(self) -> bool:
        """Its record is in its episode."""
        return self._ended

    def hang_up(self) -> None:
        """The client went away: unless its record is there already, the call was cancelled."""
        error = ErrorInfo(type=_GONE, message="the client went away before it had its answer")
        self.finish(Reply(), error=error, cancelled=True)

    def revoke(self) -> None:
        """The reply was whole, but its client never had it: no sample may come of it. In time as long as the episode is open."""
        data = self.open.span.call
        if data is not None:
            data.status, data.complete, data.exact = "abandoned", False, False
            data.inexact_reason = _exact.INCOMPLETE

    def sent_body(self, raw: bytes, app_body: dict[str, Any]) -> bytes:
        """What to send: the client's own bytes where nothing was changed."""
        return raw if self.body is app_body else msgspec.json.encode(self.body)


class MessagesCall(GatewayCall):
    """A call of Anthropic's API that goes to a server of Anthropic's API."""

    def _may_ask(self) -> bool:
        return False

    def read(self, raw: bytes) -> tuple[Reply, bytes]:
        try:
            return read_message(raw), raw
        except UNREADABLE:
            return Reply(fault=_exact.UNREADABLE), raw

    def events(self) -> Any:
        return MessagesReader()


def goes_to_policy(bound: Bound, model: str) -> bool:
    """Whether a call that asks for ``model`` is redirected."""
    return bound.route is not None and bound.scope is not None and redirects(bound.route, bound.scope, model)


def open_gateway_call(
    bound: Bound, operation: Operation, body: dict[str, Any], destination: Destination, headers: dict[str, str], *, native_messages: bool
) -> GatewayCall | None:
    """Begins the call in its scope and plans where it goes. None: nothing records it."""
    scope = bound.scope
    if scope is None:
        return None
    before = enter(scope)
    call: GatewayCall | None = None
    try:
        with guard("gateway"), use_route(None if native_messages else bound.route):
            opened = open_call(operation=operation, requested_model=str(body.get("model") or ""))
            if opened is not None:
                kind = MessagesCall if native_messages else GatewayCall
                call = kind(opened, None, operation, body, destination)
                retries = headers.get(_RETRIES, "")
                if retries.isdecimal():
                    call.attempts = min(int(retries), 1_000)
                call.plan()
                return call
        if call is not None:
            call.finish(Reply())
        return None
    finally:
        leave(scope, before)
