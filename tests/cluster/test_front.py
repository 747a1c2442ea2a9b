"""The front turns OpenAI requests into token ids for a replica, and a replica's token ids into OpenAI's replies, whoever the replica is."""

from __future__ import annotations

import asyncio
import http.client
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rllm_trainer.cluster._front import Front
from rllm_trainer.cluster.app_worker import FrontAddress
from rllm_trainer.models import resolve_model
from rllm_trainer.serving._local.tokens import Tokenizer


class Output(msgspec.Struct, kw_only=True):
    """What verl's client gives."""

    token_ids: list[int]
    log_probs: list[float]
    stop_reason: str = "completed"
    extra_fields: dict[str, Any] = {}


class ScriptedClient:
    """verl's client, answering from a script and keeping what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, list[int], dict[str, Any]]] = []
        self.script: list[Any] = []

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> Any:
        self.asked.append((request_id, prompt_ids, sampling_params))
        await asyncio.sleep(0)
        found = self.script.pop(0)
        if isinstance(found, Exception):
            raise found
        return found


@pytest.fixture(scope="module")
def model() -> Path:
    return resolve_model("tiny-qwen2")


@pytest.fixture(scope="module")
def client() -> ScriptedClient:
    return ScriptedClient()


@pytest.fixture(scope="module")
def address(model: Path, client: ScriptedClient) -> FrontAddress:
    return Front(str(model), name="policy", max_len=256, client=client, host="127.0.0.1", exact=False).start()


def ask(address: FrontAddress, body: dict[str, Any], *, session: str = "s1", token: str | None = None) -> tuple[int, dict[str, Any]]:
    """One request; status and decoded body."""
    connection = http.client.HTTPConnection(address.url.removeprefix("http://"), timeout=30)
    headers = {"authorization": f"Bearer {token or address.api_key}", "content-type": "application/json"}
    connection.request("POST", f"/s/{session}/v1/chat/completions", json.dumps({"model": "policy", **body}), headers)
    response = connection.getresponse()
    found = json.loads(response.read())
    connection.close()
    return response.status, found


def test_a_reply_is_the_replicas_tokens_to_the_id(model: Path, client: ScriptedClient, address: FrontAddress) -> None:
    """Prompt ids are the template's, reply ids and logprobs the replica's own, and the version is told for each token."""
    tokenizer = Tokenizer(model)
    end = tokenizer.encode("<|im_end|>", add_special_tokens=False)[0]
    reply = [*tokenizer.encode("hey", add_special_tokens=False), end]
    versions = [(3, 0, 2), (4, 2, 4)]
    client.script.append(Output(token_ids=reply, log_probs=[-0.5, -1.0, -1.5, -0.25], extra_fields={"versions": versions}))
    status, body = ask(
        address,
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "logprobs": True, "return_token_ids": True, "temperature": 0.7},
        session="episode-1",
    )
    assert status == 200
    choice = body["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("hey", "stop")
    assert choice["token_ids"] == reply
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == [-0.5, -1.0, -1.5, -0.25]
    assert body["metadata"]["weight_versions"] == [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 4}]
    session, prompt_ids, params = client.asked[-1]
    assert session == "episode-1"
    assert body["prompt_token_ids"] == prompt_ids
    assert tokenizer.decode(prompt_ids, skip_special=False).endswith("<|im_start|>assistant\n")
    assert (params["temperature"], params["max_tokens"], params["logprobs"]) == (0.7, 9, True)


def test_what_comes_after_a_stop_string_is_left_out(model: Path, client: ScriptedClient, address: FrontAddress) -> None:
    """Replicas know no text: the front ends the reply at the token that completes the stop string."""
    ids = Tokenizer(model).encode("abSTOPcd", add_special_tokens=False)
    client.script.append(Output(token_ids=ids, log_probs=[-1.0] * len(ids), stop_reason="length"))
    status, body = ask(
        address,
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "stop": ["STOP"], "logprobs": True, "return_token_ids": True},
    )
    assert status == 200
    assert body["choices"][0]["message"]["content"] == "ab"
    assert body["choices"][0]["token_ids"] == ids[:6]


@pytest.mark.parametrize(
    "body, words",
    [
        ({"logprobs": True, "top_logprobs": 2}, "top_logprobs"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_what_replicas_cannot_do_is_refused_by_name(address: FrontAddress, body: dict[str, Any], words: str) -> None:
    """A field that would be ignored is a 400."""
    status, answer = ask(address, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, **body})
    assert status == 400
    assert words in answer["error"]["message"]


def test_a_replica_that_fails_is_a_500_with_its_words(client: ScriptedClient, address: FrontAddress) -> None:
    """The app sees a server error, and the rollout an infrastructure fault."""
    client.script.append(RuntimeError("replica 3 is gone"))
    status, answer = ask(address, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4})
    assert status == 500
    assert "replica 3 is gone" in answer["error"]["message"]


def test_logprobs_that_do_not_match_the_tokens_are_no_reply(client: ScriptedClient, address: FrontAddress) -> None:
    """They are never padded."""
    client.script.append(Output(token_ids=[5, 6], log_probs=[-1.0]))
    status, answer = ask(address, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4})
    assert status == 500
    assert "2 token ids and 1 logprobs" in answer["error"]["message"]


def test_a_wrong_token_gets_nothing(client: ScriptedClient, address: FrontAddress) -> None:
    """A front on a node's own address is guarded like any server."""
    before = len(client.asked)
    assert ask(address, {"messages": [{"role": "user", "content": "hi"}]}, token="wrong")[0] == 401
    assert len(client.asked) == before
