"""SGLang, Fireworks and any OpenAI-compatible server: the documented wire of each, against servers that speak it."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from rllm_trace._decorators import workflow
from rllm_trace.clients import ensure
from rllm_trace.rollouts import rollout
from rllm_trace.routing import Route
from rllm_trainer.engine.base import WeightsFile
from rllm_trainer.exceptions import ServerError
from rllm_trainer.serving.base import Probe
from rllm_trainer.serving.fireworks import attach_fireworks
from rllm_trainer.serving.openai_compatible import attach_openai_compatible
from rllm_trainer.serving.proof import SwapNotProven
from rllm_trainer.serving.remote import DoorServer
from rllm_trainer.serving.sglang import attach_sglang
from rllm_trainer.serving_settings import FireworksSettings

MakeProbe = Callable[[int, int], Probe]

READY = {"readiness": True, "current_snapshot_identity": "run-000001", "loading_state": {"stage": "done"}}
BUSY = {
    "readiness": False,
    "current_snapshot_identity": "base",
    "loading_state": {"stage": "loading", "target_snapshot_identity": "run-000001"},
}
OLD_ERROR = {
    "readiness": False,
    "current_snapshot_identity": "base",
    "loading_state": {"stage": "error", "target_snapshot_identity": "run-0"},
}
ERROR = {
    "readiness": False,
    "current_snapshot_identity": "base",
    "loading_state": {"stage": "error", "target_snapshot_identity": "run-000001"},
}


def weights(folder: Path, number: int) -> WeightsFile:
    path = folder / f"w-{number}.safetensors"
    path.write_bytes(b"tensors")
    return WeightsFile(path=path, version=number, digest="", tensors=1, num_bytes=7)


def client(server: DoorServer) -> httpx.Client:
    return httpx.Client(base_url=server.base_url, headers={"authorization": f"Bearer {server.api_key}"}, timeout=20, trust_env=False)


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"old")
    return folder


@pytest.fixture
def sglang(scripted_sglang: Any, model_folder: Path, server_key: str, tmp_path: Path) -> Iterator[DoorServer]:
    server = attach_sglang(scripted_sglang.url, run_dir=tmp_path, model_folder=model_folder, key=server_key, most_noise=1e-3)
    yield server
    server.close()


def test_sglang_is_retracted_loaded_and_continued(sglang: DoorServer, scripted_sglang: Any, make_probe: MakeProbe, tmp_path: Path) -> None:
    """The folder that it loads has the new weights and all else of the model; the version it then says is compared."""
    before = len(scripted_sglang.got)
    report = sglang.swap(weights(tmp_path, 1), probe=make_probe(0, 1))
    assert (report.version, report.proof) == (1, "logprobs")
    control = [(path, body) for path, body in scripted_sglang.got[before:] if path != "/generate"]
    assert [path for path, _ in control] == ["/pause_generation", "/update_weights_from_disk", "/continue_generation", "/model_info"]
    assert control[0][1] == {"mode": "retract"}
    asked = control[1][1]
    folder = Path(asked.pop("model_path"))
    assert asked == {"weight_version": "1", "flush_cache": True, "abort_all_requests": False, "keep_pause": True}
    assert sorted(file.name for file in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert (folder / "model.safetensors").read_bytes() == b"tensors"


def test_sglang_that_fails_is_continued(sglang: DoorServer, scripted_sglang: Any, tmp_path: Path) -> None:
    """A load that did not succeed is an error with its message, and generation goes on."""
    scripted_sglang.success = False
    with pytest.raises(ServerError, match="SGLang did not take version 1: shapes differ"):
        sglang.swap(weights(tmp_path, 1))
    assert "/continue_generation" in scripted_sglang.paths()
    assert sglang.version == 0


def test_sglang_with_a_stale_cache_is_caught(sglang: DoorServer, scripted_sglang: Any, make_probe: MakeProbe, tmp_path: Path) -> None:
    """Tokens that come from the cache after a swap came from the old weights."""
    scripted_sglang.flushes = False
    with pytest.raises(SwapNotProven, match="took 512 tokens"):
        sglang.swap(weights(tmp_path, 1), probe=make_probe(0, 1))


def test_sglang_is_asked_for_ids_under_its_own_names(sglang: DoorServer) -> None:
    """``return_token_ids`` asks for the prompt's too."""
    with client(sglang) as http:
        asked = http.post("/chat/completions", json={"model": "policy", "messages": [], "return_token_ids": True}).json()["asked"]
        plain = http.post("/chat/completions", json={"model": "policy", "messages": []}).json()["asked"]
    assert asked["return_prompt_token_ids"] is True
    assert plain == {"model": "policy", "messages": []}


