"""What ``local={...}`` says of how the model writes holds for a node's front, too: tool calls and thinking are told apart there."""

from __future__ import annotations

import asyncio
import http.client
import json
from typing import Any

import msgspec
import pytest

from rllm_trainer.cluster._front import Front
from rllm_trainer.models import resolve_model
from rllm_trainer.serving._local.tokens import Tokenizer
from rllm_trainer.serving_settings import LocalSettings

WRITTEN = '<think>add</think>{"name": "look", "parameters": {"at": 1}}'
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "integer"}}}}}]


class Output(msgspec.Struct, kw_only=True):
    """What verl's client gives."""

    token_ids: list[int]
    log_probs: list[float]
    stop_reason: str = "completed"
    extra_fields: dict[str, Any] = {}


class Client:
    """verl's client, which always gives the same reply."""

    def __init__(self, ids: list[int]) -> None:
        self._ids = ids

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> Output:
        await asyncio.sleep(0)
        return Output(token_ids=self._ids, log_probs=[-1.0] * len(self._ids))


def message(reads: LocalSettings | None) -> dict[str, Any]:
    """The message of one chat with tools."""
    model = resolve_model("tiny-qwen2")
    tokenizer = Tokenizer(model)
    ids = [*tokenizer.encode(WRITTEN, add_special_tokens=False), tokenizer.encode("<|im_end|>", add_special_tokens=False)[0]]
    front = Front(str(model), name="policy", max_len=2048, client=Client(ids), host="127.0.0.1", exact=False, reads=reads)
    address = front.start()
    connection = http.client.HTTPConnection(address.url.removeprefix("http://"), timeout=30)
    body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, "max_tokens": 200}
    headers = {"authorization": f"Bearer {address.api_key}", "content-type": "application/json"}
    connection.request("POST", "/s/one/v1/chat/completions", json.dumps(body), headers)
    response = connection.getresponse()
    found = json.loads(response.read())
    connection.close()
    assert response.status == 200, found
    return found["choices"][0]["message"]


@pytest.mark.parametrize(
    "reads, content, reasoning, calls",
    [
        (None, WRITTEN, None, []),
        (LocalSettings(tool_format="llama", reasoning="think"), None, "add", [("look", '{"at": 1}')]),
    ],
)
def test_a_front_reads_replies_as_it_is_told(
    reads: LocalSettings | None, content: str | None, reasoning: str | None, calls: list[tuple[str, str]]
) -> None:
    """By default as the template shows, which for this one is Hermes' format without thinking."""
    found = message(reads)
    assert found["content"] == content
    assert found.get("reasoning_content") == reasoning
    assert [(call["function"]["name"], call["function"]["arguments"]) for call in found.get("tool_calls") or []] == calls
