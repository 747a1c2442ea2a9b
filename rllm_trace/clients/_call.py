"""One call of the app from its request to its last byte: what is sent instead of it, what came back, and the record of both.

``ClientCall`` knows no client library. The patch tells it what happens (``sent``, ``answered``, ``failed``); it ends its span exactly
once, with the first of: the body read, the stream over, an exception.
"""

from __future__ import annotations

import time
import types
from collections.abc import Callable, Mapping
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from rllm_trace import _exact
from rllm_trace import attributes as A
from rllm_trace._calls import OpenCall
from rllm_trace._guard import guard
from rllm_trace._recorder import recorder
from rllm_trace._spans import error_info
from rllm_trace.clients._ask import ask, is_strict, refusals, refused_fields
from rllm_trace.clients._decode import UNREADABLE, Keep, Operation, Reply, is_bare, read_body, read_reply, reply_of, shown, shown_unread
from rllm_trace.clients._events import EventReader
from rllm_trace.clients._onlooker import Onlooker
from rllm_trace.clients._record import Outcome, expected_choices, record_of
from rllm_trace.clients._responses import ResponsesReader, read_response
from rllm_trace.clients._stream import tee
from rllm_trace.routing import Endpoint, Route, call_seed, current_route, redirects, reshaped, settings_of
from rllm_trace.types import ErrorInfo

__all__ = ["ClientCall", "Destination"]

_MAX_MESSAGE: Final = 2_000
_SHORTEST_SECRET: Final = 3
_EVENT_STARTS: Final = (b"data:", b"event:", b"id:", b"retry:", b":")
_KEEP_ALL: Final = Keep(ids=True, logprobs=True)
_NOTHING: Final[Mapping[str, Any]] = types.MappingProxyType({})
_TOLD: Final = frozenset({b"content-type", b"content-encoding", _VERSION := A.HEADER_POLICY_VERSION.lower().encode()})
"""Headers of an answer that are looked at."""

_BROKEN: Final = ErrorInfo(type=_exact.INCOMPLETE_STREAM, message="the stream ended before its last event")

_encode = msgspec.json.Encoder(enc_hook=repr).encode


class Destination(msgspec.Struct, frozen=True):
    """Where the app itself would send the call."""

    base_url: str
    host: str
    server: str
    """host:port."""
    strict: bool
    """A kind of client whose servers are strict at any host."""


