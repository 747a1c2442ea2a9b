"""A request of a client in, its answer out: admitted, bound to its episode, sent on, recorded, answered. An ASGI application.

The order is the invariant: the record of a call is in its episode before the last byte of the answer leaves, and a call whose client
has gone away leaves a failed call, never a sample. What is no model call passes through unrecorded.
"""

from __future__ import annotations

import asyncio
import collections
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec

from rllm_trace import attributes as A
from rllm_trace._calls import Operation
from rllm_trace._guard import counters
from rllm_trace.clients._call import Destination
from rllm_trace.exceptions import CallRefusedError
from rllm_trace.gateway import _headers as H
from rllm_trace.gateway._arguments import Arguments
from rllm_trace.gateway._binding import Bindings, Bound, split_path
from rllm_trace.gateway._client import Client, ClientGoneError, Receive, Send
from rllm_trace.gateway._control import Control
from rllm_trace.gateway._gateway_call import GatewayCall, goes_to_policy, open_gateway_call
from rllm_trace.gateway._messages_request import chat_request
from rllm_trace.gateway._refusal import Refusal, error_body
from rllm_trace.gateway._relay import Relay, Translation
from rllm_trace.gateway._upstream import Upstream, Upstreams, is_timeout, is_unreachable

if TYPE_CHECKING:
    from rllm_trace.gateway._commit import Commit
    from rllm_trace.gateway._gateway import Limits

__all__ = ["App"]

_OPERATIONS: Final[dict[str, Operation]] = {
    "/chat/completions": "chat",
    "/completions": "text_completion",
    "/responses": "responses",
}
_MESSAGES: Final = "/messages"
_VERSION: Final = "/v1"
_CHAT_PATH: Final = "/chat/completions"
_CONVERSATION: Final = A.HEADER_CONVERSATION.encode()
_DROPPED: Final = A.HEADER_LEFT_OUT.encode()


