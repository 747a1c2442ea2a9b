"""The real OpenAI client against the scripted server: what the server says it sent is what each episode holds, however the app runs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

import rllm_trace as rllm
from rllm_trace.rollouts import rollout
from rllm_trace.routing import Route
from rllm_trace.testing import Exchange, Reply, ReplyChoice, ScriptedServer
from rllm_trace.types import Episode, ModelCall


def question(exchange: Exchange) -> str:
    return str(exchange.body["messages"][-1]["content"])


def answer(exchange: Exchange) -> Reply:
    """Ids and logprobs that follow from the question, so that a mix-up of any two calls shows."""
    ids = [ord(letter) for letter in question(exchange)]
    choice = ReplyChoice(text=question(exchange)[::-1], token_ids=[*ids, 2], logprobs=[*(-i / 256 for i in ids), -0.125])
    return Reply(choices=[choice], prompt_token_ids=[1, *ids])


def is_the_servers(call: ModelCall) -> bool:
    """Whether the record of a call is what ``answer`` sent for its question."""
    asked = call.messages[-1]["content"]
    ids = [ord(letter) for letter in asked]
    (choice,) = call.choices
    return (
        call.exact
        and call.complete
        and call.prompt_token_ids == [1, *ids]
        and choice.token_ids == [*ids, 2]
        and choice.logprobs == [*(-i / 256 for i in ids), -0.125]
        and choice.text == asked[::-1]
    )


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer(answer) as running:
        yield running


def sync_client(server: ScriptedServer, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.base_url, api_key=server.api_key, max_retries=0, **options)


def async_client(server: ScriptedServer, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=server.base_url, api_key=server.api_key, max_retries=0, **options)


def ask(client: openai.OpenAI, text: str, **options: Any) -> Any:
    return client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}], **options)


async def ask_async(client: openai.AsyncOpenAI, text: str, **options: Any) -> Any:
    return await client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}], **options)


def asked(episode: Episode) -> dict[str, list[str]]:
    """Questions by trajectory."""
    return {t.name: [c.messages[-1]["content"] for c in t.calls] for t in episode.trajectories}


def test_an_app_without_a_word_of_ours_but_two_decorators(server: ScriptedServer) -> None:
    """Calls, a tool, a reward; the call is exact, and the reply is the one that the app would have seen without us."""
    client = sync_client(server)
    bare = ask(client, "ab")

    @rllm.tool
    def reverse(text: str) -> str:
        return text[::-1]

    @rllm.reward
    def right(text: str) -> bool:
        return text == "ab"

    @rllm.workflow
    def app(text: str) -> str:
        reply = ask(client, text, temperature=1.0)
        assert reply.model_dump(exclude={"id"}) == bare.model_dump(exclude={"id"})
        found = reverse(reply.choices[0].message.content)
        right(found)
        return found

    with rllm.collect() as episodes, client:
        assert app("ab") == "ab"
    (episode,) = episodes
    (call,) = episode.calls
    assert is_the_servers(call)
    assert call.trainable
    assert (call.messages, call.sampling) == ([{"role": "user", "content": "ab"}], {"temperature": 1.0})
    assert [(tool.name, tool.arguments, tool.result) for tool in episode.trajectories[0].tools] == [("reverse", {"text": "ba"}, "ab")]
    assert (episode.reward, episode.input, episode.output, episode.termination) == (1.0, {"text": "ab"}, "ab", "completed")
    assert len(server.calls()) == 2
    assert rllm.stats()["faults"] == {}


def test_a_thousand_workflows_at_once_through_one_client(server: ScriptedServer) -> None:
    """Each call is in its own episode, with the ids that the server sent for it."""

    @rllm.workflow
    async def app(client: openai.AsyncOpenAI, n: int) -> str:
        reply = await ask_async(client, f"{n}")
        return str(reply.choices[0].message.content)

    async def main() -> list[str]:
        async with async_client(server, timeout=120) as client:
            return await asyncio.gather(*(app(client, n) for n in range(1000)))

    with rllm.collect() as episodes:
        assert asyncio.run(main()) == [f"{n}"[::-1] for n in range(1000)]
    assert sorted(episode.input["n"] for episode in episodes) == list(range(1000))
    assert all(asked(episode) == {"app": [f"{episode.input['n']}"]} for episode in episodes)
    assert all(is_the_servers(call) for episode in episodes for call in episode.calls)
    assert rllm.stats()["faults"] == {}
    assert len(server.calls()) == 1000


def test_parallel_solvers_each_have_their_own_tokens_and_reward(server: ScriptedServer) -> None:
    """Two agents of one name at a time in each of 40 concurrent workflows; the judge between them is scored apart."""

    @rllm.reward
    def length(text: str) -> float:
        return float(len(text))

    @rllm.agent("solver")
    async def solver(client: openai.AsyncOpenAI, text: str) -> str:
        reply = await ask_async(client, text)
        length(text)
        return str(reply.choices[0].message.content)

    @rllm.workflow
    async def app(client: openai.AsyncOpenAI, n: int) -> None:
        await asyncio.gather(solver(client, f"{n}a"), solver(client, f"{n}bb"))
        await ask_async(client, f"{n}ccc")
        length(f"{n}ccc")

    async def main() -> None:
        async with async_client(server) as client:
            await asyncio.gather(*(app(client, n) for n in range(40)))

    with rllm.collect() as episodes:
        asyncio.run(main())
    assert len(episodes) == 40
    for episode in episodes:
        n = str(episode.input["n"])
        found = sorted((t.name, [c.messages[-1]["content"] for c in t.calls], t.reward) for t in episode.trajectories)
        assert found == [
            ("app", [f"{n}ccc"], None),
            ("solver", [f"{n}a"], len(n) + 1.0),
            ("solver", [f"{n}bb"], len(n) + 2.0),
        ]
        assert episode.reward == len(n) + 3.0
        assert all(is_the_servers(call) for call in episode.calls)


def test_workflows_in_threads_share_one_client(server: ScriptedServer) -> None:
    """200 runs on 16 threads, each with a call in an executor of its own."""
    client = sync_client(server)

    @rllm.workflow
    def app(n: int) -> None:
        with rllm.agent("inner"), ThreadPoolExecutor(1) as pool:
            pool.submit(ask, client, f"{n}x").result()
        ask(client, f"{n}y")

    with rllm.collect() as episodes, ThreadPoolExecutor(16) as threads, client:
        list(threads.map(app, range(200)))
    assert sorted(episode.input["n"] for episode in episodes) == list(range(200))
    assert all(asked(e) == {"app": [f"{e.input['n']}y"], "inner": [f"{e.input['n']}x"]} for e in episodes)
    assert all(is_the_servers(call) for episode in episodes for call in episode.calls)


def test_a_stream_that_outlives_its_workflow_is_part_of_the_episode(server: ScriptedServer) -> None:
    """The workflow returns the stream; its consumer, outside, reads it to the end; the episode waited for it."""
    client = sync_client(server)

    @rllm.workflow
    def app() -> Any:
        with rllm.agent("writer"):
            return ask(client, "stream", stream=True)

    with rllm.collect() as episodes, client:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in app() if chunk.choices)
    assert text == "maerts"
    (episode,) = episodes
    assert (asked(episode), episode.termination) == ({"writer": ["stream"]}, "completed")
    assert is_the_servers(episode.calls[0])


def test_streaming_workflows_consumed_in_other_tasks(server: ScriptedServer) -> None:
    """20 async generators that stream, each step in a task of its own: every call in its own episode, nothing in the consumers."""

    @rllm.workflow
    async def app(client: openai.AsyncOpenAI, n: int) -> AsyncIterator[str]:
        stream = await ask_async(client, f"{n}s", stream=True)
        async for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                yield chunk.choices[0].delta.content

    async def consume(steps: Any) -> str:
        text = ""
        while True:
            try:
                text += await asyncio.create_task(steps.__anext__())
            except StopAsyncIteration:
                return text
            assert rllm.current_episode() is None

    async def main() -> list[str]:
        async with async_client(server) as client:
            return await asyncio.gather(*(consume(app(client, n)) for n in range(20)))

    with rllm.collect() as episodes:
        assert asyncio.run(main()) == [f"{n}s"[::-1] for n in range(20)]
    assert sorted(episode.input["n"] for episode in episodes) == list(range(20))
    for episode in episodes:
        assert asked(episode) == {"app": [f"{episode.input['n']}s"]}
        assert is_the_servers(episode.calls[0])
        assert "".join(episode.output) == f"{episode.input['n']}s"[::-1]


def test_in_a_rollout_calls_go_to_the_policy_and_judges_keep_their_endpoint(server: ScriptedServer) -> None:
    """Calls of the app are redirected with a seed of their own; those in rewards and under ``no_train`` are not, and are never trained."""
    with ScriptedServer(answer, api_key="own-key") as own:
        client = openai.OpenAI(base_url=own.base_url, api_key="own-key", max_retries=0)

        @rllm.reward
        def judged() -> float:
            ask(client, "judge")
            return 0.25

        @rllm.workflow
        def app(text: str) -> None:
            ask(client, text)
            with rllm.no_train:
                ask(client, "helper")
            judged()
            ask(client, text + "!")

        route = Route(base_url=server.base_url, api_key="scripted", model="policy")
        with client:
            with rollout(task_id="t1", route=route, seed=5) as handle:
                app("hi")
            (episode,) = handle.wait(10)
        assert [(question(e), e.body["model"]) for e in own.calls()] == [("helper", "m"), ("judge", "m")]
    assert [(question(e), e.body["model"]) for e in server.calls()] == [("hi", "policy"), ("hi!", "policy")]
    seeds = [exchange.body["seed"] for exchange in server.calls()]
    assert len(set(seeds)) == 2
    assert [(c.messages[-1]["content"], c.endpoint, c.trainable) for c in episode.calls] == [
        ("hi", "policy", True),
        ("helper", "own", False),
        ("judge", "own", False),
        ("hi!", "policy", True),
    ]
    assert (episode.task_id, episode.reward) == ("t1", 0.25)


def test_the_same_rollout_asks_with_the_same_seeds(server: ScriptedServer) -> None:
    """A call's seed follows from the rollout's seed, its role and its number, not from what runs beside it."""

    @rllm.workflow
    def app(client: openai.OpenAI, order: str) -> None:
        for name in order:
            with rllm.agent(name):
                ask(client, name)

    def seeds(order: str) -> dict[str, int]:
        route = Route(base_url=server.base_url, api_key="scripted", model="policy")
        before = len(server.calls())
        with sync_client(server) as client, rollout(task_id="t", route=route, seed=5) as handle:
            app(client, order)
        assert len(handle.wait(10)) == 1
        return {question(exchange): exchange.body["seed"] for exchange in server.calls()[before:]}

    first = seeds("ab")
    assert first == seeds("ba")
    assert len(set(first.values())) == 2


def test_a_call_that_never_ends_is_counted_when_its_rollout_is_over(server: ScriptedServer) -> None:
    """The app hangs in a request: the episode is a timeout with one open call, and the call's end comes late."""
    held = threading.Event()

    def hold(exchange: Exchange) -> Reply:
        held.set()
        return Reply(hold_after=0)

    with ScriptedServer(hold) as stuck:
        client = openai.OpenAI(base_url=stuck.base_url, api_key=stuck.api_key, max_retries=0, timeout=60)

        @rllm.workflow
        def app() -> None:
            with pytest.raises(openai.APIConnectionError):
                ask(client, "hang")

        with rollout() as handle:
            thread = threading.Thread(target=app)
            thread.start()
            assert held.wait(10)
        (episode,) = handle.wait(0.02)
    thread.join(20)
    client.close()
    assert (episode.termination, episode.open_calls, list(episode.calls)) == ("timeout", 1, [])
    assert rllm.stats()["late"] == {"chat": 1, "episode": 1}


def test_uninstrumented_the_client_is_left_alone(server: ScriptedServer) -> None:
    """After ``uninstrument`` nothing of a call is recorded or changed, until ``instrument``."""
    client = sync_client(server)

    @rllm.workflow
    def app() -> None:
        ask(client, "x")

    with client, rllm.collect() as episodes:
        app()
        rllm.uninstrument("openai")
        app()
        assert rllm.instrument("openai") is True
        app()
    assert [len(episode.calls) for episode in episodes] == [1, 0, 1]
    assert ["return_token_ids" in exchange.body for exchange in server.calls()] == [True, False, True]
