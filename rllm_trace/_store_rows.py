"""One Episode in, one row of plain columns out, and back: ``episode_of(row_of(episode)) == episode``. Pure.

A row stores each token and each message once. The calls of an episode stand in one list, in the order of their trajectories; a call's
prompt is written as the call whose sequence (its prompt and one of its replies) it extends furthest, how many tokens they share, and the
tokens after those; its messages likewise. Values of any shape are JSON text (``_plain``), token arrays stay arrays.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast

import msgspec

from rllm_trace._plain import dumps, from_plain, loads, to_plain
from rllm_trace.types import Choice, Episode, ErrorInfo, ModelCall, Reward, TokenIds, ToolCall, Trajectory, Usage

__all__ = ["Row", "episode_of", "row_of"]

Row = dict[str, Any]

_BLOCK: Final = 64
"""Bytes of ids that are looked up at once: a shared beginning shorter than 16 tokens is not worth a reference."""
_BLOCK_IDS: Final = _BLOCK // 4
_CANDIDATES: Final = 8
"""Sequences that are compared id by id, of those that share equally many blocks."""

_EPISODE_SCALARS: Final = (
    "id", "trace_id", "span_id", "task_id", "session_id", "parent_episode_id", "workflow", "termination", "reward",
    "started", "ended", "open_calls",
)  # fmt: skip
_EPISODE_JSON: Final = ("input", "output", "metadata")
_CALL_SCALARS: Final = (
    "span_id", "parent_id", "operation", "model", "requested_model", "endpoint", "server", "response_id", "response_model", "attempts",
    "exact", "inexact_reason", "complete", "streamed", "no_train", "late", "multimodal", "trainable", "policy_version_start",
    "policy_version_end", "started", "ended", "time_to_first_token",
)  # fmt: skip
_CALL_JSON: Final = ("sampling", "requested_sampling", "version_spans")
_CHOICE_SCALARS: Final = ("index", "token_ids", "logprobs", "text", "reasoning", "refusal", "finish_reason")
_CHOICE_JSON: Final = ("tool_calls", "stop_reason", "version_spans")
_TOOL_SCALARS: Final = ("span_id", "parent_id", "name", "started", "ended")
_TOOL_JSON: Final = ("arguments", "result")
_TRAJECTORY_SCALARS: Final = ("id", "name", "parent_id", "reward", "started", "ended")


def row_of(episode: Episode) -> Row:
    """The columns of one episode."""
    calls, tools = _Calls(), list[Row]()
    for number, trajectory in enumerate(episode.trajectories):
        calls.begin(number)
        for call in trajectory.calls:
            calls.add(call)
        tools += [
            {"trajectory": number, **_columns(tool, _TOOL_SCALARS, _TOOL_JSON), "error": _plain(tool.error)} for tool in trajectory.tools
        ]
    return {
        **_columns(episode, _EPISODE_SCALARS, _EPISODE_JSON),
        "error": _plain(episode.error),
        "rewards": [_plain(reward) for reward in episode.rewards],
        "trajectories": [
            {**_columns(trajectory, _TRAJECTORY_SCALARS), "rewards": [_plain(reward) for reward in trajectory.rewards]}
            for trajectory in episode.trajectories
        ],
        "calls": calls.rows,
        "tools": tools,
    }


def episode_of(row: Mapping[str, Any]) -> Episode:
    """The episode that the row was made of. A column that the row lacks, because an older release wrote it, has its default."""
    calls = _restored_calls(row["calls"])
    of_calls = [call["trajectory"] for call in row["calls"]]
    trajectories = [
        Trajectory(
            **_fields(Trajectory, columns, _TRAJECTORY_SCALARS),
            calls=[call for call, of in zip(calls, of_calls, strict=True) if of == number],
            tools=[_tool(tool) for tool in row["tools"] if tool["trajectory"] == number],
            rewards=[_record(Reward, reward) for reward in columns["rewards"]],
        )
        for number, columns in enumerate(row["trajectories"])
    ]
    return Episode(
        **_fields(Episode, row, _EPISODE_SCALARS, _EPISODE_JSON),
        error=_optional(ErrorInfo, row.get("error")),
        rewards=[_record(Reward, reward) for reward in row["rewards"]],
        trajectories=trajectories,
    )


def token_count(row: Mapping[str, Any]) -> int:
    """How many token ids the row stores."""
    return sum(len(call["prompt_new"] or ()) + sum(len(choice["token_ids"] or ()) for choice in call["choices"]) for call in row["calls"])


class _Calls:
    """Turns the calls of one episode into rows, each against those before it."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self._calls: list[ModelCall] = []
        self._trajectory = 0
        self._last: int | None = None
        """The call before in the same trajectory."""
        self._sequences = _Sequences()
        self._tools: dict[str, int] = {}

    def begin(self, trajectory: int) -> None:
        self._trajectory, self._last = trajectory, None

    def add(self, call: ModelCall) -> None:
        number = len(self.rows)
        prompt = self._sequences.prompt(call)
        self.rows.append(
            {
                "trajectory": self._trajectory,
                **_columns(call, _CALL_SCALARS, _CALL_JSON),
                **self._messages(call, prompt["prompt_from"]),
                **self._tool_definitions(call, number),
                **prompt,
                "choices": [_columns(choice, _CHOICE_SCALARS, _CHOICE_JSON) for choice in call.choices],
                "usage": _plain(call.usage),
                "error": _plain(call.error),
            }
        )
        self._sequences.add(number, call)
        self._calls.append(call)
        self._last = number

    def _messages(self, call: ModelCall, prompt_from: int | None) -> Row:
        best, shared = None, 0
        for candidate in dict.fromkeys(known for known in (prompt_from, self._last) if known is not None):
            common = _common(call.messages, self._calls[candidate].messages)
            if common > shared:
                best, shared = candidate, common
        return {"messages_from": best, "messages_shared": shared, "messages": dumps(to_plain(call.messages[shared:]))}

    def _tool_definitions(self, call: ModelCall, number: int) -> Row:
        if call.tools is None:
            return {"tools_from": None, "tools": None}
        if self._last is not None and self._calls[self._last].tools == call.tools:
            last = self.rows[self._last]
            return {"tools_from": self._last if last["tools_from"] is None else last["tools_from"], "tools": None}
        text = dumps(to_plain(call.tools))
        known = self._tools.setdefault(text, number)
        return {"tools_from": None, "tools": text} if known == number else {"tools_from": known, "tools": None}


