"""A clerk that adds up a bill in two steps: it lists the amounts, then answers; every call goes through an ordinary OpenAI client."""

from __future__ import annotations

import random
import re
from functools import cache
from typing import Any

import openai

import rllm_trace as rllm

MODEL = "gpt-4o-mini"
"""What the app asks for; while it is trained, its calls go to the policy instead."""


@cache
def client() -> openai.OpenAI:
    """One client for the process, made at the first call."""
    return openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="unused while training")


@rllm.workflow
def add_up(bill: str) -> str:
    """The answer to one bill."""
    messages: list[Any] = [{"role": "user", "content": f"{bill}\nList the amounts."}]
    listed = client().chat.completions.create(model=MODEL, messages=messages, max_tokens=24)
    messages += [
        {"role": "assistant", "content": listed.choices[0].message.content or ""},
        {"role": "user", "content": "Now give the sum, as one number."},
    ]
    answer = client().chat.completions.create(model=MODEL, messages=messages, max_tokens=16)
    return answer.choices[0].message.content or ""


@rllm.reward
def close(output: str | None, total: int) -> float:
    """1 for the right number; a little for any digits, so that a small model finds its way there."""
    if output is None:
        return 0.0
    numbers = re.findall(r"\d+", output)
    if str(total) in numbers:
        return 1.0
    return 0.3 * sum(c.isdigit() for c in output) / max(1, len(output))


def bills(count: int, seed: int) -> list[dict[str, Any]]:
    """Rows: bills with their totals."""
    draw = random.Random(f"bills {seed}")
    rows: list[dict[str, Any]] = []
    for number in range(count):
        amounts = [draw.randint(1, 99) for _ in range(3)]
        rows.append({"bill": f"Bill {number}: " + ", ".join(f"{amount} euros" for amount in amounts), "total": sum(amounts)})
    return rows
