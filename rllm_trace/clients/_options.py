"""The options of one request of the ``openai`` package: what of a call stands in them, and the same options with what is sent instead."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Mapping
from typing import Any, Final, cast
from urllib.parse import urlsplit

import msgspec

from rllm_trace.attributes import HEADER_CONVERSATION
from rllm_trace.clients._call import ClientCall, Destination
from rllm_trace.clients._decode import UNREADABLE, Operation
from rllm_trace.clients._parameters import NOT_GIVEN
from rllm_trace.routing import kept_header

__all__ = ["body_of", "destination_of", "is_sound", "operation_of", "with_call"]

_PATHS: Final[tuple[tuple[str, Operation], ...]] = (
    ("/chat/completions", "chat"),
    ("/completions", "text_completion"),
    ("/responses", "responses"),
)
_FOREIGN: Final = ("api-key", "x-api-key", "OpenAI-Organization", "OpenAI-Project", "Cookie")
_ACCEPT_ENCODING: Final = "Accept-Encoding"
"""``identity`` where the app reads the answer itself: what was added is taken out of the bytes on their way."""
_AZURE: Final = "BaseAzureClient"
"""What both Azure clients of every release inherit from; their servers refuse unknown fields at any host."""
_RAW_RESPONSE: Final = "X-Stainless-Raw-Response"

_destinations: Final[weakref.WeakKeyDictionary[Any, tuple[Any, Destination]]] = weakref.WeakKeyDictionary()
"""Client -> its base URL, and where that leads."""


def operation_of(options: Any) -> Operation | None:
    """What kind of model call the request is; None: it is none."""
    url, method = getattr(options, "url", None), getattr(options, "method", None)
    return _operation_at(url) if isinstance(url, str) and (method == "post" or str(method).lower() == "post") else None


@functools.lru_cache(maxsize=256)
def _operation_at(url: str) -> Operation | None:
    path = "/" + url.partition("?")[0].strip("/")
    return next((operation for suffix, operation in _PATHS if path.endswith(suffix)), None)


def body_of(options: Any) -> Mapping[str, Any] | None:
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


def is_sound(options: Any) -> bool:
    """False where the SDK is about to raise for what the app gave (``extra_body=[1]``): it is left alone, and the error is the app's."""
    return isinstance(options.extra_json, (Mapping, types.NoneType)) and _is_given_well(options.headers) and _is_given_well(options.params)


def _is_given_well(given: Any) -> bool:
    return not given or isinstance(given, Mapping) or type(given).__name__ in NOT_GIVEN


def destination_of(client: Any, options: Any) -> Destination:
    """Where the app itself sends the request."""
    if options.url.startswith(("http://", "https://")):
        return _place(options.url, _is_azure(client))
    base_url, known = client.base_url, _destinations.get(client)
    if known is None or known[0] is not base_url:
        known = _destinations[client] = (base_url, _place(str(base_url), _is_azure(client)))
    return known[1]


def _is_azure(client: Any) -> bool:
    return any(kind.__name__ == _AZURE for kind in type(client).__mro__)


@functools.lru_cache(maxsize=256)
def _place(url: str, strict: bool) -> Destination:
    parts = urlsplit(url)
    host = parts.hostname or ""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return Destination(f"{parts.scheme}://{host}:{port}{parts.path}", host, f"{host}:{port}", strict)


def with_call(call: ClientCall, options: Any) -> Any:
    """The options with what the call sends in place of what the app gave."""
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
