"""What the servers behind the gateway get, byte by byte, and what becomes of a client that takes no bytes."""

from __future__ import annotations

import gzip
import json
import socket
import socketserver
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from rllm_trace.gateway import Gateway, Upstream
from rllm_trace.gateway._gateway import Limits
from rllm_trace.testing import Reply, ReplyChoice

BODY = b'{"model": "m",  "messages": []}'


class Wire(socketserver.ThreadingTCPServer):
    """Keeps each request as it came, and gives the same answer to all."""

    daemon_threads = True
    answer = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\nset-cookie: a=b\r\n\r\n{}"

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.heads: list[bytes] = []
        self.bodies: list[bytes] = []


class Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        server: Any = self.server
        while (line := self.rfile.readline()) not in (b"", b"\r\n"):
            head = line
            while (line := self.rfile.readline()) != b"\r\n":
                head += line
            length = next((int(line.split(b":")[1]) for line in head.splitlines() if line.lower().startswith(b"content-length:")), 0)
            server.heads.append(head)
            server.bodies.append(self.rfile.read(length))
            self.wfile.write(server.answer)


@pytest.fixture
def wire() -> Iterator[Wire]:
    with Wire() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def gateway(wire: Wire) -> Iterator[Gateway]:
    with Gateway(upstream=Upstream(base_url=f"http://127.0.0.1:{wire.server_address[1]}/v1", api_key="sk-up")) as gateway:
        yield gateway


def asked(gateway: Gateway, path: str = "/chat/completions", body: bytes = BODY, *, method: str = "POST", **headers: str) -> bytes:
    """What a client that adds nothing gets: its head is the one given here."""
    at = httpx.URL(gateway.base_url)
    with socket.create_connection((at.host, at.port or 0), 30) as client:
        lines = [f"{method} {at.path}{path} HTTP/1.1", "host: h", f"authorization: Bearer {gateway.token}"]
        lines += [f"content-length: {len(body)}"] if body else []
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        client.sendall("\r\n".join([*lines, "connection: close", "", ""]).encode() + body)
        received = b""
        while piece := client.recv(65_536):
            received += piece
    return received


def test_a_request_goes_out_as_its_client_wrote_it(wire: Wire, gateway: Gateway) -> None:
    """No header is added but the host, the length, the server's key and that the answer is to come plain; the address is not rewritten."""
    asked(gateway, "/chat/completions?a=%2Fb&c=d%20e", x_mine="Ünï")
    (head,) = wire.heads
    first, *lines = head.decode().splitlines()
    assert first == "POST /v1/chat/completions?a=%2Fb&c=d%20e HTTP/1.1"
    assert sorted(line.lower() for line in lines) == [
        "accept-encoding: identity",
        "authorization: bearer sk-up",
        f"content-length: {len(BODY)}",
        f"host: 127.0.0.1:{wire.server_address[1]}",
        "x-mine: ünï",
    ]
    assert wire.bodies == [BODY]


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_what_has_no_body_goes_out_without_one(wire: Wire, gateway: Gateway, method: str) -> None:
    """No length is added to the request, and the answer to a HEAD says the length that the server says."""
    if method == "HEAD":
        wire.answer = b"HTTP/1.1 200 OK\r\ncontent-length: 1234\r\n\r\n"
    answer = asked(gateway, "/models", b"", method=method).lower()
    assert b"content-length" not in wire.heads[0].lower()
    assert (b"content-length: 1234" if method == "HEAD" else b"content-length: 2") in answer


def test_a_cookie_of_one_answer_goes_with_no_other_request(wire: Wire, gateway: Gateway) -> None:
    """Clients share the gateway's connections, and nothing else."""
    asked(gateway)
    asked(gateway)
    assert len(wire.heads) == 2
    assert not any(b"cookie" in head.lower() for head in wire.heads)


def test_a_body_of_megabytes_goes_out_whole(wire: Wire, gateway: Gateway) -> None:
    """With its length."""
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * 3_000_000}]}).encode()
    asked(gateway, body=body)
    assert wire.bodies == [body]


def test_a_redirect_is_the_clients_to_follow(wire: Wire, gateway: Gateway) -> None:
    """The gateway would take the server's key elsewhere."""
    wire.answer = b"HTTP/1.1 307 Temporary Redirect\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n"
    answer = asked(gateway)
    assert answer.startswith(b"HTTP/1.1 307")
    assert b"location: http://127.0.0.1:1/" in answer.lower()


def test_a_compressed_answer_passes_as_it_came(wire: Wire, gateway: Gateway) -> None:
    """A server that compresses unasked has its bytes and its header passed on."""
    data = gzip.compress(b'{"choices": []}')
    wire.answer = (
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(data) + data
    )
    head, _, body = asked(gateway).partition(b"\r\n\r\n")
    assert b"content-encoding: gzip" in head.lower()
    assert body == data


def test_a_client_that_takes_nothing_ends_its_exchange(behind: Any, recording: Any) -> None:
    """It has asked for a stream, and reads none of it: after the silence that is granted its call has failed, and no sample comes of it."""
    long = ReplyChoice(text="x" * 64_000_000, token_ids=list(range(64)), logprobs=[-1.0] * 64)
    _, gateway = behind([Reply(choices=[long])], limits=Limits(silence=1.0))
    ended = threading.Event()

    def app() -> None:
        at = httpx.URL(gateway.url_for())
        body = json.dumps({"model": "m", "messages": [], "stream": True}).encode()
        lines = [f"POST {at.path}/chat/completions HTTP/1.1", "host: h", f"authorization: Bearer {gateway.token}"]
        with socket.create_connection((at.host, at.port or 0), 30) as client:
            client.sendall("\r\n".join([*lines, f"content-length: {len(body)}", "", ""]).encode() + body)
            while not gateway.counts.get("refused"):
                ended.wait(0.05)

    call = recording.call(app)
    assert (call.complete, call.exact, call.trainable) == (False, False, False)