class _Sequences:
    """The token sequences of the calls so far, found by the chain of their blocks from the first token on."""

    def __init__(self) -> None:
        self._known: list[tuple[int, int | None, bytes]] = []
        """(call, reply or None, bytes of ids)."""
        self._blocks: dict[int, tuple[int, ...]] = {}
        """Hash of a chain of blocks to the last sequences that begin with it."""
        self._pending: dict[bytes, list[tuple[int, ModelCall]]] = {}
        """First block -> calls that begin with it and that nobody has asked for."""

    def add(self, number: int, call: ModelCall) -> None:
        """The call can be referred to from now on; nothing of it is hashed before one that begins alike asks."""
        prompt = call.prompt_token_ids
        if prompt is None:
            return
        if len(prompt) * prompt.itemsize < _BLOCK:
            self._index(number, call)
        else:
            self._pending.setdefault(prompt[:_BLOCK_IDS].tobytes(), []).append((number, call))

    def prompt(self, call: ModelCall) -> Row:
        """The columns of the call's prompt."""
        ids = call.prompt_token_ids
        if ids is None:
            return {"prompt_from": None, "prompt_choice": None, "prompt_shared": 0, "prompt_new": None}
        data = ids.tobytes()
        for number, earlier in self._pending.pop(data[:_BLOCK], ()):
            self._index(number, earlier)
        shared, best = max(((_common_ids(data, self._known[known][2]), known) for known in self._candidates(data)), default=(0, 0))
        if not shared:
            return {"prompt_from": None, "prompt_choice": None, "prompt_shared": 0, "prompt_new": ids}
        number, choice, _ = self._known[best]
        return {"prompt_from": number, "prompt_choice": choice, "prompt_shared": shared, "prompt_new": TokenIds(ids[shared:])}

    def _index(self, number: int, call: ModelCall) -> None:
        prompt = cast("TokenIds", call.prompt_token_ids).tobytes()
        chains = _chains(prompt)
        replies = [(position, choice.token_ids) for position, choice in enumerate(call.choices) if choice.token_ids is not None]
        for position, reply in replies or [(None, None)]:
            own = (len(self._known),)
            data = prompt if reply is None else prompt + reply.tobytes()
            self._known.append((number, position, data))
            for chain in (*chains, *_chains(data, len(chains), chains[-1] if chains else 0)):
                known = self._blocks.setdefault(chain, own)
                if known is not own:
                    self._blocks[chain] = (*known[1 - _CANDIDATES :], *own)

    def _candidates(self, data: bytes) -> Sequence[int]:
        """The sequences that share the most whole blocks with ``data``."""
        best: Sequence[int] = ()
        chain = 0
        for start in range(0, len(data) - _BLOCK + 1, _BLOCK) if self._blocks else ():
            chain = hash((chain, data[start : start + _BLOCK]))
            known = self._blocks.get(chain)
            if known is None:
                break
            best = known
        return best


