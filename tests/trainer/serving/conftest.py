"""Servers of other people's kinds, by script: the documented wire over real HTTP, and weights that can be told apart by their logprobs."""

from __future__ import annotations

import json
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

from rllm_trainer.serving.base import Probe

ROWS = [np.arange(1, 9, dtype=np.int32), np.arange(20, 26, dtype=np.int32)]


def logprob(token: int, weights: int) -> float:
    """What the scripted model says of a token under weights of that number."""
    return -1.0 - (token % 5) / 10 - weights / 4


def scores(row: list[int], weights: int) -> list[float | None]:
    return [None, *(logprob(token, weights) for token in row[1:])]


def probe(old: int, new: int) -> Probe:
    """The trainer's side of a swap from weights ``old`` to ``new``."""

    def of(weights: int) -> list[Any]:
        return [np.array([np.nan, *(logprob(int(t), weights) for t in row[1:])], np.float32) for row in ROWS]

    return Probe(rows=ROWS, old=of(old), new=of(new))


class Scripted:
    """A server on loopback. A subclass answers by path; what it got is in ``got``, in order."""

    def __init__(self) -> None:
        self.got: list[tuple[str, Any]] = []
        """(path with its query, body)."""
        self.headers: list[dict[str, str]] = []
        self.weights = 0
        self.version = "default"
        self.cached: set[str] = set()
        """Salts of prompts in the prefix cache."""
        self.tells_versions = True
        self.flushes = True
        """A swap empties the prefix cache."""
        self.stuck = threading.Event()
        """Not set: requests for replies wait."""
        self.stuck.set()
        self.entered: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.left: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.reply: dict[str, Any] | None = None
        """The whole answer to a chat; streams that ask for ids are then refused, as SGLang does."""
        scripted = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._answer(None)

            def do_POST(self) -> None:
                raw = self.rfile.read(int(self.headers.get("content-length") or 0))
                self._answer(json.loads(raw) if raw else None)

            def _answer(self, body: Any) -> None:
                scripted.got.append((self.path, body))
                scripted.headers.append({name.lower(): value for name, value in self.headers.items()})
                path = self.path.partition("?")[0]
                if path in ("/v1/chat/completions", "/inference/v1/chat/completions"):
                    self._chat(body)
                    return
                status, answer = scripted.answer(path, body, self.path.partition("?")[2])
                self._send(status, answer)

            def _chat(self, body: Any) -> None:
                scripted.entered.put("chat")
                if scripted.reply is not None:
                    refused = body.get("stream") and (body.get("return_token_ids") or body.get("return_prompt_token_ids"))
                    self._send(
                        *((400, {"message": "return_token_ids is not supported with streaming"}) if refused else (200, scripted.reply))
                    )
                    return
                if not body.get("stream"):
                    scripted.stuck.wait(20)
                    self._send(200, {"id": "c", "choices": [], "asked": body})
                    return
                self.send_response(200)
                self.send_header("content-type", "text/event-stream")
                self.send_header("connection", "close")
                self.end_headers()
                try:
                    self.wfile.write(b'data: {"first":1}\n\n')
                    self.wfile.flush()
                    while not scripted.stuck.wait(0.05):
                        self.wfile.write(b": waiting\n\n")
                        self.wfile.flush()
                    self.wfile.write(b"data: [DONE]\n\n")
                    self.wfile.flush()
                    scripted.left.put("whole")
                except OSError:
                    scripted.left.put("broken off")
                self.close_connection = True

            def _send(self, status: int, answer: Any) -> None:
                raw = b"" if answer is None else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def url(self) -> str:
        return self.origin + "/v1"

    def paths(self) -> list[str]:
        """Where it was asked, without what only asks."""
        return [path for path, _ in self.got]

    def answer(self, path: str, body: Any, query: str) -> tuple[int, Any]:
        raise NotImplementedError

    def text(self, body: Any) -> dict[str, Any]:
        """A text completion that scores given tokens, or says what of its prompt was cached."""
        prompt = body["prompt"]
        rows = prompt if isinstance(prompt[0], list) else [prompt]
        salt = body.get("cache_salt", "")
        usage = {"prompt_tokens_details": {"cached_tokens": 128 if salt in self.cached else 0}}
        if salt:
            self.cached.add(salt)
        choices = [{"index": i, "logprobs": {"token_logprobs": scores(row, self.weights)}} for i, row in enumerate(rows)]
        told = {"metadata": {"weight_version": self.version}} if self.tells_versions else {}
        return {"choices": choices[::-1], "usage": usage, **told}

    def taken(self, weights: int) -> None:
        """New weights are served."""
        self.weights = weights
        if self.flushes:
            self.cached.clear()

    def close(self) -> None:
        self.stuck.set()
        self._server.shutdown()
        self._server.server_close()


