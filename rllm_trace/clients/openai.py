"""The patch of the ``openai`` package: every model call of a client made inside a workflow becomes one ``ClientCall``.

Five methods of the two concrete classes ``OpenAI`` and ``AsyncOpenAI`` are wrapped: ``request`` (one call of the app, the SDK's own
retries inside it), ``_build_request`` (where its options become another request), ``_prepare_request`` and ``_send_request`` (each
request that goes out) and ``_process_response`` (the answer before it is parsed). Every call shape passes through them: raw and streaming
responses, ``parse``, the ``stream`` helper, ``client.post``, Azure, sub-classes, clients made before. Whoever else wraps ``request``, below
us or above, sees what the app asked for. A wrapper is never taken off while another sits on top of it; without a workflow it only
calls on.
"""

from __future__ import annotations

import functools
import importlib.util
import threading
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any, Final

from rllm_trace._calls import open_call
from rllm_trace._context import current
from rllm_trace._guard import guard
from rllm_trace.clients import _parameters
from rllm_trace.clients._call import ClientCall
from rllm_trace.clients._decode import Reply
from rllm_trace.clients._direct import async_sender, sender
from rllm_trace.clients._old_openai import HttpClient
from rllm_trace.clients._options import body_of, destination_of, is_sound, operation_of, with_call
from rllm_trace.exceptions import CallRefusedError
from rllm_trace.routing import current_route, kept_header, redirects

__all__ = ["ensure", "install", "uninstall"]

_METHODS: Final = ("request", "_build_request", "_prepare_request", "_process_response", "_send_request")
"""Old releases have no ``_send_request``: see ``_old_openai``."""
_HTTP: Final = "_client"
_NOT_SENT: Final = (
    "this call was to go to the policy and was not sent: rllm_trace failed at it, and it must not reach the app's own endpoint instead. "
    "The log of rllm_trace has the fault; rllm.no_train around the call, or replaces= without its model, keeps it out of training."
)

_guarded: Final = guard("client")
_call: ContextVar[ClientCall | None] = ContextVar("rllm_openai_call", default=None)
_lock: Final = threading.Lock()


class _State:
    active = False
    classes: tuple[type[Any], ...] = ()
    found_well: tuple[tuple[type[Any], str, Any], ...] = ()
    """The methods of the classes when each had a wrapper of ours on it, at any depth."""
    wrappers: Final[dict[int, tuple[Callable[..., Any], Callable[..., Any], bool]]] = {}
    """By ``id``: a wrapper of ours, what it wraps, and whether the class had only inherited that. Others copy attributes and equality
    of what they wrap, so nothing but identity tells whose a wrapper is."""


def install() -> bool:
    """Wraps the classes, once; a wrapper that somebody has taken off is put on again. False if ``openai`` is not installed."""
    if importlib.util.find_spec("openai") is None:
        return False
    import openai

    with _lock:
        _State.active = True
        _State.classes = (openai.OpenAI, openai.AsyncOpenAI)
        for cls in _State.classes:
            for name in _METHODS:
                if hasattr(cls, name) and not _is_reachable(cls, name):
                    _wrap(cls, name, is_async=cls is openai.AsyncOpenAI)
            if not hasattr(cls, "_send_request"):
                setattr(cls, _HTTP, HttpClient(_is_redirected, _goes_out, is_async=cls is openai.AsyncOpenAI))
        _parameters.install()
    return True


def ensure() -> None:
    """Called at each start of a workflow: a few comparisons while every method is the one that was found well the last time."""
    if not _State.active or any(vars(cls).get(name) is not method for cls, name, method in _State.found_well):
        _State.found_well = ()
    if _State.found_well:
        return
    methods = [(cls, name, vars(cls).get(name)) for cls in _State.classes for name in _METHODS if hasattr(cls, name)]
    if not _State.active or not all(_is_reachable(cls, name) for cls, name, _ in methods):
        install()
    else:
        _State.found_well = tuple(methods)


