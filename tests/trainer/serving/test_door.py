"""The door before a server that is not ours: its token, what passes, how streams pass, and swaps over vLLM's wire."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rllm_trainer.engine.base import WeightsFile
from rllm_trainer.exceptions import ServerError
from rllm_trainer.serving.base import Probe
from rllm_trainer.serving.proof import SwapNotProven
from rllm_trainer.serving.remote import DoorServer
from rllm_trainer.serving.vllm import attach_vllm

MakeProbe = Callable[[int, int], Probe]


def weights(number: int, *, lora: bool = False, folder: Path = Path("/tmp")) -> WeightsFile:
    return WeightsFile(
        path=folder / f"w-{number}.safetensors", version=number, digest=f"digest-{number}", tensors=1, num_bytes=1, lora=lora
    )


@pytest.fixture
def server(scripted_vllm: Any, server_key: str, tmp_path: Path) -> Iterator[DoorServer]:
    server = attach_vllm(scripted_vllm.url, run_dir=tmp_path, key=server_key, lora=True)
    yield server
    server.close()


@pytest.fixture
def http(server: DoorServer) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {server.api_key}"}
    with httpx.Client(base_url=server.base_url, headers=headers, timeout=20, trust_env=False) as client:
        yield client


def test_only_what_serves_passes_and_only_with_the_token(server: DoorServer, http: httpx.Client, scripted_vllm: Any) -> None:
    """A development route, an unknown path and a call without the token reach nobody; the server's own key is not the door's."""
    asked = len(scripted_vllm.got)
    origin = server.base_url.removesuffix("/v1")
    assert http.post(origin + "/pause").status_code == 404
    assert http.post(origin + "/collective_rpc", json={"method": "x"}).status_code == 404
    assert http.post("/load_lora_adapter", json={}).status_code == 404
    assert httpx.post(server.base_url + "/chat/completions", json={}, trust_env=False).status_code == 401
    wrong = {"authorization": "Bearer the-servers-own-key"}
    assert httpx.post(server.base_url + "/chat/completions", json={}, headers=wrong, trust_env=False).status_code == 401
    assert len(scripted_vllm.got) == asked
    assert http.get("/models").json()["data"][0]["id"] == server.model == "policy"


def test_a_request_goes_through_as_it_is(http: httpx.Client, scripted_vllm: Any) -> None:
    """The body is the client's, the key the server's, the version at dispatch stands on the answer."""
    answer = http.post("/chat/completions", json={"model": "policy", "messages": [], "seed": 7}, headers={"cookie": "mine=1"})
    assert answer.json()["asked"] == {"model": "policy", "messages": [], "seed": 7}
    assert answer.headers["x-rllm-policy-version"] == "0"
    sent = scripted_vllm.headers[-1]
    assert sent["authorization"] == "Bearer the-servers-own-key"
    assert "cookie" not in sent


def test_a_stream_passes_as_it_comes(http: httpx.Client, scripted_vllm: Any) -> None:
    """The first event is there while the server still writes."""
    scripted_vllm.stuck.clear()
    with http.stream("POST", "/chat/completions", json={"stream": True}) as response:
        lines = response.iter_lines()
        assert next(lines) == 'data: {"first":1}'
        assert scripted_vllm.left.empty()
        scripted_vllm.stuck.set()
        assert "data: [DONE]" in list(lines)
    assert scripted_vllm.left.get(timeout=60) == "whole"


def test_a_client_that_leaves_ends_its_request(server: DoorServer, http: httpx.Client, scripted_vllm: Any) -> None:
    """The server sees the connection break, and the request is no longer inside."""
    scripted_vllm.stuck.clear()
    with http.stream("POST", "/chat/completions", json={"stream": True}) as response:
        lines = response.iter_lines()
        assert next(lines) == 'data: {"first":1}'
        assert server.stats()["inside"] == 1
    assert scripted_vllm.left.get(timeout=60) == "broken off"
    while server.stats()["inside"]:
        pass


def test_a_swap_is_pause_load_version_resume_and_proof(server: DoorServer, scripted_vllm: Any, make_probe: MakeProbe) -> None:
    """Caches are cleared with the pause, the version is read back, and the logprobs have moved as the trainer's."""
    before = len(scripted_vllm.got)
    report = server.swap(weights(1), probe=make_probe(0, 1))
    assert (report.version, report.proof, report.requests_in_flight) == (1, "logprobs", 0)
    assert report.max_difference < 1e-6
    assert server.version == 1
    assert [path for path in scripted_vllm.paths()[before:] if path != "/v1/completions"] == [
        "/pause?mode=keep&clear_cache=true",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/resume",
        "/weight_info",
    ]


def test_refused_weights_leave_the_old_ones(server: DoorServer, scripted_vllm: Any, make_probe: MakeProbe) -> None:
    """The server goes on, unpaused, at its version."""
    scripted_vllm.takes = lambda asked: None
    with pytest.raises(ServerError, match=r"did not take version 1.*the old weights stay served"):
        server.swap(weights(1), probe=make_probe(0, 1))
    assert not scripted_vllm.paused
    assert (server.version, server.stats()["version"]) == (0, 0)


