"""An app of the Responses API, written as agent frameworks do it, led to the embedded server and trained: tiny model, real everything."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest

import rllm_trace as rllm
from rllm_trace.rollouts import rollout
from rllm_trace.routing import Route
from rllm_trainer import fit
from rllm_trainer.models import resolve_model
from rllm_trainer.rollout.record import read_rollouts
from rllm_trainer.samples import build_samples
from rllm_trainer.serving.local import LocalServer

TOOL: Any = {"type": "function", "name": "look", "description": "Looks", "strict": None, "parameters": {"type": "object", "properties": {}}}


async def streamed(client: openai.AsyncOpenAI, asked: dict[str, Any]) -> Any:
    async for event in await client.responses.create(**asked, stream=True):
        if event.type in ("response.completed", "response.incomplete"):
            return event.response
    raise AssertionError("the stream had no last event")


@rllm.workflow
async def app(word: str) -> str:
    """Two turns: the whole conversation goes along each time, items as the server gave them; the first turn is streamed."""
    http = openai.DefaultAsyncHttpxClient(trust_env=False)
    async with openai.AsyncOpenAI(base_url="http://127.0.0.1:9/v1", api_key="the app's own", max_retries=0, http_client=http) as client:
        asked: dict[str, Any] = {"model": "gpt-4o-mini", "instructions": "Be brief.", "max_output_tokens": 8, "store": False}
        items: list[Any] = [{"role": "user", "content": word}]
        first = await streamed(client, {**asked, "input": items})
        items += [item.model_dump(exclude_unset=True) for item in first.output] + [{"role": "user", "content": "and?"}]
        second = await client.responses.create(**asked, input=items)
        assert not {"token_ids", "prompt_token_ids", "token_logprobs", "weight_versions"} & (second.model_extra or {}).keys()
        return second.output_text


@rllm.reward
def lowercase(output: str) -> float:
    return sum(letter.islower() for letter in output) / max(1, len(output))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    folder = tmp_path_factory.mktemp("server")
    server = LocalServer.start(resolve_model("tiny-llama"), run_dir=folder, name="policy", version=2, threads=1, max_model_len=1024)
    yield server
    server.close()


def route_to(server: LocalServer) -> Route:
    return Route(base_url=server.base_url, api_key=server.api_key, model="policy")


def test_two_turns_are_two_exact_calls(server: LocalServer) -> None:
    """Streamed or not, ids, logprobs and version are the server's, and every sampled token is a sample."""
    with rollout(route=route_to(server), seed=3) as handle:
        text = asyncio.run(app("hello"))
    (episode,) = handle.wait(10)
    first, second = episode.calls
    for call in (first, second):
        assert (call.exact, call.inexact_reason, call.trainable, call.endpoint) == (True, None, True, "policy")
        (choice,) = call.choices
        assert choice.token_ids is not None
        assert choice.logprobs is not None
        assert len(choice.token_ids) == len(choice.logprobs) == call.usage.completion_tokens
        assert len(call.prompt_token_ids) == call.usage.prompt_tokens
        assert (call.policy_version_start, call.policy_version_end) == (2, 2)
    assert (first.streamed, second.streamed, second.choices[0].text) == (True, False, text)
    assert first.choices[0].finish_reason in ("stop", "length")
    assert [message["role"] for message in second.messages] == ["system", "user", "assistant", "user"]
    samples = build_samples(episode)
    assert samples.counters.trained_tokens == sum(len(call.choices[0].token_ids) for call in (first, second))
    assert samples.set_aside == []


def test_the_same_seed_samples_the_same_tokens_as_chat(server: LocalServer) -> None:
    """A redirected response is the redirected chat completion in other words: same seed, same prompt ids, same ids, same logprobs."""
    http = openai.DefaultHttpxClient(trust_env=False)
    client = openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="k", max_retries=0, http_client=http)
    calls = []
    for chat in (True, False):

        @rllm.workflow
        def ask(chat: bool = chat) -> None:
            if chat:
                messages: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
                client.chat.completions.create(model="m", messages=messages, max_tokens=8)
            else:
                client.responses.create(model="m", instructions="Be brief.", input="hello", max_output_tokens=8)

        with rollout(route=route_to(server), seed=11) as handle:
            ask()
        (episode,) = handle.wait(10)
        calls += episode.calls
    client.close()
    chat_call, response_call = calls
    assert response_call.operation == "responses"
    assert response_call.prompt_token_ids == chat_call.prompt_token_ids
    assert response_call.choices[0].token_ids == chat_call.choices[0].token_ids
    assert list(response_call.choices[0].logprobs) == pytest.approx(list(chat_call.choices[0].logprobs), abs=1e-5)
    assert response_call.choices[0].text == chat_call.choices[0].text


def test_what_the_server_cannot_serve_is_the_apps_error(server: LocalServer) -> None:
    """A hosted tool is a 400 of the server that names it, a failed call, and nothing is trained."""
    http = openai.DefaultHttpxClient(trust_env=False)
    client = openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="k", max_retries=0, http_client=http)

    @rllm.workflow
    def ask() -> None:
        with pytest.raises(openai.BadRequestError, match="web_search"):
            client.responses.create(model="m", input="hello", tools=[{"type": "web_search"}])

    with rollout(route=route_to(server)) as handle:
        ask()
    (episode,) = handle.wait(10)
    client.close()
    (call,) = episode.calls
    assert (call.error.status_code, call.trainable) == (400, False)


def test_fit_trains_every_sampled_token_of_responses(tmp_path: Any) -> None:
    """Two steps of fit: all calls go to the policy, every sampled token is trained once, and the weights move."""
    rows = [{"word": f"say {number}"} for number in range(4)]
    small: dict[str, Any] = {"model": "tiny-qwen2", "lr": 5e-3, "batch_tasks": 2, "group_size": 4, "threads": 1, "progress": False}
    result = fit(app, rows, output_dir=tmp_path / "run", steps=2, **small)
    rollouts = [rollout for found in read_rollouts(result.run_dir, steps=[1, 2]).values() for rollout in found]
    calls = [call for rollout in rollouts for call in rollout.episode.calls]
    assert len(calls) == 2 * 2 * 4 * 2
    assert {(call.operation, call.endpoint, call.trainable) for call in calls} == {("responses", "policy", True)}
    lines = [line for line in result.metrics if "loss" in line]
    assert [line["tokens/trained_share"] for line in lines] == [1, 1]
    assert [line["version"] for line in lines] == [1, 2]
    assert sum(line["tokens/trained"] for line in lines) == sum(len(call.choices[0].token_ids) for call in calls)
    assert all(line["rollout/logprob_diff_max"] < 1e-4 for line in lines)
    assert {call.policy_version_start for call in calls} == {0, 1}
