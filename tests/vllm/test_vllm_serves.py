"""A real vLLM behind the door: its wire, its exactness, and swaps that are proven or caught."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from rllm_trace.clients._decode import Keep, read_reply
from rllm_trainer.engine.base import WeightsFile
from rllm_trainer.exceptions import ServerError
from rllm_trainer.serving.base import CONTINUED, Continues, Probe
from rllm_trainer.serving.proof import SwapNotProven, judge
from rllm_trainer.serving.remote import DoorServer
from rllm_trainer.types import Int32

Write = Callable[[dict[str, Any], int], WeightsFile]

HELLO = [{"role": "user", "content": "hello there"}]
CLOSE = 1e-4
"""Nats between two float32 programs."""


def http(server: DoorServer) -> httpx.Client:
    return httpx.Client(base_url=server.base_url, headers={"authorization": f"Bearer {server.api_key}"}, timeout=120, trust_env=False)


def direct(server: DoorServer, run_dir: Path) -> httpx.Client:
    """Past the door, as only the owner of its folder can."""
    return httpx.Client(transport=httpx.HTTPTransport(uds=str(run_dir / "vllm" / "vllm.sock")), base_url="http://vllm", timeout=120)


def chat(server: DoorServer, *, reference: str | None = None, **fields: Any) -> dict[str, Any]:
    """``reference``: episode and trajectory that the call belongs to."""
    headers = {} if reference is None else {"x-rllm-conversation": reference}
    asked = {"model": server.model, "messages": HELLO, "max_tokens": 16, "logprobs": True, "return_token_ids": True, "seed": 3, **fields}
    with http(server) as client:
        response = client.post("/chat/completions", json=asked, headers=headers)
    assert response.status_code == 200, response.text
    return response.json()


def logprobs_of(choice: dict[str, Any]) -> list[float]:
    return [entry["logprob"] for entry in choice["logprobs"]["content"]]


def apart(one: list[Any], other: list[Any]) -> float:
    return max(float(np.nanmax(np.abs(a - b))) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_ids_and_logprobs_are_the_models_own(vllm: DoorServer, reference: Any, temperature: float) -> None:
    """Sampled ids with the logprobs at the temperature that was used, equal to transformers' within 1e-4."""
    current(vllm, reference)
    answer = chat(vllm, temperature=temperature, n=2)
    for choice in answer["choices"]:
        row = np.array([*answer["prompt_token_ids"], *choice["token_ids"]], np.int32)
        expected = reference.logprobs([row], temperature)[0][len(answer["prompt_token_ids"]) :]
        assert logprobs_of(choice) == pytest.approx(expected.tolist(), abs=CLOSE)


def test_given_tokens_are_scored(vllm: DoorServer, reference: Any, rows: list[Int32]) -> None:
    """Prompt logprobs are the model's own."""
    current(vllm, reference)
    assert apart(vllm.prompt_logprobs(rows), reference.logprobs(rows)) < CLOSE


