"""Over HTTP to another process and back: real servers, real clients, ids that say what was asked."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import aiohttp
import httpx
import pytest
import requests

import rllm_trace as rllm
from rllm_trace.episode_receiver import EpisodeReceiver
from rllm_trace.exceptions import ConfigurationError
from rllm_trace.http_hops import Hop
from rllm_trace.middleware import WSGIMiddleware
from rllm_trace.testing import ScriptedServer

SERVER = """
import asyncio, os, socket, sys
import openai, uvicorn
import rllm_trace as rllm
from rllm_trace.exporters import OTLPExporter
from rllm_trace.middleware import ASGIMiddleware

rllm.configure(exporters=[OTLPExporter(tokens=True)], capture_content=True, tokens=True)
client = openai.AsyncOpenAI(base_url=os.environ["APP_MODEL"], api_key="scripted", max_retries=0, timeout=300)

async def app(scope, receive, send):
    asked = scope["path"].strip("/")
    with rllm.agent("remote"):
        await client.chat.completions.create(model="m", messages=[{"role": "user", "content": asked}])
    seen = dict(scope["headers"]).get(b"traceparent", b"none")
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
    await send({"type": "http.response.body", "body": seen})

listening = socket.create_server(("127.0.0.1", 0), backlog=256)
print(listening.getsockname()[1], flush=True)
asyncio.run(uvicorn.Server(uvicorn.Config(ASGIMiddleware(app, flush_timeout=60), log_level="warning", lifespan="off")).serve([listening]))
"""


@pytest.fixture
def remote(model: ScriptedServer, tmp_path: Path) -> Iterator[tuple[str, EpisodeReceiver]]:
    """(host:port of an app in another process, the receiver of its spans)."""
    with EpisodeReceiver(settle=0.1) as receiver:
        environment = {**os.environ, **receiver.environ(), "APP_MODEL": model.base_url, "PYTHONPATH": os.pathsep.join(sys.path)}
        with subprocess.Popen([sys.executable, "-c", SERVER], env=environment, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            try:
                yield f"127.0.0.1:{int(server.stdout.readline())}", receiver
            finally:
                server.kill()


def asked(episode: rllm.Episode) -> list[Any]:
    """What its calls asked for, each with its ids and the role that made it."""
    (remote,) = [trajectory for trajectory in episode.trajectories if trajectory.calls]
    return [[call.messages[0]["content"], list(call.choices[0].token_ids), call.trainable, remote.name] for call in remote.calls]


def test_64_concurrent_episodes_through_another_process(remote: tuple[str, EpisodeReceiver]) -> None:
    """Each has its own call and no other, with its ids, under the agent of the other process, whichever client carried it."""
    host, receiver = remote
    hop = Hop([host])

    @rllm.workflow
    async def hops(n: int, get: Callable[[str], Any]) -> int:
        await get(f"http://{host}/{n}")
        return n

    async def all_of_them() -> None:
        limits = httpx.Limits(max_connections=64)
        async with (
            httpx.AsyncClient(event_hooks=hop.httpx_async(), timeout=200, limits=limits) as one,
            aiohttp.ClientSession(trace_configs=[hop.aiohttp()], timeout=aiohttp.ClientTimeout(200)) as two,
        ):

            async def get(url: str) -> None:
                async with two.get(url) as answer:
                    assert await answer.text() == "none"

            await asyncio.gather(*(hops(n, one.get if n % 2 else get) for n in range(100, 164)))

    with rllm.collect() as episodes:
        asyncio.run(all_of_them())
    found = sorted((episode.output, asked(episode)) for episode in episodes)
    assert found == [(n, [[str(n), [n, 2], True, "remote"]]) for n in range(100, 164)]
    assert receiver.episodes == []


def test_synchronous_clients(remote: tuple[str, EpisodeReceiver]) -> None:
    """httpx and requests, from threads, in workflows of their own; the app's own traceparent arrives as it was."""
    host, _ = remote
    hop = Hop([host])
    theirs = f"00-{'a' * 32}-{'b' * 16}-01"
    session = requests.Session()
    session.trust_env = False
    session.mount("http://", hop.requests())

    @rllm.workflow
    def hops(n: int) -> str:
        url = f"http://{host}/{n}"
        if n % 2:
            return session.get(url, headers={"traceparent": theirs}, timeout=200).text
        with httpx.Client(event_hooks=hop.httpx(), timeout=200, trust_env=False) as client:
            return client.get(url, headers={"traceparent": theirs}).text

    with rllm.collect() as episodes, ThreadPoolExecutor(4) as threads:
        assert list(threads.map(hops, range(10, 18))) == [theirs] * 8
    session.close()
    assert sorted(asked(episode) for episode in episodes) == [[[str(n), [n, 2], True, "remote"]] for n in range(10, 18)]