class ScriptedVllm(Scripted):
    """vLLM's routes; ``takes`` is what it makes of an update: the weights' number in the path, or nothing, or a refusal."""

    def __init__(self) -> None:
        super().__init__()
        self.takes: Callable[[int], int | None] = lambda asked: asked
        self.paused = False
        self.digest: str | None = None

    def answer(self, path: str, body: Any, query: str) -> tuple[int, Any]:
        match path:
            case "/health":
                return 200, None
            case "/v1/models":
                return 200, {"data": [{"id": "policy", "max_model_len": 64}]}
            case "/v1/completions":
                assert not self.paused or "echo" not in body
                return 200, self.text(body)
            case "/pause" | "/resume":
                self.paused = path == "/pause"
            case "/update_weight_version":
                self.version = body["new_version"]
            case "/start_weight_update":
                pass
            case "/update_weights":
                weights = self.takes(number_of(body["update_info"]["path"]))
                if weights is None:
                    return 500, {"error": "no such file; the old weights stay served"}
                self.taken(weights)
            case "/finish_weight_update":
                self.version = body["weight_version"]
            case "/weight_info":
                return 200, {"weight_version": self.version}
            case "/v1/load_lora_adapter":
                self.taken(int(body["lora_path"].rpartition("/")[2]))
            case "/collective_rpc":
                return 200, {"results": [{"digest": self.digest}]}
            case _:
                return 404, {"error": f"there is no {path}"}
        return 200, {}


class ScriptedSGLang(Scripted):
    """SGLang's routes."""

    success = True

    def answer(self, path: str, body: Any, query: str) -> tuple[int, Any]:
        match path:
            case "/health":
                return 200, None
            case "/v1/models":
                return 200, {"data": [{"id": "policy", "max_model_len": 64}]}
            case "/update_weight_version":
                self.version = body["new_version"]
            case "/pause_generation" | "/continue_generation":
                pass
            case "/update_weights_from_disk":
                if not self.success:
                    return 200, {"success": False, "message": "shapes differ", "num_paused_requests": 0}
                self.taken(int(body["weight_version"]))
                self.version = body["weight_version"]
                return 200, {"success": True, "message": "", "num_paused_requests": 0}
            case "/model_info":
                return 200, {"weight_version": self.version}
            case "/generate":
                return 200, self._generate(body)
            case _:
                return 404, {"error": f"there is no {path}"}
        return 200, {}

    def _generate(self, body: Any) -> Any:
        ids = body["input_ids"]
        if not isinstance(ids[0], list):
            salt = body.get("extra_key", "")
            found = 512 if salt in self.cached else 0
            self.cached.add(salt)
            return {"meta_info": {"cached_tokens": found}}
        return [
            {"meta_info": {"input_token_logprobs": [[p, t, None] for p, t in zip(scores(row, self.weights), row, strict=True)]}}
            for row in ids
        ]


class ScriptedFireworks(Scripted):
    """A hot-load deployment of two replicas; ``steps`` is what their states are at each look, the last one for good."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[list[dict[str, Any]]] = []
        self.identity = ""

    def answer(self, path: str, body: Any, query: str) -> tuple[int, Any]:
        match path:
            case "/hot_load/v1/models/hot_load":
                if body is not None:
                    self.identity = body["identity"]
                    return 200, {}
                state = self.steps.pop(0) if len(self.steps) > 1 else self.steps[0]
                if all(replica.get("readiness") for replica in state):
                    self.taken(number_of(self.identity))
                return 200, {"replicas": state}
            case "/inference/v1/completions":
                return 200, self.text(body)
            case _:
                return 404, {"error": f"there is no {path}"}


def number_of(name: str) -> int:
    """The number that ends a file's or snapshot's name."""
    return int(name.removesuffix(".safetensors").rpartition("-")[2])


def _running(make: Callable[[], Any]) -> Iterator[Any]:
    server = make()
    yield server
    server.close()


@pytest.fixture
def scripted_vllm() -> Iterator[ScriptedVllm]:
    yield from _running(ScriptedVllm)


@pytest.fixture
def scripted_sglang() -> Iterator[ScriptedSGLang]:
    yield from _running(ScriptedSGLang)


@pytest.fixture
def scripted_fireworks() -> Iterator[ScriptedFireworks]:
    yield from _running(ScriptedFireworks)


@pytest.fixture
def make_probe() -> Callable[[int, int], Probe]:
    """Old and new number of weights -> what a swap between them is proven with."""
    return probe


@pytest.fixture
def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@pytest.fixture
def server_key() -> str:
    return "the-servers-own-key"
