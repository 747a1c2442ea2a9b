"""A call of the app in, the call that goes over the wire out: to the served policy, under the run's sampling, at a seed of its own.

A ``Route`` is carried with the context (``use_route``) and read anew at each call; the app's client object is never changed. Of the
app's request only these fields change, and each change is kept beside the request: ``model``, what ``sampling`` overrides, a seed
where the app gave none, and ``tool_choice`` where a forced tool call would make the logprobs a grammar's instead of the policy's.
Nothing that identifies the app to its own provider (keys, organisation, cookies, query strings) leaves for the policy.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Set
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, Literal, cast, get_args

import msgspec

from rllm_trace._exact import constraint, tool_choice_constraint
from rllm_trace._given import seconds, words
from rllm_trace.exceptions import CallRefusedError, ConfigurationError

if TYPE_CHECKING:
    from rllm_trace._calls import Operation

__all__ = ["CallSite", "CallSites", "Constrained", "Endpoint", "Route", "call_seed", "current_route", "use_route"]

Constrained = Literal["as_auto", "inexact", "refuse"]
"""What becomes of a call whose reply is forced into a grammar: its ``tool_choice`` is sent as ``"auto"`` and both values are recorded;
it is sent as it is and recorded as inexact; or it is refused with ``CallRefusedError``."""

_MAX_VALUES: Final = 64
"""Different values kept per setting of a call site; further ones are counted under ``"other"``."""

_LENGTH_FIELDS: Final = ("max_tokens", "max_completion_tokens")
"""Two names of one limit: overriding either removes the other."""
_RESPONSES_LENGTH: Final = "max_output_tokens"
"""Its name in the Responses API, which has only this one."""
_KEPT_BY_PROVIDER: Final = ("previous_response_id", "conversation", "prompt", "background")
"""Fields of the Responses API that mean something which the app's own provider keeps."""

_KEPT_HEADERS: Final = frozenset(
    {
        "accept",
        "accept-encoding",
        "baggage",
        "connection",
        "content-length",
        "content-type",
        "host",
        "idempotency-key",
        "traceparent",
        "tracestate",
        "transfer-encoding",
        "user-agent",
    }
)
_KEPT_PREFIXES: Final = ("x-stainless-", "x-rllm-", "____stainless")
"""What the client library itself reads or sets, and our own; the rest of the app's headers may hold a secret."""


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Where one redirected call goes."""

    base_url: str
    """Such as ``http://127.0.0.1:8000/v1``."""
    api_key: str
    model: str

    def __repr__(self) -> str:
        return f"Endpoint(base_url={self.base_url!r}, model={self.model!r})"


class CallSite(msgspec.Struct, kw_only=True):
    """What was seen of the calls that asked for one model name and went one way."""

    model: str
    """The name that the app asked for."""
    endpoint: Literal["policy", "own"]
    trained: bool
    """False under ``no_train``, inside a reward, and for calls that keep their own endpoint."""
    calls: int = 0
    values: dict[str, Counter[Any]] = {}
    """How often each value of ``temperature``, ``top_p``, ``top_k`` (as sent), ``seed`` (the app's own) and ``constrained`` was seen; None
    is a field that was not set. At most 64 different values each, the rest under ``"other"``."""


class CallSites:
    """Every call site seen under the routes that share this object; safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sites: dict[tuple[str, str, bool], CallSite] = {}

    def saw(self, *, model: str, endpoint: Literal["policy", "own"], trained: bool, settings: Mapping[str, Any]) -> None:
        """Counts one call; ``settings`` as in ``CallSite.values``."""
        with self._lock:
            site = self._sites.setdefault((model, endpoint, trained), CallSite(model=model, endpoint=endpoint, trained=trained))
            site.calls += 1
            for name, value in settings.items():
                counts = site.values.setdefault(name, Counter())
                counts[value if value in counts or len(counts) < _MAX_VALUES else "other"] += 1

    def seen(self) -> list[CallSite]:
        """A copy, most used first."""
        with self._lock:
            sites = [msgspec.structs.replace(s, values={name: Counter(c) for name, c in s.values.items()}) for s in self._sites.values()]
        return sorted(sites, key=lambda site: (-site.calls, site.model, site.endpoint, site.trained))

    def models(self) -> frozenset[str]:
        """Every model name that was asked for."""
        with self._lock:
            return frozenset(model for model, _, _ in self._sites)


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """Where the calls of a rollout go and how they are sampled.

    Example: ``Route(base_url="http://127.0.0.1:8000/v1", api_key="local", model="policy", sampling={"temperature": 1.0})``
    Raises ConfigurationError for fields of another type.
    """

    base_url: str
    api_key: str
    model: str
    replaces: frozenset[str] | None = None
    """Only calls that ask for one of these models are redirected; None: all."""
    sampling: dict[str, Any] = {}
    """Overrides the app's own fields in redirected calls; None as a value removes the field."""
    constrained: Constrained = "as_auto"
    call_timeout: float | None = None
    """Seconds that one attempt of a redirected call may wait for the server; a shorter timeout of the app's stays."""
    sites: CallSites | None = None
    """Where the calls are counted by call site; None: nowhere."""
    resolve: Callable[[Any], Endpoint] | None = None
    """Given the scope of the call, chooses its endpoint; None: always this one. It may raise, and the call then fails with that."""

    def __post_init__(self) -> None:
        for name in ("base_url", "api_key", "model"):
            if not isinstance(getattr(self, name), str):
                raise ConfigurationError(f"got {name}={getattr(self, name)!r}; expected a string")
        words(self.sampling, "sampling")
        if self.replaces is not None and (
            isinstance(cast("object", self.replaces), str) or not isinstance(cast("object", self.replaces), Set)
        ):
            raise ConfigurationError(f"got replaces={self.replaces!r}; expected a frozenset of model names, or None")
        if self.constrained not in get_args(Constrained):
            raise ConfigurationError(f"got constrained={self.constrained!r}; expected one of {', '.join(map(repr, get_args(Constrained)))}")
        if self.call_timeout is not None:
            seconds(self.call_timeout, "call_timeout")

    def __repr__(self) -> str:
        return f"Route(base_url={self.base_url!r}, model={self.model!r}, replaces={self.replaces!r}, sampling={self.sampling!r})"

    def endpoint(self, scope: Any) -> Endpoint:
        """The endpoint of one call made in ``scope``."""
        if self.resolve is not None:
            return self.resolve(scope)
        return Endpoint(base_url=self.base_url, api_key=self.api_key, model=self.model)


