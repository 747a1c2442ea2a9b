"""A chat of many turns whose history is compacted: what is older than two turns is kept as one line, and the chat goes on from there."""

import os

from openai import AsyncOpenAI

import rllm_trace as rllm

CLIENT = AsyncOpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"), api_key=os.environ.get("OPENAI_API_KEY", "none"), max_retries=0
)
KEEP_TURNS = 2

Message = dict[str, str]

START: list[Message] = [
    {"role": "system", "content": "Say the colour."},
    {"role": "user", "content": "A gold ring was found."},
    {"role": "assistant", "content": "gold"},
]


def history_of(turns: list[tuple[str, str]]) -> list[Message]:
    """The messages that stand for these turns: the newest word for word, older ones as the line that they come to."""
    old, new = turns[:-KEEP_TURNS], turns[-KEEP_TURNS:]
    history = [*START]
    if old:
        said = ", ".join(reply for _, reply in old)
        history += [{"role": "user", "content": "What did you say before?"}, {"role": "assistant", "content": said}]
    for sentence, reply in new:
        history += [{"role": "user", "content": sentence}, {"role": "assistant", "content": reply}]
    return history


@rllm.workflow
async def chat(sentences: list[str]) -> list[str]:
    """The model's word on each sentence, one turn after another."""
    turns: list[tuple[str, str]] = []
    for sentence in sentences:
        messages = [*history_of(turns), {"role": "user", "content": sentence}]
        reply = await CLIENT.chat.completions.create(model="smollm2-135m-instruct", messages=messages, max_tokens=5)
        turns.append((sentence, reply.choices[0].message.content or ""))
    return [reply for _, reply in turns]


@rllm.reward
def named(output: list[str] | None, colours: list[str]) -> float:
    """The share of turns in which the colour was said, and nothing else."""
    replies = output or []
    return sum(reply.strip().lower().rstrip(".") == colour for reply, colour in zip(replies, colours, strict=False)) / len(colours)