def test_a_stream_tells_what_the_whole_reply_tells(vllm: DoorServer) -> None:
    """The same seed gives the same ids; ids, logprobs and versions are in the events."""
    whole = chat(vllm)
    with http(vllm) as client, client.stream("POST", "/chat/completions", json=_asked(vllm) | {"stream": True}) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    events = [json.loads(line) for line in lines]
    choices = [event["choices"][0] for event in events if event["choices"]]
    assert [i for choice in choices for i in choice.get("token_ids") or ()] == whole["choices"][0]["token_ids"]
    assert events[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert events[-1]["metadata"] == whole["metadata"]


def test_a_chat_is_continued_from_its_own_ids(vllm: DoorServer, reference: Any) -> None:
    """The second turn is computed from the ids of the first, to the token, though the client changed the reply's ends; streams, too."""
    current(vllm, reference)
    assert isinstance(vllm, Continues)
    before = vllm.continuations()
    first = chat(vllm, reference="e/agent", temperature=1.5)
    said = first["choices"][0]["message"]["content"] or ""
    recorded = [*first["prompt_token_ids"], *first["choices"][0]["token_ids"]]
    messages = [*HELLO, {"role": "assistant", "content": f" {said.strip()}\n"}, {"role": "user", "content": "and then?"}]
    second = chat(vllm, reference="e/agent", messages=messages)
    prompt = second["prompt_token_ids"]
    assert prompt[: len(recorded)] == recorded
    assert len(prompt) > len(recorded)
    assert second["usage"]["prompt_tokens"] == len(prompt)
    (choice,) = second["choices"]
    row = np.array([*prompt, *choice["token_ids"]], np.int32)
    assert logprobs_of(choice) == pytest.approx(reference.logprobs([row])[0][len(prompt) :].tolist(), abs=CLOSE)
    asked = _asked(vllm) | {"messages": messages, "stream": True}
    headers = {"x-rllm-conversation": "e/agent"}
    with http(vllm) as client, client.stream("POST", "/chat/completions", json=asked, headers=headers) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    told = read_events(lines[:-1])
    assert told == choice["token_ids"]
    assert vllm.continuations() - before == {CONTINUED: 2}


def read_events(lines: list[str]) -> list[int]:
    """The ids of a stream."""
    choices = [choice for line in lines for choice in json.loads(line)["choices"]]
    return [i for choice in choices for i in choice.get("token_ids") or ()]


def test_seeded_requests_of_many_lengths_run_together(vllm: DoorServer) -> None:
    """Training gives every call a seed; a batch of them is served."""

    async def ask() -> list[int]:
        headers = {"authorization": f"Bearer {vllm.api_key}"}
        async with httpx.AsyncClient(base_url=vllm.base_url, headers=headers, timeout=120, trust_env=False) as client:
            bodies = [_asked(vllm) | {"seed": i, "messages": [{"role": "user", "content": "word " * (3 * i + 1)}]} for i in range(48)]
            return [response.status_code for response in await asyncio.gather(*(client.post("/chat/completions", json=b) for b in bodies))]

    assert set(asyncio.run(ask())) == {200}


def test_a_swap_is_proven_and_exact(vllm: DoorServer, reference: Any, rows: list[Int32], write: Write) -> None:
    """Old weights before, new ones after, by logprobs; the tied head moves with the rest."""
    old = current(vllm, reference).logprobs(rows)
    file = write(reference.change(1), vllm.version + 1)
    report = vllm.swap(file, probe=Probe(rows=rows, old=old, new=reference.logprobs(rows)))
    assert report.proof == "logprobs"
    assert report.max_difference < CLOSE
    assert chat(vllm)["metadata"]["weight_version"] == str(file.version)
    remember(vllm, reference)


def test_calls_in_flight_are_kept_and_say_which_token_is_whose(vllm: DoorServer, reference: Any, write: Write) -> None:
    """Replies that span a swap are exact on both sides of it, at the token that the server names."""
    current(vllm, reference)
    before = vllm.version
    old_tensors = dict(reference.tensors)
    file = write(reference.change(2), before + 1)
    new_tensors = reference.tensors

    async def ask() -> list[dict[str, Any]]:
        headers = {"authorization": f"Bearer {vllm.api_key}"}
        async with httpx.AsyncClient(base_url=vllm.base_url, headers=headers, timeout=900, trust_env=False) as client:
            body = _asked(vllm) | {"max_tokens": 700, "ignore_eos": True, "stream": False}
            calls = [asyncio.create_task(client.post("/chat/completions", json=body | {"seed": n})) for n in range(3)]
            async with client.stream("POST", "/chat/completions", json=body | {"stream": True}) as seen:
                events = seen.aiter_lines()
                for _ in range(60):
                    await anext(events)
                await asyncio.to_thread(vllm.swap, file)
                remember(vllm, reference)
                async for _ in events:
                    pass
            return [(await call).json() for call in calls]

    for answer in asyncio.run(ask()):
        spans = answer["metadata"]["weight_versions"]
        assert [span["version"] for span in spans] == [str(before), str(before + 1)]
        assert (spans[0]["start"], spans[0]["end"], spans[1]["end"]) == (0, spans[1]["start"], 700)
        choice, prompt = answer["choices"][0], answer["prompt_token_ids"]
        row, cut = np.array([*prompt, *choice["token_ids"]], np.int32), spans[1]["start"]
        for tensors, part in ((old_tensors, slice(0, cut)), (new_tensors, slice(cut, 700))):
            reference.model.load_state_dict(tensors, strict=False)
            reference.model.tie_weights()
            expected = reference.logprobs([row])[0][len(prompt) :]
            assert logprobs_of(choice)[part] == pytest.approx(expected[part].tolist(), abs=CLOSE)
        reply, _ = read_reply(json.dumps(answer).encode(), Keep(ids=True, logprobs=True))
        assert reply.version_spans == [(before, 0, cut), (before + 1, cut, 700)]


def test_refused_weights_leave_the_old_ones_served(vllm: DoorServer, reference: Any, rows: list[Int32], write: Write) -> None:
    """A file that lacks a tensor, has one of another shape, or is not there, changes nothing."""
    expected = current(vllm, reference).logprobs(rows)
    tensors = dict(reference.tensors)
    name = sorted(tensors)[0]
    for wrong in ({n: t for n, t in tensors.items() if n != name}, {**tensors, name: tensors[name][:-1].clone()}):
        with pytest.raises(ServerError, match="the old weights stay served"):
            vllm.swap(write(wrong, vllm.version + 1))
    with pytest.raises(ServerError, match="there is no safetensors file"):
        vllm.swap(WeightsFile(path=Path("/nowhere.safetensors"), version=9, digest="", tensors=0, num_bytes=0))
    assert apart(vllm.prompt_logprobs(rows), expected) < CLOSE


def test_a_missing_tied_head_is_caught(vllm: DoorServer, reference: Any, rows: list[Int32], write: Write) -> None:
    """vLLM's own reload leaves a tied output head at the old weights; the proof sees it."""
    old = current(vllm, reference).logprobs(rows)
    before = vllm.prompt_logprobs(rows)
    good = write(reference.change(3), vllm.version + 1)
    probe = Probe(rows=rows, old=old, new=reference.logprobs(rows))
    folder = good.path.parent / "reload"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(good.path.read_bytes())
    with direct(vllm, folder_of(vllm)) as client:
        asked = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        assert client.post("/collective_rpc", json=asked).status_code == 200
        client.post("/reset_prefix_cache")
    with pytest.raises(SwapNotProven, match="neither the old nor the new weights whole"):
        judge(probe, before, vllm.prompt_logprobs(rows))
    vllm.swap(good)
    assert judge(probe, before, vllm.prompt_logprobs(rows)).proof == "logprobs"
    remember(vllm, reference)


def test_a_skipped_swap_is_caught(vllm: DoorServer, reference: Any, rows: list[Int32], write: Write) -> None:
    """The right version with the old tensors."""
    old = current(vllm, reference).logprobs(rows)
    same = write(reference.tensors, vllm.version + 1)
    reference.change(4)
    probe = Probe(rows=rows, old=old, new=reference.logprobs(rows))
    with pytest.raises(SwapNotProven, match="it still serves the old weights"):
        vllm.swap(same, probe=probe)


def test_a_stale_cache_is_caught(vllm: DoorServer) -> None:
    """A prompt whose blocks survived is found in the cache, and that is what a swap is refused for."""
    row = list(range(1, 129)) * 3
    assert vllm._cached(row, "a salt of its own") == 0
    with pytest.raises(SwapNotProven, match=r"still took \d+ tokens of a prompt from the cache"):
        vllm._require_cleared(row, "a salt of its own")


def _asked(server: DoorServer) -> dict[str, Any]:
    return {"model": server.model, "messages": HELLO, "max_tokens": 16, "logprobs": True, "return_token_ids": True, "seed": 3}


_served: dict[int, dict[str, Any]] = {}


def remember(server: DoorServer, reference: Any) -> None:
    """What the server serves from here on, for the tests that follow."""
    _served[server.pid] = dict(reference.tensors)


def current(server: DoorServer, reference: Any) -> Any:
    """The reference, with the weights that the server serves."""
    tensors = _served.get(server.pid)
    if tensors is not None:
        reference.tensors = dict(tensors)
        reference.model.load_state_dict(tensors, strict=False)
        reference.model.tie_weights()
    return reference


def folder_of(server: DoorServer) -> Path:
    return Path(server._child.log_path).parent
