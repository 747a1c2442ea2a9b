"""One call of the app from its request to its last byte: what is sent instead of it, what came back, and the record of both.

``ClientCall`` knows no client library. The patch tells it what happens (``sent``, ``answered``, ``failed``); it ends its span exactly
once, with the first of: the body read, the stream over, an exception.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final, cast
from urllib.parse import urlsplit

import msgspec

from rllm_trace import _exact
from rllm_trace import attributes as A
from rllm_trace._calldata import CallData
from rllm_trace._calls import OpenCall
from rllm_trace._guard import guard
from rllm_trace._recorder import recorder
from rllm_trace._spans import error_info
from rllm_trace.clients._ask import ask, is_strict, refusals, refused_fields
from rllm_trace.clients._decode import UNREADABLE, Keep, Operation, Reply, read_reply, shown_unread
from rllm_trace.clients._events import EventReader
from rllm_trace.clients._onlooker import Onlooker
from rllm_trace.clients._responses import ResponsesReader, read_response
from rllm_trace.clients._stream import tee
from rllm_trace.routing import Endpoint, Route, call_seed, current_route, redirects, reshaped, settings_of
from rllm_trace.types import ErrorInfo

__all__ = ["ClientCall", "Destination"]

_MAX_MESSAGE: Final = 2_000
_CUT_OFF: Final = frozenset({"abort", "error", "cancelled", "failed", "in_progress", "queued"})
"""Finish reasons that a server gives to a reply that it broke off, or has not written yet (a response in the background)."""
_MEDIA: Final = frozenset(
    {"image_url", "input_image", "image", "input_audio", "audio", "audio_url", "video_url", "video", "file", "input_file"}
)
_EVENT_STARTS: Final = (b"data:", b"event:", b"id:", b"retry:", b":")
_KEEP_ALL: Final = Keep(ids=True, logprobs=True)

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

    __slots__ = (
        "_answered",
        "_ended",
        "_first",
        "_header_version",
        "_request",
        "_secrets",
        "_sent_at",
        "added",
        "app_body",
        "attempts",
        "body",
        "changed",
        "client",
        "destination",
        "endpoint",
        "keep",
        "model",
        "open",
        "operation",
        "options",
        "refusal",
        "server",
        "timeout",
    )

    def __init__(self, opened: OpenCall, client: Any, operation: Operation, body: Mapping[str, Any], destination: Destination) -> None:
        self.open = opened
        self.client = client
        self.operation: Operation = operation
        self.app_body = body
        self.body = body
        self.model = str(body.get("model") or "")
        self.destination = destination
        self.server = destination.server
        self.endpoint: Endpoint | None = None
        self.changed: dict[str, Any] = {}
        self.added: dict[str, Any] = {}
        self.keep = _KEEP_ALL
        self.options: Any = None
        """The client library's request options that this call was sent with; tells a nested wrapper that the call is known."""
        self.timeout: float | None = None
        """Seconds that an attempt may wait for the policy's server."""
        self.refusal: Exception | None = None
        """Why the call is not sent at all."""
        self.attempts = 0
        self._request: Any = None
        self._secrets: list[str] = []
        self._sent_at = time.perf_counter_ns()
        self._first: int | None = None
        self._header_version: int | None = None
        self._answered = False
        self._ended = False

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
            refused = (
                frozenset[str]()
                if self.endpoint
                else refusals.of(self.destination.base_url, self.model, stream=bool(self.body.get("stream")))
            )
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
        strict = self.destination.strict or is_strict(self.destination.host)
        return not strict or recorder.tokens is True

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
        self.body, self.added, self.changed, self.keep = self.app_body, {}, {}, _KEEP_ALL
        self.endpoint, self.server, self.model = None, self.destination.server, str(self.app_body.get("model") or "")

    def hide(self, *secrets: Any) -> None:
        """Texts that must not appear in the record."""
        self._secrets += [secret for secret in secrets if isinstance(secret, str) and len(secret) > 3]

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
        version = response.headers.get(A.HEADER_POLICY_VERSION)
        if version is not None and version.isdigit():
            self._header_version = int(version)
        events = "event-stream" in response.headers.get("content-type", "")
        if hasattr(response, "_content"):
            self._answered_whole(response, events=events)
            return
        encoding = response.headers.get("content-encoding")
        reader = Onlooker(self, response, events, None if encoding in (None, "", "identity") else encoding)
        tee(response, reader, is_async=is_async)

    def _answered_whole(self, response: Any, *, events: bool) -> None:
        """Somebody (the SDK, a hook or a transport of the app's) has the body already; who reads it later reads what is put there."""
        raw = response.content
        if events or self.looks_streamed(raw):
            reader = self.events()
            seen = reader.feed(raw) + reader.flush()
            response._content = seen
            self.stream_over(reader.reply(), reader.done, None, exhausted=True)
            return
        reply, seen = self.read(raw)
        if seen is not raw:
            response._content = seen
        self.finish(reply, complete=True)

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
        return bool(self.body.get("stream")) and raw.lstrip().startswith(_EVENT_STARTS)

    def first_chunk(self) -> None:
        if self._first is None:
            self._first = time.perf_counter_ns() - self._sent_at

    def failed(self, error: BaseException) -> bool:
        """The call has raised. True: it was refused for a field that we added, and is to be sent once more, untouched."""
        if self.added and self.endpoint is None and not self._answered:
            with guard("client"):
                refused = refused_fields(getattr(error, "status_code", None), _text_of(error), self.added)
                if refused:
                    refusals.remember(self.destination.base_url, self.model, refused, stream=bool(self.body.get("stream")))
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
        if self._ended:
            return
        self._ended = True
        data: CallData | None = None
        with guard("client"):
            data = self._data(reply, complete, error, cancelled, streamed)
        self.open.end(data or self._minimal())

    def _data(self, reply: Reply, complete: bool, error: ErrorInfo | None, cancelled: bool, streamed: bool) -> CallData:
        if error is None and reply.error is not None:
            error = self._told(reply.error)
        complete = complete and error is None and not any(choice.finish_reason in _CUT_OFF for choice in reply.choices)
        reason = self._inexact(reply, complete, failed=error is not None)
        first_version, last_version, spans = self._versions(reply, streamed)
        return CallData(
            operation=self.operation,
            model=self.model,
            requested_model=str(self.app_body.get("model") or ""),
            endpoint="policy" if self.endpoint is not None else "own",
            server=self.server,
            request=self._request_body(),
            requested={**self.added, **self.changed} or None,
            choices=reply.choices,
            prompt_token_ids=reply.prompt_token_ids,
            usage=reply.usage,
            response_id=reply.response_id,
            response_model=reply.response_model,
            attempts=max(self.attempts, 1),
            error=error,
            status="cancelled" if cancelled else "error" if error is not None else "ok" if complete else "abandoned",
            exact=reason is None,
            inexact_reason=reason,
            complete=complete,
            streamed=bool(self.app_body.get("stream")),
            multimodal=_has_media(self.app_body),
            policy_version_start=first_version,
            policy_version_end=last_version,
            version_spans=spans,
            time_to_first_token=self._first,
        )

    def _minimal(self) -> CallData:
        return CallData(
            operation=self.operation,
            model=self.model,
            requested_model=self.model,
            request=b"{}",
            inexact_reason=_exact.UNREADABLE,
            status="error",
        )

    def _inexact(self, reply: Reply, complete: bool, *, failed: bool) -> str | None:
        if failed:
            return _exact.FAILED
        if not complete:
            return _exact.INCOMPLETE
        if reply.choices and len(reply.choices) < self.expected:
            return f"{_exact.NO_CHOICES}: {len(reply.choices)} of {self.expected}"
        if reply.fault in _exact.ABSENT and not self._has_asked:
            return _exact.NOT_ASKED
        return reply.fault or _exact.sampling_reason(self.body)

    @property
    def _has_asked(self) -> bool:
        """Whether the server had reason to tell ids and logprobs. The policy's tells them with every response unasked."""
        if self.operation == "responses":
            return self.endpoint is not None
        return bool(self.body.get("return_token_ids")) and self.body.get("logprobs") is not None

    def _versions(self, reply: Reply, streamed: bool) -> tuple[int | None, int | None, list[tuple[int, int, int]] | None]:
        spans, header = reply.version_spans, self._header_version
        if not spans:
            return header, None if streamed else header, None
        told = len(spans) > 1 or (header not in (None, spans[0][0]) and spans[0][2] > 0)  # sent before a swap, sampled after it
        last = max([spans[-1][0], *(choice.version_spans[-1][0] for choice in reply.choices if choice.version_spans)])
        return spans[0][0] if told or header is None else header, last, spans if told else None

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

    def _told(self, error: Mapping[str, Any]) -> ErrorInfo:
        code = error.get("code")
        status = code if isinstance(code, int) and 100 <= code < 600 else None
        return ErrorInfo(type="openai.APIError", message=self._clean(str(error.get("message") or dict(error))), status_code=status)

    def _clean(self, message: str) -> str:
        for secret in self._secrets:
            message = message.replace(secret, "[withheld]")
        return message[:_MAX_MESSAGE]

    def is_whole(self, reply: Reply) -> bool:
        """Every choice that was asked for is there and has its finish reason."""
        return reply.finished and len(reply.choices) >= self.expected

    @property
    def expected(self) -> int:
        """Choices that were asked for."""
        count = self.body.get("n")
        return count if isinstance(count, int) else 1

    def stream_over(self, reply: Reply, done: bool, error: BaseException | None, *, exhausted: bool) -> None:
        """The stream of the answer has ended in any way."""
        if done or self.is_whole(reply):
            self.finish(reply, complete=True, streamed=True)
        elif error is None or isinstance(error, GeneratorExit):
            broken = ErrorInfo(type="rllm_trace.IncompleteStream", message="the stream ended before its last event") if exhausted else None
            self.finish(reply, error=broken, streamed=True)
        else:
            self.finish(reply, error=self._error(error), cancelled=not isinstance(error, Exception), streamed=True)


def _text_of(error: BaseException) -> str:
    response = getattr(error, "response", None)
    return f"{error} {getattr(response, 'text', '')}"


def _has_media(body: Mapping[str, Any]) -> bool:
    messages = body.get("messages") or body.get("input")
    if not isinstance(messages, list):
        return False
    for message in cast("list[Any]", messages):
        content = cast("dict[str, Any]", message).get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            for part in cast("list[Any]", content):
                if isinstance(part, dict) and cast("dict[str, Any]", part).get("type") in _MEDIA:
                    return True
    return False