class App:
    """The application; one for each gateway, used on one event loop."""

    def __init__(
        self,
        *,
        bindings: Bindings,
        control: Control,
        upstream: Upstream | None,
        anthropic: Upstream | None,
        limits: Limits,
        commit: Commit | None,
    ) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        """Requests, by how they were bound (headers, path, key, unassigned), and ``refused``, ``gone``, ``passed``."""
        self._bindings = bindings
        self._control = control
        self._upstream = upstream
        self._anthropic = anthropic
        self._limits = limits
        self._commit = commit
        self._arguments = Arguments()
        self._under_way = 0
        self.upstreams = Upstreams(connect_timeout=limits.connect_timeout, silence=limits.silence, max_connections=limits.max_concurrency)

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"the gateway speaks HTTP, not {scope['type']}")
        client = Client(scope, receive, send, max_body=self._limits.max_body, patience=self._limits.silence)
        self._under_way += 1
        try:
            async with asyncio.timeout(self._limits.deadline):
                await self._answered(client)
        except asyncio.CancelledError:
            if not client.gone:
                raise
            self.counts["gone"] += 1
            task = asyncio.current_task()
            if task is not None:
                task.uncancel()
        except ClientGoneError:
            self.counts["gone"] += 1
        except TimeoutError:
            await self._refuse(client, Refusal(504, f"no whole answer within {self._limits.deadline:g} s", code="deadline"))
        finally:
            self._under_way -= 1
            await client.close()

    async def _answered(self, client: Client) -> None:
        try:
            await self._serve(client)
        except Refusal as refusal:
            await self._refuse(client, refusal)

    async def _refuse(self, client: Client, refusal: Refusal) -> None:
        self.counts["refused"] += 1
        if client.started or client.gone:
            return
        anthropic = client.path.endswith(_MESSAGES) or "/messages/" in client.path
        body = error_body(refusal.status, str(refusal), refusal.code, anthropic=anthropic)
        headers: H.Headers = [(b"content-type", b"application/json")]
        if refusal.status in (401, 413):
            headers.append((b"connection", b"close"))
        await client.answer(refusal.status, headers, body)

    async def _serve(self, client: Client) -> None:
        keys = H.credentials(client.headers)
        if not self._bindings.admits(keys):
            raise Refusal(401, "missing or wrong key; give the gateway's token, or a key that it made, as the API key", code="wrong_key")
        if self._under_way > self._limits.max_concurrency:
            raise Refusal(503, f"{self._limits.max_concurrency} requests are under way; try again later", code="too_many_requests")
        if self._control.takes(client.path):
            status, body = self._control.answer(client.method, client.path, await client.body(), keys, self.counts)
            await client.answer(status, [(b"content-type", b"application/json")], body)
            return
        id, number, path = split_path(client.path)
        path = path.removeprefix(_VERSION) if path.startswith(_VERSION + "/") else path
        operation = _OPERATIONS.get(path) if client.method == "POST" else None
        if operation is None and not (path == _MESSAGES and client.method == "POST"):
            await self._pass(client, path, id, keys)
            return
        raw = await client.body()
        client.watch()
        app_body = _json_object(raw)
        headers = H.plain(client.headers)
        bound = self._bindings.find(headers, id, number, keys)
        self.counts[bound.by] += 1
        try:
            await self._call(client, bound, operation, raw, app_body, headers)
        finally:
            if bound.by == "unassigned" and bound.scope is not None:
                bound.scope.episode.finish("completed", None)

    async def _call(
        self, client: Client, bound: Bound, operation: Operation | None, raw: bytes, app_body: dict[str, Any], headers: dict[str, str]
    ) -> None:
        """A model call: ``operation`` is None for Anthropic's Messages."""
        if bound.is_given_up:
            counters.add("late", "gateway call of a rollout that is over")
            raise Refusal(410, "the episode of this call is over, so the call was sent nowhere", code="episode_over")
        to_policy = goes_to_policy(bound, str(app_body.get("model") or ""))
        native = operation is None and self._anthropic is not None and not to_policy
        upstream = self._anthropic if native else self._upstream
        translation: Translation | None = None
        body = app_body
        if operation is None and not native:
            body, left_out = chat_request(app_body, lambda id, given: self._arguments.recall(bound.name, id, given))
            for field in left_out:
                counters.add("dropped", f"gateway field {field}")
            translation = Translation(str(app_body.get("model") or ""), lambda id, text: self._arguments.remember(bound.name, id, text))
            translation.headers = [(_DROPPED, ",".join(left_out).encode())] if left_out else []
        if upstream is None and not to_policy:
            raise Refusal(404, "this call is not one for the policy, and the gateway has no upstream for it", code="no_upstream")
        destination = _NOWHERE if upstream is None else upstream.destination()
        call = open_gateway_call(bound, operation or "chat", body, destination, headers, native_messages=native)
        path = _MESSAGES if native else _CHAT_PATH if operation is None else _PATHS[operation]
        try:
            await self._exchange(client, call, upstream, path, raw, body, translation)
        except asyncio.CancelledError:
            if call is not None and client.gone:
                call.hang_up()
            elif call is not None:
                call.failed(TimeoutError(f"no whole answer within {self._limits.deadline:g} s"))
            raise
        except ClientGoneError:
            if call is not None:
                call.hang_up()
            raise
        finally:
            if call is not None and not call.has_ended:
                call.failed(RuntimeError("the gateway gave the call up"))

    async def _exchange(
        self,
        client: Client,
        call: GatewayCall | None,
        upstream: Upstream | None,
        path: str,
        raw: bytes,
        body: dict[str, Any],
        translation: Translation | None,
    ) -> None:
        if call is not None and call.refusal is not None:
            call.failed(call.refusal)
            is_ours = isinstance(call.refusal, CallRefusedError)
            raise Refusal(400 if is_ours else 410, str(call.refusal), code="call_refused")
        while True:
            request = self._request(client, call, upstream, path, raw, body, translation)
            relay = Relay(client, call, translation, self._commit, self._secrets(call, upstream), self._limits.max_answer)
            if call is not None:
                call.sent(request)
            try:
                response = await self.upstreams.send(request)
            except Exception as error:
                raise _unreachable(error, call) from error
            try:
                if not await relay.run(response):
                    return
            finally:
                await cast("Any", response.stream).aclose()

    def _request(
        self,
        client: Client,
        call: GatewayCall | None,
        upstream: Upstream | None,
        path: str,
        raw: bytes,
        body: dict[str, Any],
        translation: Translation | None,
    ) -> Any:
        endpoint = None if call is None else call.endpoint
        content = raw if call is None else call.sent_body(raw, body)
        if translation is not None and content is raw:
            content = msgspec.json.encode(body)
        headers = H.up(client.headers, policy=endpoint is not None, translated=translation is not None)
        if call is not None and endpoint is not None:
            headers = [(name, value) for name, value in headers if name != _CONVERSATION]
            headers.append((b"authorization", b"Bearer " + endpoint.api_key.encode()))
            headers.append((_CONVERSATION, call.conversation.encode()))
            return self.upstreams.request("POST", endpoint.base_url.rstrip("/") + path, headers, content, call.timeout)
        if upstream is None:
            raise Refusal(404, "the gateway has no upstream for this call", code="no_upstream")
        headers += [*upstream.needed(headers), *upstream.keys()]
        return self.upstreams.request("POST", _with_query(upstream.url(path), client.query), headers, content, None)

    def _secrets(self, call: GatewayCall | None, upstream: Upstream | None) -> list[str]:
        endpoint = None if call is None else call.endpoint
        keys = [None if upstream is None else upstream.api_key, None if endpoint is None else endpoint.api_key]
        found = [key for key in keys if key is not None and len(key) > 3]
        if call is not None:
            call.hide(*found)
        return found

    async def _pass(self, client: Client, path: str, id: str | None, keys: list[str]) -> None:
        """Something else than a model call: models, embeddings, files. It keeps its endpoint and is not recorded."""
        upstream = self._anthropic if path.startswith(_MESSAGES) and self._anthropic is not None else self._upstream or self._anthropic
        if upstream is None or not path.startswith("/") or "/../" in path + "/":
            raise Refusal(404, f"got {client.method} {path[:100]!r}, and the gateway has no upstream for it", code="no_upstream")
        raw = await client.body()
        client.watch()
        self.counts["passed"] += 1
        headers = H.up(client.headers, policy=False, translated=False)
        headers += [*upstream.needed(headers), *upstream.keys()]
        request = self.upstreams.request(client.method, _with_query(upstream.url(path), client.query), headers, raw, None)
        relay = Relay(client, None, None, None, self._secrets(None, upstream), self._limits.max_answer)
        try:
            response = await self.upstreams.send(request)
        except Exception as error:
            raise _unreachable(error, None) from error
        try:
            await relay.run(response)
        finally:
            await cast("Any", response.stream).aclose()


_NOWHERE: Final = Destination("", "", "", strict=True)
_PATHS: Final[dict[Operation, str]] = {operation: path for path, operation in _OPERATIONS.items()}


def _json_object(raw: bytes) -> dict[str, Any]:
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refusal(400, f"the body is no JSON ({error})", code="bad_json") from error
    if not isinstance(body, dict):
        raise Refusal(400, f"the body is a JSON {type(body).__name__}; expected an object", code="bad_json")
    return cast("dict[str, Any]", body)


def _with_query(url: str, query: bytes) -> str:
    return f"{url}?{query.decode('latin-1')}" if query else url


def _unreachable(error: Exception, call: GatewayCall | None) -> Exception:
    """The answer to a request that its server never answered; the call has ended with that error."""
    if not is_unreachable(error):
        return error
    if call is not None:
        call.failed(error)
    if is_timeout(error):
        return Refusal(504, f"the server behind the gateway did not answer in time ({type(error).__name__})", code="upstream_timeout")
    return Refusal(502, f"the server behind the gateway cannot be reached ({type(error).__name__})", code="upstream_unreachable")
