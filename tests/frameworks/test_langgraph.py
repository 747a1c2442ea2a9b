"""An app of LangGraph and LangChain's OpenAI model, the real packages: its calls are redirected and recorded as any app's.

``make test-peers PEER=langgraph`` runs this file in an environment of its own.
"""

from __future__ import annotations

import asyncio
import operator
from typing import Annotated, Any, TypedDict

import pytest

import rllm_trace as rllm
from rllm_trace.rollouts import rollout
from rllm_trace.routing import Route
from rllm_trace.testing import Exchange, Reply, ReplyChoice, ScriptedServer

pytestmark = pytest.mark.peer


class Branches(TypedDict):
    items: list[str]
    found: Annotated[list[str], operator.add]


def answer(exchange: Exchange) -> Reply:
    """A call of the tool where one is offered and has not answered yet; else a text, with an id that says which question was asked."""
    said = exchange.body["messages"]
    if exchange.body.get("tools") and said[-1]["role"] != "tool":
        call = {"id": "call_1", "type": "function", "function": {"name": "stock", "arguments": '{"item": "pens"}'}}
        asked = ReplyChoice(text=None, token_ids=[5, 6], logprobs=[-0.5, -0.25], finish_reason="tool_calls", tool_calls=[call])
        return Reply(choices=[asked], prompt_token_ids=[1, 2])
    if said[-1]["role"] == "tool":
        assert said[-1]["content"] == "17"
        return Reply(choices=[ReplyChoice(text="17 pens", token_ids=[7], logprobs=[-0.125])], prompt_token_ids=[1, 2, 5, 6, 9])
    number = int(said[-1]["content"])
    return Reply(choices=[ReplyChoice(text=f"item {number}", token_ids=[100 + number], logprobs=[-0.5])], prompt_token_ids=[3, number])


def model() -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(base_url="http://127.0.0.1:9/v1", api_key="its own", model="gpt-4o-mini", max_retries=0)


def assistant() -> Any:
    """A graph that calls the model, then the tool, then the model."""
    from langchain_core.tools import tool
    from langgraph.graph import START, StateGraph
    from langgraph.graph.message import MessagesState
    from langgraph.prebuilt import ToolNode, tools_condition

    @tool
    def stock(item: str) -> str:
        """How many there are."""
        return {"pens": "17"}[item]

    asks = model().bind_tools([stock])
    graph = StateGraph(MessagesState)
    graph.add_node("model", lambda state: {"messages": [asks.invoke(state["messages"])]})
    graph.add_node("tools", ToolNode([stock]))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    return graph.compile()


def recorded(app: Any, question: Any) -> tuple[Any, rllm.Episode]:
    """What the app gives, and its episode."""
    with ScriptedServer(answer) as server:
        route = Route(base_url=server.base_url, api_key=server.api_key, model="policy")
        with rollout(route=route) as handle:
            given = app(question)
        (episode,) = handle.wait(20)
        assert {exchange.body["model"] for exchange in server.log} == {"policy"}
    return given, episode


def calls(trajectory: rllm.Trajectory) -> list[Any]:
    return [(call.trainable, call.prompt_token_ids, call.choices[0].token_ids) for call in trajectory.calls]


TWO_CALLS = [(True, [1, 2], [5, 6]), (True, [1, 2, 5, 6, 9], [7])]


def test_a_graph_with_a_tool() -> None:
    """Two calls, the second after the tool, in the workflow's own trajectory."""

    @rllm.workflow
    def solve(question: str) -> str:
        return assistant().invoke({"messages": [("user", question)]})["messages"][-1].content

    given, episode = recorded(solve, "how many pens?")
    assert given == "17 pens"
    assert [(t.name, calls(t)) for t in episode.trajectories] == [("solve", TWO_CALLS)]


def test_a_streamed_graph() -> None:
    """The same calls where the app streams the graph's messages, asynchronously."""

    @rllm.workflow
    async def solve(question: str) -> list[str]:
        events = assistant().astream({"messages": [("user", question)]}, stream_mode="messages")
        return [str(message.content) async for message, _ in events if message.content]

    given, episode = recorded(lambda question: asyncio.run(solve(question)), "how many pens?")
    assert given[-1] == "17 pens"
    assert [(t.name, calls(t)) for t in episode.trajectories] == [("solve", TWO_CALLS)]


def test_branches_that_run_at_once() -> None:
    """Each branch of a fan-out is an agent of its own, with the tokens of its own question."""
    from langgraph.graph import END, START, StateGraph
    from langgraph.types import Send

    asks = model()

    @rllm.agent("worker")
    def work(state: dict[str, str]) -> dict[str, list[str]]:
        return {"found": [asks.invoke(state["item"]).content]}

    graph = StateGraph(Branches)
    graph.add_node("work", work)
    graph.add_conditional_edges(START, lambda state: [Send("work", {"item": item}) for item in state["items"]], ["work"])
    graph.add_edge("work", END)
    fan_out = graph.compile()

    @rllm.workflow
    def solve(items: list[str]) -> list[str]:
        return fan_out.invoke({"items": items, "found": []})["found"]

    given, episode = recorded(solve, [str(number) for number in range(8)])
    assert sorted(given) == [f"item {number}" for number in range(8)]
    assert {t.name for t in episode.trajectories} == {"worker"}
    assert sorted(calls(t) for t in episode.trajectories) == [[(True, [3, number], [100 + number])] for number in range(8)]
