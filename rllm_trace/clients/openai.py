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
import types
import weakref
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any, Final, cast
from urllib.parse import urlsplit

import msgspec

from rllm_trace._calls import open_call
from rllm_trace._context import current
from rllm_trace._guard import guard
from rllm_trace.attributes import HEADER_CONVERSATION
from rllm_trace.clients import _parameters
from rllm_trace.clients._call import ClientCall, Destination
from rllm_trace.clients._decode import UNREADABLE, Operation, Reply
from rllm_trace.clients._direct import async_sender, sender
from rllm_trace.clients._old_openai import HttpClient
from rllm_trace.exceptions import CallRefusedError
from rllm_trace.routing import current_route, kept_header, redirects

__all__ = ["ensure", "install", "uninstall"]

_PATHS: Final[tuple[tuple[str, Operation], ...]] = (
    ("/chat/completions", "chat"),
    ("/completions", "text_completion"),
    ("/responses", "responses"),
)
_METHODS: Final = ("request", "_build_request", "_prepare_request", "_process_response", "_send_request")
"""Old releases have no ``_send_request``: see ``_old_openai``."""
_HTTP: Final = "_client"
_FOREIGN: Final = ("api-key", "x-api-key", "OpenAI-Organization", "OpenAI-Project", "Cookie")
_ACCEPT_ENCODING: Final = "Accept-Encoding"
"""``identity`` where the app reads the answer itself: what was added is taken out of the bytes on their way."""
_NOT_SENT: Final = (
    "this call was to go to the policy and was not sent: rllm_trace failed at it, and it must not reach the app's own endpoint instead. "
    "The log of rllm_trace has the fault; rllm.no_train around the call, or replaces= without its model, keeps it out of training."
)
_NOT_GIVEN: Final = frozenset({"NotGiven", "Omit"})
"""The SDK's words for what was left out."""
_RAW_RESPONSE: Final = "X-Stainless-Raw-Response"

_guarded: Final = guard("client")
_destinations: Final[weakref.WeakKeyDictionary[Any, tuple[Any, Destination]]] = weakref.WeakKeyDictionary()
"""Client -> its base URL, and where that leads."""
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
        if route is not None and scope.episode.closed and _operation(options) is not None:
            route.endpoint(scope)  # raises where its rollout was given up: the call must reach nobody, the app's own endpoint least of all
        return None
    with _guarded:
        if _is_sound(options):
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
    operation = _operation(options)
    if operation is None:
        return None
    running = _call.get()
    if running is not None and running.options is options:
        return None
    body = _body(options)
    if body is None:
        return None
    opened = open_call(operation=operation, requested_model=str(body.get("model") or ""))
    if opened is None:
        return None
    call = ClientCall(opened, client, operation, body, _destination(client, options))
    call.hide(getattr(client, "api_key", None), getattr(client, "admin_api_key", None))
    return call


def _operation(options: Any) -> Operation | None:
    url, method = getattr(options, "url", None), getattr(options, "method", None)
    return _operation_at(url) if isinstance(url, str) and (method == "post" or str(method).lower() == "post") else None


@functools.lru_cache(maxsize=256)
def _operation_at(url: str) -> Operation | None:
    path = "/" + url.partition("?")[0].strip("/")
    return next((operation for suffix, operation in _PATHS if path.endswith(suffix)), None)


def _body(options: Any) -> Mapping[str, Any] | None:
    """The JSON object that the SDK would send; None if it is something else."""
    body = options.json_data
    if body is None and isinstance(content := getattr(options, "content", None), (bytes, bytearray)):
        body = content
    if isinstance(body, (bytes, bytearray)):
        try:
            body = msgspec.json.decode(body)
        except UNREADABLE:
            return None
    if not isinstance(body, Mapping):
        return None
    extra = options.extra_json
    return cast("Mapping[str, Any]", body) if not extra or not isinstance(extra, Mapping) else {**body, **extra}


def _is_sound(options: Any) -> bool:
    """False where the SDK is about to raise for what the app gave (``extra_body=[1]``): it is left alone, and the error is the app's."""
    return isinstance(options.extra_json, (Mapping, types.NoneType)) and _is_given_well(options.headers) and _is_given_well(options.params)


