"""However a call ends, its span ends once and says how; what is not whole is never credited."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator
from typing import Any

import openai
import pytest

import rllm_trace as rllm
from rllm_trace.rollouts import rollout
from rllm_trace.testing import Reply, ReplyChoice, ScriptedServer
from rllm_trace.types import ErrorInfo

MESSAGES: Any = [{"role": "user", "content": "hi"}]
CREATE: Any = {"model": "m", "messages": MESSAGES}
STREAM: Any = {**CREATE, "stream": True}
LONG = ReplyChoice(text="abcdefgh", token_ids=[1, 2, 3, 4, 5, 6, 7, 8], logprobs=[-1.0, -2.0, -3.0, -4.0, -5.0, -6.0, -7.0, -8.0])


def sync_client(server: ScriptedServer, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.base_url, api_key=server.api_key, http_client=openai.DefaultHttpxClient(verify=False), **options)


def async_client(server: ScriptedServer, **options: Any) -> openai.AsyncOpenAI:
    http = openai.DefaultAsyncHttpxClient(verify=False)
    return openai.AsyncOpenAI(base_url=server.base_url, api_key=server.api_key, http_client=http, **options)


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer([Reply(choices=[LONG])]) as server:
        yield server


def test_a_stream_closed_early_is_abandoned(server: ScriptedServer, recording: Any) -> None:
    """The part that was received is recorded, as an abandoned call that is not trained."""

    def app() -> None:
        with sync_client(server) as client, client.chat.completions.create(**STREAM) as stream:
            for _ in range(4):
                next(stream)

    call = recording.call(app)
    assert call.choices[0].text == "abc"
    assert call.choices[0].token_ids == [1, 2, 3]
    assert call.prompt_token_ids == [1, 72, 105]
    assert (call.complete, call.exact, call.inexact_reason, call.trainable, call.error) == (False, False, "reply incomplete", False, None)


def test_a_stream_that_is_broken_out_of_after_its_finish_reason_is_whole(server: ScriptedServer, recording: Any) -> None:
    """Leaving the loop at the finish reason loses nothing that was sampled."""

    def app() -> None:
        with sync_client(server) as client:
            for chunk in client.chat.completions.create(**STREAM):
                if chunk.choices[0].finish_reason:
                    break
            gc.collect()

    call = recording.call(app)
    assert call.choices[0].token_ids == [1, 2, 3, 4, 5, 6, 7, 8]
    assert (call.complete, call.exact, call.trainable) == (True, True, True)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_stream_that_is_kept_at_its_finish_reason_ends_with_its_workflow(server: ScriptedServer, is_async: bool, no_faults: None) -> None:
    """The app holds on to its stream and never reads the rest: the reply was received whole, and its episode does not wait."""

    @rllm.workflow
    def reads(client: openai.OpenAI) -> Any:
        stream = client.chat.completions.create(**STREAM)
        next(chunk for chunk in stream if chunk.choices[0].finish_reason)
        return stream

    @rllm.workflow
    async def awaits(client: openai.AsyncOpenAI) -> Any:
        stream = await client.chat.completions.create(**STREAM)
        async for chunk in stream:
            if chunk.choices[0].finish_reason:
                return stream

    async def app() -> Any:
        async with async_client(server) as client:
            with rollout() as handle:
                stream = await awaits(client)
            (episode,) = await handle.wait_async(60)
            await stream.close()
            return episode

    if is_async:
        episode = asyncio.run(app())
    else:
        with sync_client(server) as client:
            with rollout() as handle:
                stream = reads(client)
            (episode,) = handle.wait(60)
            stream.close()
    (call,) = episode.calls
    assert call.choices[0].token_ids == [1, 2, 3, 4, 5, 6, 7, 8]
    assert (call.complete, call.exact, call.trainable, call.error) == (True, True, True, None)
    assert (episode.termination, episode.open_calls) == ("completed", 0)


def test_a_stream_that_is_kept_before_its_finish_reason_is_waited_for(server: ScriptedServer, no_faults: None) -> None:
    """Part of a reply is no reply: the workflow has returned, and what a consumer outside reads of it still belongs to the record."""
    returned = threading.Event()

    def consume(client: openai.OpenAI, stream: Any) -> None:
        with client:
            returned.wait(60)
            list(stream)

    def app() -> threading.Thread:
        client = sync_client(server)
        stream = client.chat.completions.create(**STREAM)
        next(stream), next(stream)
        consumer = threading.Thread(target=consume, args=(client, stream))
        consumer.start()
        return consumer

    with rollout() as handle:
        consumer = rllm.workflow(app)()
    returned.set()
    (episode,) = handle.wait(60)
    consumer.join(60)
    (call,) = episode.calls
    assert call.choices[0].token_ids == [1, 2, 3, 4, 5, 6, 7, 8]
    assert (call.complete, call.exact, call.trainable) == (True, True, True)


def test_a_stream_that_is_never_read_ends_with_its_object(server: ScriptedServer, recording: Any) -> None:
    """A stream that is dropped unread is an abandoned call without ids."""

    def app() -> None:
        with sync_client(server) as client:
            client.chat.completions.create(**STREAM)
            gc.collect()

    call = recording.call(app)
    assert (call.choices, call.complete, call.inexact_reason, call.error) == ([], False, "reply incomplete", None)


def test_an_asynchronous_stream_closed_early_is_abandoned(server: ScriptedServer, recording: Any) -> None:
    """``await stream.close()`` ends the span."""

    async def app() -> None:
        async with async_client(server) as client:
            stream = await client.chat.completions.create(**STREAM)
            await anext(stream)
            await anext(stream)
            await stream.close()

    call = recording.call(lambda: asyncio.run(app()))
    assert call.choices[0].token_ids == [1]
    assert (call.complete, call.trainable) == (False, False)


def test_a_cancelled_stream_says_so(recording: Any) -> None:
    """Cancelling the task that reads a stream ends the span as cancelled, with what had been received."""
    with ScriptedServer([Reply(choices=[LONG], hold_after=3)]) as server:

        async def consume(client: openai.AsyncOpenAI, second: asyncio.Event) -> None:
            async for chunk in await client.chat.completions.create(**STREAM):
                if chunk.choices[0].delta.content == "b":
                    second.set()

        async def app() -> None:
            async with async_client(server) as client:
                second = asyncio.Event()
                task = asyncio.create_task(consume(client, second))
                await asyncio.wait_for(second.wait(), 5)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task

        call = recording.call(lambda: asyncio.run(app()))
    assert call.error is not None
    assert call.error.type == "asyncio.exceptions.CancelledError"
    assert call.choices[0].token_ids == [1, 2]
    assert (call.complete, call.inexact_reason, call.trainable) == (False, "call failed", False)


def test_a_stream_that_times_out_is_an_error(recording: Any) -> None:
    """A server that falls silent within a stream ends the call with the client's timeout, and what had been received."""
    with ScriptedServer([Reply(choices=[LONG], hold_after=3)]) as server:

        def app() -> None:
            with sync_client(server, timeout=0.2) as client:
                list(client.chat.completions.create(**STREAM))

        call = recording.call(app)
    assert type(recording.error).__name__ in ("ReadTimeout", "APITimeoutError")
    assert call.error is not None
    assert call.error.type.endswith("ReadTimeout")
    assert (call.choices[0].token_ids, call.complete, call.trainable) == ([1, 2], False, False)


