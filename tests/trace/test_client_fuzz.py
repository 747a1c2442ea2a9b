"""Random schedules against a server that logs what it sent: no call lost, none mixed, no id and no logprob altered.

``RLLM_TEST_FUZZ_CALLS`` sets the number of calls (2,000 by default), ``RLLM_TEST_FUZZ_SEED`` the first schedule. Workflows run in threads,
in event loops, and spread over processes of a pool; with ``pytest -s`` the figures are printed.
"""

from __future__ import annotations

import asyncio
import gc
import json
import multiprocessing
import os
import random
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any, Literal

import openai
import pytest

import rllm_trace as rllm
from rllm_trace._decorators import workflow
from rllm_trace.clients import ensure
from rllm_trace.rollouts import rollout
from rllm_trace.testing import Exchange, Reply, ReplyChoice, ScriptedServer
from rllm_trace.types import Episode, Logprobs, ModelCall

CALLS = int(os.environ.get("RLLM_TEST_FUZZ_CALLS", "2000"))
SEED = int(os.environ.get("RLLM_TEST_FUZZ_SEED", "0"))
CALLS_PER_ROUND = 2_000
"""Calls of one schedule; what it recorded is compared before the next one begins."""
CALLS_PER_WORKFLOW = 10
CONCURRENT = 16
PROCESSES = 2

Kind = Literal["threads", "loop", "processes"]

SHAPES = ("create", "stream", "raw", "raw stream", "streaming response", "close early", "drop", "helper", "cancel", "timeout")
"""What is done with a call; the last two only by asynchronous workflows."""
FATES = ("good", "good", "good", "good", "retried", "error", "cut", "silent")
"""What the server does with it."""


KINDS: tuple[Kind, ...] = ("threads", "loop", "threads", "loop", "processes")
if find_spec("opentelemetry.proto") is None:
    KINDS = ("threads", "loop")  # what children record comes home as OTLP


class Plan:
    """One call of the schedule, known to the app and to the server by its key."""

    def __init__(self, key: str, draw: random.Random, *, is_async: bool) -> None:
        self.key = key
        self.shape = draw.choice(SHAPES if is_async else SHAPES[:-2])
        if self.shape == "drop" and draw.random() < 0.9:
            self.shape = "stream"  # a dropped stream costs a full garbage collection
        self.fate = draw.choice(FATES)
        if self.shape in ("cancel", "timeout"):
            self.fate = "silent"
        elif self.fate == "silent":
            self.fate = "good"
        self.take = draw.randrange(4)
        self.n = draw.choice((1, 1, 1, 3))
        self.failures = draw.randrange(1, 3) if self.fate == "retried" else 0
        self.sent = 0
        self.told: Any = None
        """What the processes said that made the calls of its workflow."""
        self.reply = Reply(
            choices=[self._choice(draw) for _ in range(self.n)],
            prompt_token_ids=[draw.randrange(50_000) for _ in range(draw.randrange(1, 40))],
            tokens_per_chunk=draw.randrange(1, 5),
            chunk_bytes=draw.choice((None, None, 11, 300)),
            gzip=draw.random() < 0.1,
        )

    @staticmethod
    def _choice(draw: random.Random) -> ReplyChoice:
        size = draw.randrange(1, 30)
        calls = [{"id": f"c{draw.random()}", "type": "function", "function": {"name": "f", "arguments": json.dumps({"x": draw.random()})}}]
        return ReplyChoice(
            text=draw.choice(("", "plain", 'odd "token_ids": [1] \n\n data: }')) + str(draw.random()),
            token_ids=[draw.randrange(50_000) for _ in range(size)],
            logprobs=[-draw.random() * 20 for _ in range(size)],
            tool_calls=calls if draw.random() < 0.3 else None,
        )


