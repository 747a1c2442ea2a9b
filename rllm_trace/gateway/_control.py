"""The paths under ``/rllm/``: an app in any language opens an episode, scores it and ends it, and asks what was recorded. Token only.

POST /rllm/episodes                {"task_id": ..., "session_id": ..., "metadata": {...}, "workflow": ..., "input": ...}, all optional
POST /rllm/episodes/{id}/rewards   {"value": 1.0, "name": "exact", "weight": 1.0}
POST /rllm/episodes/{id}/end       {"output": ..., "error": "..."}, both optional
GET  /rllm/stats
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, cast
from urllib.parse import unquote

import msgspec

from rllm_trace._collect import stats
from rllm_trace._context import Scope
from rllm_trace._rewards import add_reward
from rllm_trace.exceptions import RewardError, UnknownEpisodeError
from rllm_trace.gateway._binding import Bindings
from rllm_trace.gateway._episodes import Episodes
from rllm_trace.gateway._refusal import Refusal

__all__ = ["Control"]

_ROOT: Final = "/rllm/"
_REWARD_FIELDS: Final = frozenset({"value", "name", "weight", "span_id"})


class Control:
    """Answers what is no call but about calls."""

    def __init__(self, bindings: Bindings, episodes: Episodes, places: Callable[[Scope], dict[str, Any]]) -> None:
        self._bindings = bindings
        self._episodes = episodes
        self._places = places
        """What an app is told of a new episode: URLs, key, headers."""

    def takes(self, path: str) -> bool:
        """Whether the path is one of these."""
        return path.startswith(_ROOT)

    def answer(self, method: str, path: str, raw: bytes, keys: list[str], counts: Mapping[str, int]) -> tuple[int, bytes]:
        """(status, JSON). Raises Refusal."""
        if not self._bindings.is_token(keys):
            raise Refusal(403, "this needs the gateway's token; the key of an episode is for its calls only", code="token_needed")
        parts = [unquote(part) for part in path[len(_ROOT) :].strip("/").split("/")]
        match method, parts:
            case "GET", ["stats"]:
                return 200, msgspec.json.encode({"requests": dict(counts), "open_episodes": len(self._episodes), "recorded": stats()})
            case "POST", ["episodes"]:
                return 201, msgspec.json.encode(self._open(_given(raw)))
            case "POST", ["episodes", id, "rewards"]:
                self._reward(id, _given(raw))
                return 200, b"{}"
            case "POST", ["episodes", id, "end"]:
                if not self._episodes.end(id, _given(raw)):
                    raise Refusal(404, f"no episode {id!r} is open here", code="unknown_episode")
                return 200, b"{}"
            case _:
                raise Refusal(404, f"got {method} {path[:100]!r}; see rllm gateway --help for the paths under {_ROOT}", code="unknown_path")

    def _open(self, given: dict[str, Any]) -> dict[str, Any]:
        id = given.get("id")
        scope = self._episodes.open(None if id is None else str(id), given=given)
        if scope is None:
            raise Refusal(409, "nothing records here: start the gateway with --store or --otlp", code="not_recording")
        return {"id": scope.episode.id, "trace_id": scope.episode.trace_id, **self._places(scope)}

    def _reward(self, id: str, given: dict[str, Any]) -> None:
        unknown = sorted(set(given) - _REWARD_FIELDS)
        if unknown or "value" not in given:
            raise Refusal(400, f"got the fields {sorted(given)}; expected value and some of {sorted(_REWARD_FIELDS)}", code="bad_reward")
        try:
            add_reward(
                given["value"],
                name=str(given.get("name") or "reward"),
                weight=given.get("weight", 1.0),
                episode_id=id,
                span_id=given.get("span_id"),
            )
        except RewardError as error:
            raise Refusal(400, str(error), code="bad_reward") from error
        except UnknownEpisodeError as error:
            raise Refusal(404, str(error), code="unknown_episode") from error


def _given(raw: bytes) -> dict[str, Any]:
    try:
        given: Any = msgspec.json.decode(raw) if raw.strip() else {}
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refusal(400, f"the body is no JSON ({error})", code="bad_json") from error
    if not isinstance(given, dict):
        raise Refusal(400, f"the body is a JSON {type(given).__name__}; expected an object", code="bad_json")
    return cast("dict[str, Any]", given)
