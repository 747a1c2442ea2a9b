"""An app with calls of many shapes, in a process of its own: beside another instrumentation of the OpenAI client, beside ours, or both.

    app_beside.py PEER ORDER

``PEER`` is one of ``PEERS``. ``ORDER`` says what is installed, and in which order: ``theirs``, ``ours``, ``theirs,ours``, ``ours,theirs``.
Prints one JSON object: what the app saw, the spans that they made, the episode that we made, and faults of ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import openai
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

URL = os.environ["APP_MODEL"]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


# the app: it knows neither of them


def messages(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@functools.cache
def client() -> openai.OpenAI:
    return openai.OpenAI(base_url=URL, api_key="scripted", max_retries=0)


def text_of(chunks: list[Any]) -> str:
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


def plain() -> Any:
    return client().chat.completions.create(model="m", messages=messages("plain"), temperature=0.5).to_dict()


def with_tools() -> Any:
    return client().chat.completions.create(model="m", messages=messages("tools"), tools=TOOLS, n=2, seed=3).to_dict()


def streamed() -> Any:
    stream = client().chat.completions.create(model="m", messages=messages("stream"), stream=True, stream_options={"include_usage": True})
    return [chunk.to_dict() for chunk in stream]


def streamed_without_usage() -> Any:
    return text_of(list(client().chat.completions.create(model="m", messages=messages("bare stream"), stream=True)))


def left_early() -> Any:
    stream = client().chat.completions.create(model="m", messages=messages("early"), stream=True)
    first = next(iter(stream)).to_dict()
    stream.close()
    return first


def helper() -> Any:
    with client().chat.completions.stream(model="m", messages=messages("helper")) as events:
        return [event.type for event in events]


def parsed() -> Any:
    return client().chat.completions.parse(model="m", messages=messages("parse")).choices[0].message.content


def raw() -> Any:
    return client().chat.completions.with_raw_response.create(model="m", messages=messages("raw")).parse().to_dict()


def refused() -> Any:
    return client().chat.completions.create(model="m", messages=messages("refused"))


def retried() -> Any:
    return client().with_options(max_retries=1).chat.completions.create(model="m", messages=messages("retried")).to_dict()


def embedded() -> Any:
    return client().embeddings.create(model="m", input="text", encoding_format="float").to_dict()


async def awaited() -> list[Any]:
    """Alone, streamed, and three at once."""
    async with openai.AsyncOpenAI(base_url=URL, api_key="scripted", max_retries=0) as own:
        create = own.chat.completions.create
        alone = await create(model="m", messages=messages("async"), max_tokens=5)
        stream = await create(model="m", messages=messages("async stream"), stream=True, stream_options={"include_usage": True})
        chunks = [chunk.to_dict() async for chunk in stream]
        together = await asyncio.gather(*(create(model="m", messages=messages(f"together {n}")) for n in range(3)))
        return [alone.to_dict(), chunks, [completion.choices[0].message.content for completion in together]]


STEPS: list[Callable[[], Any]] = [
    plain,
    with_tools,
    streamed,
    streamed_without_usage,
    left_early,
    helper,
    parsed,
    raw,
    refused,
    retried,
    embedded,
    lambda: asyncio.run(awaited()),
]


def call_everything() -> list[Any]:
    """What each step gave or raised."""
    seen: list[Any] = []
    for step in STEPS:
        try:
            seen.append(step())
        except Exception as error:  # noqa: BLE001 - what the app sees, with and without the other
            seen.append([type(error).__name__, str(error)])
    return seen


def ask_agent() -> list[Any]:
    """An agent with a tool, sync and streamed."""
    from strands import Agent, tool
    from strands.models.openai import OpenAIModel

    @tool
    def look_up(word: str) -> str:
        """Looks a word up."""
        return f"{word}: {client().chat.completions.create(model='m', messages=messages('in the tool')).choices[0].message.content}"

    def agent() -> Any:
        model = OpenAIModel(client_args={"base_url": URL, "api_key": "scripted"}, model_id="m")
        return Agent(model=model, tools=[look_up], callback_handler=None, name="helper")

    async def words() -> list[str]:
        return [event["data"] async for event in agent().stream_async("agent stream") if "data" in event]

    return [str(agent()("agent with a tool")), asyncio.run(words())]


def call_and_ask_agent() -> list[Any]:
    return [*call_everything(), *ask_agent()]


# the others


class Peer(NamedTuple):
    """Another instrumentation, installed."""

    spans: Callable[[], Sequence[ReadableSpan]]
    """What it has recorded so far."""
    around: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda app: app
    """Its own decorator, where it has one."""


def provider() -> tuple[TracerProvider, InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    made = TracerProvider()
    made.add_span_processor(SimpleSpanProcessor(exporter))
    return made, exporter


def logfire() -> Peer:
    import logfire

    exporter = InMemorySpanExporter()
    processor = SimpleSpanProcessor(exporter)
    logfire.configure(send_to_logfire=False, console=False, additional_span_processors=[processor], inspect_arguments=False)
    logfire.instrument_openai()
    return Peer(exporter.get_finished_spans)


def openinference() -> Peer:
    from openinference.instrumentation.openai import OpenAIInstrumentor

    made, exporter = provider()
    OpenAIInstrumentor().instrument(tracer_provider=made)
    return Peer(exporter.get_finished_spans)


def opentelemetry() -> Peer:
    from opentelemetry.instrumentation.openai_v2 import OpenAIInstrumentor

    made, exporter = provider()
    OpenAIInstrumentor().instrument(tracer_provider=made)
    return Peer(exporter.get_finished_spans)


def openllmetry() -> Peer:
    from opentelemetry.instrumentation.openai import OpenAIInstrumentor

    made, exporter = provider()
    OpenAIInstrumentor().instrument(tracer_provider=made)
    return Peer(exporter.get_finished_spans)


def langfuse() -> Peer:
    import langfuse
    import langfuse.openai  # its wrapper is put on by the import

    exporter = InMemorySpanExporter()
    own = langfuse.Langfuse(public_key="pk-lf-none", secret_key="sk-lf-none", host="http://127.0.0.1:9", span_exporter=exporter)

    def spans() -> Sequence[ReadableSpan]:
        own.flush()
        return exporter.get_finished_spans()

    return Peer(spans, langfuse.observe(name="observed"))


def strands() -> Peer:
    from strands.telemetry import StrandsTelemetry

    exporter = InMemorySpanExporter()
    StrandsTelemetry().tracer_provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Peer(exporter.get_finished_spans)


PEERS: dict[str, Callable[[], Peer]] = {
    "logfire": logfire,
    "openinference": openinference,
    "opentelemetry": opentelemetry,
    "openllmetry": openllmetry,
    "langfuse": langfuse,
    "strands": strands,
}


# what each of them has made of it


def shown(spans: Sequence[ReadableSpan]) -> list[Any]:
    """Names, names of parents, attributes, status and events of spans."""
    names = {span.context.span_id: span.name for span in spans if span.context is not None}
    found: list[Any] = []
    for span in spans:
        parent = None if span.parent is None else names.get(span.parent.span_id, "none of theirs")
        events = [[event.name, dict(event.attributes or {})] for event in span.events]
        found.append([span.name, parent, dict(span.attributes or {}), span.status.status_code.name, span.status.description, events])
    return found


def main() -> None:
    name, order = sys.argv[1], sys.argv[2].split(",")
    found: dict[str, Any] = {"ours": None, "theirs": None, "faults": {}}
    peer: Peer | None = None
    app: Callable[[], Any] = call_and_ask_agent if name == "strands" else call_everything
    with contextlib.ExitStack() as recording:
        episodes: list[Any] = []
        for who in order:
            if who == "theirs":
                peer = PEERS[name]()
            else:
                import rllm_trace as rllm

                rllm.instrument("openai")
                episodes = recording.enter_context(rllm.collect())
        if peer is not None:
            app = peer.around(app)
        if "ours" in order:
            app = rllm.workflow(name="app")(app)
        found["seen"] = app()
    if peer is not None:
        found["theirs"] = shown(peer.spans())
    if "ours" in order:
        (episode,) = episodes
        found["ours"] = msgspec.to_builtins(episode, enc_hook=list)
        found["faults"] = rllm.stats()["faults"]
    print(json.dumps(found, default=repr))


if __name__ == "__main__":
    main()