class Schedule:
    """Every planned call by its key, and what the server did for it."""

    def __init__(self, seed: int, calls: int) -> None:
        draw = random.Random(seed)
        self.workflows: list[tuple[Kind, list[Plan]]] = []
        for number in range(max(1, calls // CALLS_PER_WORKFLOW)):
            kind: Kind = draw.choice(KINDS)
            is_async = kind == "loop"
            plans = [Plan(f"{number}-{position}", draw, is_async=is_async) for position in range(CALLS_PER_WORKFLOW)]
            self.workflows.append((kind, plans))
        self.plans = {plan.key: plan for _, plans in self.workflows for plan in plans}

    def answer(self, exchange: Exchange) -> Reply:
        plan = self.plans[exchange.body["messages"][0]["content"]]
        plan.sent += 1
        if plan.fate == "silent":
            return Reply(hold_after=0)
        if plan.fate == "error":
            return Reply(status=400, error={"message": "no"})
        if plan.sent <= plan.failures:
            return Reply(status=500, error={"message": "busy"}, headers={"retry-after-ms": "1"})
        if plan.fate == "cut" and exchange.body.get("stream"):
            plan.reply.disconnect_after = 1 + plan.take
        return plan.reply


def arguments(plan: Plan) -> dict[str, Any]:
    stream = plan.shape in ("stream", "raw stream", "close early", "drop", "timeout")
    return {"model": "m", "messages": [{"role": "user", "content": plan.key}], "n": plan.n, **({"stream": True} if stream else {})}


def helpers(client: Any) -> Any:
    """Where this release of openai has ``stream``."""
    return client.chat.completions if hasattr(client.chat.completions, "stream") else client.beta.chat.completions


def run_sync(client: openai.OpenAI, plan: Plan) -> None:
    create, asked = client.chat.completions.create, arguments(plan)
    if plan.shape == "create":
        create(**asked)
    elif plan.shape == "raw":
        client.chat.completions.with_raw_response.create(**asked).parse()
    elif plan.shape == "raw stream":
        list(client.chat.completions.with_raw_response.create(**asked).parse())
    elif plan.shape == "streaming response":
        with client.chat.completions.with_streaming_response.create(**asked) as response:
            response.parse()
    elif plan.shape == "helper":
        with helpers(client).stream(**asked) as stream:
            list(stream)
    else:
        stream = create(**asked)
        if plan.shape == "stream":
            list(stream)
        elif plan.shape == "close early":
            for _ in zip(stream, range(plan.take), strict=False):
                pass
            stream.close()


async def run_async(client: openai.AsyncOpenAI, plan: Plan) -> None:
    create, asked = client.chat.completions.create, arguments(plan)
    if plan.shape == "create":
        await create(**asked)
    elif plan.shape == "raw":
        (await client.chat.completions.with_raw_response.create(**asked)).parse()
    elif plan.shape == "raw stream":
        async for _ in (await client.chat.completions.with_raw_response.create(**asked)).parse():
            pass
    elif plan.shape == "streaming response":
        async with client.chat.completions.with_streaming_response.create(**asked) as response:
            await response.parse()
    elif plan.shape == "helper":
        async with helpers(client).stream(**asked) as stream:
            async for _ in stream:
                pass
    elif plan.shape == "timeout":
        await client.with_options(max_retries=0).chat.completions.create(**asked, timeout=0.05)
    elif plan.shape == "cancel":
        await asyncio.wait_for(create(**asked), 0.05)
    else:
        stream = await create(**asked)
        if plan.shape == "stream":
            async for _ in stream:
                pass
        elif plan.shape == "close early":
            for _ in range(plan.take):
                await anext(stream, None)
            await stream.close()


EXPECTED_ERRORS = (openai.OpenAIError, TimeoutError)


def is_expected(error: Exception) -> bool:
    return isinstance(error, EXPECTED_ERRORS) or type(error).__module__.partition(".")[0] in ("httpx", "httpx2")


@pytest.fixture
def clients() -> Iterator[Any]:
    """A synchronous client per thread and an asynchronous one per loop, so that connections are shared as in an app."""
    local = threading.local()
    opened: list[openai.OpenAI] = []

    def client(server: ScriptedServer) -> openai.OpenAI:
        if not hasattr(local, "client"):
            http = openai.DefaultHttpxClient(verify=False)
            local.client = openai.OpenAI(base_url=server.base_url, api_key=server.api_key, http_client=http, timeout=120)
            opened.append(local.client)
        return local.client

    yield client
    for each in opened:
        each.close()


def one_after_another(client: openai.OpenAI, plans: list[Plan]) -> None:
    for plan in plans:
        try:
            run_sync(client, plan)
        except Exception as error:
            if not is_expected(error):
                raise
    if any(plan.shape == "drop" for plan in plans):
        gc.collect()


def in_child(base_url: str, api_key: str, plans: list[Plan]) -> tuple[int, Any]:
    """Makes the calls in a process of the pool; gives its id, and what it has counted so far."""
    http = openai.DefaultHttpxClient(verify=False)
    with openai.OpenAI(base_url=base_url, api_key=api_key, http_client=http, timeout=120) as client:
        one_after_another(client, plans)
    return os.getpid(), rllm.stats()


@pytest.fixture
def pool() -> Iterator[ProcessPoolExecutor]:
    """Processes that were forked before the test starts threads, and are not this one."""
    executor = ProcessPoolExecutor(PROCESSES, mp_context=multiprocessing.get_context("fork"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking beside the recorder's idle thread is meant
        assert executor.submit(os.getpid).result(60) != os.getpid()
    yield executor
    executor.shutdown(cancel_futures=True)


def run_workflow(server: ScriptedServer, client: Any, pool: ProcessPoolExecutor, kind: Kind, plans: list[Plan]) -> Episode:
    async def all_of_them() -> None:
        http = openai.DefaultAsyncHttpxClient(verify=False)
        async with openai.AsyncOpenAI(base_url=server.base_url, api_key=server.api_key, http_client=http, timeout=120) as shared:
            results = await asyncio.gather(*(run_async(shared, plan) for plan in plans), return_exceptions=True)
        unexpected = [result for result in results if isinstance(result, Exception) and not is_expected(result)]
        assert unexpected == []

    @workflow
    def app() -> None:
        if kind == "processes":
            half = len(plans) // 2
            parts = [pool.submit(in_child, server.base_url, server.api_key, part) for part in (plans[:half], plans[half:])]
            plans[0].told = [part.result(300) for part in parts]
            assert os.getpid() not in [pid for pid, _ in plans[0].told]
        elif kind == "loop":
            asyncio.run(all_of_them())
            if any(plan.shape == "drop" for plan in plans):
                gc.collect()
        else:
            one_after_another(client(server), plans)

    with rollout() as handle:
        app()
    (episode,) = handle.wait(120)
    return episode


def check(plan: Plan, call: ModelCall) -> None:
    """Everything that the record says is what the server did, or a part of it that is not credited."""
    sent = plan.reply.choices
    assert call.attempts == plan.sent or plan.sent == 0
    if plan.fate in ("error", "silent"):
        assert (call.choices, call.trainable, call.error is not None) == ([], False, True)
        return
    if call.complete:
        assert call.prompt_token_ids == list(plan.reply.prompt_token_ids)
        assert len(call.choices) == len(sent)
    for record in call.choices:
        choice = sent[record.index]
        ids, logprobs = list(choice.token_ids), Logprobs(choice.logprobs)  # type: ignore[arg-type] - no None among them
        size = len(record.token_ids or ())
        assert (record.token_ids or []) == ids[:size]
        assert record.logprobs is None or record.logprobs == logprobs[:size]
        if call.complete:
            assert (size, record.text, record.tool_calls) == (len(ids), choice.text, choice.tool_calls)
    whole = plan.shape in ("create", "stream", "raw", "raw stream", "streaming response", "helper") and plan.fate != "cut"
    if whole or (plan.fate == "cut" and plan.shape in ("create", "raw", "streaming response")):
        assert (call.exact, call.complete, call.trainable, call.error) == (True, True, True, None)
    assert call.trainable == (call.complete and call.exact)
    if plan.shape == "drop":
        assert not call.trainable


# CPython: a collection in one thread finds dropped generators of another thread's loop, which begins to close the first of them while the
# others are still to be finalized ("async generator already executing"). The bare client has it as often.
@pytest.mark.filterwarnings("ignore:Exception ignored in. <async_generator object :pytest.PytestUnraisableExceptionWarning")
@pytest.mark.timeout(max(300, CALLS // 5))
def test_random_schedules_lose_mix_and_alter_nothing(pool: ProcessPoolExecutor, clients: Any, no_faults: None) -> None:
    """Thousands of calls in every shape, with retries, errors, lost connections, timeouts and streams left anywhere."""
    ensure()
    if "processes" in KINDS:
        rllm.configure(processes=True)
    told: Counter[str] = Counter()
    try:
        for number in range(-(-CALLS // CALLS_PER_ROUND)):
            told += one_round(SEED + number, min(CALLS - number * CALLS_PER_ROUND, CALLS_PER_ROUND), clients, pool)
    finally:
        rllm.shutdown()
    print("\n" + ", ".join(f"{count:,} {name}" for name, count in sorted(told.items())) + ": none lost, none mixed, none altered")
    assert told["calls"] == max(1, CALLS // CALLS_PER_WORKFLOW) * CALLS_PER_WORKFLOW
    assert told["trained"] > told["calls"] // 3


def one_round(seed: int, calls: int, clients: Any, pool: ProcessPoolExecutor) -> Counter[str]:
    """Runs one schedule and compares every call with what the server sent; gives what there was of what."""
    schedule = Schedule(seed, calls)
    with ScriptedServer(schedule.answer) as server, ThreadPoolExecutor(CONCURRENT) as threads:
        episodes = list(threads.map(lambda work: run_workflow(server, clients, pool, *work), schedule.workflows))
        answered = len(server.calls())
    assert answered == sum(plan.sent for plan in schedule.plans.values())
    recorded: dict[str, ModelCall] = {}
    for (_, plans), episode in zip(schedule.workflows, episodes, strict=True):
        keys = [str(call.messages[0]["content"]) for call in episode.calls]
        assert sorted(keys) == sorted(plan.key for plan in plans), (plans[0].told, rllm.stats())
        assert len({call.span_id for call in episode.calls}) == len(plans)
        recorded |= dict(zip(keys, episode.calls, strict=True))
    assert recorded.keys() == schedule.plans.keys()
    for key, call in recorded.items():
        check(schedule.plans[key], call)
    told = Counter({"calls": len(recorded), "requests": answered, "trained": sum(call.trainable for call in recorded.values())})
    told["ids"] = sum(len(choice.token_ids or ()) for call in recorded.values() for choice in call.choices)
    told.update(f"calls in {kind}" for kind, plans in schedule.workflows for _ in plans)
    return told
