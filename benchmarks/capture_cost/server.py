"""A model server that costs next to nothing: every answer is bytes made before the first request. Also a sink for OTLP.

    python -m capture_cost.server TOKENIZER

Says its address on its first line. ``POST /ids/v1/chat/completions`` answers as vLLM does, with ids and logprobs where they are asked for;
``/paced/v1/...`` does the same with half a millisecond between the chunks of a stream; ``/plain/v1/...`` never gives any. The passage is
the one that the request begins with. ``GET /passages`` gives all of them. Every other ``POST`` is a batch of spans, taken and forgotten.
A process of its own: nothing of it is in what is measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final

import msgspec

from capture_cost.prose import Passage, passages

__all__ = ["serving"]

_KEY_BYTES: Final = 40
_PACE: Final = 0.0005
_MARKS: Final = (b'"content":"', b'"content": "')


class Answers:
    """Every answer, as the bytes that go over the wire."""

    def __init__(self, passage: Passage) -> None:
        self.whole = {ids: _whole(passage, ids=ids) for ids in (False, True)}
        self.streams = {(ids, usage): _stream(passage, ids=ids, usage=usage) for ids in (False, True) for usage in (False, True)}


def _reply(passage: Passage) -> Any:
    from rllm_trace.testing import Reply, ReplyChoice

    choice = ReplyChoice(text=passage.reply, token_ids=passage.reply_ids, logprobs=passage.logprobs)
    return Reply(choices=[choice], prompt_token_ids=passage.prompt_ids)


def _asked(*, ids: bool, **fields: Any) -> dict[str, Any]:
    return {"model": "m", **({"logprobs": True, "return_token_ids": True} if ids else {}), **fields}


def _whole(passage: Passage, *, ids: bool) -> bytes:
    from rllm_trace._wire import whole_body

    body = whole_body(_asked(ids=ids), _reply(passage), chat=True, number=1)
    return _head("application/json", b"content-length: %d" % len(body)) + body


def _stream(passage: Passage, *, ids: bool, usage: bool) -> list[bytes]:
    """The head, then each chunk with its frame."""
    from rllm_trace._wire import stream_events

    options = {"stream_options": {"include_usage": True}} if usage else {}
    events = stream_events(_asked(ids=ids, stream=True, **options), _reply(passage), chat=True, number=1)
    chunks = [b"%x\r\n%s\r\n" % (len(event), event) for event in events]
    return [_head("text/event-stream", b"transfer-encoding: chunked"), *chunks, b"0\r\n\r\n"]


def _head(kind: str, framing: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\n%s\r\n\r\n" % (kind.encode(), framing)


class _Connection(asyncio.Protocol):
    def __init__(self, answers: dict[bytes, Answers], listing: bytes) -> None:
        self._answers = answers
        self._listing = listing
        self._pending = b""
        self._transport: Any = None
        self._pacing: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        pending = self._pending + data if self._pending else data
        while (end := pending.find(b"\r\n\r\n")) >= 0:
            head = pending[:end].lower()
            at = head.find(b"content-length:")
            length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(pending) < end + 4 + length:
                break
            self._answer(head.split(b" ", 2)[1], pending[end + 4 : end + 4 + length])
            pending = pending[end + 4 + length :]
        self._pending = pending

    def _answer(self, path: bytes, body: bytes) -> None:
        write = self._transport.write
        if path.startswith(b"/passages"):
            write(_head("application/json", b"content-length: %d" % len(self._listing)) + self._listing)
            return
        if not path.endswith(b"/chat/completions"):
            write(_head("application/x-protobuf", b"content-length: 0"))
            return
        answers = self._answers[_key(body)]
        ids = not path.startswith(b"/plain") and b'"return_token_ids":true' in body.replace(b": ", b":")
        if b'"stream":true' in body.replace(b": ", b":"):
            chunks = answers.streams[ids, b"include_usage" in body]
            if path.startswith(b"/paced"):
                self._pacing = asyncio.get_running_loop().create_task(self._paced(chunks))
                return
            for chunk in chunks:
                write(chunk)
        else:
            write(answers.whole[ids])

    async def _paced(self, chunks: list[bytes]) -> None:
        for chunk in chunks:
            self._transport.write(chunk)
            await asyncio.sleep(_PACE)


def _key(body: bytes) -> bytes:
    for mark in _MARKS:
        at = body.find(mark)
        if at >= 0:
            return body[at + len(mark) : at + len(mark) + _KEY_BYTES]
    return b""


def _spelled(prompt: str) -> bytes:
    return json.dumps(prompt, ensure_ascii=False).encode()[1 : _KEY_BYTES + 1]


async def _serve(tokenizer: Path) -> None:
    found = passages(tokenizer)
    answers = {_spelled(passage.prompt): Answers(passage) for size in found.values() for passage in size}
    if len(answers) != sum(map(len, found.values())):
        raise ValueError("two passages begin alike")
    listing = msgspec.json.encode(found)
    server = await asyncio.get_running_loop().create_server(lambda: _Connection(answers, listing), "127.0.0.1", 0)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


@contextlib.contextmanager
def serving(tokenizer: Path) -> Generator[str]:
    """The address of a server that runs while it is open."""
    here = Path(__file__).parents[1]
    environ = {**os.environ, "PYTHONPATH": f"{here}{os.pathsep}{here.parent}"}
    command = [sys.executable, "-m", __name__, str(tokenizer)]
    process = subprocess.Popen(command, text=True, stdout=subprocess.PIPE, env=environ)
    try:
        address = "" if process.stdout is None else process.stdout.readline().strip()
        if not address:
            raise RuntimeError(f"the server ended with {process.wait(10)} before it served")
        yield address
    finally:
        process.terminate()
        process.wait(10)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(Path(sys.argv[1])))
