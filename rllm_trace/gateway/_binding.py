"""What a request says about its episode in; the scope and the route of its call out.

Headers come first, then the URL path, then the bearer key; where none of them names an episode the call is unassigned. Nothing is ever
inferred from content, address or time. Who may call at all is decided before: by the gateway's token or by a key of an open episode.
"""

from __future__ import annotations

import collections
import hmac
import re
import secrets
import threading
from typing import Any, Final, Literal
from urllib.parse import quote, unquote

import msgspec

from rllm_trace import attributes as A
from rllm_trace._context import Scope, current
from rllm_trace._guard import counters
from rllm_trace._propagation import _scope_of
from rllm_trace._recorder import recorder
from rllm_trace._spans import sources
from rllm_trace.exceptions import ConfigurationError
from rllm_trace.gateway._episodes import Episodes, is_episode_id
from rllm_trace.gateway._refusal import Refusal
from rllm_trace.routing import Route, current_route

__all__ = ["Bindings", "Bound", "By", "split_path"]

By = Literal["headers", "path", "key", "unassigned"]

_MAX_BOUND: Final = 50_000
_EPISODE_PATH: Final = re.compile(r"/e/([^/]+)(?:/s/([^/]+))?(/.*)?")
_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}.*")
_KEY_PREFIX: Final = "rllm-"


class Bound(msgspec.Struct, frozen=True):
    """Where the calls of one request belong."""

    scope: Scope | None
    """None: nothing records them."""
    route: Route | None
    by: By
    name: str = ""
    """The episode's id; empty for an unassigned call."""

    @property
    def is_given_up(self) -> bool:
        """A call that was to go to the policy, of an episode that is over: it must reach nobody, another endpoint least of all."""
        return self.route is not None and self.scope is not None and self.scope.episode.closed


def split_path(path: str) -> tuple[str | None, str | None, str]:
    """(episode id, number of its scope, rest): ``/e/ep%201/v1/models`` gives ``("ep 1", None, "/v1/models")``."""
    found = _EPISODE_PATH.fullmatch(path)
    if found is None:
        return None, None, path
    return unquote(found[1]), found[2], found[3] or "/"