@pytest.mark.parametrize("stream", [False, True])
def test_a_cancelled_await_is_one_cancelled_call(stream: bool, recording: Any) -> None:
    """A task cancelled while it awaits the answer leaves one failed call and no ghost."""
    asked = threading.Event()

    def script(_: Any) -> Reply:
        asked.set()
        return Reply(hold_after=0)

    with ScriptedServer(script) as server:

        async def app() -> None:
            async with async_client(server) as client:
                task = asyncio.create_task(client.chat.completions.create(**CREATE, stream=stream))
                await asyncio.to_thread(asked.wait, 5)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task

        call = recording.call(lambda: asyncio.run(app()))
    assert call.error is not None
    assert call.error.type == "asyncio.exceptions.CancelledError"
    assert (call.attempts, call.choices, call.trainable) == (1, [], False)


@pytest.mark.parametrize("kwargs", [CREATE, STREAM], ids=["create", "stream"])
def test_a_timeout_is_one_failed_call_with_its_attempts(kwargs: Any, recording: Any) -> None:
    """A call that times out twice is one call of two attempts with the client's own error."""
    with ScriptedServer([Reply(hold_after=0)]) as server:

        def app() -> None:
            with sync_client(server, max_retries=1, timeout=0.2) as client, pytest.raises(openai.APITimeoutError):
                client.chat.completions.create(**kwargs)

        call = recording.call(app)
        assert len(server.log) == 2
    assert call.error == ErrorInfo(type="openai.APITimeoutError", message="Request timed out.", status_code=None)
    assert (call.attempts, call.complete, call.exact, call.trainable) == (2, False, False, False)
    assert call.messages == MESSAGES


