"""What the tests of the SDK share: a process that records nothing before and after each test, and a call without a client."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

import rllm_trace as rllm
from rllm_trace._calldata import CallData
from rllm_trace._calls import open_call
from rllm_trace._guard import counters
from rllm_trace.types import Choice, Logprobs, TokenIds

MakeCall = Callable[..., str | None]


@pytest.fixture(autouse=True)
def quiet_process() -> Iterator[None]:
    """Nothing recorded, configured or counted is left over from another test."""
    counters.clear()
    yield
    rllm.shutdown(timeout=5)
    rllm.configure()
    counters.clear()


@pytest.fixture
def call() -> MakeCall:
    """``call("hello")``: an exact call that samples the ids [7, 2]; gives its span id, or None where it was not recorded."""
    return record_call


def record_call(text: str = "hi", *, model: str = "m", **fields: Any) -> str | None:
    opened = open_call(operation="chat", requested_model=model)
    if opened is None:
        return None
    opened.end(call_data(text, model=model, **fields))
    return opened.span_id


def call_data(text: str = "hi", *, model: str = "m", **fields: Any) -> CallData:
    given: dict[str, Any] = {
        "operation": "chat",
        "model": model,
        "requested_model": model,
        "request": msgspec.json.encode({"model": model, "messages": [{"role": "user", "content": text}], "temperature": 1.0}),
        "choices": [Choice(index=0, token_ids=TokenIds([7, 2]), logprobs=Logprobs([-0.5, -0.25]), text="ok", finish_reason="stop")],
        "prompt_token_ids": TokenIds([1, 5]),
        "exact": True,
        "complete": True,
        **fields,
    }
    return CallData(**given)


@pytest.fixture
def data() -> Callable[..., CallData]:
    """``data("hello", error=...)``: what a client hands over when a call ends."""
    return call_data