class _Echo(BaseHTTPRequestHandler):
    """Says which headers of ours came; ``/to/PORT`` redirects there."""

    def do_GET(self) -> None:
        self.server.seen.append((self.path, self.headers.get("x-rllm-parent") is not None, self.headers.get("baggage")))  # type: ignore[attr-defined]
        if self.path.startswith("/to/"):
            self.send_response(302)
            self.send_header("location", f"http://127.0.0.1:{self.path[4:]}/end")
        else:
            self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def echoes() -> Iterator[list[Any]]:
    """Two servers; the first is the one that is listed."""
    servers: list[Any] = []
    for _ in range(2):
        server: Any = ThreadingHTTPServer(("127.0.0.1", 0), _Echo)
        server.seen = []
        Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        servers.append(server)
    yield servers
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("client", ["httpx", "httpx_async", "aiohttp", "requests"])
def test_only_listed_hosts_are_told(echoes: list[Any], client: str) -> None:
    """Another host gets the app's own baggage and nothing of ours, asked directly or by a redirect; outside a workflow nobody is told."""
    listed, other = (server.server_port for server in echoes)
    hop = Hop([f"127.0.0.1:{listed}"])
    own = {"baggage": "theirs=1"}

    async def asynchronous(urls: list[str]) -> None:
        if client == "httpx_async":
            async with httpx.AsyncClient(event_hooks=hop.httpx_async(), follow_redirects=True, trust_env=False) as session:
                for url in urls:
                    await session.get(url, headers=own)
        else:
            async with aiohttp.ClientSession(trace_configs=[hop.aiohttp()]) as session:
                for url in urls:
                    async with session.get(url, headers=own):
                        pass

    def get(*urls: str) -> None:
        if client in ("httpx_async", "aiohttp"):
            asyncio.run(asynchronous(list(urls)))
        elif client == "httpx":
            with httpx.Client(event_hooks=hop.httpx(), follow_redirects=True, trust_env=False) as session:
                for url in urls:
                    session.get(url, headers=own)
        else:
            with requests.Session() as session:
                session.trust_env = False
                session.mount("http://", hop.requests())
                for url in urls:
                    session.get(url, headers=own, timeout=60)

    get(f"http://127.0.0.1:{listed}/outside")
    with rllm.collect():
        rllm.workflow(get)(f"http://127.0.0.1:{listed}/in", f"http://127.0.0.1:{other}/in", f"http://127.0.0.1:{listed}/to/{other}")
    at_listed, at_other = echoes[0].seen, echoes[1].seen
    assert at_listed[0] == ("/outside", False, "theirs=1")
    assert [(path, told) for path, told, _ in at_listed[1:]] == [("/in", True), (f"/to/{other}", True)]
    assert all(baggage.startswith("theirs=1,rllm.episode.id=") for _, _, baggage in at_listed[1:])
    assert at_other == [("/in", False, "theirs=1"), ("/end", False, "theirs=1")]


@pytest.mark.parametrize("hosts", ["localhost", ["http://localhost"], ["*.internal"], [""], ["h:99999"]])
def test_a_host_that_is_none_is_refused(hosts: Any) -> None:
    """A string instead of a list, a scheme, a pattern, nothing, a port that cannot be."""
    with pytest.raises(ConfigurationError):
        Hop(hosts)


def test_which_urls_a_hop_reaches() -> None:
    """Hosts without a port are all ports; names go without case; what is no URL is nowhere."""
    hop = Hop(["Agents.internal", "127.0.0.1:80", "[::1]:8000"])
    assert [
        hop.reaches(url) for url in ("https://agents.INTERNAL/x", "http://agents.internal:9", "http://127.0.0.1/", "http://[::1]:8000")
    ] == [True] * 4
    assert [
        hop.reaches(url) for url in ("http://127.0.0.1:81", "http://x.agents.internal", "http://agents.internal.x", "http://[", "")
    ] == [False] * 5


def test_a_wsgi_answer_is_produced_inside_the_workflow() -> None:
    """Whole or bit by bit; the server's thread is left as it was in between, and a request without a workflow passes through."""
    seen: list[Any] = []

    def here() -> bytes:
        handle = rllm.current_episode()
        return b"none" if handle is None else handle.id.encode()

    def app(environ: dict[str, Any], start_response: Any) -> Any:
        if environ["PATH_INFO"] == "/whole":
            return [here()]
        return (here() for _ in range(2))

    wrapped = WSGIMiddleware(app)

    @rllm.workflow
    def asks() -> str:
        handle = rllm.current_episode()
        assert handle is not None
        sent = {"HTTP_" + name.upper().replace("-", "_"): value for name, value in rllm.headers().items()}

        def serve() -> None:
            for path in ("/whole", "/bits"):
                for chunk in wrapped({**sent, "PATH_INFO": path}, None):
                    seen.append((chunk.decode() == handle.id, rllm.current_episode()))
            seen.append(list(wrapped({"PATH_INFO": "/whole"}, None)))

        import contextvars

        contextvars.Context().run(serve)
        return handle.id

    with rllm.collect():
        asks()
    assert seen == [(True, None)] * 3 + [[b"none"]]