def test_a_skipped_swap_is_caught(server: DoorServer, scripted_vllm: Any, make_probe: MakeProbe) -> None:
    """A server that says it has swapped and has not is told by its logprobs."""
    scripted_vllm.takes = lambda asked: scripted_vllm.weights
    with pytest.raises(SwapNotProven, match="it still serves the old weights"):
        server.swap(weights(1), probe=make_probe(0, 1))


def test_other_weights_are_caught(server: DoorServer, scripted_vllm: Any, make_probe: MakeProbe) -> None:
    """Neither the old nor the new weights."""
    scripted_vllm.takes = lambda asked: 9
    with pytest.raises(SwapNotProven, match="neither the old nor the new"):
        server.swap(weights(1), probe=make_probe(0, 1))


def test_what_is_not_proven_is_taken_back(server: DoorServer, scripted_vllm: Any, make_probe: MakeProbe) -> None:
    """Weights that were proven are loaded again where the next are not; before the first swap there are none to go back to."""
    sound = scripted_vllm.takes
    scripted_vllm.takes = lambda asked: 9
    with pytest.raises(SwapNotProven, match="it goes on with what it serves, as there is no file of the weights before version 1"):
        server.swap(weights(1), probe=make_probe(0, 1))
    scripted_vllm.takes = lambda asked: 0
    server.swap_unproven(weights(0))
    scripted_vllm.takes = sound
    server.swap(weights(1), probe=make_probe(0, 1))
    taken = iter([9, 1])
    scripted_vllm.takes = lambda asked: next(taken)
    with pytest.raises(SwapNotProven, match=r"neither the old nor the new.*; version 1 is served again"):
        server.swap(weights(2), probe=make_probe(1, 2))
    assert (server.version, server.stats()["version"], scripted_vllm.weights) == (1, 1, 1)


def test_a_stale_cache_is_caught(server: DoorServer, scripted_vllm: Any, make_probe: MakeProbe) -> None:
    """A prompt that was cached before the swap must not be found cached after it."""
    scripted_vllm.flushes = False
    with pytest.raises(SwapNotProven, match="took 128 tokens of a prompt from the cache of the old weights"):
        server.swap(weights(1), probe=make_probe(0, 1))


def test_a_change_too_small_to_tell_is_proven_by_digest(server: DoorServer, scripted_vllm: Any, make_probe: MakeProbe) -> None:
    """Where no token moves, the digest of what was received counts."""
    scripted_vllm.takes = lambda asked: 0
    scripted_vllm.digest = "digest-1"
    assert server.swap(weights(1), probe=make_probe(0, 0)).proof == "digest"
    with pytest.raises(SwapNotProven, match="holds tensors of digest digest-1, not digest-2"):
        server.swap(weights(2), probe=make_probe(0, 0))


def test_an_adapter_is_loaded_in_place_and_asked_for(
    server: DoorServer, http: httpx.Client, scripted_vllm: Any, make_probe: MakeProbe, tmp_path: Path
) -> None:
    """Its file is laid out with what its header says; from then on calls for the model are calls for the adapter."""
    import torch
    from safetensors.torch import save_file

    tensors = {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.zeros(4, 8)}
    save_file(tensors, tmp_path / "w-1.safetensors", {"r": "4", "lora_alpha": "8"})
    server.swap(weights(1, lora=True, folder=tmp_path), probe=make_probe(0, 1))
    asked = next(body for path, body in scripted_vllm.got if path == "/v1/load_lora_adapter")
    assert asked["load_inplace"] is True
    config = Path(asked["lora_path"], "adapter_config.json").read_text()
    assert '"r":4' in config
    assert '"target_modules":["q_proj"]' in config
    assert http.post("/chat/completions", json={"model": "policy", "messages": []}).json()["asked"]["model"] == "rllm-adapter"


def test_a_server_without_the_routes_of_a_swap_is_refused(scripted_sglang: Any, tmp_path: Path) -> None:
    """What is missing is said at the start."""
    scripted_sglang.answer = lambda path, body, query: (404, {}) if "version" in path else (200, {"data": [{"id": "m"}]})
    with pytest.raises(ServerError, match=r"cannot be given weights.*VLLM_SERVER_DEV_MODE=1"):
        attach_vllm(scripted_sglang.url, run_dir=tmp_path)


def test_calls_are_kept_over_a_swap_only_where_versions_are_told(scripted_vllm: Any, tmp_path: Path) -> None:
    """Else which token is whose could not be said; waiting for them is always exact."""
    scripted_vllm.tells_versions = False
    with pytest.raises(ServerError, match=r"does not say which weights sampled which token.*in_flight='wait'"):
        attach_vllm(scripted_vllm.url, run_dir=tmp_path)
    server = attach_vllm(scripted_vllm.url, run_dir=tmp_path, in_flight="wait")
    try:
        assert not server.capabilities.per_token_versions
        assert server.swap(weights(1)).version == 1
        assert "/pause?mode=wait&clear_cache=true" in scripted_vllm.paths()
    finally:
        server.close()


def test_a_server_that_does_not_answer_is_refused(free_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait has an end, and the message says where nobody was."""
    monkeypatch.setattr("rllm_trainer.serving.vllm._ASKED_WITHIN", 0.5)
    with pytest.raises(ServerError, match=f"vLLM at http://127.0.0.1:{free_port}/v1 cannot be used: it did not answer GET /health"):
        attach_vllm(f"http://127.0.0.1:{free_port}/v1", run_dir=tmp_path)
