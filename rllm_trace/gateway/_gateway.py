"""The gateway as an object: started, it listens on loopback in a thread of its own; closed, it leaves nothing behind.

    with Gateway(upstream=Upstream(base_url="http://127.0.0.1:8000/v1")) as gateway:
        subprocess.run(["node", "agent.js"], env=os.environ | gateway.environ())     # inside a workflow

Who asks for ``url_for``, ``key_for`` or ``environ`` inside a workflow gets an address of that very place: its agent, its ``no_train``, and
the route of its rollout, so that ``fit`` trains an app in any language.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import importlib
import importlib.util
import secrets
import socket
import threading
from collections.abc import Callable
from typing import Any, Final, Self

import msgspec

from rllm_trace import attributes as A
from rllm_trace._context import Scope, enter, leave
from rllm_trace._propagation import headers
from rllm_trace._recorder import recorder
from rllm_trace.exceptions import ConfigurationError
from rllm_trace.gateway._app import App
from rllm_trace.gateway._binding import Bindings
from rllm_trace.gateway._commit import Commit
from rllm_trace.gateway._control import Control
from rllm_trace.gateway._episodes import Episodes
from rllm_trace.gateway._upstream import Upstream
from rllm_trace.routing import Route

__all__ = ["Gateway", "Limits"]

_LOOPBACK: Final = "127.0.0.1"
_START: Final = 60.0
_CLOSE: Final = 15.0
_GRACE: Final = 3
"""Seconds that calls under way may go on when the gateway closes."""
_HEAD_LIMIT: Final = 256 * 1024
_KEEP_ALIVE: Final = 60
_INSTALL: Final = "the gateway needs a package that is not installed ({}): pip install 'rllm-trace[gateway]'"


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What the gateway takes at most."""

    max_body: int = 64 * 2**20
    """Bytes of a request."""
    max_answer: int = 256 * 2**20
    """Bytes of an answer in one piece."""
    max_concurrency: int = 1_024
    """Requests under way."""
    connect_timeout: float = 10.0
    silence: float = 600.0
    """Seconds that the server may say nothing, or the client read nothing."""
    deadline: float = 3_600.0
    """Seconds for a whole request."""
    idle: float = 600.0
    """Seconds without a call after which an episode that the gateway holds has ended."""


