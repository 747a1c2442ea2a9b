"""Two solvers answer a question at the same time, a judge picks one of the answers; each of the three is scored for what it did."""

import asyncio
import os
import random

from openai import AsyncOpenAI

import rllm_trace as rllm

CLIENT = AsyncOpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"), api_key=os.environ.get("OPENAI_API_KEY", "none"), max_retries=0
)
LATENCY = random.Random()
"""Of the network between an agent and its model: answers come in any order."""
MEAN_LATENCY = 0.02
LETTERS = "AB"

SOLVER = [
    {"role": "system", "content": "Say the colour."},
    {"role": "user", "content": "A gold ring was found."},
    {"role": "assistant", "content": "gold"},
]
JUDGE = [
    {"role": "system", "content": "Say which answer is right, A or B."},
    {"role": "user", "content": "A gold ring was found. A: ring B: gold"},
    {"role": "assistant", "content": "B"},
]


async def say(messages: list[dict[str, str]], content: str) -> str:
    """One reply of the model, some time later."""
    await asyncio.sleep(LATENCY.expovariate(1 / MEAN_LATENCY))
    asked = [*messages, {"role": "user", "content": content}]
    reply = await CLIENT.chat.completions.create(model="smollm2-135m-instruct", messages=asked, max_tokens=5)
    await asyncio.sleep(LATENCY.expovariate(1 / MEAN_LATENCY))
    return (reply.choices[0].message.content or "").strip()


@rllm.reward
def solved(reply: str, colour: str) -> bool:
    """Whether a solver said the colour, and nothing else."""
    return reply.lower().rstrip(".") == colour


@rllm.reward
def judged(letter: str, replies: list[str], colour: str) -> bool:
    """Whether the judge named a right answer."""
    return letter in tuple(LETTERS) and replies[LETTERS.index(letter)].lower().rstrip(".") == colour


@rllm.agent("solver")
async def solve(sentence: str, colour: str) -> str:
    """One answer; its reward is this solver's own."""
    reply = await say(SOLVER, sentence)
    solved(reply, colour)
    return reply


@rllm.agent("judge")
async def judge(sentence: str, colour: str, replies: list[str]) -> str:
    """The letter of one answer; its reward is the judge's own."""
    named = " ".join(f"{letter}: {reply}" for letter, reply in zip(LETTERS, replies, strict=True))
    letter = await say(JUDGE, f"{sentence} {named}")
    judged(letter, replies, colour)
    return letter


@rllm.workflow
async def decide(sentence: str, colour: str) -> dict[str, object]:
    """The colour in a sentence, in the solvers' words and by the judge's choice."""
    replies = list(await asyncio.gather(solve(sentence, colour), solve(sentence, colour)))
    return {"replies": replies, "letter": await judge(sentence, colour, replies)}
