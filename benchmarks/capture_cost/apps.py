"""The app that is measured: a run of ten questions to a model, asked one by one, whole or streamed; or 32 such runs at once.

``asks``: the app itself asks for ids and logprobs, and reads every one of them from what the client parsed; what else it does is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

__all__ = ["CONCURRENT", "RUN", "Answer", "run", "run_async", "run_streamed"]

RUN: Final = 10
"""Calls of one run."""
CONCURRENT: Final = 32
_ASKING: Final[dict[str, Any]] = {"logprobs": True, "extra_body": {"return_token_ids": True}}

Answer = tuple[str, list[int], list[int], list[float]]
"""Text, ids of the prompt, ids of the reply, logprobs; the three lists are empty where the app did not ask."""


def _request(prompt: str, asks: bool) -> dict[str, Any]:
    asking = _ASKING if asks else {}
    return {"model": "m", "messages": [{"role": "user", "content": prompt}], "max_tokens": 4_096, "temperature": 1.0, **asking}


def _read(answer: Any, asks: bool) -> Answer:
    choice = answer.choices[0]
    if not asks:
        return choice.message.content, [], [], []
    return choice.message.content, answer.prompt_token_ids, choice.token_ids, [entry.logprob for entry in choice.logprobs.content]


def _read_stream(stream: Any, asks: bool) -> Answer:
    text: list[str] = []
    prompt_ids: list[int] = []
    ids: list[int] = []
    logprobs: list[float] = []
    for chunk in stream:
        for choice in chunk.choices:
            if choice.delta.content:
                text.append(choice.delta.content)
            if asks and choice.logprobs is not None:
                ids += choice.token_ids
                logprobs += [entry.logprob for entry in choice.logprobs.content]
        if asks and not prompt_ids:
            prompt_ids = chunk.prompt_token_ids
    return "".join(text), prompt_ids, ids, logprobs


def run(client: Any, prompts: Sequence[str], asks: bool) -> Answer | None:
    """One call for each prompt; what the last one said."""
    answer = None
    for prompt in prompts:
        answer = _read(client.chat.completions.create(**_request(prompt, asks)), asks)
    return answer


def run_streamed(client: Any, prompts: Sequence[str], asks: bool) -> Answer | None:
    """The same, each reply read chunk by chunk."""
    answer = None
    for prompt in prompts:
        answer = _read_stream(client.chat.completions.create(**_request(prompt, asks), stream=True), asks)
    return answer


async def run_async(client: Any, prompts: Sequence[str], asks: bool) -> Answer | None:
    """The same as ``run``, in an event loop."""
    answer = None
    for prompt in prompts:
        answer = _read(await client.chat.completions.create(**_request(prompt, asks)), asks)
    return answer