class Bindings:
    """What was handed out in this process, and what it stands for. Any thread may ask."""

    def __init__(self, token: str | None, route: Route | None, episodes: Episodes, *, opens: bool) -> None:
        self._token = token
        self._route = route
        self._episodes = episodes
        self._opens = opens
        """Whether an episode that a request names, and nobody has, is opened."""
        self._lock = threading.Lock()
        self._numbers: collections.OrderedDict[tuple[str, str, bool, bool], str] = collections.OrderedDict()
        self._bound: dict[tuple[str, str], Bound] = {}
        self._by_key: collections.OrderedDict[str, Bound] = collections.OrderedDict()
        self._keys: dict[tuple[str, str], str] = {}
        self._routed: collections.OrderedDict[str, Bound] = collections.OrderedDict()
        """Episodes of rollouts of which a call has been seen."""

    # handing out

    def scope_of(self, episode: Any) -> Scope:
        """The scope that an episode, its handle or its id stands for: the running one if it is in that episode, else its outermost."""
        running = current()
        if episode is None:
            if running is None or not running.episode.id or running.episode.closed:
                raise ConfigurationError("there is no recorded episode here; call this inside a workflow, or give an episode or its id")
            return running
        id = episode if isinstance(episode, str) else str(episode.id)
        if running is not None and running.episode.id == id and not running.episode.closed:
            return running
        scope = self._episodes.find(id) or _outermost(id)
        if scope is None:
            raise ConfigurationError(f"no episode {id!r} is open in this process; ask while its workflow runs")
        return scope

    def path(self, scope: Scope) -> str:
        """The prefix of URLs whose calls belong to ``scope``."""
        number = self._number(scope)
        return f"/e/{quote(scope.episode.id, safe='')}" + (f"/s/{number}" if number else "")

    def key(self, scope: Scope) -> str:
        """The bearer key whose calls belong to ``scope``; made at the first time of asking."""
        place = (scope.episode.id, self._number(scope))
        with self._lock:
            key = self._keys.get(place)
            if key is None:
                key = self._keys[place] = _KEY_PREFIX + secrets.token_urlsafe(24)
                self._by_key[key] = self._bound[place]
            return key

    def _number(self, scope: Scope) -> str:
        """ "" for the outermost scope of an episode, else a number: agents and ``no_train`` have places of their own."""
        episode = scope.episode
        facts = (episode.id, scope.span_id, scope.no_train, scope.in_reward)
        with self._lock:
            number = self._numbers.get(facts)
            if number is None:
                is_outermost = scope.span_id == episode.root.span_id and not (scope.no_train or scope.in_reward)
                number = self._numbers[facts] = "" if is_outermost else secrets.token_hex(6)
                route = current_route() or self._route_of(scope)
                self._bound[episode.id, number] = Bound(scope, route, "path", episode.id)
                self._forget_oldest()
            return number

    def _forget_oldest(self) -> None:
        while len(self._numbers) > _MAX_BOUND:
            (id, *_), number = self._numbers.popitem(last=False)
            self._bound.pop((id, number), None)
            key = self._keys.pop((id, number), None)
            if key is not None:
                self._by_key.pop(key, None)

    def _route_of(self, scope: Scope) -> Route | None:
        rollout = scope.episode.rollout
        return (None if rollout is None else rollout.route) or self._route

    # asking

    def is_token(self, keys: list[str]) -> bool:
        """Whether one of the keys that a client shows is the gateway's own, or none is asked for."""
        if self._token is None:
            return True
        token = self._token.encode()
        return any(hmac.compare_digest(key.encode("utf-8", "replace"), token) for key in keys)

    def admits(self, keys: list[str]) -> bool:
        """Whether one of the keys is the gateway's token or that of an episode."""
        return self.is_token(keys) or any(key in self._by_key for key in keys)

    def find(self, headers: dict[str, str], id: str | None, number: str | None, keys: list[str]) -> Bound:
        """Where a request belongs. Raises Refusal for a scope in the path that was never handed out."""
        key = next((self._by_key[key] for key in keys if key in self._by_key), None)
        told = self._by_headers(headers)
        if told is None and id is not None:
            told = self._by_path(id, number)
        if told is None and key is not None:
            self._episodes.find(key.name)
            return Bound(key.scope, key.route, "key", key.name)
        if told is None:
            return Bound(Episodes.unassigned(), self._route, "unassigned")
        self._episodes.find(told.name)  # it is in use
        others = {name for name in (id, None if key is None else key.name) if name is not None}
        if others - {told.name}:
            counters.add("orphan", "gateway call that names two episodes")
        return told

    def _by_headers(self, headers: dict[str, str]) -> Bound | None:
        entries = dict(entry.strip().split("=", 1) for entry in headers.get(A.HEADER_BAGGAGE, "").split(",") if "=" in entry)
        id = unquote(entries.get(A.EPISODE_ID, "").split(";", 1)[0])
        if not id and A.HEADER_PARENT not in headers:
            return None
        if A.HEADER_PARENT not in headers:
            parent = self._parent_of(id, entries, headers)
            if parent is None:
                return self._by_path(id, None) if self._opens and is_episode_id(id) else _malformed()
            headers = {**headers, A.HEADER_PARENT: parent}
        if self._keeps_itself(id):
            found = _TRACEPARENT.fullmatch(headers[A.HEADER_PARENT].strip())
            scope = self._episodes.find(id) or (self._opened(id, found[1]) if found is not None else None)
            return _malformed() if found is None else Bound(scope, self._route, "headers", id)
        scope = _scope_of(headers)
        if scope is None:
            return None
        if scope.episode.remote and id in self._routed:
            return self._routed[id]
        bound = Bound(scope, self._route_of(scope), "headers", id)
        if scope.episode.rollout is not None and id not in self._routed:
            self._routed[id] = bound
            if len(self._routed) > _MAX_BOUND:
                self._routed.popitem(last=False)
        return bound

    def _keeps_itself(self, id: str) -> bool:
        """Whether the record of an episode of another process is made here, because nothing would take its spans there."""
        return self._opens and is_episode_id(id) and id not in recorder.open_episodes and not recorder.span_sinks

    def _parent_of(self, id: str, entries: dict[str, str], headers: dict[str, str]) -> str | None:
        """Our own parent header for baggage that came without it; None if nothing says what it is."""
        episode = recorder.open_episodes.get(id)
        if episode is not None:
            return f"00-{episode.trace_id}-{entries.get(A.TRAJECTORY_ID) or episode.root.span_id}-01"
        found = _TRACEPARENT.fullmatch(headers.get(A.HEADER_TRACEPARENT, "").strip())
        return None if found is None else f"00-{found[1]}-{found[2]}-01"

    def _by_path(self, id: str, number: str | None) -> Bound:
        bound = self._bound.get((id, number or ""))
        if bound is not None:
            return bound
        if number:
            raise Refusal(404, "this URL was not handed out by this gateway, or too long ago; ask it for a new one", code="unknown_url")
        scope = self._episodes.find(id) or _outermost(id)
        if scope is None and self._opens and not self._episodes.has_ended(id):
            scope = self._opened(id, None)
        elif scope is None:
            counters.add("late" if self._episodes.has_ended(id) else "orphan", "gateway call for an episode that is not open")
            if not self._opens:
                raise Refusal(410, f"the episode {id!r} is not open in this process", code="episode_not_open")
        return Bound(scope, self._route if scope is None else self._route_of(scope), "path", id)

    def _opened(self, id: str, trace_id: str | None) -> Scope | None:
        if self._episodes.has_ended(id):
            counters.add("late", "gateway call for an episode that is not open")
            return None
        return self._episodes.open(id, trace_id=trace_id or sources.trace_id())


def _malformed() -> None:
    counters.add("orphan", "malformed headers")


def _outermost(id: str) -> Scope | None:
    """The scope of the workflow of an episode that is open in this process."""
    episode = recorder.open_episodes.get(id)
    if episode is None or episode.closed:
        return None
    return Scope(episode, episode.trajectory, episode.root.span_id, no_train=False, in_reward=False, parent=None)
