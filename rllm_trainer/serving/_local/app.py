"""HTTP in, HTTP out: the routes, the token that guards them, errors in OpenAI's shape. Loopback only; ``/health`` alone needs no token."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from rllm_trace.attributes import HEADER_CONVERSATION, HEADER_POLICY_VERSION
from rllm_trainer.serving._local.jobs import Generation, Scoring, Update
from rllm_trainer.serving._local.loader import Loader
from rllm_trainer.serving._local.protocol import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    PauseRequest,
    ScoreRequest,
    SwapRequest,
    TokenizeRequest,
    decode,
    error_body,
)
from rllm_trainer.serving._local.replies import ChatReply, CompletionReply
from rllm_trainer.serving._local.requests import Asked, Intake
from rllm_trainer.serving._local.responses import ResponsesReply, ResponsesRequest, as_chat
from rllm_trainer.serving._local.scheduler import Busy, Job, News, Scheduler
from rllm_trainer.serving._local.swapping import Swaps

__all__ = ["Service", "make_app"]

_MAX_BODY = 64 * 2**20
_GONE = Response(status_code=499)


class Service:
    """What the routes work with."""

    def __init__(self, intake: Intake, loader: Loader, scheduler: Scheduler, *, api_key: str) -> None:
        self.intake = intake
        self.loader = loader
        self.scheduler = scheduler
        self.api_key = api_key
        self.swaps = Swaps(loader, scheduler)

    @property
    def version(self) -> int:
        return self.scheduler.stats.version

    def submit(self, jobs: Sequence[Job]) -> None:
        try:
            self.scheduler.submit(list(jobs))
        except Busy as error:
            raise ApiError(429, f"the server's queue is full: {error}", code="queue_full", kind="rate_limit_error") from error


def deliver_to(loop: asyncio.AbstractEventLoop) -> Callable[[News], None]:
    """What the scheduler's thread hands its news to."""

    def put(news: News) -> None:
        for job, update in news:
            if isinstance(job, Scoring):
                job.news.put_nowait(job)
            elif update is not None:
                job.news.put_nowait((job, update))

    return lambda news: _quietly(loop, put, news)


def _quietly(loop: asyncio.AbstractEventLoop, put: Callable[[News], None], news: News) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to hear it
        loop.call_soon_threadsafe(put, news)


def make_app(service: Service) -> Starlette:
    """Every route of the server."""
    routes = {
        "/health": ("GET", _health),
        "/v1/models": ("GET", _models),
        "/v1/chat/completions": ("POST", _chat),
        "/v1/completions": ("POST", _completions),
        "/v1/responses": ("POST", _responses),
        "/tokenize": ("POST", _tokenize),
        "/detokenize": ("POST", _detokenize),
        "/rllm/swap": ("POST", _swap),
        "/rllm/back": ("POST", _back),
        "/rllm/pause": ("POST", _pause),
        "/rllm/resume": ("POST", _resume),
        "/rllm/score": ("POST", _score),
        "/rllm/digest": ("GET", _digest),
        "/rllm/stats": ("GET", _stats),
    }
    guarded = [Route(path, _guarded(service, handler), methods=[method]) for path, (method, handler) in routes.items()]
    return Starlette(routes=guarded, exception_handlers={404: _unknown_route, 405: _unknown_route})


Handler = Callable[[Service, Request], Awaitable[Response]]


