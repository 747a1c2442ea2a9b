"""Hooks, transports and mislabelled answers: the record and what the app sees stay the same, whatever sits on its HTTP client."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import openai
import pytest

from rllm_trace.routing import Route
from rllm_trace.testing import Reply, ReplyChoice, ScriptedServer

STREAM: Any = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
REPLY = Reply(choices=[ReplyChoice(text="hello", token_ids=[11, 12, 2], logprobs=[-0.5, -1.0, -0.25])])
HTTP: Any = importlib.import_module(next(kind.__module__.partition(".")[0] for kind in openai.DefaultHttpxClient.__mro__[1:-1]))
"""httpx or httpx2, whichever this release of openai speaks through."""


def read_all(response: Any) -> None:
    response.read()


async def aread_all(response: Any) -> None:
    await response.aread()


def chunks(stream: Any) -> list[Any]:
    return [chunk.model_dump() for chunk in stream]


def plain(client: openai.OpenAI) -> Any:
    return chunks(client.chat.completions.create(**STREAM))


def raw(client: openai.OpenAI) -> Any:
    return chunks(client.chat.completions.with_raw_response.create(**STREAM).parse())


def raw_text(client: openai.OpenAI) -> Any:
    return client.chat.completions.with_raw_response.create(**STREAM).text


def streaming_lines(client: openai.OpenAI) -> Any:
    with client.chat.completions.with_streaming_response.create(**STREAM) as response:
        return list(response.iter_lines())


def first_chunk(client: openai.OpenAI) -> Any:
    with client.chat.completions.create(**STREAM) as stream:
        return next(iter(stream)).model_dump()


def with_sync(server: ScriptedServer, shape: Callable[[Any], Any], **options: Any) -> Any:
    http = openai.DefaultHttpxClient(verify=False, **options)
    with openai.OpenAI(base_url=server.base_url, api_key=server.api_key, http_client=http) as client:
        return shape(client)


def with_async(server: ScriptedServer, *, raw: bool = False, **options: Any) -> Any:
    async def go() -> Any:
        http = openai.DefaultAsyncHttpxClient(verify=False, **options)
        async with openai.AsyncOpenAI(base_url=server.base_url, api_key=server.api_key, http_client=http) as client:
            create = client.chat.completions.with_raw_response.create if raw else client.chat.completions.create
            answer: Any = await create(**STREAM)
            return [chunk.model_dump() async for chunk in (answer.parse() if raw else answer)]

    return asyncio.run(go())


SYNC_HOOK: Any = {"event_hooks": {"response": [read_all]}}
ASYNC_HOOK: Any = {"event_hooks": {"response": [aread_all]}}
HOOKED: dict[str, Callable[[ScriptedServer], Any]] = {
    "create": lambda server: with_sync(server, plain, **SYNC_HOOK),
    "raw": lambda server: with_sync(server, raw, **SYNC_HOOK),
    "raw text": lambda server: with_sync(server, raw_text, **SYNC_HOOK),
    "streaming response": lambda server: with_sync(server, streaming_lines, **SYNC_HOOK),
    "left early": lambda server: with_sync(server, first_chunk, **SYNC_HOOK),
    "async": lambda server: with_async(server, **ASYNC_HOOK),
    "async raw": lambda server: with_async(server, raw=True, **ASYNC_HOOK),
}


@pytest.mark.parametrize("run", HOOKED.values(), ids=HOOKED.keys())
def test_a_hook_that_has_read_the_stream_changes_no_record(run: Callable[[ScriptedServer], Any], recording: Any) -> None:
    """A response hook that reads every body leaves the app the events that it would see without us, and the record every id."""
    with ScriptedServer([REPLY]) as server:
        bare = run(server)
    with ScriptedServer([REPLY]) as server:
        call = recording.call(lambda: run(server))
    assert recording.error is None
    assert recording.value == bare
    assert "token_ids" not in repr(recording.value)
    assert (call.choices[0].token_ids, call.choices[0].logprobs, call.choices[0].text) == ([11, 12, 2], [-0.5, -1.0, -0.25], "hello")
    assert (call.complete, call.exact, call.streamed, call.error) == (True, True, True, None)


def test_a_transport_that_answers_out_of_memory_is_recorded(recording: Any) -> None:
    """An answer that never was on a wire (a cache, a test's transport) is read like one."""
    with ScriptedServer([REPLY]) as server:
        asked: Any = {**STREAM, "logprobs": True, "extra_body": {"return_token_ids": True, "stream_options": {"include_usage": True}}}
        with_sync(server, lambda client: list(client.chat.completions.create(**asked)))
        body = server.log[0].sent

    def answer(request: Any) -> Any:
        return HTTP.Response(200, content=body, headers={"content-type": "text/event-stream"})

    def app() -> Any:
        with openai.OpenAI(
            base_url="http://nowhere.test/v1", api_key="k", http_client=HTTP.Client(transport=HTTP.MockTransport(answer))
        ) as c:
            return plain(c)

    call = recording.call(app)
    assert "token_ids" not in repr(recording.value)
    assert (call.choices[0].token_ids, call.choices[0].text, call.complete, call.exact) == ([11, 12, 2], "hello", True, True)


@pytest.mark.parametrize("content_type", ["text/plain", "application/json", "application/octet-stream"])
@pytest.mark.parametrize("hook", [{}, SYNC_HOOK], ids=["read by the app", "read by a hook"])
def test_a_stream_under_another_name_is_a_stream(content_type: str, hook: Any, recording: Any) -> None:
    """The SDK reads the answer to a streamed call as events, whatever its type says; so do we."""

    def renamed(response: Any) -> None:
        response.headers["content-type"] = content_type

    options = {"event_hooks": {"response": [*hook.get("event_hooks", {}).get("response", []), renamed]}}
    with ScriptedServer([REPLY]) as server:
        bare = with_sync(server, plain, **options)
    with ScriptedServer([REPLY]) as server:
        call = recording.call(lambda: with_sync(server, plain, **options))
    assert recording.value == bare
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in bare) == "hello"
    assert (call.choices[0].token_ids, call.complete, call.exact) == ([11, 12, 2], True, True)


