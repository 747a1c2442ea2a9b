"""A help desk's router: an async Strands agent reads a message, and its streamed answer names the queue."""

import asyncio
import os
from collections.abc import AsyncIterator

from strands import Agent
from strands.models.openai import OpenAIModel

QUEUES = ("billing", "delivery", "returns")
PROMPT = "Answer with one word: billing, delivery or returns."


def agent() -> Agent:
    """A fresh agent: no message is seen by the next one's."""
    model = OpenAIModel(
        client_args={
            "base_url": os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
            "api_key": os.environ.get("OPENAI_API_KEY", "none"),
        },
        model_id="smollm2-135m-instruct",
        params={"max_tokens": 8},
    )
    return Agent(model=model, system_prompt=PROMPT, callback_handler=None)


async def words(message: str) -> AsyncIterator[str]:
    """The pieces of the answer, as they come."""
    async for event in agent().stream_async(message):
        if "data" in event:
            yield event["data"]


async def route(message: str) -> str | None:
    """The queue that a message belongs to; None where the answer names none."""
    answer = "".join([piece async for piece in words(message)])
    name = answer.strip().strip(".").lower()
    return name if name in QUEUES else None


def right_queue(output: str | None, queue: str) -> bool:
    """Whether a message went where it belongs."""
    return output == queue


if __name__ == "__main__":
    print(asyncio.run(route("My parcel has not come.")))