SGLANG_ANSWER = {
    "id": "chat-1",
    "object": "chat.completion",
    "created": 7,
    "model": "policy",
    "choices": [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": "sum",
                "reasoning_content": "two numbers",
                "tool_calls": [{"id": "a", "index": 0, "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}],
            },
            "logprobs": {"content": [{"token": "s", "bytes": [115], "logprob": -0.5, "top_logprobs": []}, {"token": "", "logprob": -0.25}]},
            "finish_reason": "tool_calls",
            "matched_stop": None,
            "prompt_token_ids": [1, 2, 3],
            "response_token_ids": [4, 5],
        },
        {
            "index": 1,
            "message": {"role": "assistant", "content": "no", "reasoning_content": None, "tool_calls": None},
            "logprobs": {"content": [{"token": "no", "bytes": [110], "logprob": -1.5, "top_logprobs": []}]},
            "finish_reason": "stop",
            "matched_stop": 151645,
            "prompt_token_ids": [1, 2, 3],
            "response_token_ids": [6],
        },
    ],
    "usage": {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6},
    "metadata": {"weight_version": "0", "weight_versions": [{"version": "0", "start": 0, "end": 2}]},
}


def recorded(server: DoorServer, *, stream: bool) -> tuple[Any, list[Any]]:
    """What the trainer records of one call of an app at the server, and what the app is given."""
    app = openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="its own", max_retries=0)
    route = Route(base_url=server.base_url, api_key=server.api_key, model="policy")
    asked: dict[str, Any] = {"model": "gpt-4o-mini", "messages": [{"role": "user", "content": "1 + 1"}], "n": 2}
    seen: list[Any] = []

    @workflow
    def solve() -> None:
        answer = app.chat.completions.create(**asked, stream=stream)
        seen.extend(answer if stream else [answer])

    ensure()
    with rollout(route=route) as handle:
        solve()
    (episode,) = handle.wait(20)
    return episode.calls[0], seen


def test_a_streamed_chat_at_sglang_is_recorded_as_an_unstreamed_one(sglang: DoorServer, scripted_sglang: Any) -> None:
    """SGLang refuses a stream with ids: the door asks for it whole, and the app gets a stream."""
    scripted_sglang.reply = SGLANG_ANSWER
    plain, _ = recorded(sglang, stream=False)
    streamed, chunks = recorded(sglang, stream=True)
    assert [choice.token_ids for choice in streamed.choices] == [[4, 5], [6]]
    assert (streamed.prompt_token_ids, streamed.exact, streamed.trainable) == ([1, 2, 3], True, True)
    assert streamed.choices == plain.choices
    assert (streamed.policy_version_start, streamed.policy_version_end) == (0, 0)
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices if choice.index == 0) == "sum"
    assert [call.function.arguments for chunk in chunks for choice in chunk.choices for call in choice.delta.tool_calls or ()] == [
        '{"x": 1}'
    ]
    assert not any("response_token_ids" in str(chunk) or choice.logprobs for chunk in chunks for choice in chunk.choices)
    asked = [body for path, body in scripted_sglang.got if path == "/v1/chat/completions"]
    assert [body["stream"] for body in asked if "stream" in body][-1] is False


def test_what_is_no_chat_completion_is_an_error_of_the_server(sglang: DoorServer, scripted_sglang: Any) -> None:
    """A stream is not made of anything else."""
    scripted_sglang.reply = {"choices": 3}
    with client(sglang) as http:
        answer = http.post("/chat/completions", json={"model": "policy", "messages": [], "return_token_ids": True, "stream": True})
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "server_answer")


@pytest.fixture
def fireworks(scripted_fireworks: Any, model_folder: Path, server_key: str, tmp_path: Path) -> Iterator[DoorServer]:
    deployment = FireworksSettings(
        model="accounts/a/models/m",
        deployment="accounts/a/deployments/d",
        bucket=str(tmp_path / "bucket"),
        base_url=scripted_fireworks.origin + "/inference/v1",
    )
    (tmp_path / "run").mkdir()
    server = attach_fireworks(
        deployment, run_dir=tmp_path / "run" / "logs", key=server_key, model_folder=model_folder, most_noise=1e-3, poll=0.01
    )
    yield server
    server.close()