def test_a_whole_reply_to_a_streamed_call_is_read_as_one(recording: Any) -> None:
    """A server that does not stream when asked to is recorded, by an app that reads the body itself, with nothing added for it to see."""
    whole = (
        b'{"id":"c","model":"m","choices":[{"index":0,"message":{"content":"hello"},"finish_reason":"stop","logprobs":{"content":'
        b'[{"logprob":-0.5},{"logprob":-0.25}]},"token_ids":[11,2]}],"prompt_token_ids":[1,2]}'
    )

    def shape(client: openai.OpenAI) -> bytes:
        with client.chat.completions.with_streaming_response.create(**STREAM) as response:
            return response.read()

    def unnamed(response: Any) -> None:
        response.headers["content-type"] = "application/json"

    with ScriptedServer([Reply(raw=whole)]) as server:
        call = recording.call(lambda: with_sync(server, shape, event_hooks={"response": [unnamed]}))
    assert recording.value == (
        b'{"id":"c","model":"m","choices":[{"index":0,"message":{"content":"hello"},"finish_reason":"stop","logprobs":null}]}'
    )
    assert (call.choices[0].token_ids, call.choices[0].logprobs, call.complete, call.exact) == ([11, 2], [-0.5, -0.25], True, True)


ASKED: Any = {"model": "m", "messages": STREAM["messages"]}


def with_aiohttp(server: ScriptedServer, *, stream: bool) -> Any:
    async def go() -> Any:
        async with openai.AsyncOpenAI(
            base_url=server.base_url, api_key=server.api_key, http_client=openai.DefaultAioHttpClient(), max_retries=0
        ) as client:
            if not stream:
                return (await client.chat.completions.create(**ASKED)).model_dump()
            chunks = await client.chat.completions.create(**STREAM)
            return [chunk.model_dump() async for chunk in chunks]

    return asyncio.run(go())


needs_aiohttp = pytest.mark.skipif(
    not hasattr(openai, "DefaultAioHttpClient") or importlib.util.find_spec("aiohttp") is None,
    reason="openai[aiohttp] is not installed, or this release has none",
)


@needs_aiohttp
@pytest.mark.parametrize("redirected", [False, True], ids=["own", "policy"])
@pytest.mark.parametrize("stream", [False, True], ids=["create", "stream"])
def test_a_client_over_aiohttp_is_recorded_like_any_other(stream: bool, redirected: bool, recording: Any) -> None:
    """Over aiohttp instead of httpx's own connections: the same record, and the app sees what it would see without us."""
    with ScriptedServer([REPLY]) as server:
        bare = with_aiohttp(server, stream=stream)
    with ScriptedServer([REPLY]) as server, ScriptedServer([REPLY]) as own:
        route = Route(base_url=server.base_url, api_key=server.api_key, model="m") if redirected else None
        call = recording.call(lambda: with_aiohttp(own if redirected else server, stream=stream), route=route)
        assert len(server.log) == 1
    assert recording.error is None
    assert recording.value == bare
    assert (call.choices[0].token_ids, call.choices[0].logprobs, call.choices[0].text) == ([11, 12, 2], [-0.5, -1.0, -0.25], "hello")
    assert (call.complete, call.exact, call.attempts, call.endpoint) == (True, True, 1, "policy" if redirected else "own")


@needs_aiohttp
def test_a_lost_connection_over_aiohttp_is_a_failed_call(recording: Any) -> None:
    """The app gets the client's own error."""
    with ScriptedServer([Reply(disconnect_after=0)]) as server:
        call = recording.call(lambda: with_aiohttp(server, stream=False))
    assert isinstance(recording.error, openai.APIConnectionError)
    assert (call.error.type, call.trainable) == (f"openai.{type(recording.error).__name__}", False)
