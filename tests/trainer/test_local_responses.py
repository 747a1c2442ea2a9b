"""The embedded server's Responses API, through the openai client: plain, streamed, with tools, over two turns."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from rllm_trainer.models import resolve_model
from rllm_trainer.serving.local import LocalServer

TOOL: Any = {
    "type": "function",
    "name": "weather",
    "description": "Tells the weather",
    "strict": None,
    "parameters": {
        "type": "object",
        "properties": {"day": {"type": "integer", "minimum": 1, "maximum": 7}},
        "required": ["day"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    server = LocalServer.start(
        resolve_model("tiny-llama"), run_dir=tmp_path_factory.mktemp("server"), name="policy", version=2, threads=1, max_model_len=1024
    )
    yield server
    server.close()


@pytest.fixture
def client(server: LocalServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.base_url, api_key=server.api_key, max_retries=0) as client:
        yield client


def test_a_response_is_the_chat_reply_in_other_words(client: openai.OpenAI) -> None:
    """Instructions are the system message; same seed, same prompt ids, ids, logprobs and text as chat completions; versions beside them."""
    wanted: Any = {"max_output_tokens": 8, "include": ["message.output_text.logprobs"], "extra_body": {"seed": 5}}
    response: Any = client.responses.create(model="policy", input="hello", instructions="Be brief.", **wanted)
    messages: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
    asked: Any = {"return_token_ids": True}
    chat: Any = client.chat.completions.create(model="policy", messages=messages, max_tokens=8, seed=5, logprobs=True, extra_body=asked)
    assert response.output_text == chat.choices[0].message.content
    assert response.prompt_token_ids == chat.prompt_token_ids
    assert response.token_ids == chat.choices[0].token_ids
    logprobs = [entry.logprob for entry in chat.choices[0].logprobs.content]
    assert response.token_logprobs == pytest.approx(logprobs, abs=1e-5)
    assert [entry.logprob for entry in response.output[0].content[0].logprobs] == pytest.approx(logprobs, abs=1e-5)
    assert response.weight_versions == [{"version": "2", "start": 0, "end": 8}]
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (response.usage.input_tokens, response.usage.output_tokens) == (len(chat.prompt_token_ids), 8)


@pytest.mark.parametrize("tool_choice", [None, "required"])
def test_a_streamed_response_is_the_plain_one(client: openai.OpenAI, tool_choice: Any) -> None:
    """The last event holds the same response; the deltas join to its text and arguments; events are numbered in order."""
    asked: Any = {"model": "policy", "input": "hello", "max_output_tokens": 200, "extra_body": {"seed": 5}}
    if tool_choice:
        asked |= {"tools": [TOOL], "tool_choice": tool_choice, "parallel_tool_calls": False}
    plain: Any = client.responses.create(**asked)
    events: list[Any] = list(client.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1].response
    assert events[-1].type == f"response.{plain.status}"
    assert (last.token_ids, last.prompt_token_ids, last.output_text) == (plain.token_ids, plain.prompt_token_ids, plain.output_text)
    assert last.usage.output_tokens == plain.usage.output_tokens
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == plain.output_text
    written = "".join(e.delta for e in events if e.type == "response.function_call_arguments.delta")
    assert written == "".join(item.arguments for item in plain.output if item.type == "function_call")
    assert [e.item.type for e in events if e.type == "response.output_item.done"] == [item.type for item in plain.output]


def test_a_call_and_its_output_make_the_next_prompt(client: openai.OpenAI) -> None:
    """A forced call comes as an item; sent back with its output it renders as chat renders the same turn."""
    forced: Any = {"tools": [TOOL], "tool_choice": {"type": "function", "name": "weather"}, "parallel_tool_calls": False}
    first: Any = client.responses.create(model="policy", input="hello", **forced)
    (call,) = first.output
    assert (call.type, call.name, call.status) == ("function_call", "weather", "completed")
    assert json.loads(call.arguments)["day"] in range(1, 8)
    items: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
        {"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": call.arguments},
        {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"},
    ]
    second: Any = client.responses.create(model="policy", input=items, tools=[TOOL], max_output_tokens=1)
    function = {"name": call.name, "arguments": call.arguments}
    messages: Any = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": call.call_id, "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": call.call_id, "content": "sunny"},
    ]
    described = {k: v for k, v in TOOL.items() if k not in ("type", "strict")}
    tools: Any = [{"type": "function", "function": described}]
    asked: Any = {"return_token_ids": True}
    chat: Any = client.chat.completions.create(model="policy", messages=messages, tools=tools, max_tokens=1, extra_body=asked)
    assert second.prompt_token_ids == chat.prompt_token_ids
    assert second.prompt_token_ids[: len(first.prompt_token_ids + first.token_ids)] == first.prompt_token_ids + first.token_ids


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"reasoning": {"effort": "low"}}, "reasoning"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"input": [{"type": "reasoning", "id": "r", "summary": []}]}, "input"),
        ({"truncation": "auto"}, "truncation"),
    ],
)
def test_what_is_not_served_is_refused_by_name(client: openai.OpenAI, fields: Any, param: str) -> None:
    """State, reasoning, hosted tools and truncation are a 400 that names them."""
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**{"model": "policy", "input": "hello", **fields})
    assert caught.value.param == param