_route: ContextVar[Route | None] = ContextVar("rllm_route", default=None)


def current_route() -> Route | None:
    """The route that calls made here and now would take; None: their own endpoint."""
    route = _route.get()
    return _inherited.route if route is None else route


class _Inherited:
    """The route that a whole process was started under."""

    route: Route | None = None


_inherited: Final = _Inherited()


def inherit(route: Route) -> None:
    """Calls of this process that are under no other route take this one."""
    _inherited.route = route


@contextlib.contextmanager
def use_route(route: Route | None) -> Generator[Route | None]:
    """Calls made inside, in any thread or task that the context is carried to, take ``route``; None switches redirection off."""
    token = _route.set(route)
    try:
        yield route
    finally:
        _route.reset(token)


def call_seed(seed: int, trajectory: str, number: int, entry: int = 0) -> int:
    """The seed of the ``number``-th call of a role's ``entry``-th agent: 31 bits that depend on all four and on nothing else."""
    parts = [seed, trajectory, number, *([entry] if entry else [])]
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1


def redirects(route: Route, scope: Any, requested_model: str) -> bool:
    """Whether a call goes to the policy: not under ``no_train``, not inside a reward, and only if its model is one that is replaced."""
    if scope.no_train or scope.in_reward:
        return False
    return route.replaces is None or requested_model in route.replaces


def reshaped(
    body: Mapping[str, Any], route: Route, model: str, seed: int | None, operation: Operation = "chat"
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The body to send to the policy, and the app's own value (None: absent) of each field that was changed.

    Raises ``CallRefusedError`` for a constrained call under ``constrained="refuse"``, and for one that only the app's provider can answer.
    """
    changes: dict[str, Any] = {"model": model, **_overrides(route.sampling, operation)}
    if operation == "responses":
        _require_whole({**body, **changes})
    if seed is not None and body.get("seed") is None:
        changes.setdefault("seed", seed)
    forced = constraint({**body, **changes})
    if forced is not None and route.constrained == "refuse":
        raise CallRefusedError(
            f"this call forces its reply ({forced}), so its logprobs are a grammar's and not the policy's. Give constrained='as_auto' "
            "to ask with tool_choice='auto', constrained='inexact' to run the call untrained, or put it under rllm.no_train."
        )
    if route.constrained == "as_auto" and tool_choice_constraint({**body, **changes}) is not None:
        changes["tool_choice"] = "auto"
    sent = {field: value for field, value in {**body, **changes}.items() if value is not None or field not in changes}
    return sent, {field: body.get(field) for field, value in changes.items() if body.get(field) != value}


def _overrides(sampling: Mapping[str, Any], operation: Operation) -> dict[str, Any]:
    """``sampling`` in the words of the operation; a limit on the length takes the place of whatever limit the app gives."""
    lengths = [sampling[name] for name in (*_LENGTH_FIELDS, _RESPONSES_LENGTH) if name in sampling]
    if operation != "responses":
        return {**dict.fromkeys(_LENGTH_FIELDS), **sampling} if lengths else dict(sampling)
    others = {name: value for name, value in sampling.items() if name not in _LENGTH_FIELDS}
    return {**others, _RESPONSES_LENGTH: lengths[0]} if lengths else others


def _require_whole(body: Mapping[str, Any]) -> None:
    """Refuses a call to ``responses`` that is not all there: the rest of it is at the app's provider, where the policy cannot read it."""
    needed = next((name for name in _KEPT_BY_PROVIDER if body.get(name)), None)
    if needed is not None:
        raise CallRefusedError(
            f"responses.create with {needed} cannot be sent to the policy: it needs what the app's own provider keeps, and the policy's "
            "server keeps nothing from call to call. Send the whole conversation as input (the items of response.output included), limit "
            "fit(replaces=[...]) to other models, or put the call under rllm.no_train."
        )


def settings_of(body: Mapping[str, Any], sent: Mapping[str, Any]) -> dict[str, Any]:
    """What a call site is reported with: see ``CallSite.values``."""
    settings: dict[str, Any] = {name: _countable(sent.get(name)) for name in ("temperature", "top_p", "top_k")}
    settings["seed"] = _countable(body.get("seed"))
    settings["constrained"] = constraint(body)
    return settings


def _countable(value: Any) -> Any:
    return value if value is None or isinstance(value, (int, float, str)) else repr(cast("object", value))


def kept_header(name: str) -> bool:
    """Whether a header of the app's request may go to the policy."""
    name = name.lower()
    return name in _KEPT_HEADERS or name.startswith(_KEPT_PREFIXES)
