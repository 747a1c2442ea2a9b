"""The embedded server over HTTP, with the tiny model: its wire, its refusals, its batching and its cache."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rllm_trainer.exceptions import ServerError
from rllm_trainer.models import resolve_model
from rllm_trainer.serving.local import LocalServer

HELLO = [{"role": "user", "content": "hello"}]
HELLO_IDS = 62
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather",
        "parameters": {
            "type": "object",
            "properties": {"day": {"type": "integer", "minimum": 1, "maximum": 7}},
            "required": ["day"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    run_dir = tmp_path_factory.mktemp("server")
    server = LocalServer.start(
        resolve_model("tiny-qwen2"), run_dir=run_dir, name="policy", version=3, threads=1, max_model_len=1024, max_waiting=160
    )
    yield server
    server.close()


@pytest.fixture
def http(server: LocalServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.base_url, headers=key(server), timeout=60, trust_env=False) as client:
        yield client


def key(server: LocalServer) -> dict[str, str]:
    return {"authorization": f"Bearer {server.api_key}"}


def chat(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    body = {"model": "policy", "messages": HELLO, "max_tokens": 8, "logprobs": True, "return_token_ids": True, "seed": 1, **fields}
    response = http.post("/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def stream(http: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    body = {
        "model": "policy",
        "messages": HELLO,
        "max_tokens": 8,
        "logprobs": True,
        "return_token_ids": True,
        "seed": 1,
        "stream": True,
        **fields,
    }
    with http.stream("POST", "/chat/completions", json=body) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def refusal(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def logprobs_of(choice: dict[str, Any]) -> list[float]:
    return [entry["logprob"] for entry in choice["logprobs"]["content"]]


def test_a_reply_carries_ids_logprobs_and_versions(http: httpx.Client) -> None:
    """Prompt ids are the template's, each sampled id has its logprob, and the policy version stands in metadata and header."""
    response = http.post(
        "/chat/completions",
        json={
            "model": "policy",
            "messages": HELLO,
            "max_tokens": 4,
            "logprobs": True,
            "top_logprobs": 2,
            "return_token_ids": True,
            "seed": 1,
        },
    )
    body = response.json()
    (choice,) = body["choices"]
    text = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert http.post(root(http) + "/detokenize", json={"tokens": body["prompt_token_ids"]}).json() == {"prompt": text}
    assert len(choice["token_ids"]) == len(choice["logprobs"]["content"]) == 4
    assert all(len(entry["top_logprobs"]) == 2 for entry in choice["logprobs"]["content"])
    assert body["usage"]["prompt_tokens"] == len(body["prompt_token_ids"]) == HELLO_IDS
    assert body["usage"]["completion_tokens"] == 4
    assert body["metadata"] == {"weight_version": "3", "weight_versions": [{"version": "3", "start": 0, "end": 4}]}
    assert response.headers["x-rllm-policy-version"] == "3"
    assert choice["finish_reason"] == "length"


def root(http: httpx.Client) -> str:
    return str(http.base_url).removesuffix("/v1/")


