"""OpenAI's API in, verl's replicas out: token ids go there, token ids come back, and each rollout's calls go to one replica.

Rendering, parsing and every refused field are the embedded server's own; only who samples is another. Requests come to
``/s/<session>/v1/...``; the session is what verl's load balancer is sticky by. A token guards every route.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, MutableMapping
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any, cast

from rllm_trainer.cluster._replica import VERSIONS
from rllm_trainer.cluster.app_worker import FrontAddress
from rllm_trainer.serving._local.app import Service, make_app
from rllm_trainer.serving._local.jobs import Generation
from rllm_trainer.serving._local.protocol import ApiError
from rllm_trainer.serving._local.requests import Intake
from rllm_trainer.serving._local.sampling import Sampled
from rllm_trainer.serving._local.scheduler import Busy, Job, Stats
from rllm_trainer.serving._local.spec import eos_token_ids, read_config
from rllm_trainer.serving_settings import LocalSettings

__all__ = ["Front", "ReplicaScheduler", "by_session"]

_UP = 60.0
_MOST_WAITING = 16_384
_session: ContextVar[str] = ContextVar("rllm_front_session", default="")


class ReplicaScheduler:
    """What the routes submit to: asks verl's client for each reply, and hands its tokens on as if they had been sampled here."""

    def __init__(self, client: Any) -> None:
        self.stats = Stats(version=0)
        self._client = client
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def submit(self, jobs: list[Job]) -> None:
        """Raises ``Busy`` if too many replies are waited for, ``ApiError`` for what replicas cannot do."""
        if len(self._tasks) + len(jobs) > _MOST_WAITING:
            raise Busy(f"{len(self._tasks)} replies are waited for, and at most {_MOST_WAITING} may be; try again later")
        for job in jobs:
            if not isinstance(job, Generation):
                raise ApiError(400, "got echo, prompt_logprobs or scoring, which replicas of a cluster do not give", code="unsupported")
        for job in cast("list[Generation]", jobs):
            _require_possible(job)
            task = asyncio.get_running_loop().create_task(self._reply(job, _session.get()))
            key = id(job)
            self._tasks[key] = task
            task.add_done_callback(partial(self._forget, key))

    def _forget(self, key: int, _: object) -> None:
        self._tasks.pop(key, None)

    def cancel(self, jobs: list[Job]) -> None:
        """Their requester has gone."""
        for job in jobs:
            task = self._tasks.get(id(job))
            if task is not None:
                self.stats.cancelled += 1
                task.cancel()

    async def _reply(self, job: Generation, session: str) -> None:
        self.stats.running += 1
        try:
            output = await self._client.generate(session, prompt_ids=list(job.ids), sampling_params=_sampling_params(job))
            self._push(job, output)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - the client gets an answer that says why
            job.news.put_nowait((job, job.fail(f"the replica failed: {type(error).__name__}: {error}")))
        finally:
            self.stats.running -= 1

    def _push(self, job: Generation, output: Any) -> None:
        ids, logprobs = list(output.token_ids), list(output.log_probs or [])
        if len(ids) != len(logprobs) or not ids or any(math.isnan(value) for value in logprobs):
            job.news.put_nowait((job, job.fail(f"the replica sent {len(ids)} token ids and {len(logprobs)} logprobs")))
            return
        versions = _versions(output.extra_fields, len(ids))
        self.stats.version = max(self.stats.version, *versions)
        self.stats.sampled_tokens += len(ids)
        for token_id, logprob, version in zip(ids, logprobs, versions, strict=True):
            update = job.push(Sampled(token_id=token_id, logprob=logprob, top=[]), version)
            if update is not None:
                job.news.put_nowait((job, update))
                if update.finish_reason is not None:
                    return
        job.news.put_nowait((job, job.fail(f"the replica ended a reply after {len(ids)} tokens without an end: {output.stop_reason}")))


def _require_possible(job: Generation) -> None:
    if job.params.top:
        raise ApiError(400, "got top_logprobs, which replicas of a cluster do not give", param="top_logprobs", code="unsupported")
    if job.params.sampling.logit_bias:
        raise ApiError(400, "got logit_bias, which replicas of a cluster do not take", param="logit_bias", code="unsupported")
    if job._matcher is not None:
        raise ApiError(
            400,
            "got a reply to be forced into a form (response_format or tool_choice), which replicas of a cluster do not do",
            param="response_format",
            code="unsupported",
        )


