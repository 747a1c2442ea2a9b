"""Beside another instrumentation of the OpenAI client, the real package: it records what it records without us, and so do we.

``RLLM_TEST_PEER`` says which; ``make test-peers`` runs this file once for each, in an environment of its own.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rllm_trace.testing import Exchange, Reply, ReplyChoice, ScriptedServer

pytestmark = pytest.mark.peer

PEER = os.environ.get("RLLM_TEST_PEER", "")
APP = Path(__file__).with_name("app_beside.py")
_VARYING = re.compile(r"(^|[._])(id|started|ended|trace_id|span_id|parent_id|target|time_to_first_token)$")
"""Fields of ours that no two runs have in common: ids and times."""
_OWN_RUN = re.compile(r"time|duration|cycle_id|stacktrace|fingerprint|code\.(function|lineno)", re.IGNORECASE)
"""Attributes of theirs that no two runs have in common: times, ids that are made anew, stacks, which show who was called through, and the
line that ran when a stream that was left was finalized."""


def answer(exchange: Exchange) -> Reply:
    """Ids that say what was asked; a tool call where an agent offers a tool for the first time; errors where they are asked for."""
    said = exchange.body.get("messages") or []
    text = str(said[-1]["content"])
    tokens = list(text.encode()[-8:])
    if text == "refused":
        return Reply(status=400, error={"message": "refused", "type": "invalid_request_error", "param": None, "code": None})
    if text == "retried" and exchange.headers.get("x-stainless-retry-count") == "0":
        return Reply(status=500, error={"message": "again"}, headers={"retry-after-ms": "1"})
    if "agent with a tool" in text:
        call = {"id": "call_1", "type": "function", "function": {"name": "look_up", "arguments": '{"word": "tea"}'}}
        return Reply(choices=[_choice(None, tokens, tool_calls=[call], finish_reason="tool_calls")])
    return Reply(choices=[_choice(f"about {text[-12:]} {n}", [*tokens, n]) for n in range(int(exchange.body.get("n") or 1))])


def _choice(text: str | None, tokens: list[int], **fields: Any) -> ReplyChoice:
    return ReplyChoice(text=text, token_ids=tokens, logprobs=[-token / 1024 for token in tokens], **fields)


@functools.cache
def run(order: str) -> dict[str, Any]:
    """One run of the app; what differs between any two runs is taken out."""
    with ScriptedServer(answer) as server:
        environment = {**os.environ, "APP_MODEL": server.base_url}
        command = [sys.executable, str(APP), PEER, order]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        port = server.base_url.split(":")[2].split("/")[0]
    text = re.sub(rf"\b{port}\b", "8000", done.stdout.splitlines()[-1])
    return json.loads(re.sub(r"took \d+\.\d+s", "took", re.sub(r"cmpl-\d+", "cmpl-0", text)))


def without(value: Any, varying: re.Pattern[str]) -> Any:
    """``value`` without the entries whose names say that they vary."""
    if isinstance(value, dict):
        return {key: without(item, varying) for key, item in value.items() if not varying.search(key)}
    return [without(item, varying) for item in value] if isinstance(value, list) else value


def theirs(order: str) -> list[str]:
    return sorted(json.dumps(span, sort_keys=True) for span in without(run(order)["theirs"], _OWN_RUN))


def ours(order: str) -> Any:
    return without(run(order)["ours"], _VARYING)


ORDERS = pytest.mark.parametrize("order", ["theirs,ours", "ours,theirs"])


@ORDERS
def test_they_record_what_they_record_without_us(order: str) -> None:
    """The same spans, with the same attributes, whoever was installed first."""
    assert theirs(order) == theirs("theirs")
    assert theirs("theirs")


@ORDERS
def test_we_record_what_we_record_without_them(order: str) -> None:
    """The same episode: every call once, with the same ids, logprobs and verdict."""
    assert ours(order) == ours("ours")
    assert run(order)["faults"] == {}


@ORDERS
def test_the_app_sees_what_it_sees_without_us(order: str) -> None:
    """What each call returns or raises is what it is beside them alone."""
    assert run(order)["seen"] == run("theirs")["seen"]
