"""The embedded server's replies in flight at a swap: kept, waited for, or ended; and nothing is lost, however often weights change."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from rllm_trainer._digest import file_digest
from rllm_trainer.engine.base import WeightsFile
from rllm_trainer.models import resolve_model
from rllm_trainer.serving.local import LocalServer
from rllm_trainer.serving_settings import InFlight

STREAMS = 64
SWAPS = 100
TOKENS = 120


@contextmanager
def serving(tmp_path: Path, in_flight: InFlight) -> Iterator[LocalServer]:
    server = LocalServer.start(
        resolve_model("tiny-qwen2"), run_dir=tmp_path, name="policy", threads=1, max_model_len=256, max_waiting=256, in_flight=in_flight
    )
    try:
        yield server
    finally:
        server.close()


@pytest.fixture(scope="module")
def file() -> Callable[[int], WeightsFile]:
    """Version -> the same weights under that version."""
    path = resolve_model("tiny-qwen2") / "model.safetensors"
    first = WeightsFile(path=path, version=1, digest=file_digest(path), tensors=0, num_bytes=path.stat().st_size)
    return lambda version: msgspec.structs.replace(first, version=version)


def asked(**fields: Any) -> dict[str, Any]:
    body = {"model": "policy", "prompt": [65, 66, 67], "max_tokens": TOKENS, "ignore_eos": True, "return_token_ids": True, "logprobs": 0}
    return {**body, "seed": 1, **fields}


def key(server: LocalServer) -> dict[str, str]:
    return {"authorization": f"Bearer {server.api_key}"}


def client_of(server: LocalServer) -> httpx.Client:
    return httpx.Client(base_url=server.base_url, headers=key(server), timeout=120, trust_env=False)


def pause(server: LocalServer, after_tokens: int) -> None:
    server._call("POST", "/rllm/pause", {"after_tokens": after_tokens})


def resume(server: LocalServer) -> None:
    server._call("POST", "/rllm/resume")


def test_nothing_is_lost_under_64_streams_over_100_swaps(tmp_path: Path, file: Callable[[int], WeightsFile]) -> None:
    """Every stream ends with all of its tokens, each with a logprob and exactly one version, and the versions only rise."""

    async def stream(client: httpx.AsyncClient, seed: int) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        async with client.stream("POST", "/completions", json=asked(seed=seed, stream=True)) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    events.append(json.loads(line[6:]))
        return events

    async def run(server: LocalServer) -> list[list[dict[str, Any]]]:
        limits = httpx.Limits(max_connections=STREAMS)
        async with httpx.AsyncClient(base_url=server.base_url, headers=key(server), timeout=240, trust_env=False, limits=limits) as client:
            streams = [asyncio.create_task(stream(client, seed)) for seed in range(STREAMS)]
            for version in range(1, SWAPS + 1):
                await asyncio.to_thread(server.swap_unproven, file(version))
            return await asyncio.gather(*streams)

    with serving(tmp_path, "keep") as server:
        told = asyncio.run(run(server))
        assert server.version == SWAPS
        assert server.stats()["cancelled"] == 0
    for events in told:
        choices = [event["choices"][0] for event in events if event["choices"]]
        assert sum(len(choice["token_ids"]) for choice in choices) == TOKENS
        assert sum(len(choice["logprobs"]["token_logprobs"]) for choice in choices) == TOKENS
        assert choices[-1]["finish_reason"] == "length"
        spans = next(event["metadata"]["weight_versions"] for event in reversed(events) if "metadata" in event)
        assert (spans[0]["start"], spans[-1]["end"]) == (0, TOKENS)
        assert all(one["end"] == other["start"] for one, other in pairwise(spans))
        versions = [int(span["version"]) for span in spans]
        assert versions == sorted(set(versions))


def test_wait_lets_replies_end_under_the_old_weights(tmp_path: Path, file: Callable[[int], WeightsFile]) -> None:
    """The swap comes after the reply in flight; none is sampled by two versions."""
    with serving(tmp_path, "wait") as server, ThreadPoolExecutor(3) as pool, client_of(server) as client:
        pause(server, 0)
        first = pool.submit(client.post, "/completions", json=asked())
        while server.stats()["waiting"] + server.stats()["running"] < 1:
            pass
        swap = pool.submit(server.swap_unproven, file(1))
        resume(server)
        second = pool.submit(client.post, "/completions", json=asked(seed=2))
        assert swap.result(120).version == 1
        answers = [one.result(120).json() for one in (first, second)]
    spans = [answer["metadata"]["weight_versions"] for answer in answers]
    assert [len(answer["choices"][0]["token_ids"]) for answer in answers] == [TOKENS, TOKENS]
    assert all(len(told) == 1 for told in spans)
    assert spans[0][0]["version"] == "0"


def test_abort_ends_replies_as_they_are(tmp_path: Path, file: Callable[[int], WeightsFile]) -> None:
    """What was sampled is there with its logprobs, the reason is ``abort``, and the next request is served by the new weights."""
    with serving(tmp_path, "abort") as server, ThreadPoolExecutor(1) as pool, client_of(server) as client:
        pause(server, 0)
        asking = pool.submit(lambda: client.post("/completions", json=asked(stream=True)).text)
        while server.stats()["waiting"] + server.stats()["running"] < 1:
            pass
        pause(server, 20)
        server.swap_unproven(file(1))
        events = [json.loads(line[6:]) for line in asking.result(120).splitlines() if line.startswith("data: {")]
        resume(server)
        after = client.post("/completions", json=asked()).json()
    choices = [event["choices"][0] for event in events if event["choices"]]
    assert choices[-1]["finish_reason"] == "abort"
    assert sum(len(choice["token_ids"]) for choice in choices) == sum(len(c["logprobs"]["token_logprobs"]) for c in choices) == 20
    assert after["metadata"]["weight_versions"] == [{"version": "1", "start": 0, "end": TOKENS}]
