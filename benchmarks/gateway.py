"""What ``rllm gateway`` costs: CPU of its process for each call, beside a proxy on the same stack that only passes bytes on.

    python benchmarks/gateway.py [--json]

Server, gateway and proxy are processes of their own; the answers are those of a server with vLLM's fields, 2,048 tokens of prompt and 256
of reply, with ids and logprobs. The events of a stream come half a millisecond apart, so that each is a packet of its own, as a model's
are. Blocks of both are interleaved, and the median block counts.
``gateway_cpu_ms``: an unstreamed call, recorded with ids into a store. ``gateway_stream_ratio``: CPU of a streamed call, gateway ÷ proxy.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from capture_cost.prose import passages, tokenizer_file
from capture_cost.server import serving

SIZE = "2k+256"
TOKEN = "benchmark"
KEY = "sk-benchmark"
_OWN = (b"host", b"content-length", b"authorization")


def serve_proxy(upstream: str) -> None:
    """Passes bytes on, with the same server, event loop and HTTP client as the gateway, and does nothing else."""
    import socket

    import aiohttp
    import uvicorn
    import uvloop

    async def serve() -> None:
        async with aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False) as session:

            async def app(scope: Any, receive: Any, send: Any) -> None:
                body = b""
                while True:
                    message = await receive()
                    body += message.get("body", b"")
                    if not message.get("more_body"):
                        break
                headers = [(name.decode(), value.decode()) for name, value in scope["headers"] if name not in _OWN]
                headers.append(("authorization", f"Bearer {KEY}"))
                async with session.post(upstream.removesuffix("/v1") + scope["path"], headers=headers, data=body) as answer:
                    head = [(name.lower(), value) for name, value in answer.raw_headers if name.lower() != b"transfer-encoding"]
                    await send({"type": "http.response.start", "status": answer.status, "headers": head})
                    async for chunk in answer.content.iter_any():
                        await send({"type": "http.response.body", "body": chunk, "more_body": True})
                    await send({"type": "http.response.body", "body": b"", "more_body": False})

            config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", ws="none", interface="asgi3", http="h11")
            await uvicorn.Server(config).serve(sockets=[listener])

    listener = socket.create_server(("127.0.0.1", 0))
    print(f"http://127.0.0.1:{listener.getsockname()[1]}/v1", flush=True)
    uvloop.run(serve())


@contextlib.contextmanager
def running(command: list[str], environ: dict[str, str] | None = None, *, stderr: bool = False) -> Iterator[tuple[int, str]]:
    """(process id, base URL) of a server, which says its address on its first line."""
    pipe = "stderr" if stderr else "stdout"
    process = subprocess.Popen(command, text=True, env={**os.environ, **(environ or {})}, **{pipe: subprocess.PIPE})
    try:
        told: Any = process.stderr if stderr else process.stdout
        line = next(line for line in told if "http://" in line)
        yield process.pid, next(word for word in line.split() if word.startswith("http://")).removesuffix(",")
    finally:
        process.terminate()
        process.wait(20)


def cpu(pid: int) -> float:
    """Seconds of CPU that the threads of a process have used."""
    return sum(int(path.read_text(encoding="ascii").split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def block(pid: int, url: str, prompt: str, calls: int, *, streamed: bool) -> float:
    """Milliseconds of CPU for one call, over ``calls`` calls on one connection."""
    at = http.client.HTTPConnection(url.split("/")[2], timeout=60)
    asks = {"logprobs": True, "return_token_ids": True}
    body = msgspec.json.encode({"model": "m", "messages": [{"role": "user", "content": prompt}], "stream": streamed, **asks})
    path = "/" + url.split("/", 3)[3] + "/chat/completions"
    headers = {"authorization": f"Bearer {TOKEN}", "content-type": "application/json"}
    before = cpu(pid)
    for _ in range(calls):
        at.request("POST", path, body, headers)
        answer = at.getresponse()
        answer.read()
        if answer.status != 200:
            raise SystemExit(f"got status {answer.status}")
    used = cpu(pid) - before
    at.close()
    return used * 1_000 / calls


def measure(tokenizer: Path, blocks: int, whole: int, streams: int) -> dict[str, float]:
    """The numbers, from interleaved blocks."""
    prompt = passages(tokenizer, (SIZE,))[SIZE][0].prompt
    with contextlib.ExitStack() as stack:
        upstream = stack.enter_context(serving(tokenizer)) + "/paced/v1"
        proxy = stack.enter_context(running([sys.executable, __file__, "--proxy-to", upstream]))
        store = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        command = [sys.executable, "-m", "rllm_trace.gateway", "--port", "0", "--upstream", upstream, "--store", store]
        environ = {"PYTHONPATH": str(Path(__file__).parents[1]), "RLLM_GATEWAY_TOKEN": TOKEN, "RLLM_GATEWAY_UPSTREAM_KEY": KEY}
        pid, url = stack.enter_context(running(command, environ, stderr=True))
        found: dict[str, list[float]] = {}
        for number in range(-1, blocks):
            episode = f"{url.removesuffix('/v1')}/e/block-{number}/v1"
            for name, target, place, count, streamed in (
                ("gateway_cpu_ms", pid, episode, whole, False),
                ("proxy_cpu_ms", proxy[0], proxy[1], whole, False),
                ("gateway_stream_cpu_ms", pid, episode, streams, True),
                ("proxy_stream_cpu_ms", proxy[0], proxy[1], streams, True),
            ):
                used = block(target, place, prompt, count, streamed=streamed)
                if number >= 0:
                    found.setdefault(name, []).append(used)
    numbers = {name: statistics.median(values) for name, values in found.items()}
    numbers["gateway_stream_ratio"] = numbers["gateway_stream_cpu_ms"] / numbers["proxy_stream_cpu_ms"]
    return numbers


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the numbers as one last line of JSON")
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--calls", type=int, default=200, help="unstreamed calls of a block; streamed ones are an eighth")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json; without it that of the embedded model")
    parser.add_argument("--proxy-to", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.proxy_to:
        serve_proxy(asked.proxy_to)
    else:
        numbers = measure(asked.tokenizer or tokenizer_file(), asked.blocks, asked.calls, max(1, asked.calls // 8))
        for name, value in sorted(numbers.items()):
            print(f"{name:24} {value:8.3f}")
        if asked.json:
            print(json.dumps({name: round(value, 4) for name, value in numbers.items()}))


if __name__ == "__main__":
    main()
