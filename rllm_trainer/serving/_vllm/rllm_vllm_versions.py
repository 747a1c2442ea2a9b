"""vLLM's answers in, the same answers out with the policy version of each sampled token: ``metadata.weight_versions``.

Runs inside vLLM's API process (``--middleware rllm_vllm_versions.Versions``). vLLM knows which weights sampled which token and says so on
one route of its own only; here it is taken from the engine's outputs as they pass, and put at the end of the bodies that clients
read: chat and text completions, streamed or whole.

The same place gives the engine another prompt than the one that was rendered, where the body of a request has one: the ids of a chat that
is continued exactly.
"""
# pyright: basic

from __future__ import annotations

import contextvars
import json
from collections.abc import AsyncIterator
from typing import Any

PATHS = frozenset({"/v1/chat/completions", "/v1/completions"})
EVENT = b"data: {"
CONTINUED = b"x-rllm-continued"
"""Header that says that the body has the field."""
PROMPT = "rllm_prompt_token_ids"

Spans = list[dict[str, Any]]
"""``version``, ``start`` and ``end`` (sampled tokens), and ``choice`` where it is not the first."""


class _Told:
    """What the engine has said of one request."""

    def __init__(self) -> None:
        self.spans: Spans = []
        self.choices = 0
        """Of the prompts that have been begun."""
        self.prompt: list[int] | None = None
        """In place of the one that was rendered."""


_told: contextvars.ContextVar[_Told | None] = contextvars.ContextVar("rllm_versions", default=None)


class Versions:
    """ASGI middleware."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._listening: Any = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] not in PATHS:
            await self._app(scope, receive, send)
            return
        self._listen(scope["app"].state.engine_client)
        told = _Told()
        if any(name == CONTINUED for name, _ in scope["headers"]):
            receive, told.prompt = await _without_prompt(receive)
        token = _told.set(told)
        try:
            await self._app(scope, receive, _Annotating(send, told.spans))
        finally:
            _told.reset(token)

    def _listen(self, engine: Any) -> None:
        """From here on each request's outputs leave their versions in its own list."""
        if self._listening is engine:
            return
        self._listening = engine
        inner = engine.generate

        def generate(prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
            told = _told.get()
            if told is not None and told.prompt is not None:
                prompt = {**{name: value for name, value in prompt.items() if name != "prompt"}, "prompt_token_ids": told.prompt}
            outputs = inner(prompt, sampling_params, *args, **kwargs)
            return outputs if told is None else _noting(outputs, told, getattr(sampling_params, "n", None) or 1)

        engine.generate = generate


async def _without_prompt(receive: Any) -> tuple[Any, list[int] | None]:
    """The body without the prompt's ids, as it is received from now on; and the ids."""
    body, more = bytearray(), True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            break
        body += message.get("body", b"")
        more = message.get("more_body", False)
    asked = json.loads(bytes(body))
    ids = asked.pop(PROMPT, None)
    first: list[Any] = [{"type": "http.request", "body": json.dumps(asked).encode(), "more_body": False}]

    async def received() -> Any:
        return first.pop() if first else await receive()

    return received, ids


def _noting(outputs: AsyncIterator[Any], told: _Told, choices: int) -> AsyncIterator[Any]:
    """The outputs of one prompt; its choices follow those of the prompts that were begun before it."""
    first = told.choices
    told.choices += choices

    async def passing() -> AsyncIterator[Any]:
        known: set[int] = set()
        async for output in outputs:
            for choice in output.outputs:
                if choice.weight_versions and choice.index not in known:
                    known.add(choice.index)
                    which = {"choice": first + choice.index} if first + choice.index else {}
                    told.spans.extend({"version": s.version, "start": s.start, "end": s.end, **which} for s in choice.weight_versions)
            yield output

    return passing()


class _Annotating:
    """What a response is sent through; an event stream as it comes, any other body once it is whole."""

    def __init__(self, send: Any, spans: Spans) -> None:
        self._send = send
        self._spans = spans
        self._start: Any = None
        self._body = bytearray()
        self._events = False

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            kind = next((value for name, value in message["headers"] if name.lower() == b"content-type"), b"")
            self._events = b"event-stream" in kind
            if self._events:
                await self._send(message)
            else:
                self._start = message
        elif message["type"] != "http.response.body":
            await self._send(message)
        elif self._events:
            body = bytes(message.get("body", b""))
            await self._send({**message, "body": self._annotated(body) if self._spans else body})
        else:
            self._body += message.get("body", b"")
            if not message.get("more_body"):
                await self._whole()

    async def _whole(self) -> None:
        body = bytes(self._body)
        if self._spans and body.endswith(b"}"):
            body = body[:-1] + b"," + self._member() + b"}"
        headers = [(name, value) for name, value in self._start["headers"] if name.lower() != b"content-length"]
        headers.append((b"content-length", str(len(body)).encode()))
        await self._send({**self._start, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})

    def _annotated(self, body: bytes) -> bytes:
        """Every event in ``body`` that is an object gets the member; vLLM sends whole events."""
        events = body.split(b"\n\n")
        for number, event in enumerate(events):
            if event.startswith(EVENT) and event.endswith(b"}"):
                events[number] = event[:-1] + b"," + self._member() + b"}"
        return b"\n\n".join(events)

    def _member(self) -> bytes:
        told = {"weight_version": self._spans[-1]["version"], "weight_versions": self._spans}
        return b'"metadata":' + json.dumps(told, separators=(",", ":")).encode()
