"""A scripted server behind a gateway, and HTTP clients that know nothing of rllm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from rllm_trace.gateway import Gateway, Upstream
from rllm_trace.testing import Reply, ReplyChoice, ScriptedServer

SECRET = "sk-upstream-secret-1234"


@pytest.fixture
def behind() -> Iterator[Callable[..., tuple[ScriptedServer, Gateway]]]:
    """Starts a scripted server with the given script, and a gateway before it."""
    opened: list[Any] = []

    def start(script: Any = None, *, refuses: Any = None, **options: Any) -> tuple[ScriptedServer, Gateway]:
        server = ScriptedServer(script, refuses=refuses, api_key=SECRET)
        opened.append(server.__enter__() and server)
        given: dict[str, Any] = {"upstream": Upstream(base_url=server.base_url, api_key=SECRET), **options}
        gateway = Gateway(**given).start()
        opened.append(gateway)
        return server, gateway

    yield start
    for part in reversed(opened):
        part.__exit__(None, None, None)


@pytest.fixture
def http() -> Iterator[httpx.Client]:
    with httpx.Client(trust_env=False, timeout=60) as client:
        yield client


@pytest.fixture
def tool_reply() -> Reply:
    """A reply with text and a tool call whose JSON has a spacing of its own."""
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a":  1, "b": 2}'}}
    choice = ReplyChoice(
        text="let me see", token_ids=[7, 8, 9, 2], logprobs=[-0.5, -0.25, -1.0, -0.125], tool_calls=[call], finish_reason="tool_calls"
    )
    return Reply(choices=[choice])