class Gateway:
    """A reverse proxy that records. Listens from ``start``, or the beginning of a ``with`` block, until ``close``.

    ``upstream`` takes what is not redirected, ``anthropic`` the Messages API's share of it; ``route`` redirects calls whose rollout has no
    route of its own. ``token=None`` makes one up; ``open_access=True`` asks for none, and is refused beyond loopback. ``opens_episodes``:
    whether a request may name an episode that nobody has. ``commit``: an exporter for spans of episodes that other processes keep.
    Raises ConfigurationError.
    """

    def __init__(
        self,
        *,
        upstream: Upstream | None = None,
        anthropic: Upstream | None = None,
        route: Route | None = None,
        host: str = _LOOPBACK,
        port: int = 0,
        token: str | None = None,
        open_access: bool = False,
        opens_episodes: bool = False,
        limits: Limits | None = None,
        commit: Any = None,
    ) -> None:
        if open_access and host not in (_LOOPBACK, "::1", "localhost"):
            raise ConfigurationError(f"got open_access with host {host!r}; beyond loopback the gateway asks for its token")
        if upstream is not None and upstream.protocol != "openai":
            raise ConfigurationError("got an Anthropic upstream as upstream=; give it as anthropic=")
        if anthropic is not None and anthropic.protocol != "anthropic":
            raise ConfigurationError("got an OpenAI-compatible upstream as anthropic=; give it as upstream=")
        self.token = token or secrets.token_urlsafe(24)
        """What a client shows as its API key, unless it has the key of an episode."""
        self.open_access = open_access
        self.limits = limits or Limits()
        self._host = host
        self._port = port
        self._episodes = Episodes(idle=self.limits.idle)
        self._bindings = Bindings(None if open_access else self.token, route, self._episodes, opens=opens_episodes)
        self._commit = None if commit is None else Commit(commit)
        self._parts: dict[str, Any] = {"upstream": upstream, "anthropic": anthropic, "limits": self.limits, "commit": self._commit}
        self._app: App | None = None
        self._server: Any = None
        self._socket: socket.socket | None = None
        self._thread: threading.Thread | None = None

    # where it is

    @property
    def root(self) -> str:
        """Its address without a path."""
        if self._socket is None:
            raise ConfigurationError("the gateway is not running; call start() or use it in a with block")
        host, port = self._socket.getsockname()[:2]
        shown = {"0.0.0.0": _LOOPBACK, "::": "::1"}.get(host) or str(host)
        return f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"

    @property
    def base_url(self) -> str:
        """For clients that name their episode by headers or key."""
        return f"{self.root}/v1"

    def url_for(self, episode: Any = None) -> str:
        """The base URL whose calls belong to an episode (the running one, an episode, its handle, or its id), with ``/v1``."""
        return f"{self.root}{self._bindings.path(self._bindings.scope_of(episode))}/v1"

    def key_for(self, episode: Any = None) -> str:
        """The API key whose calls belong to an episode, for clients whose URL cannot be set for each; good for that episode only."""
        return self._bindings.key(self._bindings.scope_of(episode))

    def environ(self, episode: Any = None) -> dict[str, str]:
        """Variables that lead the clients of OpenAI and Anthropic in a child process here, into an episode."""
        url, key = self.url_for(episode), self.key_for(episode)
        return {
            A.ENV_OPENAI_BASE_URL: url,
            A.ENV_OPENAI_API_KEY: key,
            A.ENV_ANTHROPIC_BASE_URL: url.removesuffix("/v1"),
            A.ENV_ANTHROPIC_API_KEY: key,
        }

    @property
    def counts(self) -> dict[str, int]:
        """Requests so far: by how they were bound (headers, path, key, unassigned), and passed, refused, gone."""
        return {} if self._app is None else dict(self._app.counts)

    # its life

    def start(self) -> Self:
        """Listens. Raises ConfigurationError if it cannot."""
        self._listen()
        thread = self._thread = threading.Thread(target=self._run, name="rllm-trace-gateway", daemon=True)
        contextvars.Context().run(thread.start)
        if not self._ready.wait(_START):
            self.close()
            raise ConfigurationError(f"the gateway did not start within {_START:g} s")
        return self

    def serve(self, listening: Callable[[Gateway], None]) -> None:
        """Serves on this thread until a signal ends it; ``listening`` is called once its address is known."""
        self._listen()
        try:
            listening(self)
            self._run()
        finally:
            self.close()

    def close(self) -> None:
        """Ends calls under way after a moment, its own episodes, and its thread."""
        if self._server is not None:
            self._server.should_exit = True
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_CLOSE)
        self._episodes.end_all()
        if self._commit is not None:
            recorder.span_sinks = tuple(sink for sink in recorder.span_sinks if sink is not self._commit)
            recorder.refresh()
            self._commit.close(_CLOSE)
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _listen(self) -> None:
        if self._socket is not None:
            raise ConfigurationError("the gateway is running already")
        try:
            self._uvicorn: Any = importlib.import_module("uvicorn")
            importlib.import_module("aiohttp")  # what speaks to the servers, asked for only once it runs
        except ImportError as error:
            raise ConfigurationError(_INSTALL.format(error)) from error
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((self._host, self._port))
            listener.listen(2_048)
        except OSError as error:
            listener.close()
            raise ConfigurationError(f"the gateway cannot listen on {self._host}:{self._port} ({error}); give another port") from error
        self._socket = listener
        self._ready = threading.Event()
        if self._commit is not None:
            recorder.span_sinks = (*recorder.span_sinks, self._commit)
            recorder.check_environment()

    def _run(self) -> None:
        config = self._uvicorn.Config(
            self._asgi,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            interface="asgi3",
            http="h11",  # the one that knows a limit for heads
            loop="asyncio",
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=_KEEP_ALIVE,
            timeout_graceful_shutdown=_GRACE,
            h11_max_incomplete_event_size=_HEAD_LIMIT,
        )
        self._server = self._uvicorn.Server(config)
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(self._serving())

    async def _serving(self) -> None:
        control = Control(self._bindings, self._episodes, self._places)
        app = self._app = App(bindings=self._bindings, control=control, **self._parts)
        sweeper = asyncio.create_task(self._sweep())
        self._ready.set()  # the socket listens already: who connects now is served
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            sweeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sweeper
            await app.upstreams.close()

    async def _asgi(self, scope: Any, receive: Any, send: Any) -> None:
        assert self._app is not None
        await self._app(scope, receive, send)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(min(self.limits.idle / 4, 5.0))
            self._episodes.end_idle()

    def _places(self, scope: Scope) -> dict[str, Any]:
        path = self._bindings.path(scope)
        before = enter(scope)
        try:
            told = headers()
        finally:
            leave(scope, before)
        return {
            "base_url": f"{self.root}{path}/v1",
            "anthropic_base_url": f"{self.root}{path}",
            "api_key": self._bindings.key(scope),
            "headers": told,
        }


def _loop_factory() -> Any:
    """What makes the event loop: uvloop, which takes half the CPU, where the platform has it; None: Python's own."""
    if importlib.util.find_spec("uvloop") is None:
        return None
    return importlib.import_module("uvloop").new_event_loop
