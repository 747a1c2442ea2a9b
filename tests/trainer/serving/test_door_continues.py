"""A vLLM whose chats are continued exactly: what the door sends on of a second turn, and what the client reads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rllm_trainer.config import make_settings
from rllm_trainer.exceptions import ServerError, SettingError
from rllm_trainer.models import resolve_model
from rllm_trainer.serving._local.tokens import Tokenizer
from rllm_trainer.serving.base import Continues
from rllm_trainer.serving.remote import DoorServer
from rllm_trainer.serving.starting import start_serving
from rllm_trainer.serving.vllm import attach_vllm

HELLO = {"role": "user", "content": "hi"}
END = 258
"""``<|im_end|>`` of the model."""


def turn(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"model": "policy", "messages": list(messages), "return_token_ids": True, "max_tokens": 8, **more}


def reply(text: str, prompt: list[int], ids: list[int], **more: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    return {
        "id": "c",
        "object": "chat.completion",
        "created": 1,
        "model": "policy",
        "prompt_token_ids": prompt,
        "choices": [{"index": 0, "message": message, "token_ids": ids, "finish_reason": "stop", "stop_reason": None, **more}],
        "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(ids)},
    }


@pytest.fixture
def server(scripted_vllm: Any, server_key: str, tmp_path: Path) -> Iterator[DoorServer]:
    server = attach_vllm(scripted_vllm.url, run_dir=tmp_path, key=server_key, continues=resolve_model("tiny-qwen2"))
    yield server
    server.close()


@pytest.fixture
def http(server: DoorServer) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {server.api_key}", "x-rllm-conversation": "episode/agent"}
    with httpx.Client(base_url=server.base_url, headers=headers, timeout=20, trust_env=False) as client:
        yield client


def ids_of(text: str) -> list[int]:
    return Tokenizer(resolve_model("tiny-qwen2")).encode(text, add_special_tokens=False)


def test_the_next_turn_is_sent_as_the_recorded_ids_and_the_new_ones(server: DoorServer, http: httpx.Client, scripted_vllm: Any) -> None:
    """Whatever the client made of the reply's ends: prompt and reply to the token, the end of turn that was sampled, then what is new."""
    sampled = [*ids_of(" so  "), END]
    scripted_vllm.reply = reply(" so  ", [1, 2, 3], sampled)
    http.post("/chat/completions", json=turn(HELLO)).raise_for_status()
    assert "rllm_prompt_token_ids" not in scripted_vllm.got[-1][1]
    assert "x-rllm-continued" not in scripted_vllm.headers[-1]
    scripted_vllm.reply = reply("yes", [9], [*ids_of("yes"), END])
    answer = http.post("/chat/completions", json=turn(HELLO, {"role": "assistant", "content": "so"}, {"role": "user", "content": "and"}))
    assert answer.json()["choices"][0]["message"]["content"] == "yes"
    assert answer.headers["x-rllm-policy-version"] == "0"
    sent = scripted_vllm.got[-1][1]
    assert scripted_vllm.headers[-1]["x-rllm-continued"] == "1"
    assert sent["messages"][-1] == {"role": "user", "content": "and"}
    prompt = sent["rllm_prompt_token_ids"]
    assert prompt[: 3 + len(sampled)] == [1, 2, 3, *sampled]
    assert prompt[3 + len(sampled) :] == ids_of("\n<|im_start|>user\nand<|im_end|>\n<|im_start|>assistant\n")
    assert isinstance(server, Continues)
    assert dict(server.continuations()) == {"continued": 1}


def test_a_stream_is_asked_whole_and_recorded(http: httpx.Client, scripted_vllm: Any) -> None:
    """The client reads events that say what the answer says; the turn after it continues."""
    scripted_vllm.reply = reply("so", [1, 2, 3], [*ids_of("so"), END])
    with http.stream("POST", "/chat/completions", json=turn(HELLO, stream=True)) as response:
        events = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
    assert scripted_vllm.got[-1][1]["stream"] is False
    assert "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"]) == "so"
    http.post("/chat/completions", json=turn(HELLO, {"role": "assistant", "content": "so"}, HELLO)).raise_for_status()
    assert scripted_vllm.got[-1][1]["rllm_prompt_token_ids"][:3] == [1, 2, 3]


def test_what_cannot_be_continued_is_rendered_and_counted(server: DoorServer, http: httpx.Client, scripted_vllm: Any) -> None:
    """Another reply than was recorded is another chat; one of another episode, or without ids, was never recorded."""
    scripted_vllm.reply = reply("so", [1, 2, 3], [*ids_of("so"), END])
    http.post("/chat/completions", json=turn(HELLO))
    changed = turn(HELLO, {"role": "assistant", "content": "no"}, HELLO)
    http.post("/chat/completions", json=changed)
    assert "rllm_prompt_token_ids" not in scripted_vllm.got[-1][1]
    http.post("/chat/completions", json=changed, headers={"x-rllm-conversation": "other/agent"})
    http.post("/chat/completions", json={**changed, "return_token_ids": False})
    assert "rllm_prompt_token_ids" not in scripted_vllm.got[-1][1]
    assert isinstance(server, Continues)
    assert dict(server.continuations()) == {"continued": 0, "reply changed": 1}


def test_servers_that_cannot_continue_are_refused(scripted_vllm: Any, tmp_path: Path) -> None:
    """A vLLM without our middleware, other kinds of server, and a model that is only a name."""
    scripted_vllm.tells_versions = False
    with pytest.raises(ServerError, match="it has not our middleware"):
        attach_vllm(scripted_vllm.url, run_dir=tmp_path, continues=resolve_model("tiny-qwen2"))
    attached = {"serving_url": "http://127.0.0.1:1/v1", "continuation": "exact"}
    with pytest.raises(SettingError, match="serving='sglang' does not, 'local' and 'vllm' do"):
        make_settings({"serving": "sglang", **attached})
    with pytest.raises(SettingError, match="continuation='exact' needs the model's folder"):
        start_serving(make_settings({"serving": "vllm", **attached}), "policy", tmp_path)