def test_token_fields_are_sent_only_when_asked_for(http: httpx.Client) -> None:
    """Without return_token_ids and logprobs a reply has neither."""
    body = chat(http, logprobs=False, return_token_ids=False)
    assert "prompt_token_ids" not in body
    assert "token_ids" not in body["choices"][0]
    assert body["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"stop": ["e", "th"], "max_tokens": 60}, {"temperature": 0.7, "top_p": 0.9}])
def test_a_streamed_reply_is_the_unstreamed_one(http: httpx.Client, fields: dict[str, Any]) -> None:
    """Joined chunks give the same text, ids, logprobs, finish and stop reason, usage and versions, per choice."""
    whole = chat(http, **fields)
    chunks = stream(http, stream_options={"include_usage": True}, **fields)
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert chunks[-1]["metadata"] == whole["metadata"]
    for choice in whole["choices"]:
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(c["delta"].get("content") or "" for c in mine) == choice["message"]["content"]
        assert [i for c in mine for i in c["token_ids"]] == choice["token_ids"]
        assert [p for c in mine if c["logprobs"] for p in logprobs_of(c)] == pytest.approx(logprobs_of(choice), abs=1e-5)
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
        assert mine[-1]["stop_reason"] == choice["stop_reason"]


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"best_of": 2}, "best_of"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"logprobs": False, "top_logprobs": 3}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"logit_bias": {"9999": 1}}, "logit_bias"),
        ({"response_format": {"type": "text", "json_schema": {"name": "n", "schema": {}}}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_object", "json_schema": {"schema": {}}}}, "response_format.json_schema"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"parallel_tool_calls": True, "tools": []}, "parallel_tool_calls"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        ({"stream_options": {"chunk": 1}, "stream": True}, "stream_options.chunk"),
    ],
)
def test_what_is_not_served_is_refused_by_name(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    """A field that is unknown, out of range or without effect is a 400 that names it."""
    error = refusal(http.post("/chat/completions", json={"model": "policy", "messages": HELLO, "max_tokens": 4, **fields}), 400)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


def test_harmless_fields_are_accepted(http: httpx.Client) -> None:
    """store, metadata and user change nothing; None means the default."""
    plain = chat(http)
    dressed = chat(http, store=True, metadata={"run": "1"}, user="me", top_p=None, stop=None, tools=None)
    assert dressed["choices"][0]["token_ids"] == plain["choices"][0]["token_ids"]


def test_text_parts_are_one_text(http: httpx.Client) -> None:
    """Content as a list of parts renders as the joined string."""
    parts = [{"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]}]
    assert chat(http, messages=parts)["prompt_token_ids"] == chat(http)["prompt_token_ids"]


def test_errors_have_openai_status_and_shape(server: LocalServer, http: httpx.Client) -> None:
    """A wrong key is 401, another model 404, a prompt that is too long 400 with OpenAI's code, a missing route 404."""
    body = {"model": "policy", "messages": HELLO, "max_tokens": 4}
    wrong = httpx.post(server.base_url + "/chat/completions", json=body, headers={"authorization": "Bearer x"}, trust_env=False)
    assert refusal(wrong, 401)["code"] == "invalid_api_key"
    assert refusal(http.post("/chat/completions", json={**body, "model": "gpt-4o"}), 404)["code"] == "model_not_found"
    assert refusal(http.post("/chat/completions", json={**body, "max_tokens": 1000}), 400)["code"] == "context_length_exceeded"
    assert refusal(http.post("/completions", json={"prompt": [5] * 1025}), 400)["code"] == "context_length_exceeded"
    assert refusal(http.post("/completions", json={"prompt": [261]}), 400)["message"] == "got token ids outside 0 to 260"
    assert refusal(http.post("/embeddings", json={}), 404)["code"] == "unknown_route"
    assert refusal(http.post("/chat/completions", content=b"{"), 400)["code"] == "invalid_json"


def test_health_and_models(server: LocalServer, http: httpx.Client) -> None:
    """Health needs no key; models tells the name and the context length."""
    assert httpx.get(root(http) + "/health", trust_env=False).json() == {"status": "ok"}
    (model,) = http.get("/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == ("policy", 1024)
    server.check()


def test_tokenize_is_what_chat_sends(http: httpx.Client) -> None:
    """Tokenizing messages gives the prompt's ids; a prompt's text round-trips."""
    assert http.post(root(http) + "/tokenize", json={"messages": HELLO}).json()["tokens"] == chat(http)["prompt_token_ids"]
    tokens = http.post(root(http) + "/tokenize", json={"prompt": "né<|im_end|>"}).json()["tokens"]
    assert tokens[-1] == 258
    assert http.post(root(http) + "/detokenize", json={"tokens": tokens}).json() == {"prompt": "né<|im_end|>"}


def test_a_stop_string_is_cut_from_the_text_and_kept_in_the_ids(http: httpx.Client) -> None:
    """The text ends before the stop string, the ids hold every sampled token, and the reason names it."""
    free = chat(http, max_tokens=40, ignore_eos=True)["choices"][0]
    text = free["message"]["content"]
    stop = text[5:7]
    cut = chat(http, max_tokens=40, ignore_eos=True, stop=stop)["choices"][0]
    assert cut["message"]["content"] == text[: text.index(stop)]
    assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", stop)
    assert cut["token_ids"] == free["token_ids"][: len(cut["token_ids"])]
    kept = chat(http, max_tokens=40, ignore_eos=True, stop=stop, include_stop_str_in_output=True)["choices"][0]
    assert kept["message"]["content"] == text[: text.index(stop)] + stop


def test_the_end_of_turn_is_sampled_kept_and_hidden(http: httpx.Client) -> None:
    """A reply that ends by itself has the end token as its last id, its logprob with it, and no trace of it in the text."""
    body = chat(http, logit_bias={"258": 100})
    (choice,) = body["choices"]
    assert (choice["token_ids"], choice["finish_reason"], choice["message"]["content"]) == ([258], "stop", "")
    assert len(logprobs_of(choice)) == 1
    ignored = chat(http, logit_bias={"258": 100}, ignore_eos=True, max_tokens=3)["choices"][0]
    assert (ignored["token_ids"], ignored["finish_reason"]) == ([258, 258, 258], "length")
    other = chat(http, logit_bias={"65": 100}, stop_token_ids=[65])["choices"][0]
    assert (other["token_ids"], other["stop_reason"]) == ([65], 65)


def test_the_same_seed_gives_the_same_ids_in_any_company(server: LocalServer, http: httpx.Client) -> None:
    """A seeded request alone and the same one among thirty others sample the same tokens; another seed does not."""
    alone = chat(http, max_tokens=24, seed=7)["choices"][0]["token_ids"]

    async def crowd() -> list[list[int]]:
        async with httpx.AsyncClient(base_url=server.base_url, headers=key(server), timeout=60, trust_env=False) as client:

            async def one(seed: int, content: str) -> list[int]:
                body = {"messages": [{"role": "user", "content": content}], "max_tokens": 24, "seed": seed, "return_token_ids": True}
                return (await client.post("/chat/completions", json=body)).json()["choices"][0]["token_ids"]

            return await asyncio.gather(one(7, "hello"), *(one(n, "hi" * n) for n in range(30)), one(7, "hello"))

    replies = asyncio.run(crowd())
    assert replies[0] == replies[-1] == alone
    assert chat(http, max_tokens=24, seed=8)["choices"][0]["token_ids"] != alone


def test_a_shared_prompt_is_computed_once(server: LocalServer, http: httpx.Client) -> None:
    """Eight choices of one new prompt compute it once and one token for each further choice; the next turn computes only what is new."""
    messages = [{"role": "user", "content": "count " * 40}]
    before = server.stats()
    body = chat(http, messages=messages, n=8, max_tokens=2, ignore_eos=True)
    after = server.stats()
    prompt = len(body["prompt_token_ids"])
    computed = after["prompt_tokens_computed"] - before["prompt_tokens_computed"]
    shared_with_hello = len("<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n") - 2 * len("<|im_start|>") - 8
    assert prompt - shared_with_hello <= computed <= prompt + 7
    turn = body["prompt_token_ids"] + body["choices"][3]["token_ids"] + [10, 10, 10]
    http.post("/completions", json={"prompt": turn, "max_tokens": 1})
    assert server.stats()["prompt_tokens_computed"] - after["prompt_tokens_computed"] == 4


def test_required_and_named_tools_are_forced(http: httpx.Client) -> None:
    """A forced reply is a valid call of a given function; the finish reason follows OpenAI; streamed, it is the same call."""
    tools = [WEATHER, {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}]
    for choice, names, finish in (("required", {"weather", "clock"}, "tool_calls"), (named("weather"), {"weather"}, "stop")):
        body = chat(http, tools=tools, tool_choice=choice, max_tokens=200, parallel_tool_calls=False)
        message = body["choices"][0]["message"]
        (call,) = message["tool_calls"]
        assert call["function"]["name"] in names
        assert isinstance(json.loads(call["function"]["arguments"]), dict)
        assert message["content"] is None
        assert body["choices"][0]["finish_reason"] == finish
        chunks = stream(http, tools=tools, tool_choice=choice, max_tokens=200, parallel_tool_calls=False)
        deltas = [d for chunk in chunks for c in chunk["choices"] for d in c["delta"].get("tool_calls") or []]
        assert [d["function"] for d in deltas] == [call["function"]]
        assert [i for chunk in chunks for c in chunk["choices"] for i in c["token_ids"]] == body["choices"][0]["token_ids"]


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def test_tools_are_in_the_prompt_and_free_text_stays_text(http: httpx.Client) -> None:
    """With auto the tools are rendered, and a reply without a call is plain content."""
    body = chat(http, tools=[WEATHER])
    prompt = http.post(root(http) + "/detokenize", json={"tokens": body["prompt_token_ids"]}).json()["prompt"]
    assert '"name": "weather"' in prompt
    assert "tool_calls" not in body["choices"][0]["message"]


def test_a_schema_is_kept(http: httpx.Client) -> None:
    """response_format forces valid JSON under the schema."""
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9, "minimum": 0}}, "required": ["n"]}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {**schema, "additionalProperties": False}}}
    content = chat(http, response_format=form, max_tokens=100)["choices"][0]["message"]["content"]
    assert json.loads(content)["n"] in range(10)


