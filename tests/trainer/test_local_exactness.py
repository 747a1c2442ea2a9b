"""What the embedded server reports is what a plain transformers forward of the same ids gives, before and after swaps."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rllm_trainer._digest import file_digest
from rllm_trainer.engine.base import WeightsFile
from rllm_trainer.exceptions import ServerError
from rllm_trainer.models import resolve_model
from rllm_trainer.serving.base import Probe
from rllm_trainer.serving.local import LocalServer
from rllm_trainer.serving.proof import SwapNotProven

TOLERANCE = 1e-4
END_OF_TURN = 258

Reference = Callable[[Sequence[int], float], np.ndarray]

FAULTY = '''
"""The server with one fault of swapping put in at each swap; going back is sound."""
import msgspec

from rllm_trainer.serving._local import main as server
from rllm_trainer.serving._local.prefix_store import PrefixStore
from rllm_trainer.serving._local.runner import NativeRunner

use, clear = NativeRunner.use, PrefixStore.clear


def skipped(self, weights):
    use(self, self._weights)


def stale_head(self, weights):
    use(self, msgspec.structs.replace(weights, head=self._weights.head))


def stale_cache(self, weights):
    PrefixStore.clear = lambda self: None
    use(self, weights)
    PrefixStore.clear = clear


turns = iter([skipped, use, stale_head, use, stale_cache, use])
NativeRunner.use = lambda self, weights: next(turns)(self, weights)
server.main()
'''


@pytest.fixture(scope="module")
def tiny() -> Path:
    return resolve_model("tiny-qwen2")


@pytest.fixture(scope="module")
def llama() -> Path:
    return resolve_model("tiny-llama")


def started(model: Path, folder: Path, **settings: Any) -> Iterator[LocalServer]:
    server = LocalServer.start(model, run_dir=folder, name="policy", threads=1, max_model_len=1024, **settings)
    yield server
    server.close()


@pytest.fixture(scope="module")
def roomy(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    yield from started(tiny, tmp_path_factory.mktemp("roomy"))


@pytest.fixture(scope="module")
def tight(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    """With memory for the keys and values of 2,400 tokens."""
    yield from started(llama, tmp_path_factory.mktemp("tight"), kv_bytes=2400 * 2 * 2 * 32 * 4)


@pytest.fixture(scope="module")
def faulty(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    folder = tmp_path_factory.mktemp("faulty")
    (folder / "faulty_server.py").write_text(FAULTY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        yield from started(tiny, folder, module="faulty_server")


@pytest.fixture
def as_started(roomy: LocalServer, tiny: Path) -> Iterator[LocalServer]:
    """The roomy server, back at its first weights after the test."""
    yield roomy
    roomy.swap(weights_file(tiny / "model.safetensors", 0))


def reference(folder: Path, weights: Path | None = None) -> Reference:
    """The logprob of each token given the ones before it, computed by transformers; NaN first."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if weights is not None:
        model.load_state_dict(load_file(weights), strict=False)
        model.tie_weights()

    def logprobs(ids: Sequence[int], temperature: float) -> np.ndarray:
        with torch.inference_mode():
            logits = model(torch.tensor([list(ids)])).logits[0, :-1] / temperature
            values = torch.log_softmax(logits, -1).gather(1, torch.tensor(list(ids[1:])).unsqueeze(1)).squeeze(1)
        return np.concatenate([[np.nan], values.numpy()])

    return logprobs


def changed_weights(folder: Path, path: Path, version: int, scale: float = 0.05) -> WeightsFile:
    """The folder's weights, each moved by noise, in one file."""
    torch.manual_seed(version)
    tensors = {name: t + scale * torch.randn_like(t) * t.std() for name, t in load_file(folder / "model.safetensors").items()}
    save_file(tensors, path)
    return weights_file(path, version)


def weights_file(path: Path, version: int) -> WeightsFile:
    return WeightsFile(path=path, version=version, digest=file_digest(path), tensors=len(load_file(path)), num_bytes=path.stat().st_size)


async def post(server: LocalServer, path: str, *bodies: dict[str, Any]) -> list[dict[str, Any]]:
    headers = {"authorization": f"Bearer {server.api_key}"}
    async with httpx.AsyncClient(base_url=server.base_url, headers=headers, timeout=120, trust_env=False) as client:

        async def one(body: dict[str, Any]) -> dict[str, Any]:
            response = await client.post(path, json=body)
            assert response.status_code == 200, response.text
            return response.json()

        return await asyncio.gather(*(one(body) for body in bodies))