class ClientCall:
    """A call that is under way."""

    defers = True
    """Whether the record is made of the answer later, beside the app, which has the answer by then."""

    endpoint: Endpoint | None = None
    options: Any = None
    """The client library's request options that this call was sent with; tells a nested wrapper that the call is known."""
    timeout: float | None = None
    """Seconds that an attempt may wait for the policy's server."""
    refusal: Exception | None = None
    """Why the call is not sent at all."""
    keep: Keep = _KEEP_ALL
    attempts = 0
    _request: Any = None
    _secrets: tuple[Any, ...] = ()
    first: int | None = None
    header_version: int | None = None
    _answered = False
    _ended = False

    def __init__(self, opened: OpenCall, client: Any, operation: Operation, body: Mapping[str, Any], destination: Destination) -> None:
        self.open = opened
        self.client = client
        self.operation: Operation = operation
        self.app_body = body
        self.body = body
        self.model = self.requested_model = str(body.get("model") or "")
        self.streams = bool(body.get("stream"))
        self.destination = destination
        self.server = destination.server
        self.added: Mapping[str, Any] = _NOTHING
        self.changed: Mapping[str, Any] = _NOTHING
        self._sent_at = time.perf_counter_ns()

    # before the request

    def plan(self) -> None:
        """Decides where the call goes and with which body. May set ``refusal``."""
        route = current_route()
        scope = self.open.scope
        requested = self.model
        if route is not None:
            redirected = redirects(route, scope, requested)
            try:
                if redirected:
                    self._redirect(route)
            except Exception as error:  # noqa: BLE001 - whatever the route's owner raises is the app's to see
                self.refusal = error
            if route.sites is not None:
                route.sites.saw(
                    model=requested,
                    endpoint="policy" if redirected else "own",
                    trained=redirected,
                    settings=settings_of(self.app_body, self.body),
                )
        if self.refusal is None and self._may_ask():
            refused = frozenset[str]() if self.endpoint else refusals.of(self.destination.base_url, self.model, stream=self.streams)
            asking = ask(self.body, self.operation, refused, policy=self.endpoint is not None)
            self.body, self.added, self.keep = asking.body, asking.added, asking.keep

    def _redirect(self, route: Route) -> None:
        scope = self.open.scope
        endpoint = route.endpoint(scope)
        agent, first = scope.trajectory, scope.episode.seed
        seed = None if first is None else call_seed(first, agent.name, self.open.number, agent.entry)
        self.body, self.changed = reshaped(self.app_body, route, endpoint.model, seed, self.operation)
        self.endpoint, self.model, self.server = endpoint, endpoint.model, urlsplit(endpoint.base_url).netloc.rpartition("@")[2]
        self.timeout = route.call_timeout
        self.hide(endpoint.api_key)

    def _may_ask(self) -> bool:
        if self.endpoint is not None:
            return True
        if not self.open.wants_tokens:
            return False
        return recorder.tokens is True or not (self.destination.strict or is_strict(self.destination.host))

    @property
    def conversation(self) -> str:
        """``episode/trajectory``, by which a server keeps the calls of one episode together."""
        return f"{self.open.scope.episode.id}/{self.open.scope.trajectory_id}"

    @property
    def is_changed(self) -> bool:
        """Whether something else is sent than what the app gave."""
        return self.body is not self.app_body

    def untouch(self) -> None:
        """From here on the call is sent as the app gave it."""
        self.body, self.added, self.changed, self.keep = self.app_body, _NOTHING, _NOTHING, _KEEP_ALL
        self.endpoint, self.server, self.model = None, self.destination.server, self.requested_model

    def hide(self, *secrets: Any) -> None:
        """Texts that must not appear in the record."""
        self._secrets += secrets

    # what happens

    def sent(self, request: Any) -> None:
        """A request of httpx or httpx2 is about to go out."""
        if request is not self._request:
            self.attempts += 1
            self._request = request

    def answered(self, response: Any, retries: int, *, is_async: bool) -> None:
        """The response has arrived, its body read or not; what the app did not ask for is taken out of it."""
        if self._answered:
            return
        self._answered = True
        if self.attempts == 0:
            self.attempts, self._request = retries + 1, response.request
        told = {lower: value for name, value in response.headers.raw if (lower := name.lower()) in _TOLD}
        version = told.get(_VERSION)
        if version is not None and version.isdigit():
            self.header_version = int(version)
        events = b"event-stream" in told.get(b"content-type", b"")
        if hasattr(response, "_content"):
            self._answered_whole(response, events=events)
            return
        encoding = told.get(b"content-encoding", b"").decode("ascii", "replace")
        reader = Onlooker(self, response, events, None if encoding in ("", "identity") else encoding)
        tee(response, reader, is_async=is_async)

    def _answered_whole(self, response: Any, *, events: bool) -> None:
        """Somebody (the SDK, a hook or a transport of the app's) has the body already; who reads it later reads what is put there."""
        raw = response.content
        if events or self.looks_streamed(raw):
            reader = self.events()
            response._content = reader.feed(raw) + reader.flush()
            self.stream_over(reader.reply, reader.done, None, exhausted=True)
            return
        seen = self.whole(raw)
        if seen is not raw:
            response._content = seen

    def whole(self, raw: bytes) -> bytes:
        """Ends the call with an unstreamed body; gives it as the app is to see it."""
        if not self.defers or self.operation == "responses":
            reply, seen = self.read(raw)
            self.finish(reply, complete=True)
            return seen
        if is_bare(raw, self.keep):
            self._finish_later(Outcome(read=lambda: self.read(raw)[0], complete=True))
            return raw
        try:
            body = read_body(raw)
        except UNREADABLE:
            self.finish(Reply(fault=_exact.UNREADABLE), complete=True)
            return shown_unread(raw, self.keep)
        self._finish_later(Outcome(read=lambda: reply_of(body), complete=True))
        return shown(raw, body, self.keep)

    def read(self, raw: bytes) -> tuple[Reply, bytes]:
        """The reply in an unstreamed body, and the body as the app is to see it."""
        try:
            if self.operation == "responses":
                return read_response(raw, self.keep)
            return read_reply(raw, self.keep)
        except UNREADABLE:
            return Reply(fault=_exact.UNREADABLE), shown_unread(raw, self.keep)

    def events(self) -> EventReader | ResponsesReader:
        """A reader for this call's event stream."""
        return ResponsesReader(self.keep) if self.operation == "responses" else EventReader(self.keep)

    def looks_streamed(self, raw: bytes) -> bool:
        """Whether a body that is not called an event stream is read as one: the SDK goes by what was asked for, not by the type."""
        return self.streams and raw.lstrip().startswith(_EVENT_STARTS)

    def first_chunk(self) -> None:
        if self.first is None:
            self.first = time.perf_counter_ns() - self._sent_at

    def failed(self, error: BaseException) -> bool:
        """The call has raised. True: it was refused for a field that we added, and is to be sent once more, untouched."""
        if self.added and self.endpoint is None and not self._answered:
            with guard("client"):
                refused = refused_fields(getattr(error, "status_code", None), _text_of(error), self.added)
                if refused:
                    refusals.remember(self.destination.base_url, self.model, refused, stream=self.streams)
                    self.untouch()
                    return True
        self.finish(Reply(), error=self._error(error), cancelled=not isinstance(error, Exception))
        return False

    # the end

    def finish(
        self,
        reply: Reply,
        *,
        complete: bool = False,
        error: ErrorInfo | None = None,
        cancelled: bool = False,
        streamed: bool = False,
    ) -> None:
        """Ends the span, the first time that it is called."""
        if not self._ended:
            self._ended = True
            outcome = Outcome(read=lambda: reply, complete=complete, error=error, cancelled=cancelled, streamed=streamed)
            self.open.end(record_of(self, outcome, self._request_body(), self.body))

    def _finish_later(self, outcome: Outcome) -> None:
        """The same, with the record made of ``outcome`` when the app has what it waits for."""
        if not self._ended:
            self._ended = True
            request = self._request_body()
            if self.defers:
                self.open.end_later(lambda: record_of(self, outcome, request, None))
            else:
                self.open.end(record_of(self, outcome, request, self.body))

    def _request_body(self) -> bytes:
        if self._request is not None:
            try:
                return bytes(self._request.content)
            except Exception:  # noqa: BLE001 - a request that is itself a stream has no content to read
                pass
        return _encode(self.body)

    def _error(self, error: BaseException) -> ErrorInfo:
        info = error_info(error)
        return msgspec.structs.replace(info, message=self._clean(info.message))

    def told(self, error: Mapping[str, Any]) -> ErrorInfo:
        code = error.get("code")
        status = code if isinstance(code, int) and 100 <= code < 600 else None
        return ErrorInfo(type="openai.APIError", message=self._clean(str(error.get("message") or dict(error))), status_code=status)

    def _clean(self, message: str) -> str:
        for secret in self._secrets:
            if isinstance(secret, str) and len(secret) > _SHORTEST_SECRET:
                message = message.replace(secret, "[withheld]")
        return message[:_MAX_MESSAGE]

    @property
    def expected(self) -> int:
        """Choices that were asked for."""
        return expected_choices(self.body)

    def stream_over(self, read: Callable[[], Reply], done: bool, error: BaseException | None, *, exhausted: bool) -> None:
        """The stream of the answer has ended in any way; ``read`` gives what was received. ``done``: it had said that it was over."""
        if self._ended:
            return
        told: ErrorInfo | None = None
        if error is not None and not isinstance(error, GeneratorExit):
            told = self._error(error)
        elif exhausted and error is None:
            told = _BROKEN
        cancelled = not isinstance(error, (Exception, GeneratorExit, type(None)))
        ended = Outcome(read=read, complete=True, streamed=True)
        self._finish_later(ended if done else Outcome(read=read, complete=None, error=told, cancelled=cancelled, streamed=True))


def _text_of(error: BaseException) -> str:
    response = getattr(error, "response", None)
    return f"{error} {getattr(response, 'text', '')}"