def test_completions_take_ids_and_score(server: LocalServer, http: httpx.Client) -> None:
    """A prompt of ids is used as it is; echo and prompt_logprobs give each prompt token's logprob, the first has none."""
    prompt = [72, 101, 108, 108, 111]
    body = http.post("/completions", json={"prompt": prompt, "max_tokens": 3, "logprobs": 1, "return_token_ids": True, "seed": 1}).json()
    (choice,) = body["choices"]
    assert body["prompt_token_ids"] == choice["prompt_token_ids"] == prompt
    assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"]) == 3
    scored = http.post("/completions", json={"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 0, "prompt_logprobs": 1}).json()
    (echo,) = scored["choices"]
    values = echo["logprobs"]["token_logprobs"]
    assert values[0] is None
    assert echo["prompt_logprobs"][0] is None
    import numpy as np

    (served,) = server.prompt_logprobs([np.array(prompt, np.int32)])
    assert np.isnan(served[0])
    assert values[1:] == pytest.approx(served[1:].tolist(), abs=1e-5)
    assert [echo["prompt_logprobs"][i][str(prompt[i])]["logprob"] for i in range(1, 5)] == pytest.approx(values[1:], abs=1e-5)


def test_several_prompts_at_once(http: httpx.Client) -> None:
    """Two prompts with two choices each give four choices in order."""
    asked = {"prompt": [[9, 9], [8, 8, 8]], "n": 2, "max_tokens": 2, "return_token_ids": True, "ignore_eos": True}
    body = http.post("/completions", json=asked).json()
    prompts = [(c["index"], c["prompt_token_ids"]) for c in body["choices"]]
    assert prompts == [(0, [9, 9]), (1, [9, 9]), (2, [8, 8, 8]), (3, [8, 8, 8])]
    assert body["usage"] == {"prompt_tokens": 5, "completion_tokens": 8, "total_tokens": 13, "prompt_tokens_details": {"cached_tokens": 0}}


def test_a_client_that_leaves_frees_its_place(server: LocalServer) -> None:
    """A request whose client is gone is cancelled, streamed or not, and never sampled to its end."""
    before = server.stats()

    async def until(holds: Callable[[dict[str, Any]], bool]) -> None:
        while not holds(await asyncio.to_thread(server.stats)):
            pass

    async def leave() -> None:
        server.pause()
        async with httpx.AsyncClient(base_url=server.base_url, headers=key(server), timeout=60, trust_env=False) as client:
            body = {"messages": HELLO, "max_tokens": 400, "ignore_eos": True}
            plain = asyncio.create_task(client.post("/chat/completions", json={**body, "n": 8}))
            async with client.stream("POST", "/chat/completions", json={**body, "stream": True}) as response:
                lines = response.aiter_lines()
                await until(lambda stats: stats["running"] + stats["waiting"] == 9)
                await asyncio.to_thread(server.pause, after_tokens=90)
                for _ in range(5):
                    await anext(lines)
                plain.cancel()
        await until(lambda stats: stats["cancelled"] - before["cancelled"] == 9)

    try:
        asyncio.run(asyncio.wait_for(leave(), 30))
        stats = server.stats()
    finally:
        server.resume()
    assert stats["running"] == stats["waiting"] == 0


def test_a_full_queue_is_said(http: httpx.Client) -> None:
    """More sequences than may wait are refused at once with 429."""
    body = {"prompt": [[72, 101]] * 161, "max_tokens": 1}
    error = refusal(http.post("/completions", json=body), 429)
    assert error["code"] == "queue_full"
    assert "at most 160 may" in error["message"]


def test_a_wrong_start_is_one_sentence(server: LocalServer, tmp_path: Path) -> None:
    """A folder without a model, a port in use and too little memory are each told in one sentence, and nothing is left running."""
    with pytest.raises(ServerError, match="expected a Hugging Face model folder"):
        LocalServer.start(tmp_path, run_dir=tmp_path)
    port = int(server.base_url.split(":")[2].split("/")[0])
    with pytest.raises(ServerError, match=rf"got port {port}, which is in use on 127\.0\.0\.1"):
        LocalServer.start(resolve_model("tiny-qwen2"), run_dir=tmp_path, port=port)
    with pytest.raises(ServerError, match="too little for one sequence of max_model_len 512"):
        LocalServer.start(resolve_model("tiny-qwen2"), run_dir=tmp_path, max_model_len=512, kv_bytes=2**18)
