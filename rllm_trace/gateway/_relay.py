"""The answer of a server in, the answer to the client out, part by part, with the call's record committed before the last part.

An answer in one piece is sent once it is whole; events are sent as they come, and the server is read no faster than the client.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

import msgspec

from rllm_trace._guard import guard
from rllm_trace.gateway import _headers as H
from rllm_trace.gateway._client import Client, ClientGoneError
from rllm_trace.gateway._gateway_call import GatewayCall
from rllm_trace.gateway._messages_reply import MessageStream, Remember, error_of, message
from rllm_trace.gateway._refusal import Refusal
from rllm_trace.gateway._upstream import UpstreamStatusError, is_unreachable

if TYPE_CHECKING:
    import httpx

    from rllm_trace.gateway._commit import Commit

__all__ = ["Relay", "Translation"]

_TYPE: Final = b"content-type"
_LENGTH: Final = b"content-length"
_ENCODING: Final = "content-encoding"
_HIDDEN: Final = b"***"


class Translation:
    """That the client speaks Anthropic's Messages, and the server chat completions."""

    def __init__(self, model: str, remember: Remember) -> None:
        self.model = model
        self.remember = remember
        self.headers: H.Headers = []
        """What is said to the client beside the answer."""

    def stream(self) -> MessageStream:
        """For one stream."""
        return MessageStream(self.model, self.remember)


class Relay:
    """One attempt at one request."""

    def __init__(
        self,
        client: Client,
        call: GatewayCall | None,
        translation: Translation | None,
        commit: Commit | None,
        secrets: list[str],
        max_answer: int,
    ) -> None:
        self._client = client
        self._call = call
        self._translation = translation
        self._commit = commit
        self._secrets = [secret.encode() for secret in secrets]
        self._max_answer = max_answer
        self._committed = False
        self._was_over = False
        """The client has had all that the call's record says."""

    async def run(self, response: httpx.Response) -> bool:
        """Passes the answer on. True: nothing was passed on, the request is to be sent once more, untouched."""
        if response.status_code >= 400:
            return await self._error(response)
        call = self._call
        if call is not None:
            with guard("gateway"):
                call.answered(response, 0, is_async=True)
        if "event-stream" in response.headers.get("content-type", ""):
            await self._events(response)
        else:
            await self._whole(response)
        return False

    async def _error(self, response: httpx.Response) -> bool:
        body = await self._body(response)
        shown = _decoded(response, body)
        call = self._call
        if call is not None:
            if call.failed(UpstreamStatusError(response, shown)):
                return True
            await self._commit_call()
        for secret in self._secrets:
            if secret in body:
                body = body.replace(secret, _HIDDEN)
        if self._translation is not None:
            body = error_of(response.status_code, shown)
            for secret in self._secrets:
                body = body.replace(secret, _HIDDEN)
        await self._client.answer(response.status_code, self._headers(response), body)
        return False

    async def _whole(self, response: httpx.Response) -> None:
        body = await self._body(response)
        if self._translation is not None:
            try:
                body = message(_decoded(response, body), self._translation.remember)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise Refusal(502, f"the server's answer is no chat completion ({error})", code="upstream_answer") from error
        await self._commit_call()
        try:
            await self._client.answer(response.status_code, self._headers(response), body)
        except (ClientGoneError, TimeoutError):
            self._revoke()
            raise
        if self._client.gone:
            self._revoke()

    async def _body(self, response: httpx.Response) -> bytes:
        pieces: list[bytes] = []
        size = 0
        try:
            async for piece in cast("Any", response.stream):
                size += len(piece)
                if size > self._max_answer:
                    raise Refusal(502, f"the server's answer is larger than {self._max_answer} bytes", code="answer_too_large")
                pieces.append(piece)
        except Exception as error:
            if not is_unreachable(error):
                raise
            raise Refusal(502, f"the server broke its answer off ({type(error).__name__})", code="upstream_broke_off") from error
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def _events(self, response: httpx.Response) -> None:
        client, call = self._client, self._call
        translated = None if self._translation is None else self._translation.stream()
        if translated is not None and response.headers.get(_ENCODING, "identity") not in ("", "identity"):
            raise Refusal(502, "the server compressed a stream that was asked for plain", code="upstream_encoding")
        await client.start(response.status_code, self._headers(response))
        try:
            async for chunk in cast("Any", response.stream):
                is_over = call is not None and call.has_ended
                if is_over:
                    await self._commit_call()
                data = chunk if translated is None else translated.feed(chunk)
                if data:
                    await self._part(data)
                self._was_over = is_over
        except Exception as error:
            if not is_unreachable(error):
                raise
            await self._commit_call()
            return  # without an end, so that the client sees an answer that was broken off
        await self._commit_call()
        await self._part(b"" if translated is None else translated.flush(), more=False)

    async def _part(self, data: bytes, *, more: bool = True) -> None:
        """Sends a part of a stream. Without it the client had less than the call's record says: then the call has failed."""
        try:
            await self._client.write(data, more=more)
        except BaseException:
            if self._call is not None and not self._was_over:
                self._call.revoke()
                self._call.hang_up()
            raise

    async def _commit_call(self) -> None:
        """If the call has ended, its record is where it belongs once this returns."""
        if self._call is not None and self._call.has_ended and self._commit is not None and not self._committed:
            self._committed = True
            await self._commit.send(self._call.open.span_id)

    def _revoke(self) -> None:
        if self._call is not None:
            self._call.revoke()

    def _headers(self, response: httpx.Response) -> H.Headers:
        told = [(name.lower(), value) for name, value in response.headers.raw]
        headers = H.down(told, decoded=self._translation is not None)
        if self._translation is None:
            return headers if self._client.method != "HEAD" else [*headers, *(entry for entry in told if entry[0] == _LENGTH)]
        is_stream = "event-stream" in response.headers.get("content-type", "")
        kind = b"text/event-stream; charset=utf-8" if is_stream else b"application/json"
        return [*((name, value) for name, value in headers if name != _TYPE), (_TYPE, kind), *self._translation.headers]


def _decoded(response: httpx.Response, body: bytes) -> bytes:
    """The body without its content encoding, which was not asked for."""
    encoding = response.headers.get(_ENCODING)
    if encoding in (None, "", "identity"):
        return body
    kind: Any = type(response)
    try:
        return cast("bytes", kind(200, headers={_ENCODING: encoding}, content=body).content)
    except Exception:  # noqa: BLE001 - an unknown encoding, or a broken body: it is shown as it came
        return body
