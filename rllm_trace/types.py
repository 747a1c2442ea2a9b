"""The records that leave the SDK: one episode, its trajectories, their model calls, tools and rewards.

Every record is frozen and made once, when the thing it describes has ended. Identity is the span id; nothing is ever
matched by position or by text. A token id or a logprob in here is one that the server reported: nothing is re-tokenised,
padded or invented.
"""

from __future__ import annotations

import array
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self

import msgspec

__all__ = [
    "Choice",
    "Episode",
    "ErrorInfo",
    "Logprobs",
    "ModelCall",
    "Reward",
    "Termination",
    "TokenIds",
    "ToolCall",
    "Trajectory",
    "Usage",
]

Termination = Literal["completed", "failed", "cancelled", "timeout", "unsettled"]
"""How an episode ended: its workflow returned; raised; was cancelled; hit a deadline; or returned while calls that it
started were still open after the settle time."""


if TYPE_CHECKING:
    _Array = array.array[Any]
else:
    _Array = array.array


class _Packed(_Array):
    """An array of 4-byte numbers that compares with any sequence, pickles, copies and packs little-endian."""

    __slots__ = ()
    _code = "i"

    def __new__(cls, values: Iterable[Any] | bytes = ()) -> Self:
        if isinstance(values, (bytes, bytearray, memoryview)):
            taken: array.array[Any] = array.array(cls._code)
            taken.frombytes(values)
            if sys.byteorder == "big":
                taken.byteswap()
            values = taken  # copied into one of its very size: ``frombytes`` has left room to grow
        return super().__new__(cls, cls._code, values)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (list, tuple)):
            return self.tolist() == list(other)  # pyright: ignore[reportUnknownArgumentType]
        return super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        equal = self.__eq__(other)
        return equal if equal is NotImplemented else not equal

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[type[_Packed], tuple[bytes]]:
        return type(self), (self.packed(),)

    def __reduce_ex__(self, protocol: object) -> tuple[type[_Packed], tuple[bytes]]:
        return self.__reduce__()

    def __copy__(self) -> _Packed:
        return type(self)(self)

    def __deepcopy__(self, memo: object) -> _Packed:
        return type(self)(self)

    def packed(self) -> bytes:
        """The numbers as little-endian bytes, 4 per number."""
        if sys.byteorder == "big":
            swapped: array.array[Any] = array.array(self._code, self)
            swapped.byteswap()
            return swapped.tobytes()
        return self.tobytes()


class TokenIds(_Packed):
    """Token ids, int32, shape (T). A sequence of ints with the buffer protocol: ``numpy.frombuffer(ids, "i4")`` copies nothing."""

    __slots__ = ()
    _code = "i"


class Logprobs(_Packed):
    """Natural-log probabilities, float32, shape (T). A sequence of floats with the buffer protocol."""

    __slots__ = ()
    _code = "f"


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An exception, as a record. Never holds a key or a header."""

    type: str
    """Qualified class name, such as ``openai.APITimeoutError``."""
    message: str
    """``str(exception)``, at most 2,000 characters."""
    status_code: int | None = None
    """HTTP status if the error came from a response."""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts as the server reported them, summed over choices."""

    prompt_tokens: int
    completion_tokens: int


class Reward(msgspec.Struct, frozen=True, kw_only=True):
    """One score given by a reward function or by ``add_reward``."""

    name: str
    value: float
    """Finite, at most 1e18 either way; a bool became 0.0 or 1.0."""
    weight: float = 1.0
    """Its share in the total of its scope: total = sum(weight * value)."""
    target: str | None = None
    """Id of the trajectory or span id of the call that it scores; None: the whole episode."""
    span_id: str | None = None
    """Span of the reward function that gave it; None if given by ``add_reward``."""
    superseded: bool = False
    """A later reward of the same name in the same scope replaced it; it is kept but not summed."""


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """One executed tool (an ``execute_tool`` span)."""

    span_id: str
    parent_id: str | None
    name: str
    arguments: Any = None
    result: Any = None
    error: ErrorInfo | None = None
    started: int
    """Unix time, nanoseconds."""
    ended: int
    """Unix time, nanoseconds."""


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One sampled reply of a call. With n=3 there are three.

    Example: ``Choice(index=0, token_ids=TokenIds([40, 2]), logprobs=Logprobs([-0.1, -0.5]), text="a", finish_reason="stop")``
    """

    index: int
    token_ids: TokenIds | None
    """Ids that the server sampled, int32 (R), end-of-turn token included if it was sampled. None: the server sent none."""
    logprobs: Logprobs | None
    """The server's logprob of each id, float32 (R), aligned with ``token_ids``. None: the server sent none, or not one for each id."""
    text: str | None = None
    """The reply's text as the app received it; None where the server sent none (a pure tool call)."""
    tool_calls: list[dict[str, Any]] | None = None
    """Tool calls in the OpenAI shape, fragments of a stream joined."""
    reasoning: str | None = None
    """Reasoning text, where the server sends it apart."""
    refusal: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    """vLLM's field: the stop string or token that ended the reply."""
    version_spans: list[tuple[int, int, int]] | None = None
    """(version, first token, end token) of this reply, where the server reports them for a choice above 0; choice 0's are the call's."""