def _is_given_well(given: Any) -> bool:
    return not given or isinstance(given, Mapping) or type(given).__name__ in _NOT_GIVEN


def _destination(client: Any, options: Any) -> Destination:
    if options.url.startswith(("http://", "https://")):
        return _place(options.url, hasattr(client, "_azure_endpoint"))
    base_url, known = client.base_url, _destinations.get(client)
    if known is None or known[0] is not base_url:
        known = _destinations[client] = (base_url, _place(str(base_url), hasattr(client, "_azure_endpoint")))
    return known[1]


@functools.lru_cache(maxsize=256)
def _place(url: str, strict: bool) -> Destination:
    parts = urlsplit(url)
    host = parts.hostname or ""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return Destination(f"{parts.scheme}://{host}:{port}{parts.path}", host, f"{host}:{port}", strict)


def _check(call: ClientCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Before the SDK begins. Raises where the call is not to be sent."""
    if call.refusal is not None:
        call.failed(call.refusal)
        raise call.refusal
    call.options = args[1] if len(args) > 1 else kwargs.get("options")


def _changed(call: ClientCall, options: Any) -> Any:
    """Options of one attempt with what the call sends in place of what the app gave."""
    with _guarded:
        return _with_options(call, options)
    if call.endpoint is not None:
        raise CallRefusedError(_NOT_SENT)
    call.untouch()
    return options


def _with_options(call: ClientCall, options: Any) -> Any:
    update: dict[str, Any] = {}
    if call.endpoint is None and options.json_data is not getattr(call.options, "json_data", None):  # its client has reshaped it meanwhile
        update["json_data"] = {**options.json_data, **{field: call.body[field] for field in call.added}}
    else:
        update["json_data"] = dict(call.body)
        update["extra_json"] = None
        if getattr(options, "content", None) is not None:
            update["content"] = None
    headers = given = _given(options.headers)
    if call.endpoint is not None:
        update["url"] = call.endpoint.base_url.rstrip("/") + next(suffix for suffix, operation in _PATHS if operation == call.operation)
        update["params"] = {}
        update |= _timeout(call, options)
        headers = _policy_headers(call, headers)
    streams = call.body.get("stream") or headers.get(_RAW_RESPONSE) == "stream"
    if streams and (call.added or not call.keep.everything) and not any(name.lower() == "accept-encoding" for name in headers):
        headers = {**headers, _ACCEPT_ENCODING: "identity"}
    if headers is not given:
        update["headers"] = headers
    return options.model_copy(update=update)


def _given(headers: Any) -> dict[str, Any]:
    return dict(cast("Mapping[str, Any]", headers)) if isinstance(headers, Mapping) else {}


def _policy_headers(call: ClientCall, headers: Mapping[str, Any]) -> dict[str, Any]:
    """What the app set for its own provider is left out; ``_goes_out`` sees to what the HTTP client adds."""
    from openai._types import Omit  # releases before 1.107 export it nowhere else

    own = getattr(call.client, "_custom_headers", None)
    foreign = [name for name in (*_FOREIGN, *_given(own)) if not kept_header(name) and name.lower() != "authorization"]
    kept = {name: value for name, value in headers.items() if kept_header(name)}
    assert call.endpoint is not None
    ours = {"Authorization": f"Bearer {call.endpoint.api_key}", HEADER_CONVERSATION: call.conversation}
    return {**dict.fromkeys(foreign, Omit()), **kept, **ours}


def _timeout(call: ClientCall, options: Any) -> dict[str, Any]:
    limit = call.timeout
    if limit is None:
        return {}
    timeout = options.timeout if isinstance(options.timeout, (int, float)) or hasattr(options.timeout, "read") else call.client.timeout
    if hasattr(timeout, "read"):
        parts = {name: getattr(timeout, name) for name in ("connect", "read", "write", "pool")}
        return {"timeout": type(timeout)(**{name: limit if value is None else min(value, limit) for name, value in parts.items()})}
    return {"timeout": limit if timeout is None else min(timeout, limit)}


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