def uninstall() -> None:
    """Makes the wrappers inert, and takes off those that are outermost."""
    with _lock:
        _State.active = False
        _parameters.uninstall()
        for cls in _State.classes:
            if isinstance(cls.__dict__.get(_HTTP), HttpClient):
                delattr(cls, _HTTP)
            for name in _METHODS:
                while (ours := _State.wrappers.get(id(cls.__dict__.get(name)))) is not None:
                    _, original, inherited = ours
                    if inherited:
                        delattr(cls, name)
                    else:
                        setattr(cls, name, original)


def _is_reachable(cls: type[Any], name: str) -> bool:
    """Whether a wrapper of ours is on the method, with any number of others around it."""
    method = getattr(cls, name)
    for _ in range(100):
        if method is None:
            return False
        if id(method) in _State.wrappers:
            return True
        method = getattr(method, "__wrapped__", None)
    return False


def _wrap(cls: type[Any], name: str, *, is_async: bool) -> None:
    original = getattr(cls, name)
    makers = _ASYNC if is_async else _SYNC
    wrapper = functools.wraps(original)(makers[name](original))
    _State.wrappers[id(wrapper)] = (wrapper, original, name not in cls.__dict__)
    setattr(cls, name, wrapper)


# the wrappers


def _request(original: Callable[..., Any]) -> Callable[..., Any]:
    def request(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = _begin(self, args, kwargs)
        if call is None:
            with _apart(args, kwargs):
                return original(self, *args, **kwargs)
        _check(call, args, kwargs)
        while True:
            token = _call.set(call)
            try:
                return original(self, *args, **kwargs)
            except BaseException as error:
                if not call.failed(error):
                    raise
            finally:
                _call.reset(token)

    return request


def _async_request(original: Callable[..., Any]) -> Callable[..., Any]:
    async def request(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = _begin(self, args, kwargs)
        if call is None:
            with _apart(args, kwargs):
                return await original(self, *args, **kwargs)
        _check(call, args, kwargs)
        while True:
            token = _call.set(call)
            try:
                return await original(self, *args, **kwargs)
            except BaseException as error:
                if not call.failed(error):
                    raise
            finally:
                _call.reset(token)

    return request


def _build_request(original: Callable[..., Any]) -> Callable[..., Any]:
    def _build_request(self: Any, options: Any, **kwargs: Any) -> Any:
        call = _call.get()
        if call is not None and call.client is self and call.is_changed:
            options = _changed(call, options)
        return original(self, options, **kwargs)

    return _build_request


def _prepare_request(original: Callable[..., Any]) -> Callable[..., Any]:
    def _prepare_request(self: Any, request: Any) -> Any:
        result = original(self, request)
        _goes_out(self, request)
        return result

    return _prepare_request


def _async_prepare_request(original: Callable[..., Any]) -> Callable[..., Any]:
    async def _prepare_request(self: Any, request: Any) -> Any:
        result = await original(self, request)
        _goes_out(self, request)
        return result

    return _prepare_request


def _process_response(original: Callable[..., Any]) -> Callable[..., Any]:
    def _process_response(self: Any, *args: Any, **kwargs: Any) -> Any:
        _comes_back(self, kwargs, is_async=False)
        return original(self, *args, **kwargs)

    return _process_response


def _async_process_response(original: Callable[..., Any]) -> Callable[..., Any]:
    async def _process_response(self: Any, *args: Any, **kwargs: Any) -> Any:
        _comes_back(self, kwargs, is_async=True)
        return await original(self, *args, **kwargs)

    return _process_response


def _send_request(original: Callable[..., Any]) -> Callable[..., Any]:
    def _send_request(self: Any, request: Any, **kwargs: Any) -> Any:
        if not _is_redirected(self):
            return original(self, request, **kwargs)
        _goes_out(self, request)
        kwargs["auth"] = None
        http = sender(self._client, request)
        return original(self, request, **kwargs) if http is self._client else http.send(request, **kwargs)

    return _send_request


def _async_send_request(original: Callable[..., Any]) -> Callable[..., Any]:
    async def _send_request(self: Any, request: Any, **kwargs: Any) -> Any:
        if not _is_redirected(self):
            return await original(self, request, **kwargs)
        _goes_out(self, request)
        kwargs["auth"] = None
        http = async_sender(self._client, request)
        return await (original(self, request, **kwargs) if http is self._client else http.send(request, **kwargs))

    return _send_request


_SYNC: Final[dict[str, Any]] = dict(
    zip(_METHODS, (_request, _build_request, _prepare_request, _process_response, _send_request), strict=True)
)
_ASYNC: Final[dict[str, Any]] = dict(
    zip(_METHODS, (_async_request, _build_request, _async_prepare_request, _async_process_response, _async_send_request), strict=True)
)


# what the wrappers do


def _begin(client: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ClientCall | None:
    """The call that begins here, planned; None: nothing of ours."""
    scope = current()
    if not _State.active or scope is None:
        return None
    call: ClientCall | None = None
    options = args[1] if len(args) > 1 else kwargs.get("options")
    with _guarded:
        call = _opened(client, options)
    if call is None:
        route = current_route()
        if route is not None and scope.episode.closed and operation_of(options) is not None:
            route.endpoint(scope)  # raises where its rollout was given up: the call must reach nobody, the app's own endpoint least of all
        return None
    with _guarded:
        if is_sound(options):
            call.plan()
        return call
    route = current_route()
    if route is None or not redirects(route, scope, call.model):
        call.finish(Reply())
        return None
    call.refusal = CallRefusedError(_NOT_SENT)
    return call


class _apart:
    """A request that is none of ours, made while one of ours is under way (by a hook, a token provider), is not taken for it."""

    __slots__ = ("_token",)

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        running = _call.get()
        known = running is None or running.options is (args[1] if len(args) > 1 else kwargs.get("options"))
        self._token = None if known else _call.set(None)

    def __enter__(self) -> None:
        return None

    def __exit__(self, *exc: object) -> None:
        if self._token is not None:
            _call.reset(self._token)


def _opened(client: Any, options: Any) -> ClientCall | None:
    operation = operation_of(options)
    if operation is None:
        return None
    running = _call.get()
    if running is not None and running.options is options:
        return None
    body = body_of(options)
    if body is None:
        return None
    opened = open_call(operation=operation, requested_model=str(body.get("model") or ""))
    if opened is None:
        return None
    call = ClientCall(opened, client, operation, body, destination_of(client, options))
    call.hide(getattr(client, "api_key", None), getattr(client, "admin_api_key", None))
    return call


def _check(call: ClientCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Before the SDK begins. Raises where the call is not to be sent."""
    if call.refusal is not None:
        call.failed(call.refusal)
        raise call.refusal
    call.options = args[1] if len(args) > 1 else kwargs.get("options")


def _changed(call: ClientCall, options: Any) -> Any:
    """Options of one attempt with what the call sends in place of what the app gave."""
    with _guarded:
        return with_call(call, options)
    if call.endpoint is not None:
        raise CallRefusedError(_NOT_SENT)
    call.untouch()
    return options


def _goes_out(client: Any, request: Any) -> None:
    call = _call.get()
    if call is None or call.client is not client:
        return
    if call.endpoint is not None:
        headers = request.headers
        for name in [name for name in headers if not kept_header(name)]:
            del headers[name]
        headers["Authorization"] = f"Bearer {call.endpoint.api_key}"
        if request.url.query:
            request.url = request.url.copy_with(query=None)
    with _guarded:
        call.sent(request)


def _is_redirected(client: Any) -> bool:
    call = _call.get()
    return call is not None and call.client is client and call.endpoint is not None


def _comes_back(client: Any, kwargs: Mapping[str, Any], *, is_async: bool) -> None:
    call = _call.get()
    if call is not None and call.client is client and "response" in kwargs:
        with _guarded:
            call.answered(kwargs["response"], int(kwargs.get("retries_taken") or 0), is_async=is_async)
            return
        call.finish(Reply())