class ModelCall(msgspec.Struct, frozen=True, kw_only=True):
    """One request of the app to a model, retries of the SDK included, with every reply it got.

    ``trainable`` holds when the call is exact, complete, successful, not under ``no_train`` or a reward, and not late.
    """

    span_id: str
    parent_id: str | None
    operation: Literal["chat", "text_completion", "responses"] = "chat"
    model: str
    """The model name that was sent."""
    requested_model: str
    """The model name that the app asked for; differs from ``model`` where the call was redirected."""
    endpoint: Literal["policy", "own"] = "own"
    """Whether the call went to the served policy or to the app's own endpoint."""
    server: str = ""
    """host:port of the endpoint; never a key or a query string."""
    messages: list[dict[str, Any]]
    """The request's messages as sent, without the reply: a snapshot. For completions, ``[{"role": "prompt", "content": ...}]``."""
    tools: list[dict[str, Any]] | None = None
    """Tool definitions as sent."""
    sampling: dict[str, Any]
    """Sampling fields as sent: temperature, top_p, max_tokens, n, seed, stop, penalties, tool_choice, response_format ..."""
    requested_sampling: dict[str, Any] | None = None
    """What the app asked for, where it differs from ``sampling``."""
    choices: list[Choice]
    prompt_token_ids: TokenIds | None
    """The ids that the server computed the reply from, int32 (P). None: the server sent none."""
    usage: Usage | None = None
    response_id: str | None = None
    response_model: str | None = None
    attempts: int = 1
    """Requests on the wire, 1 or more; the SDK's automatic retries are attempts of one call."""
    error: ErrorInfo | None = None
    exact: bool
    """Ids and logprobs are all there, aligned, and are the policy's own at the sampling used."""
    inexact_reason: str | None = None
    """Why not, if not ``exact``."""
    complete: bool
    """The reply was received to its end."""
    streamed: bool = False
    no_train: bool = False
    """Made under ``no_train`` or inside a reward."""
    late: bool = False
    """Ended after its episode had been delivered."""
    multimodal: bool = False
    trainable: bool
    policy_version_start: int | None = None
    """Version of the weights when the request was dispatched; None where the server tells none."""
    policy_version_end: int | None = None
    """Version when the last token was sampled; differs from the start where the call spans a swap."""
    version_spans: list[tuple[int, int, int]] | None = None
    """(version, first token, end token) of choice 0, where the server reports them for a call that spans a swap."""
    started: int
    """Unix time, nanoseconds."""
    ended: int
    """Unix time, nanoseconds."""
    time_to_first_token: int | None = None
    """Nanoseconds from start to the first streamed chunk; None if not streamed."""


class Trajectory(msgspec.Struct, frozen=True, kw_only=True):
    """The calls of one entry of ``agent(...)``: a role at work. Calls outside any agent form one named after the workflow."""

    id: str
    """Span id of the agent; for the default trajectory, of the workflow."""
    name: str
    """The role, such as ``solver``."""
    parent_id: str | None = None
    calls: list[ModelCall]
    """In order of their start."""
    tools: list[ToolCall]
    rewards: list[Reward]
    """Rewards given inside this agent's scope, superseded ones included."""
    reward: float | None
    """Its own sum of weight * value; None if it was given none. Never inherited from the episode."""
    started: int
    ended: int


class Episode(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a workflow, failed ones included."""

    id: str
    trace_id: str
    """32 hex digits: the same trace in Jaeger."""
    span_id: str
    """Span of the workflow."""
    task_id: str | None = None
    """Which row of the data set it worked on, if any."""
    workflow: str
    input: Any = None
    """The workflow's arguments by name."""
    output: Any = None
    """What the workflow returned."""
    error: ErrorInfo | None = None
    termination: Termination
    trajectories: list[Trajectory]
    rewards: list[Reward]
    """Rewards that score the whole episode, superseded ones included."""
    reward: float | None
    """Sum of weight * value over ``rewards``; None if none was given."""
    started: int
    ended: int
    session_id: str | None = None
    metadata: dict[str, Any]
    """The user's and the trainer's own values."""
    parent_episode_id: str | None = None
    """Where ``new_episode=True`` made this one inside another."""
    open_calls: int = 0
    """Calls that had started and had not ended when the episode was delivered."""

    @property
    def calls(self) -> Sequence[ModelCall]:
        """Every call of every trajectory, in order of start."""
        return sorted((c for t in self.trajectories for c in t.calls), key=lambda c: (c.started, c.span_id))