def replies(body: dict[str, Any]) -> Iterator[tuple[list[int], list[float]]]:
    """(ids, logprobs) of each choice of a chat response."""
    for choice in body["choices"]:
        yield choice["token_ids"], [entry["logprob"] for entry in choice["logprobs"]["content"]]


def chat(content: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    return {"messages": messages, "logprobs": True, "return_token_ids": True, "max_tokens": 24, **fields}


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_reported_logprobs_are_transformers_own(family: str, request: pytest.FixtureRequest) -> None:
    """At T = 0.7 and 1.0, in ragged batches, over cached prefixes, and at the first tokens of a second turn."""
    server = request.getfixturevalue({"qwen2": "roomy", "llama": "tight"}[family])
    expected = reference(request.getfixturevalue({"qwen2": "tiny", "llama": "llama"}[family]))
    first = [chat("count " * n, temperature=t, n=6, seed=n) for n, t in ((1, 0.7), (30, 1.0), (60, 0.7), (7, 1.0))]
    turns: list[list[int]] = []
    for asked, body in zip(first, asyncio.run(post(server, "/chat/completions", *first)), strict=True):
        prompt = body["prompt_token_ids"]
        for ids, logprobs in replies(body):
            assert logprobs == pytest.approx(expected(prompt + ids, asked["temperature"])[len(prompt) :], abs=TOLERANCE)
            turns.append([*prompt, *ids, END_OF_TURN, 10, 257, 65])
    asked = {"max_tokens": 8, "temperature": 0.7, "logprobs": 0, "return_token_ids": True, "seed": 1}
    bodies = asyncio.run(post(server, "/completions", *({**asked, "prompt": turn} for turn in turns)))
    for turn, body in zip(turns, bodies, strict=True):
        (choice,) = body["choices"]
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected(turn + choice["token_ids"], 0.7)[len(turn) :], abs=TOLERANCE)


def test_a_second_turn_computes_only_what_is_new(roomy: LocalServer) -> None:
    """Prompt and reply of the first turn come from the cache; the last sampled token and what follows are computed."""
    (body,) = asyncio.run(post(roomy, "/chat/completions", chat("two turns", ignore_eos=True)))
    ((ids, _),) = replies(body)
    turn = [*body["prompt_token_ids"], *ids, END_OF_TURN, 10]
    before = roomy.stats()["prompt_tokens_cached"]
    asyncio.run(post(roomy, "/completions", {"prompt": turn, "max_tokens": 1}))
    assert roomy.stats()["prompt_tokens_cached"] - before == len(turn) - 3


def test_a_sampled_end_of_turn_has_its_own_logprob(roomy: LocalServer, tiny: Path) -> None:
    """Replies that end by themselves report the end token's logprob like any other's."""
    expected = reference(tiny)
    (body,) = asyncio.run(post(roomy, "/chat/completions", chat("hi", n=128, temperature=1.0, max_tokens=20, seed=3)))
    prompt = body["prompt_token_ids"]
    ended = [(ids, logprobs) for ids, logprobs in replies(body) if ids[-1] == END_OF_TURN]
    assert ended
    for ids, logprobs in ended:
        assert logprobs == pytest.approx(expected(prompt + ids, 1.0)[len(prompt) :], abs=TOLERANCE)


def test_scores_are_transformers_own(roomy: LocalServer, tiny: Path) -> None:
    """Given rows of any length score as transformers scores them."""
    expected = reference(tiny)
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 261, n, np.int32) for n in (2, 90, 700, 33)]
    for temperature in (1.0, 0.7):
        for row, served in zip(rows, roomy.prompt_logprobs(rows, temperature=temperature), strict=True):
            assert served == pytest.approx(expected(row.tolist(), temperature), abs=TOLERANCE, nan_ok=True)


def test_tokens_follow_the_distribution(roomy: LocalServer, tiny: Path) -> None:
    """Over 4,096 draws of one token, each likely token comes as often as its probability says, at T = 0.7; top_p keeps to its nucleus."""
    expected = reference(tiny)
    prompt = [72, 101, 108, 108, 111]
    asked = {"prompt": prompt, "max_tokens": 1, "n": 128, "return_token_ids": True, "temperature": 0.7}
    bodies = [asyncio.run(post(roomy, "/completions", *({**asked, "seed": 8 * k + n} for n in range(4)))) for k in range(8)]
    drawn = [choice["token_ids"][0] for answers in bodies for body in answers for choice in body["choices"]]
    probabilities = np.exp([expected([*prompt, token], 0.7)[-1] for token in range(261)])
    counts = np.bincount(drawn, minlength=261)
    deviations = np.abs(counts - 4096 * probabilities) / np.sqrt(4096 * probabilities * (1 - probabilities))
    assert len(drawn) == 4096
    assert deviations[probabilities > 0.003].max() < 4.5
    in_nucleus = int((np.sort(probabilities)[::-1].cumsum() < 0.5).sum()) + 1
    (body,) = asyncio.run(post(roomy, "/completions", {**asked, "top_p": 0.5, "seed": 1}))
    assert {choice["token_ids"][0] for choice in body["choices"]} <= set(np.argsort(-probabilities)[:in_nucleus].tolist())


