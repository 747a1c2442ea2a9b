"""A client's request in, the server's answer out, part by part: one token, the paths that serve, the version at dispatch on each."""

from __future__ import annotations

import asyncio
import hmac
import traceback
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from rllm_trace.attributes import HEADER_CONVERSATION, HEADER_POLICY_VERSION
from rllm_trainer.serving._door.as_stream import as_stream, whole_instead
from rllm_trainer.serving._door.continuing import CONTINUED_HEADER, Continuing
from rllm_trainer.serving._door.flow import Flow
from rllm_trainer.serving._door.kinds.base import Kind
from rllm_trainer.serving._door.upstream import Unreachable, Upstream

__all__ = ["make_app"]

_MAX_BODY = 64 * 2**20
_SENT_ON = ("content-type", "accept", "x-request-id")
_SENT_BACK = ("content-type", "content-encoding", "content-length", "retry-after", "x-request-id")
_HEALTH = "/health"
_CHAT = "/v1/chat/completions"
_EVENTS = "text/event-stream"


class _Refusal(Exception):
    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


def make_app(
    upstream: Upstream, kind: Kind, flow: Flow, *, api_key: str, versions: bool = True, continuing: Continuing | None = None
) -> Starlette:
    """The routes that ``kind`` lets through.

    Args:
        versions: say on each answer which version was served when its request was sent on.
        continuing: gives chats the prompts that continue what was recorded of them.
    """
    expected = f"Bearer {api_key}".encode()

    async def passed(request: Request) -> Response:
        try:
            if not hmac.compare_digest(request.headers.get("authorization", "").encode(), expected):
                raise _Refusal(401, "the request's bearer token is missing or wrong", "invalid_api_key")
            response, version = await _pass(upstream, kind, flow, request, continuing)
            if versions:
                response.headers[HEADER_POLICY_VERSION] = str(version)
        except _Refusal as error:
            return _refusal(error)
        except Unreachable as error:
            traceback.print_exc()
            return _refusal(_Refusal(502, f"the model server did not answer: {error}", "server_unreachable"))
        return response

    async def health(_: Request) -> Response:
        return Response(b'{"status":"ok"}', media_type="application/json")

    routes = [Route(path, passed, methods=["GET"]) for path in sorted(kind.get_paths)]
    routes += [Route(path, passed, methods=["POST"]) for path in sorted(kind.post_paths)]
    routes.append(Route(_HEALTH, health, methods=["GET"]))
    return Starlette(routes=routes, exception_handlers={404: _unknown, 405: _unknown})


async def _pass(upstream: Upstream, kind: Kind, flow: Flow, request: Request, continuing: Continuing | None) -> tuple[Response, int]:
    body = await _body(request)
    path = request.url.path
    chat = continuing.begin(request.headers.get(HEADER_CONVERSATION), body) if continuing is not None and path == _CHAT else None
    async with AsyncExitStack() as inside:
        version = await inside.enter_async_context(flow.request())
        headers = {name: request.headers[name] for name in _SENT_ON if name in request.headers}
        if chat is not None and chat.continued:
            headers[CONTINUED_HEADER] = "1"
        body = chat.body if chat is not None else body
        streams = whole_instead(body) if chat is not None or path in kind.whole_ids else None
        asked = streams.body if streams else body
        answer = await _unless_gone(request, upstream.send(request.method, path, kind.outgoing(path, asked) if asked else asked, headers))
        if answer is None:
            return Response(status_code=499), version
        inside.push_async_callback(answer.aclose)
        if (streams or chat) and answer.status_code == 200:
            whole = await _unless_gone(request, upstream.whole(answer))
            if whole is not None and continuing is not None and chat is not None:
                continuing.end(chat, whole)
            return _streamed(whole, usage=streams.usage) if streams else _whole(whole), version
        back = {name: answer.headers[name] for name in _SENT_BACK if name in answer.headers}
        return _Passing(upstream.parts(answer), inside.pop_all(), answer.status_code, back), version


def _whole(whole: bytes | None) -> Response:
    return Response(status_code=499) if whole is None else Response(whole, media_type="application/json")


def _streamed(whole: bytes | None, *, usage: bool) -> Response:
    if whole is None:
        return Response(status_code=499)
    try:
        return Response(as_stream(whole, usage=usage), media_type=_EVENTS)
    except msgspec.DecodeError as error:
        raise _Refusal(502, f"the model server's answer is no chat completion: {error}", "server_answer") from error


class _Passing(StreamingResponse):
    """An answer on its way. When it ends, however it does, and also where it never began, its request is no longer inside."""

    def __init__(self, parts: AsyncIterator[bytes], leave: AsyncExitStack, status: int, headers: dict[str, str]) -> None:
        super().__init__(parts, status_code=status, headers=headers)
        self._leave = leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._leave:
            await super().__call__(scope, receive, send)


async def _unless_gone(request: Request, work: Awaitable[Any]) -> Any:
    """The work's result; None if the client went away first, and then the work is given up."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        leaving.cancel()
        if not working.done():
            working.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _body(request: Request) -> bytes:
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > _MAX_BODY:
            raise _Refusal(413, f"the request is larger than {_MAX_BODY} bytes", "request_too_large")
        chunks.append(chunk)
    return b"".join(chunks)


async def _unknown(request: Request, _: Exception) -> Response:
    return _refusal(_Refusal(404, f"got {request.method} {request.url.path}, which does not pass here", "unknown_route"))


def _refusal(error: _Refusal) -> Response:
    kind = "authentication_error" if error.status == 401 else "server_error" if error.status >= 500 else "invalid_request_error"
    body = {"error": {"message": str(error), "type": kind, "param": None, "code": error.code}}
    return Response(msgspec.json.encode(body), error.status, media_type="application/json")