def _sampling_params(job: Generation) -> dict[str, Any]:
    """As verl's servers take them. Stop strings are looked for here: replicas do not turn tokens into text."""
    asked, params = job.params.sampling, job.params
    found: dict[str, Any] = {
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "top_k": asked.top_k or -1,
        "max_tokens": params.max_tokens,
        "logprobs": True,
        "seed": (params.seed + params.choice) % 2**63,
    }
    optional = {
        "min_p": asked.min_p,
        "presence_penalty": asked.presence_penalty,
        "frequency_penalty": asked.frequency_penalty,
    }
    found |= {name: value for name, value in optional.items() if value}
    if asked.repetition_penalty != 1.0:
        found["repetition_penalty"] = asked.repetition_penalty
    if params.stop_token_ids:
        found["stop_token_ids"] = sorted(params.stop_token_ids)
    if not params.eos:
        found["ignore_eos"] = True
    return found


def _versions(extra: MutableMapping[str, Any], length: int) -> list[int]:
    """The version of each token: told by token, or the first and the last of the reply, the older one where they differ."""
    spans = extra.get(VERSIONS)
    if spans:
        found = [0] * length
        for version, start, end in spans:
            found[start:end] = [int(version)] * (end - start)
        return found
    told = [extra.get(name) for name in ("min_global_steps", "max_global_steps", "global_steps")]
    known = [int(value) for value in told if value is not None]
    return [min(known, default=0)] * length


Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]


def by_session(app: Application) -> Application:
    """An ASGI app that takes ``/s/<session>`` off the path and remembers it for the request."""

    async def routed(scope: Scope, receive: Receive, send: Send) -> None:
        parts = str(scope.get("path", "")).split("/", 3)
        if scope["type"] == "http" and len(parts) == 4 and parts[1] == "s":
            _session.set(parts[2])
            path = f"/{parts[3]}"
            scope = {**scope, "path": path, "raw_path": path.encode()}
        await app(scope, receive, send)

    return routed


def _fits(_: int) -> bool:
    """Memory is the replicas' concern."""
    return True


class Front:
    """One node's front. Made into an actor by whoever starts it; serves from ``start`` until its process ends."""

    def __init__(
        self, model: str, *, name: str, max_len: int, client: Any, host: str, exact: bool, reads: LocalSettings | None = None
    ) -> None:
        """``reads``: how what the model writes is taken apart; None: as its chat template shows."""
        reads = reads or LocalSettings()
        folder = Path(model)
        described = read_config(folder)
        self._name = name
        self._host = host
        self._api_key = secrets.token_urlsafe(32)
        intake = Intake(
            folder,
            name=name,
            vocab=int(described["vocab_size"]),
            eos=eos_token_ids(folder, described),
            max_len=max_len,
            chat_template=None,
            tool_format=reads.tool_format,
            thinks=reads.reasoning is not None,
            continues=exact,
            fits=_fits,
        )
        self._scheduler = ReplicaScheduler(client)
        self._service = Service(intake, cast("Any", None), cast("Any", self._scheduler), api_key=self._api_key)

    def start(self) -> FrontAddress:
        """Listen; gives the address."""
        listening = socket.socket()
        listening.bind((self._host, 0))
        listening.listen(4096)
        up = threading.Event()
        threading.Thread(target=self._serve, args=(listening, up), name="rllm-front", daemon=True).start()
        if not up.wait(_UP):
            raise RuntimeError(f"the front did not come up within {_UP:g} s")
        port = listening.getsockname()[1]
        sys.stderr.write(f"front of {self._name} at {self._host}:{port}\n")
        sys.stderr.flush()
        return FrontAddress(url=f"http://{self._host}:{port}", api_key=self._api_key, model=self._name)

    def stats(self) -> dict[str, int]:
        """Replies waited for, and tokens handed on since the start."""
        return {"running": self._scheduler.stats.running, "sampled_tokens": self._scheduler.stats.sampled_tokens}

    def _serve(self, listening: socket.socket, up: threading.Event) -> None:
        import uvicorn

        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        app: Any = by_session(cast("Application", make_app(self._service)))
        options = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", timeout_keep_alive=75, server_header=False)
        loop.call_soon(up.set)
        loop.run_until_complete(uvicorn.Server(options).serve([listening]))
