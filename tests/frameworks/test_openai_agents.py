"""An app of the OpenAI Agents SDK, the real package: tools and handoffs, over chat completions and over responses.

``make test-peers PEER=openai-agents`` runs this file in an environment of its own.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

import rllm_trace as rllm
from rllm_trace.rollouts import rollout
from rllm_trace.routing import Route
from rllm_trace.testing import Exchange, Reply, ReplyChoice, ScriptedServer

pytestmark = pytest.mark.peer

HANDOVER, TOOL = "transfer_to_clerk", "stock"
ARGUMENTS = {HANDOVER: "{}", TOOL: '{"item": "pens"}'}
TURNS: dict[str, Any] = {
    HANDOVER: ([1, 2], [5, 6]),
    TOOL: ([1, 3], [5, 7]),
    "17 pens": ([1, 3, 5, 7, 9], [8]),
}
"""What the model says -> ids of the prompt and of the reply."""


def says(exchange: Exchange) -> str:
    """Hands over where it can, then asks for the stock, then answers."""
    body = exchange.body
    offered = [tool.get("name") or tool["function"]["name"] for tool in body.get("tools") or []]
    seen = json.dumps(body.get("messages") or body.get("input"))
    if HANDOVER in offered:
        return HANDOVER
    return "17 pens" if '"17"' in seen else TOOL


def chat(exchange: Exchange) -> Reply:
    said = says(exchange)
    prompt, ids = TURNS[said]
    logprobs = [-0.5] * len(ids)
    if said in ARGUMENTS:
        call = {"id": f"call_{said}", "type": "function", "function": {"name": said, "arguments": ARGUMENTS[said]}}
        choice = ReplyChoice(text=None, token_ids=ids, logprobs=logprobs, finish_reason="tool_calls", tool_calls=[call])
    else:
        choice = ReplyChoice(text=said, token_ids=ids, logprobs=logprobs)
    return Reply(choices=[choice], prompt_token_ids=prompt)


def response(exchange: Exchange) -> Reply:
    said = says(exchange)
    prompt, ids = TURNS[said]
    if said in ARGUMENTS:
        item = {"type": "function_call", "id": f"fc_{said}", "call_id": f"call_{said}", "name": said, "arguments": ARGUMENTS[said]}
    else:
        part = {"type": "output_text", "text": said, "annotations": [], "logprobs": []}
        item = {"type": "message", "id": "msg_1", "role": "assistant", "content": [part]}
    details = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
    usage = {"input_tokens": len(prompt), "output_tokens": len(ids), "total_tokens": len(prompt) + len(ids), **details}
    told = {"prompt_token_ids": prompt, "token_ids": ids, "token_logprobs": [-0.5] * len(ids)}
    head = {"id": f"resp_{said}", "object": "response", "created_at": 1.0, "model": "policy", "status": "completed", "error": None}
    rest = {"incomplete_details": None, "parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
    whole = {**head, **rest, **told, "output": [{**item, "status": "completed"}], "usage": usage}
    return Reply(raw=json.dumps(whole).encode())


def desk(client: Any, *, responses: bool = False) -> Any:
    """An agent that hands over to another, which has a tool."""
    from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, function_tool, set_tracing_disabled

    set_tracing_disabled(True)  # its own exporter would look for a key of OpenAI's

    @function_tool
    def stock(item: str) -> str:
        """How many there are."""
        return {"pens": "17"}[item]

    kind = OpenAIResponsesModel if responses else OpenAIChatCompletionsModel
    model = kind(model="gpt-4o-mini", openai_client=client)
    clerk = Agent(name="clerk", instructions="Use the tool.", tools=[stock], model=model)
    return Agent(name="desk", instructions="Hand over.", handoffs=[clerk], model=model)


def recorded(app: Any, script: Any) -> tuple[Any, list[Any]]:
    """What the app gives, and the calls that are recorded of it."""
    with ScriptedServer(script) as server:
        route = Route(base_url=server.base_url, api_key=server.api_key, model="policy")
        with rollout(route=route) as handle:
            given = app("how many pens?")
        (episode,) = handle.wait(20)
        assert {exchange.body["model"] for exchange in server.log} == {"policy"}
    return given, [(call.trainable, call.prompt_token_ids, call.choices[0].token_ids) for call in episode.calls]


THREE_CALLS = [(True, *TURNS[said]) for said in (HANDOVER, TOOL, "17 pens")]


def own_client() -> Any:
    from openai import AsyncOpenAI

    return AsyncOpenAI(base_url="http://127.0.0.1:9/v1", api_key="its own", max_retries=0)


@pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])
def test_a_handover_and_a_tool(responses: bool) -> None:
    """Three calls by two agents, redirected and exact, over either API."""
    from agents import Runner

    @rllm.workflow
    async def solve(question: str) -> str:
        async with own_client() as client:
            return (await Runner.run(desk(client, responses=responses), question)).final_output

    assert recorded(lambda question: asyncio.run(solve(question)), response if responses else chat) == ("17 pens", THREE_CALLS)


def test_a_synchronous_run() -> None:
    """The same where the app has no event loop of its own: the SDK runs the thread's."""
    from agents import Runner

    @rllm.workflow
    def solve(question: str) -> str:
        client = own_client()
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        try:
            return Runner.run_sync(desk(client), question).final_output
        finally:
            loop.run_until_complete(client.close())
            asyncio.set_event_loop(None)
            loop.close()

    assert recorded(solve, chat) == ("17 pens", THREE_CALLS)


def test_a_streamed_run() -> None:
    """The same calls where the app reads the run's events."""
    from agents import Runner

    @rllm.workflow
    async def solve(question: str) -> str:
        async with own_client() as client:
            run = Runner.run_streamed(desk(client), question)
            async for _ in run.stream_events():
                pass
            return run.final_output

    assert recorded(lambda question: asyncio.run(solve(question)), chat) == ("17 pens", THREE_CALLS)