def test_memory_for_keys_and_values_can_run_short(tight: LocalServer, llama: Path) -> None:
    """With memory for few sequences, many long ones wait, are set back and computed again, and every logprob still holds."""
    expected = reference(llama)
    asked = [chat("count " * n, max_tokens=400, ignore_eos=True, seed=n) for n in range(12)]
    bodies = asyncio.run(post(tight, "/chat/completions", *asked))
    assert tight.stats()["given_up"] > 0
    for body in bodies:
        prompt = body["prompt_token_ids"]
        ((ids, logprobs),) = replies(body)
        assert len(ids) == 400
        assert logprobs == pytest.approx(expected(prompt + ids, 1.0)[len(prompt) :], abs=TOLERANCE)


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_a_swap_keeps_requests_and_stamps_their_tokens(family: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Sixteen long replies cross three swaps: none is lost, and each token's logprob is that of the version stamped on it."""
    server = request.getfixturevalue({"qwen2": "as_started", "llama": "tight"}[family])
    model = request.getfixturevalue({"qwen2": "tiny", "llama": "llama"}[family])
    files = [changed_weights(model, tmp_path / f"v{n}.safetensors", n) for n in (1, 2, 3)]
    versions = [reference(model), *(reference(model, file.path) for file in files)]

    async def until(holds: Callable[[dict[str, Any]], bool]) -> None:
        while not holds(await asyncio.to_thread(server.stats)):
            pass

    async def run() -> list[dict[str, Any]]:
        asked = [chat("count " * (n % 5), max_tokens=500, ignore_eos=True, seed=n) for n in range(16)]
        server.pause()
        swaps = server.stats()["swaps"]
        asking = asyncio.create_task(post(server, "/chat/completions", *asked))
        await until(lambda stats: stats["running"] + stats["waiting"] == 16)
        for count, file in enumerate(files, start=1):
            await asyncio.to_thread(server.pause, after_tokens=200)
            swapping = asyncio.create_task(asyncio.to_thread(server.swap, file))
            await until(lambda stats, done=swaps + count: stats["swaps"] == done)
            await asyncio.to_thread(server.pause, after_tokens=1)
            report = await swapping
            assert (report.version, report.proof, report.requests_in_flight) == (count, "digest", 16)
        server.resume()
        return await asking

    try:
        bodies = asyncio.run(asyncio.wait_for(run(), 120))
    finally:
        server.resume()
    for body in bodies:
        prompt = body["prompt_token_ids"]
        ((ids, logprobs),) = replies(body)
        spans = body["metadata"]["weight_versions"]
        assert (spans[0]["start"], spans[-1]["end"], len(ids)) == (0, 500, 500)
        assert spans[-1]["version"] == body["metadata"]["weight_version"] == "3"
        for span in spans:
            now = versions[int(span["version"])](prompt + ids, 1.0)[len(prompt) :][span["start"] : span["end"]]
            assert logprobs[span["start"] : span["end"]] == pytest.approx(now, abs=TOLERANCE)


def test_after_a_swap_the_new_weights_are_served_and_not_the_old(as_started: LocalServer, tiny: Path, tmp_path: Path) -> None:
    """Cached prompts give the new weights' logprobs after a swap; the proof by logprobs and the digest read back agree."""
    file = changed_weights(tiny, tmp_path / "new.safetensors", 1)
    old, new = reference(tiny), reference(tiny, file.path)
    asyncio.run(post(as_started, "/chat/completions", chat("cached", seed=1)))
    report = as_started.swap(file, probe=make_probe(old, new))
    assert (report.version, report.proof, as_started.version) == (1, "logprobs", 1)
    assert report.max_difference < TOLERANCE
    assert as_started.served_digest() == file.digest
    (body,) = asyncio.run(post(as_started, "/chat/completions", chat("cached", seed=1)))
    prompt = body["prompt_token_ids"]
    ((ids, logprobs),) = replies(body)
    assert logprobs == pytest.approx(new(prompt + ids, 1.0)[len(prompt) :], abs=TOLERANCE)
    assert np.abs(np.array(logprobs) - old(prompt + ids, 1.0)[len(prompt) :]).max() > 100 * TOLERANCE


def make_probe(old: Reference, new: Reference) -> Probe:
    rng = np.random.default_rng(1)
    rows = [rng.integers(0, 261, n, np.int32) for n in (120, 64)]
    as_float32 = [[side(row.tolist(), 1.0).astype(np.float32) for row in rows] for side in (old, new)]
    return Probe(rows=rows, old=as_float32[0], new=as_float32[1])


def test_what_is_not_proven_is_taken_back(faulty: LocalServer, tiny: Path, tmp_path: Path) -> None:
    """A real server whose swap is skipped, keeps the tied head, or keeps the prefix cache is caught each time, and serves the old weights
    again: their version, digest and logprobs."""
    file = changed_weights(tiny, tmp_path / "new.safetensors", 1)
    old = reference(tiny)
    probe = make_probe(old, reference(tiny, file.path))
    for words in ("still serves the old weights", "neither the old nor the new weights whole", "logprobs behind a cached prefix differ"):
        with pytest.raises(SwapNotProven, match=f"{words}.*; version 0 is served again"):
            faulty.swap(file, probe=probe)
        assert (faulty.version, faulty.stats()["version"]) == (0, 0)
        assert faulty.served_digest() == file_digest(tiny / "model.safetensors")
        served = faulty.prompt_logprobs(probe.rows)
        assert all(now == pytest.approx(was, abs=TOLERANCE, nan_ok=True) for now, was in zip(served, probe.old, strict=True))


def test_nothing_that_is_gone_is_gone_back_to(as_started: LocalServer, tiny: Path, tmp_path: Path) -> None:
    """One can go back once after a swap; not twice, and not after a file whose last tensor was refused, when the set before is spoiled."""
    old, new = weights_file(tiny / "model.safetensors", 0), changed_weights(tiny, tmp_path / "new.safetensors", 1)
    tensors = load_file(new.path)
    tensors[max(tensors)] = torch.full_like(tensors[max(tensors)], float("inf"))
    save_file(tensors, tmp_path / "bad.safetensors")
    as_started.swap_unproven(old)
    as_started.swap_unproven(new)
    assert as_started._go_back() == "version 0 is served again"
    assert as_started.served_digest() == old.digest
    assert "there is no set of weights to go back to" in as_started._go_back()
    as_started.swap_unproven(new)
    with pytest.raises(ServerError, match="a value that is not finite"):
        as_started.swap_unproven(weights_file(tmp_path / "bad.safetensors", 2))
    assert "there is no set of weights to go back to" in as_started._go_back()
    assert (as_started.stats()["version"], as_started.served_digest()) == (1, new.digest)


def test_a_change_too_small_to_tell_is_proven_by_digest(as_started: LocalServer, tiny: Path, tmp_path: Path) -> None:
    """Weights that move no logprob by ten times the noise are proven by the digest of what the server holds."""
    file = changed_weights(tiny, tmp_path / "new.safetensors", 1, scale=1e-7)
    assert file.digest != file_digest(tiny / "model.safetensors")
    assert as_started.swap(file, probe=make_probe(reference(tiny), reference(tiny, file.path))).proof == "digest"


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="this machine has no shared memory that files can be put in")
def test_a_file_that_is_written_over_is_read_again(as_started: LocalServer, tiny: Path) -> None:
    """Files in shared memory stay mapped and take turns: new bytes in the pages of old ones are what is served."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = Path(folder) / "weights.safetensors"
        for version in (1, 2, 3):
            changed = changed_weights(tiny, Path(folder) / "next", version)
            with path.open("r+b" if path.exists() else "wb") as opened:
                opened.write(changed.path.read_bytes())
            as_started.swap(msgspec.structs.replace(changed, path=path))
            assert as_started.served_digest() == changed.digest


def test_a_bad_file_changes_nothing(roomy: LocalServer, tiny: Path, tmp_path: Path) -> None:
    """Missing, unknown, misshapen and non-finite tensors, another digest, and no file at all are refused; the old weights stay served."""
    row = [np.arange(40, dtype=np.int32)]
    before = roomy.prompt_logprobs(row)[0]
    good = load_file(tiny / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    bad = {
        "missing": ({n: t for n, t in good.items() if n != name}, "1 missing"),
        "unknown": ({**good, "model.extra.weight": torch.ones(2)}, "1 unknown"),
        "shape": ({**good, name: good[name][:-1].clone()}, r"got model\.layers\.1\.mlp\.up_proj\.weight of shape \(127, 64\)"),
        "untied": ({**good, "lm_head.weight": torch.ones(261, 64)}, "this model ties them"),
        "nan": ({**good, name: torch.full((128, 64), float("nan"))}, "a value that is not finite"),
    }
    for kind, (tensors, words) in bad.items():
        save_file(tensors, tmp_path / f"{kind}.safetensors")
        with pytest.raises(ServerError, match=words):
            roomy.swap(weights_file(tmp_path / f"{kind}.safetensors", 1))
    wrong = WeightsFile(path=tiny / "model.safetensors", version=1, digest="0" * 64, tensors=1, num_bytes=1)
    with pytest.raises(ServerError, match="expected 0000"):
        roomy.swap(wrong)
    with pytest.raises(ServerError, match="holds no safetensors file"):
        roomy.swap(WeightsFile(path=tmp_path / "none.safetensors", version=1, digest="", tensors=1, num_bytes=1))
    assert roomy.version == 0
    assert roomy.prompt_logprobs(row)[0] == pytest.approx(before, abs=1e-6, nan_ok=True)


def test_an_adapter_is_merged(as_started: LocalServer, tiny: Path, tmp_path: Path) -> None:
    """A LoRA file is served as base + alpha / r * B A, whatever adapter was served before."""
    torch.manual_seed(0)
    target = "model.layers.0.self_attn.q_proj"
    base = load_file(tiny / "model.safetensors")
    for version in (1, 2):
        a, b = torch.randn(4, 64) * 0.1, torch.randn(64, 4) * 0.1
        names = {f"base_model.model.{target}.lora_A.weight": a, f"base_model.model.{target}.lora_B.weight": b}
        path = tmp_path / f"adapter{version}.safetensors"
        save_file(names, path, metadata={"lora_alpha": "8"})
        file = WeightsFile(path=path, version=version, digest=file_digest(path), tensors=2, num_bytes=1, lora=True)
        save_file({**base, f"{target}.weight": base[f"{target}.weight"] + 2.0 * b @ a}, tmp_path / "merged.safetensors")
        assert as_started.swap(file).version == version
        row = np.arange(60, dtype=np.int32)
        merged = reference(tiny, tmp_path / "merged.safetensors")(row.tolist(), 1.0)
        assert as_started.prompt_logprobs([row])[0] == pytest.approx(merged, abs=TOLERANCE, nan_ok=True)


@pytest.mark.slow
def test_nothing_is_lost_under_many_swaps(as_started: LocalServer, tiny: Path, tmp_path: Path) -> None:
    """64 concurrent streams over 100 swaps: every stream comes to its end with every token stamped, in order and without a gap."""
    files = [changed_weights(tiny, tmp_path / f"v{n}.safetensors", n) for n in (1, 2)]
    headers = {"authorization": f"Bearer {as_started.api_key}"}

    async def stream(client: httpx.AsyncClient, seed: int, done: asyncio.Event) -> int:
        finished = 0
        while not (done.is_set() and finished):
            body = {**chat(f"stream {seed}", max_tokens=100, ignore_eos=True, seed=seed), "stream": True}
            async with client.stream("POST", "/chat/completions", json=body) as response:
                chunks = [json.loads(line[6:]) for line in (await response.aread()).split(b"\n") if line.startswith(b"data: {")]
            ids = [token for chunk in chunks for choice in chunk["choices"] for token in choice["token_ids"]]
            spans = chunks[-1]["metadata"]["weight_versions"]
            assert len(ids) == spans[-1]["end"] == 100
            assert [span["start"] for span in spans] == [0, *(span["end"] for span in spans[:-1])]
            versions = [int(span["version"]) for span in spans]
            assert versions == sorted(set(versions))
            finished += 1
        return finished

    async def swaps(done: asyncio.Event) -> None:
        for version in range(1, 101):
            file = msgspec.structs.replace(files[version % 2], version=version)
            await asyncio.to_thread(as_started.swap_unproven, file)
        done.set()

    async def run() -> list[int]:
        done = asyncio.Event()
        limits = httpx.Limits(max_connections=64)
        async with httpx.AsyncClient(base_url=as_started.base_url, headers=headers, timeout=250, trust_env=False, limits=limits) as client:
            finished, _ = await asyncio.gather(asyncio.gather(*(stream(client, n, done) for n in range(64))), swaps(done))
            return finished

    assert min(asyncio.run(run())) >= 1
    stats = as_started.stats()
    assert (stats["version"], stats["running"], stats["waiting"]) == (100, 0, 0)