def _guarded(service: Service, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    expected = f"Bearer {service.api_key}".encode()

    async def guarded(request: Request) -> Response:
        version = str(service.version)
        try:
            if request.url.path != "/health" and not hmac.compare_digest(request.headers.get("authorization", "").encode(), expected):
                raise ApiError(401, "the request's bearer token is missing or wrong", code="invalid_api_key", kind="authentication_error")
            response = await handler(service, request)
        except ApiError as error:
            response = _refusal(error)
        except Exception:  # noqa: BLE001 - the client gets an answer, the log the fault
            traceback.print_exc()
            response = _refusal(ApiError(500, "the server failed on this request; its log says why", code="internal_error"))
        response.headers[HEADER_POLICY_VERSION] = version
        return response

    return guarded


async def _unknown_route(request: Request, _: Exception) -> Response:
    error = ApiError(404, f"got {request.method} {request.url.path}, which this server does not have", code="unknown_route")
    return _refusal(error)


def _refusal(error: ApiError) -> Response:
    return Response(error_body(error), error.status, media_type="application/json")


def _json(body: Any) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")


async def _body(request: Request) -> bytes:
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > _MAX_BODY:
            raise ApiError(413, f"the request is larger than {_MAX_BODY} bytes", code="request_too_large")
        chunks.append(chunk)
    return b"".join(chunks)


async def _health(service: Service, request: Request) -> Response:
    return _json({"status": "ok"})


async def _models(service: Service, request: Request) -> Response:
    model = {"id": service.intake.name, "object": "model", "created": 0, "owned_by": "rllm", "max_model_len": service.intake.max_len}
    return _json({"object": "list", "data": [model]})


async def _stats(service: Service, request: Request) -> Response:
    told = msgspec.to_builtins(service.scheduler.stats)
    conversations = service.intake.conversations
    if conversations is not None:
        told |= {"continued": conversations.continued, "not_continued": dict(conversations.causes)}
    return _json(told)


async def _chat(service: Service, request: Request) -> Response:
    asked_for = decode(await _body(request), ChatRequest)
    asked = service.intake.chat(asked_for, request.headers.get(HEADER_CONVERSATION))
    reply = ChatReply(asked_for, asked, service.intake.tokenizer, model=service.intake.name, version=service.version)
    service.submit(asked.jobs)
    if asked_for.stream:
        include_usage = asked_for.stream_options is not None and bool(asked_for.stream_options.include_usage)
        return _stream(service, asked.jobs, _chat_events(asked, reply, include_usage))
    updates = await _until_done(service, request, asked.jobs, _last_updates(asked))
    if updates is None:
        return _GONE
    body = reply.whole(updates)
    for index, update in enumerate(updates):
        if asked.remember is not None:
            asked.remember(index, update, reply.message(index))
    return _json(body)


async def _chat_events(asked: Asked, reply: ChatReply, include_usage: bool) -> AsyncIterator[dict[str, Any]]:
    for chunk in reply.first_chunks():
        yield chunk
    left = len(asked.jobs)
    while left:
        job, update = await asked.news.get()
        _raise_failure(update)
        left -= update.finish_reason is not None
        chunk = reply.chunk(job.params.choice, update)
        if update.finish_reason is not None and asked.remember is not None:
            asked.remember(job.params.choice, update, reply.message(job.params.choice))
        yield chunk
    if include_usage:
        yield reply.usage_chunk()


async def _responses(service: Service, request: Request) -> Response:
    asked_for = decode(await _body(request), ResponsesRequest)
    asked = service.intake.chat(as_chat(asked_for), request.headers.get(HEADER_CONVERSATION))
    reply = ResponsesReply(asked_for, asked, service.intake.tokenizer, model=service.intake.name, version=service.version)
    service.submit(asked.jobs)
    if asked_for.stream:
        return _stream(service, asked.jobs, _responses_events(asked, reply), named=True)
    updates = await _until_done(service, request, asked.jobs, _last_updates(asked))
    if updates is None:
        return _GONE
    body = reply.whole(updates[0])
    if asked.remember is not None:
        asked.remember(0, updates[0], reply.message())
    return _json(body)


async def _responses_events(asked: Asked, reply: ResponsesReply) -> AsyncIterator[dict[str, Any]]:
    for event in reply.start():
        yield event
    while True:
        _, update = await asked.news.get()
        _raise_failure(update)
        events = list(reply.events(update))
        if update.finish_reason is not None and asked.remember is not None:
            asked.remember(0, update, reply.message())
        for event in events:
            yield event
        if update.finish_reason is not None:
            return


async def _completions(service: Service, request: Request) -> Response:
    asked_for = decode(await _body(request), CompletionRequest)
    asked = service.intake.completions(asked_for)
    reply = CompletionReply(asked_for, asked, service.intake.tokenizer, model=service.intake.name, version=service.version)
    jobs = [job for a in asked for job in a.jobs]
    if asked_for.stream:
        service.submit(jobs)
        include_usage = asked_for.stream_options is not None and bool(asked_for.stream_options.include_usage)
        return _stream(service, jobs, _completion_events(asked, reply, include_usage))
    wants_scores = asked_for.prompt_logprobs is not None or (asked_for.echo and asked_for.logprobs is not None)
    top = max(asked_for.prompt_logprobs or 0, (asked_for.logprobs or 0) if asked_for.echo else 0)
    scorings = [service.intake.prompt_scoring(a.prompt_ids, top) if wants_scores else None for a in asked]
    scoring_jobs = [s for s in scorings if s is not None]
    service.submit([*jobs, *scoring_jobs])

    async def done() -> list[list[Update]]:
        for scoring in scoring_jobs:
            await scoring.news.get()
        return [await _last_updates(a) for a in asked]

    updates = await _until_done(service, request, [*jobs, *scoring_jobs], done())
    return _GONE if updates is None else _json(reply.whole(updates, scorings))


async def _completion_events(asked: Sequence[Asked], reply: CompletionReply, include_usage: bool) -> AsyncIterator[dict[str, Any]]:
    for prompt, one in enumerate(asked):
        left = len(one.jobs)
        while left:
            job, update = await one.news.get()
            _raise_failure(update)
            left -= update.finish_reason is not None
            yield reply.chunk(prompt, job, update)
    if include_usage:
        yield reply.usage_chunk()


async def _last_updates(asked: Asked) -> list[Update]:
    """The one update of each choice, where none streams."""
    updates: dict[int, Update] = {}
    while len(updates) < len(asked.jobs):
        job, update = await asked.news.get()
        _raise_failure(update)
        updates[job.params.choice] = update
    return [updates[choice] for choice in range(len(asked.jobs))]


def _raise_failure(update: Update) -> None:
    if update.error is not None:
        raise ApiError(500, update.error, code="generation_failed")


async def _until_done(service: Service, request: Request, jobs: Sequence[Job], work: Awaitable[Any]) -> Any:
    """The work's result; None if the client went away first, and then its jobs are cancelled."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        return None
    finally:
        leaving.cancel()
        if not working.done() or working.cancelled() or working.exception() is not None:
            working.cancel()
            service.scheduler.cancel(list(jobs))


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _stream(service: Service, jobs: list[Generation], events: AsyncIterator[dict[str, Any]], *, named: bool = False) -> StreamingResponse:
    """Server-sent events; ``named``: each under its type and without a last ``[DONE]``, as the Responses API has them."""

    async def lines() -> AsyncIterator[bytes]:
        finished = False
        try:
            async for event in events:
                name = f"event: {event['type']}\n".encode() if named else b""
                yield name + b"data: " + msgspec.json.encode(event) + b"\n\n"
            finished = True
        except ApiError as error:
            yield (b"event: error\n" if named else b"") + b"data: " + error_body(error) + b"\n\n"
        finally:
            if not finished:
                service.scheduler.cancel(list(jobs))
        if not named:
            yield b"data: [DONE]\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream", headers={"cache-control": "no-cache"})


async def _tokenize(service: Service, request: Request) -> Response:
    asked = decode(await _body(request), TokenizeRequest)
    intake = service.intake
    intake.check_model(asked.model)
    if (asked.prompt is None) == (asked.messages is None):
        raise ApiError(400, "got both or neither of prompt and messages; expected one of them", param="prompt", code="invalid_value")
    if asked.messages is not None:
        ids = intake.render(asked.messages, asked.tools, generation=asked.add_generation_prompt, extra=asked.chat_template_kwargs)
    else:
        ids = intake.tokenizer.encode(asked.prompt or "", add_special_tokens=asked.add_special_tokens is not False)
    body: dict[str, Any] = {"count": len(ids), "max_model_len": intake.max_len, "tokens": ids}
    if asked.return_token_strs:
        body["token_strs"] = [intake.tokenizer.piece(i).text for i in ids]
    return _json(body)


async def _detokenize(service: Service, request: Request) -> Response:
    asked = decode(await _body(request), DetokenizeRequest)
    service.intake.check_model(asked.model)
    if any(not 0 <= i < service.loader.vocab for i in asked.tokens):
        raise ApiError(400, f"got token ids outside 0 to {service.loader.vocab - 1}", param="tokens", code="invalid_value")
    return _json({"prompt": service.intake.tokenizer.decode(asked.tokens, skip_special=False)})


async def _score(service: Service, request: Request) -> Response:
    asked = decode(await _body(request), ScoreRequest)
    jobs = service.intake.scorings(asked)
    service.submit(jobs)

    async def done() -> list[Scoring]:
        return [await job.news.get() for job in jobs]

    scored = await _until_done(service, request, jobs, done())
    if scored is None:
        return _GONE
    rows = [[None if value != value else value for value in job.logprobs.tolist()] for job in scored]
    return _json({"logprobs": rows, "versions": [job.version for job in scored], "cached": [job.cached for job in scored]})


async def _pause(service: Service, request: Request) -> Response:
    asked = decode(await _body(request), PauseRequest)
    begun = asyncio.wrap_future(service.scheduler.pause(asked.after_tokens))
    await asyncio.wait({begun})
    if begun.cancelled():
        raise ApiError(409, "this pause was ended before it began: by /rllm/resume, or by another one", code="pause_ended")
    return _json({"sampled_tokens": service.scheduler.stats.sampled_tokens})


async def _resume(service: Service, request: Request) -> Response:
    service.scheduler.resume()
    return _json({})


async def _swap(service: Service, request: Request) -> Response:
    return _json(await service.swaps.swap(decode(await _body(request), SwapRequest)))


async def _back(service: Service, request: Request) -> Response:
    return _json(await service.swaps.back())


async def _digest(service: Service, request: Request) -> Response:
    return _json(await service.swaps.digest())