def test_retries_of_the_sdk_are_attempts_of_one_call(recording: Any) -> None:
    """Two 500s and a success are one call with three attempts, and its record is the success."""
    replies = [Reply(status=500, error={"message": "busy"}), Reply(status=500, error={"message": "busy"}), Reply(choices=[LONG])]
    for reply in replies[:2]:
        reply.headers = {"retry-after-ms": "1"}
    with ScriptedServer(replies) as server:

        def app() -> None:
            with sync_client(server, max_retries=2) as client:
                client.chat.completions.create(**CREATE)

        call = recording.call(app)
    assert (call.attempts, call.error, call.exact, call.trainable) == (3, None, True, True)
    assert call.choices[0].token_ids == [1, 2, 3, 4, 5, 6, 7, 8]


def test_exhausted_retries_are_one_failed_call(recording: Any) -> None:
    """The last error is the record's, with its status."""
    with ScriptedServer([Reply(status=503, error={"message": "down"}, headers={"retry-after-ms": "1"})]) as server:

        async def app() -> None:
            async with async_client(server, max_retries=2) as client:
                with pytest.raises(openai.InternalServerError):
                    await client.chat.completions.create(**CREATE)

        call = recording.call(lambda: asyncio.run(app()))
    assert call.error is not None
    assert (call.error.type, call.error.status_code, call.attempts) == ("openai.InternalServerError", 503, 3)


def test_a_wrong_key_is_an_error_without_the_key(recording: Any) -> None:
    """A server that echoes the key in its error does not get it into the record."""
    with ScriptedServer(api_key="right") as server:

        def app() -> None:
            client = openai.OpenAI(base_url=server.base_url, api_key="sk-very-secret", http_client=openai.DefaultHttpxClient(verify=False))
            with client, pytest.raises(openai.AuthenticationError, match="sk-very-secret"):
                client.chat.completions.create(**CREATE)

        call = recording.call(app)
    assert call.error is not None
    assert call.error.status_code == 401
    assert "sk-very-secret" not in call.error.message
    assert "[withheld]" in call.error.message


def test_nothing_to_connect_to_is_a_failed_call(recording: Any) -> None:
    """A refused connection is one failed call with the client's own error."""

    def app() -> None:
        http = openai.DefaultHttpxClient(verify=False)
        client = openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="k", max_retries=0, http_client=http)
        with client, pytest.raises(openai.APIConnectionError):
            client.chat.completions.create(**CREATE)

    call = recording.call(app)
    assert call.error is not None
    assert (call.error.type, call.attempts, call.server) == ("openai.APIConnectionError", 1, "127.0.0.1:9")


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_connection_lost_within_a_stream_is_an_error(is_async: bool, recording: Any) -> None:
    """The app gets its error, the record what had been received and that it is not whole."""
    with ScriptedServer([Reply(choices=[LONG], disconnect_after=4)]) as server:

        async def consume() -> None:
            async with async_client(server) as client:
                async for _ in await client.chat.completions.create(**STREAM):
                    pass

        def app() -> None:
            if is_async:
                asyncio.run(consume())
            with sync_client(server) as client:
                for _ in client.chat.completions.create(**STREAM):
                    pass

        call = recording.call(app)
    assert type(recording.error).__name__ in ("RemoteProtocolError", "APIConnectionError")
    assert call.choices[0].token_ids == [1, 2, 3]
    assert call.error is not None
    assert call.error.type.endswith("RemoteProtocolError")
    assert (call.complete, call.exact, call.trainable) == (False, False, False)