def test_fireworks_is_ready_when_every_replica_is(
    fireworks: DoorServer, scripted_fireworks: Any, make_probe: MakeProbe, tmp_path: Path
) -> None:
    """The snapshot is whole in the bucket, its identity is asked for, and the wait ends with the last replica."""
    scripted_fireworks.steps = [[BUSY, BUSY], [READY, BUSY], [OLD_ERROR, READY], [READY, READY]]
    report = fireworks.swap(weights(tmp_path, 1), probe=make_probe(0, 1))
    assert (report.version, report.proof) == (1, "logprobs")
    loads = [
        (body, headers)
        for (path, body), headers in zip(scripted_fireworks.got, scripted_fireworks.headers, strict=True)
        if path == "/hot_load/v1/models/hot_load"
    ]
    assert loads[0][0] == {"identity": "run-000001", "reset_prompt_cache": True}
    assert [body for body, _ in loads[1:]] == [None] * 4
    sent = loads[0][1]
    assert sent["authorization"] == "Bearer the-servers-own-key"
    assert (sent["fireworks-model"], sent["fireworks-deployment"]) == ("accounts/a/models/m", "accounts/a/deployments/d")
    snapshot = tmp_path / "bucket" / "run-000001"
    assert sorted(file.name for file in snapshot.iterdir()) == ["config.json", "model.safetensors"]
    assert (snapshot / "model.safetensors").read_bytes() == b"tensors"


def test_an_error_of_our_snapshot_is_fatal(fireworks: DoorServer, scripted_fireworks: Any, tmp_path: Path) -> None:
    """The version stays, and the message has the replica's state."""
    scripted_fireworks.steps = [[BUSY, BUSY], [ERROR, BUSY]]
    with pytest.raises(ServerError, match=r"could not load the snapshot run-000001.*the old weights stay served"):
        fireworks.swap(weights(tmp_path, 1))
    assert fireworks.version == 0


def test_calls_end_before_fireworks_loads(fireworks: DoorServer, scripted_fireworks: Any, tmp_path: Path) -> None:
    """A call in flight is waited for, one that comes meanwhile waits at the door and is of the new version."""
    scripted_fireworks.steps = [[READY, READY]]
    scripted_fireworks.stuck.clear()

    def entered(seconds: float) -> bool:
        with contextlib.suppress(queue.Empty):
            return scripted_fireworks.entered.get(timeout=seconds) == "chat"
        return False

    with client(fireworks) as http, ThreadPoolExecutor(128) as pool:
        inside = [pool.submit(http.post, "/chat/completions", json={"model": "m"})]
        assert entered(20)
        swap = pool.submit(fireworks.swap, weights(tmp_path, 1))
        while True:  # the swap has begun when a call does not get through
            waits = pool.submit(http.post, "/chat/completions", json={"model": "m"})
            if not entered(2):
                break
            inside.append(waits)
        assert not any(path.startswith("/hot_load") for path in scripted_fireworks.paths())
        scripted_fireworks.stuck.set()
        assert swap.result(30).requests_in_flight == len(inside)
        assert {call.result(20).headers["x-rllm-policy-version"] for call in inside} == {"0"}
        assert (waits.result(20).status_code, waits.result(20).headers["x-rllm-policy-version"]) == (200, "1")


def test_the_key_is_in_no_file(fireworks: DoorServer, server_key: str, tmp_path: Path, scripted_fireworks: Any) -> None:
    """Neither in a log nor in the process list."""
    scripted_fireworks.steps = [[ERROR, ERROR]]
    with pytest.raises(ServerError):
        fireworks.swap(weights(tmp_path, 1))
    for file in tmp_path.rglob("*"):
        assert not file.is_file() or server_key.encode() not in file.read_bytes()
    assert server_key.encode() not in Path(f"/proc/{fireworks.pid}/cmdline").read_bytes()
    assert server_key.encode() not in Path(f"/proc/{fireworks.pid}/environ").read_bytes()


def test_any_server_is_asked_and_never_given_weights(scripted_vllm: Any, server_key: str, tmp_path: Path) -> None:
    """Its one model is found; it has no version, no scores and no swap, and says so."""
    server = attach_openai_compatible(scripted_vllm.url, run_dir=tmp_path, key=server_key)
    try:
        assert server.model == "policy"
        assert not any(getattr(server.capabilities, name) for name in server.capabilities.__struct_fields__)
        with client(server) as http:
            answer = http.post("/chat/completions", json={"model": "policy"})
        assert answer.json()["asked"] == {"model": "policy"}
        assert "x-rllm-policy-version" not in answer.headers
        with pytest.raises(ServerError, match="cannot be given weights"):
            server._call("swap", {"path": "/x", "version": 1})
    finally:
        server.close()


def test_a_server_of_many_models_needs_a_name(scripted_vllm: Any, tmp_path: Path) -> None:
    """The error lists what there is."""
    scripted_vllm.answer = lambda path, body, query: (200, {"data": [{"id": "a"}, {"id": "b"}]})
    with pytest.raises(ServerError, match=r"lists 2 models \(a, b\); name one"):
        attach_openai_compatible(scripted_vllm.url, run_dir=tmp_path)