def _chains(data: bytes, skip: int = 0, chain: int = 0) -> list[int]:
    """A number for each beginning of ``data`` that ends at a block's end, after the first ``skip``; equal beginnings have equal numbers."""
    found: list[int] = []
    for start in range(skip * _BLOCK, len(data) - _BLOCK + 1, _BLOCK):
        chain = hash((chain, data[start : start + _BLOCK]))
        found.append(chain)
    return found


def _common_ids(data: bytes, known: bytes) -> int:
    """How many ids the two begin with in common."""
    one, other = memoryview(data), memoryview(known)
    low, high = 0, min(len(one), len(other)) // 4
    while low < high:
        middle = (low + high + 1) // 2
        if one[4 * low : 4 * middle] == other[4 * low : 4 * middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _common(one: Sequence[Any], other: Sequence[Any]) -> int:
    shared = 0
    for mine, theirs in zip(one, other, strict=False):
        if mine is not theirs and (mine != theirs or dumps(to_plain(mine)) != dumps(to_plain(theirs))):
            break
        shared += 1
    return shared


def _restored_calls(rows: Sequence[Mapping[str, Any]]) -> list[ModelCall]:
    made: list[ModelCall] = []
    for row in rows:
        choices = [_choice(choice) for choice in row["choices"]]
        shared = made[int(row["messages_from"])].messages[: row["messages_shared"]] if row["messages_from"] is not None else []
        tools = made[int(row["tools_from"])].tools if row["tools_from"] is not None else _open(row["tools"])
        made.append(
            ModelCall(
                **_fields(ModelCall, row, _CALL_SCALARS, _CALL_JSON[:2]),
                version_spans=_spans(row.get("version_spans")),
                messages=[*shared, *_open(row["messages"])],
                tools=tools,
                choices=choices,
                prompt_token_ids=_prompt(row, made),
                usage=_optional(Usage, row.get("usage")),
                error=_optional(ErrorInfo, row.get("error")),
            )
        )
    return made


def _prompt(row: Mapping[str, Any], made: Sequence[ModelCall]) -> TokenIds | None:
    if row["prompt_from"] is None:
        return row["prompt_new"]
    base = made[int(row["prompt_from"])]
    prompt = cast("TokenIds", base.prompt_token_ids)
    shared = TokenIds(prompt[: row["prompt_shared"]])
    if row["prompt_choice"] is not None and row["prompt_shared"] > len(prompt):
        reply = cast("TokenIds", base.choices[int(row["prompt_choice"])].token_ids)
        shared.extend(reply[: row["prompt_shared"] - len(prompt)])
    shared.extend(row["prompt_new"])
    return shared


def _tool(row: Mapping[str, Any]) -> ToolCall:
    return ToolCall(**_fields(ToolCall, row, _TOOL_SCALARS, _TOOL_JSON), error=_optional(ErrorInfo, row.get("error")))


def _choice(row: Mapping[str, Any]) -> Choice:
    fields: dict[str, Any] = _fields(Choice, row, _CHOICE_SCALARS, _CHOICE_JSON)
    fields["version_spans"] = _spans(row.get("version_spans"))
    return Choice(**fields)


def _spans(text: str | None) -> list[tuple[int, int, int]] | None:
    found = _open(text)
    return None if found is None else [(version, start, end) for version, start, end in found]


@functools.cache
def _reader(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    """Reads many attributes at once."""
    return operator.attrgetter(*names)


def _columns(record: msgspec.Struct, scalars: tuple[str, ...], json: tuple[str, ...] = ()) -> Row:
    row = dict(zip(scalars, _reader(scalars)(record), strict=True))
    for name in json:
        value = getattr(record, name)
        row[name] = None if value is None else dumps(to_plain(value))
    return row


def _fields(kind: type[msgspec.Struct], row: Mapping[str, Any], scalars: Sequence[str], json: Sequence[str] = ()) -> dict[str, Any]:
    found = {name: row[name] for name in scalars if name in row}
    found |= {name: _open(row[name]) for name in json if name in row}
    return {name: value for name, value in found.items() if value is not None or name not in _never_null(kind)}


@functools.cache
def _never_null(kind: type[msgspec.Struct]) -> frozenset[str]:
    """Fields whose default is a value: a null column of them was written by a release that did not know them."""
    known = msgspec.structs.fields(kind)
    return frozenset(field.name for field in known if field.default is not msgspec.NODEFAULT and field.default is not None)


def _open(text: str | None) -> Any:
    return None if text is None else from_plain(loads(text))


def _plain(record: msgspec.Struct | None) -> Row | None:
    return None if record is None else {name: getattr(record, name) for name in record.__struct_fields__}


def _record(kind: type[Any], row: Mapping[str, Any]) -> Any:
    return kind(**{name: row[name] for name in kind.__struct_fields__ if name in row})


def _optional(kind: type[Any], row: Mapping[str, Any] | None) -> Any:
    return None if row is None else _record(kind, row)