def test_a_stream_that_stops_without_an_end_is_an_error(recording: Any) -> None:
    """A stream that ends cleanly before its finish reason has not been received whole."""
    cut = ReplyChoice(text="ab", token_ids=[1, 2], logprobs=[-1.0, -2.0], finish_reason=None)
    with ScriptedServer([Reply(choices=[cut], omit=frozenset({"done"}))]) as server:

        def app() -> int:
            with sync_client(server) as client:
                return len(list(client.chat.completions.create(**STREAM)))

        call = recording.call(app)
    assert recording.value == 3
    assert call.error is not None
    assert (call.error.type, call.complete, call.trainable) == ("rllm_trace.IncompleteStream", False, False)


def test_an_error_event_is_the_calls_error(recording: Any) -> None:
    """An error sent within a stream fails the call, as it does for the app."""
    with ScriptedServer([Reply(choices=[LONG], error={"message": "engine died", "code": 500})]) as server:

        def app() -> None:
            with sync_client(server) as client, pytest.raises(openai.APIError, match="engine died"):
                list(client.chat.completions.create(**STREAM))

        call = recording.call(app)
    assert call.error == ErrorInfo(type="openai.APIError", message="engine died", status_code=500)
    assert (call.exact, call.trainable) == (False, False)


@pytest.mark.parametrize("kwargs", [CREATE, STREAM], ids=["create", "stream"])
def test_a_reply_that_the_server_aborted_is_not_whole(kwargs: Any, recording: Any) -> None:
    """A finish reason of ``abort`` says that the server broke the reply off."""
    aborted = ReplyChoice(text="ab", token_ids=[1, 2], logprobs=[-1.0, -2.0], finish_reason="abort")
    with ScriptedServer([Reply(choices=[aborted])]) as server:

        def app() -> None:
            with sync_client(server) as client:
                answer = client.chat.completions.create(**kwargs)
                if kwargs is STREAM:
                    list(answer)

        call = recording.call(app)
    assert (call.complete, call.inexact_reason, call.trainable) == (False, "reply incomplete", False)


@pytest.mark.parametrize("raw", [b"", b"<html>", b"[1]", b'{"choices": [{"index": "zero"}]}'])
def test_a_body_that_cannot_be_read_is_recorded_and_passed_on(raw: bytes, recording: Any) -> None:
    """What the client makes of an odd body it makes of it with us; the record says that it was unreadable."""
    with ScriptedServer([Reply(raw=raw)]) as server:

        def app() -> bytes:
            with sync_client(server) as client:
                return client.chat.completions.with_raw_response.create(**CREATE).content

        call = recording.call(app)
    assert recording.value == raw
    assert (call.exact, call.inexact_reason) == (False, "response unreadable")


@pytest.mark.parametrize("kwargs", [CREATE, STREAM], ids=["create", "stream"])
@pytest.mark.parametrize("shape", ["create", "streaming"])
def test_compressed_answers_are_read(kwargs: Any, shape: str, recording: Any) -> None:
    """A server that compresses is recorded like any other."""
    with ScriptedServer([Reply(choices=[LONG], gzip=True)]) as server:

        def app() -> str:
            with sync_client(server) as client:
                if shape == "streaming":
                    with client.chat.completions.with_streaming_response.create(**kwargs) as response:
                        return response.read().decode()
                answer = client.chat.completions.create(**kwargs)
                return repr(list(answer) if kwargs is STREAM else answer)

        call = recording.call(app)
    assert recording.error is None
    assert "token_ids" not in recording.value
    assert call.choices[0].token_ids == [1, 2, 3, 4, 5, 6, 7, 8]
    assert (call.complete, call.exact) == (True, True)


def test_the_context_does_not_leak_out_of_a_stream(server: ScriptedServer, recording: Any) -> None:
    """After a stream has been created, another call of the same client inside the loop is a call of its own."""

    def app() -> None:
        with sync_client(server) as client:
            for position, _ in enumerate(client.chat.completions.create(**STREAM)):
                if position == 2:
                    client.chat.completions.create(**CREATE)

    calls = recording.calls(app)
    assert [(call.streamed, call.exact) for call in calls] == [(True, True), (False, True)]
    assert [call.response_id for call in calls] == ["chatcmpl-0", "chatcmpl-1"]
