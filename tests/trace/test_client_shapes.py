"""Whatever shape a call has, the record is the same and the caller sees what it would have seen without us."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from rllm_trace.testing import Reply, ReplyChoice, ScriptedServer
from rllm_trace.types import Choice, Usage

MESSAGES: Any = [{"role": "user", "content": "hi"}]
WEATHER: Any = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
TOOL_CALLS = [
    {"type": "function", "id": "call_1", "function": {"name": "weather", "arguments": '{"city":"Oslo"}'}},
    {"type": "function", "id": "call_2", "function": {"name": "weather", "arguments": '{"city":"Rome"}'}},
]
TEXT = ReplyChoice(text="hello there", token_ids=[11, 12, 13, 2], logprobs=[-0.5, -1.0, -0.25, -0.125])
OTHER = ReplyChoice(text='héllo "quoted" \\ \n ]}', token_ids=[21, 2], logprobs=[-2.0, -0.0625])
CUT = ReplyChoice(text="{", token_ids=[71], logprobs=[-0.5], finish_reason="length")
CALLS = ReplyChoice(
    text=None, tool_calls=TOOL_CALLS, token_ids=[31, 32, 33, 34, 2], logprobs=[-1.0, -2.0, -3.0, -4.0, -0.5], finish_reason="tool_calls"
)
THOUGHT = ReplyChoice(text="4", reasoning="2 and 2", token_ids=[41, 42, 2], logprobs=[-1.0, -0.5, -0.25], stop_reason="</s>")
REFUSED = ReplyChoice(text=None, refusal="I cannot", token_ids=[51, 2], logprobs=[-1.0, -0.5])
JSON = ReplyChoice(text='{"city": "Oslo"}', token_ids=[61, 62, 2], logprobs=[-1.0, -0.5, -0.25])


class City(BaseModel):
    city: str


def plain(seen: Any) -> Any:
    """Everything that a caller can read from an object of the SDK, which fields were set included."""
    if not hasattr(seen, "model_dump"):
        return seen
    return [seen.model_dump(warnings=False), seen.model_dump(exclude_unset=True, warnings=False)]


def helpers(client: Any) -> Any:
    """Where this release of openai has ``parse`` and ``stream``."""
    return client.chat.completions if hasattr(client.chat.completions, "parse") else client.beta.chat.completions


def _helper(client: Any, kwargs: dict[str, Any]) -> Any:
    with helpers(client).stream(**kwargs) as stream:
        events = [event.type for event in stream]
        return [events, plain(stream.get_final_completion())]


def _streaming_response(client: Any, kwargs: dict[str, Any], read: Callable[[Any], Any]) -> Any:
    with client.chat.completions.with_streaming_response.create(**kwargs) as response:
        return read(response)


CREATE = {"model": "m", "messages": MESSAGES}
STREAM = {**CREATE, "stream": True}
USAGE = {**STREAM, "stream_options": {"include_usage": True}}

SHAPES: dict[str, Callable[[Any], Any]] = {
    "create": lambda c: plain(c.chat.completions.create(**CREATE)),
    "stream": lambda c: [plain(x) for x in c.chat.completions.create(**STREAM)],
    "stream with usage": lambda c: [plain(x) for x in c.chat.completions.create(**USAGE)],
    "stream helper": lambda c: _helper(c, CREATE),
    "raw": lambda c: plain(c.chat.completions.with_raw_response.create(**CREATE).parse()),
    "raw text": lambda c: json.loads(c.chat.completions.with_raw_response.create(**CREATE).text),
    "raw stream": lambda c: [plain(x) for x in c.chat.completions.with_raw_response.create(**STREAM).parse()],
    "streaming response parse": lambda c: _streaming_response(c, CREATE, lambda r: plain(r.parse())),
    "streaming response read": lambda c: _streaming_response(c, CREATE, lambda r: json.loads(r.read())),
    "streaming response lines": lambda c: _streaming_response(c, STREAM, lambda r: list(r.iter_lines())),
    "streaming response stream": lambda c: _streaming_response(c, STREAM, lambda r: [plain(x) for x in r.parse()]),
    "post": lambda c: plain(c.post("/chat/completions", body=dict(CREATE), cast_to=openai.types.chat.ChatCompletion)),
    "post raw": lambda c: json.loads(
        c.post(
            "/chat/completions",
            body=dict(CREATE),
            cast_to=openai.types.chat.ChatCompletion,
            options={"headers": {"X-Stainless-Raw-Response": "true"}},
        ).text
    ),
    "with_options": lambda c: plain(c.with_options(timeout=5, max_retries=0).chat.completions.create(**CREATE)),
    "extra_body": lambda c: plain(c.chat.completions.create(**CREATE, extra_body={"chat_template_kwargs": {"x": 1}}, timeout=5)),
    "tuple of messages": lambda c: plain(c.chat.completions.create(model="m", messages=tuple(MESSAGES))),
}
ASYNC_SHAPES: dict[str, Callable[[Any], Any]] = {}


def asynchronous(name: str) -> Callable[[Any], Any]:
    def add(shape: Any) -> Any:
        ASYNC_SHAPES[name] = shape
        return shape

    return add


@asynchronous("create")
async def _(c: Any) -> Any:
    return plain(await c.chat.completions.create(**CREATE))


@asynchronous("stream")
async def _(c: Any) -> Any:
    return [plain(x) async for x in await c.chat.completions.create(**STREAM)]


@asynchronous("stream with usage")
async def _(c: Any) -> Any:
    return [plain(x) async for x in await c.chat.completions.create(**USAGE)]


@asynchronous("stream helper")
async def _(c: Any) -> Any:
    async with helpers(c).stream(**CREATE) as stream:
        events = [event.type async for event in stream]
        return [events, plain(await stream.get_final_completion())]


@asynchronous("raw")
async def _(c: Any) -> Any:
    return plain((await c.chat.completions.with_raw_response.create(**CREATE)).parse())


@asynchronous("raw stream")
async def _(c: Any) -> Any:
    return [plain(x) async for x in (await c.chat.completions.with_raw_response.create(**STREAM)).parse()]


@asynchronous("streaming response parse")
async def _(c: Any) -> Any:
    async with c.chat.completions.with_streaming_response.create(**CREATE) as response:
        return plain(await response.parse())


@asynchronous("streaming response lines")
async def _(c: Any) -> Any:
    async with c.chat.completions.with_streaming_response.create(**STREAM) as response:
        return [line async for line in response.iter_lines()]


@asynchronous("post")
async def _(c: Any) -> Any:
    return plain(await c.post("/chat/completions", body=dict(CREATE), cast_to=openai.types.chat.ChatCompletion))


def run_sync(shape: Callable[[Any], Any], server: ScriptedServer) -> Any:
    http = openai.DefaultHttpxClient(verify=False)
    with openai.OpenAI(base_url=server.base_url, api_key=server.api_key, max_retries=0, http_client=http) as client:
        return shape(client)


def run_async(shape: Callable[[Any], Any], server: ScriptedServer) -> Any:
    async def go() -> Any:
        http = openai.DefaultAsyncHttpxClient(verify=False)
        async with openai.AsyncOpenAI(base_url=server.base_url, api_key=server.api_key, max_retries=0, http_client=http) as client:
            return await shape(client)

    return asyncio.run(go())


REPLIES = {
    "text": Reply(choices=[TEXT], weight_versions=[(3, 0, 4)]),
    "tools": Reply(choices=[CALLS], tokens_per_chunk=2),
    "reasoning": Reply(choices=[THOUGHT]),
    "refusal": Reply(choices=[REFUSED]),
    "odd text": Reply(choices=[OTHER], tokens_per_chunk=3, chunk_bytes=7),
}


EXPECTED = {
    "text": Choice(index=0, token_ids=[11, 12, 13, 2], logprobs=[-0.5, -1.0, -0.25, -0.125], text="hello there", finish_reason="stop"),  # type: ignore[arg-type]
    "tools": Choice(
        index=0, token_ids=[31, 32, 33, 34, 2], logprobs=[-1.0, -2.0, -3.0, -4.0, -0.5], tool_calls=TOOL_CALLS, finish_reason="tool_calls"
    ),  # type: ignore[arg-type]
    "reasoning": Choice(
        index=0,
        token_ids=[41, 42, 2],
        logprobs=[-1.0, -0.5, -0.25],
        text="4",
        reasoning="2 and 2",
        finish_reason="stop",
        stop_reason="</s>",
    ),  # type: ignore[arg-type]
    "refusal": Choice(index=0, token_ids=[51, 2], logprobs=[-1.0, -0.5], refusal="I cannot", finish_reason="stop"),  # type: ignore[arg-type]
    "odd text": Choice(index=0, token_ids=[21, 2], logprobs=[-2.0, -0.0625], text='héllo "quoted" \\ \n ]}', finish_reason="stop"),  # type: ignore[arg-type]
}


ALL_SHAPES = [*((run_sync, shape) for shape in SHAPES.values()), *((run_async, shape) for shape in ASYNC_SHAPES.values())]


@pytest.mark.parametrize("name", REPLIES)
@pytest.mark.parametrize("run,shape", ALL_SHAPES, ids=[*SHAPES, *(f"async {name}" for name in ASYNC_SHAPES)])
def test_every_shape_gives_one_record_and_shows_the_caller_nothing_new(run: Any, shape: Any, name: str, recording: Any) -> None:
    """Streamed or not, sync or async, raw or parsed: the same ids, logprobs, texts, tool calls, usage and versions are recorded, and
    every field that the caller can read is the one that it reads without us."""
    with ScriptedServer([REPLIES[name]]) as server:
        bare = run(shape, server)
    with ScriptedServer([REPLIES[name]]) as server:
        call = recording.call(lambda: run(shape, server))
        sent = [exchange.body["return_token_ids"] for exchange in server.log]
    assert recording.error is None
    assert recording.value == bare
    assert (sent, call.attempts, call.error) == ([True], 1, None)
    (choice,) = call.choices
    expected = EXPECTED[name]
    assert {f: getattr(choice, f) for f in choice.__struct_fields__} == {f: getattr(expected, f) for f in expected.__struct_fields__}
    assert call.prompt_token_ids == [1, 72, 105]
    assert call.usage == Usage(prompt_tokens=3, completion_tokens=len(expected.token_ids or ()))
    assert (call.response_id, call.response_model, call.model, call.messages) == ("chatcmpl-0", "m", "m", MESSAGES)
    assert (call.exact, call.inexact_reason, call.complete, call.trainable) == (True, None, True, True)
    assert (call.policy_version_start, call.policy_version_end) == ((3, 3) if name == "text" else (None, None))


@pytest.mark.parametrize("kwargs", [CREATE, STREAM, USAGE], ids=["create", "stream", "stream with usage"])
def test_every_choice_of_n_is_a_choice_of_its_own(kwargs: dict[str, Any], recording: Any) -> None:
    """n=3 gives three choices, each with its own ids and logprobs, and the usage is summed."""
    reply = Reply(choices=[TEXT, OTHER, CALLS])
    with ScriptedServer([reply]) as server:
        client = openai.OpenAI(base_url=server.base_url, api_key=server.api_key)

        def app() -> None:
            answer = client.chat.completions.create(**kwargs, n=3)
            if kwargs is not CREATE:
                list(answer)

        call = recording.call(app)
        client.close()
    assert [c.token_ids for c in call.choices] == [[11, 12, 13, 2], [21, 2], [31, 32, 33, 34, 2]]
    assert [c.logprobs for c in call.choices] == [[-0.5, -1.0, -0.25, -0.125], [-2.0, -0.0625], [-1.0, -2.0, -3.0, -4.0, -0.5]]
    assert [c.text for c in call.choices] == ["hello there", OTHER.text, None]
    assert call.usage == Usage(prompt_tokens=3, completion_tokens=11)
    assert call.exact


@pytest.mark.parametrize("stream", [False, True])
def test_legacy_completions_are_calls(stream: bool, recording: Any) -> None:
    """``completions.create`` is recorded with its prompt, and its caller sees no ids."""
    with ScriptedServer([Reply(choices=[TEXT])]) as server:
        client = openai.OpenAI(base_url=server.base_url, api_key=server.api_key)

        def app() -> list[Any]:
            answer = client.completions.create(model="m", prompt="once", stream=stream)
            return [part.model_dump() for part in answer] if stream else [answer.model_dump()]

        call = recording.call(app)
        client.close()
    assert (call.operation, call.messages) == ("text_completion", [{"role": "prompt", "content": "once"}])
    assert (call.choices[0].token_ids, call.choices[0].logprobs) == ([11, 12, 13, 2], [-0.5, -1.0, -0.25, -0.125])
    assert (call.choices[0].text, call.exact, call.trainable) == ("hello there", True, True)
    assert all(choice["logprobs"] is None and "token_ids" not in choice for part in recording.value for choice in part["choices"])


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_app_asked_for_it_keeps(stream: bool, recording: Any) -> None:
    """An app that asks for logprobs and ids itself gets them, whole, and the record holds the same."""
    asks = {**(STREAM if stream else CREATE), "logprobs": True, "extra_body": {"return_token_ids": True}}

    def shape(client: Any) -> Any:
        answer = client.chat.completions.create(**asks)
        return [plain(part) for part in answer] if stream else plain(answer)

    with ScriptedServer([REPLIES["text"]]) as server:
        bare = run_sync(shape, server)
    with ScriptedServer([REPLIES["text"]]) as server:
        call = recording.call(lambda: run_sync(shape, server))
    assert recording.value == bare
    assert "token_ids" in repr(bare)
    assert call.choices[0].token_ids == [11, 12, 13, 2]
    assert call.exact


def test_logprobs_alone_are_kept_without_ids(recording: Any) -> None:
    """An app that asks for logprobs and not for ids sees logprobs and no ids."""
    with ScriptedServer([REPLIES["text"]]) as server:
        call = recording.call(lambda: run_sync(lambda c: plain(c.chat.completions.create(**CREATE, logprobs=True)), server))
    (choice,) = recording.value[0]["choices"]
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == [-0.5, -1.0, -0.25, -0.125]
    assert "token_ids" not in choice
    assert call.exact


@pytest.mark.parametrize("run", [run_sync, run_async], ids=["sync", "async"])
def test_parse_gives_the_parsed_object_and_an_inexact_call(run: Any, recording: Any) -> None:
    """``parse`` returns what it returns, and its constrained tokens are named as the reason why the call is not exact."""

    def shape(client: Any) -> Any:
        return helpers(client).parse(model="m", messages=MESSAGES, response_format=City)

    async def asynchronous(client: Any) -> Any:
        return await shape(client)

    with ScriptedServer([Reply(choices=[JSON])]) as server:
        call = recording.call(lambda: run(shape if run is run_sync else asynchronous, server))
    assert recording.value.choices[0].message.parsed == City(city="Oslo")
    assert call.choices[0].token_ids == [61, 62, 2]
    assert (call.exact, call.inexact_reason) == (False, "constrained: response_format json_schema")


def test_a_reply_that_parse_refuses_is_recorded_whole(recording: Any) -> None:
    """The SDK raises for a cut JSON reply after the server has answered: the app gets the error, the record the reply."""
    with ScriptedServer([Reply(choices=[CUT])]) as server:
        call = recording.call(lambda: run_sync(lambda c: helpers(c).parse(model="m", messages=MESSAGES, response_format=City), server))
    assert isinstance(recording.error, openai.LengthFinishReasonError)
    assert (call.choices[0].finish_reason, call.complete, call.error) == ("length", True, None)


def test_nulls_that_a_server_spells_out_stay(recording: Any) -> None:
    """A server that spells fields out as null when they are not asked for is seen to do so, in a whole body."""
    reply = Reply(choices=[TEXT], spells_nulls=True)

    def shape(client: Any) -> Any:
        return plain(client.chat.completions.create(**CREATE))

    with ScriptedServer([reply]) as server:
        bare = run_sync(shape, server)
    with ScriptedServer([reply]) as server:
        recording.call(lambda: run_sync(shape, server))
    assert recording.value == bare
    assert bare[0]["prompt_token_ids"] is None


def test_what_is_no_model_call_is_not_recorded(recording: Any) -> None:
    """``models.list`` and embeddings pass untouched and leave no record."""
    with ScriptedServer() as server:

        def shape(client: Any) -> Any:
            return [len(client.models.list().data), client.embeddings.create(model="m", input="x").data[0].embedding]

        calls = recording.calls(lambda: run_sync(shape, server))
        bodies = [exchange.body for exchange in server.log]
    assert recording.value == [1, [0.5]]
    assert calls == []
    assert all("return_token_ids" not in body for body in bodies)


def test_images_mark_a_call_multimodal(recording: Any) -> None:
    """A message with an image part is recorded, and the call says that it is multimodal."""
    content = [{"type": "text", "text": "what?"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]
    with ScriptedServer() as server:
        call = recording.call(
            lambda: run_sync(lambda c: plain(c.chat.completions.create(model="m", messages=[{"role": "user", "content": content}])), server)
        )
    assert call.multimodal
    assert call.messages == [{"role": "user", "content": content}]


RESPONSE = {
    "id": "resp_1",
    "object": "response",
    "created_at": 1,
    "model": "m",
    "status": "completed",
    "error": None,
    "output": [
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "hello", "annotations": []}],
        },
        {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "weather", "arguments": "{}", "status": "completed"},
    ],
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
    "usage": {
        "input_tokens": 5,
        "output_tokens": 7,
        "total_tokens": 12,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 0},
    },
}


@pytest.mark.skipif(not hasattr(openai.OpenAI, "responses"), reason="this release of openai has no Responses API")
@pytest.mark.parametrize("stream", [False, True])
def test_responses_are_recorded_without_ids(stream: bool, recording: Any) -> None:
    """``responses.create`` at the app's own endpoint is a record with its text and tool calls; without ids it says so."""
    delta = {"type": "response.output_text.delta", "delta": "hello", "item_id": "msg_1", "output_index": 0, "content_index": 0}
    events = [{**delta, "sequence_number": 0, "logprobs": []}, {"type": "response.completed", "sequence_number": 1, "response": RESPONSE}]
    streamed = b"".join(b"event: %s\ndata: %s\n\n" % (str(event["type"]).encode(), json.dumps(event).encode()) for event in events)
    raw = streamed if stream else json.dumps(RESPONSE).encode()
    with ScriptedServer([Reply(raw=raw)]) as server:

        def shape(client: Any) -> Any:
            answer = client.responses.create(model="m", input="hi", stream=stream)
            return [part.type for part in answer] if stream else answer.output_text

        call = recording.call(lambda: run_sync(shape, server))
        sent = server.log[0].body
    assert recording.value == (["response.output_text.delta", "response.completed"] if stream else "hello")
    assert "return_token_ids" not in sent
    assert (call.operation, call.response_id, call.choices[0].text) == ("responses", "resp_1", "hello")
    assert call.choices[0].tool_calls == [{"type": "function", "id": "call_1", "function": {"name": "weather", "arguments": "{}"}}]
    assert call.usage == Usage(prompt_tokens=5, completion_tokens=7)
    assert (call.exact, call.inexact_reason, call.error) == (False, "tokens not asked for", None)
