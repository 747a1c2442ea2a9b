"""A request's fields and a reply's numbers in, one verdict out: is this call exact, and if not, why not.

Exact means: prompt ids, sampled ids and one logprob for each of them were all reported, they agree with each other and with the
usage, and the logprobs are the policy's own at the sampling used. A verdict never changes a number. Every reason starts with one of
the names below, so that reasons can be counted; what follows ``": "`` is detail.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast

from rllm_trace.types import Choice, Logprobs, TokenIds, Usage

__all__ = ["aligned", "as_ids", "constraint", "contradiction", "reason_name", "sampling_reason", "tool_choice_constraint"]

FAILED: Final = "call failed"
INCOMPLETE: Final = "reply incomplete"
NOT_ASKED: Final = "tokens not asked for"
UNREADABLE: Final = "response unreadable"
NO_CHOICES: Final = "no choices"
INCOMPLETE_STREAM: Final = "rllm_trace.IncompleteStream"
"""Type of the error of a stream that ended before its last event."""
NO_PROMPT_IDS: Final = "prompt ids missing"
NO_IDS: Final = "token ids missing"
NO_LOGPROBS: Final = "logprobs missing"
NOT_AN_ID: Final = "not a token id"
LOGPROB_GAP: Final = "logprob missing for a token"
UNALIGNED: Final = "logprobs not aligned with ids"
NOT_A_LOGPROB: Final = "not a logprob"
PADDED: Final = "logprobs all 0"
PROMPT_IDS_DIFFER: Final = "prompt ids differ within the reply"
USAGE_COMPLETION: Final = "usage contradicts ids"
USAGE_PROMPT: Final = "usage contradicts prompt ids"
ABSENT: Final = frozenset({NO_PROMPT_IDS, NO_IDS, NO_LOGPROBS})
"""Reasons that follow where nothing was asked for."""
CONSTRAINED: Final = "constrained"
SAMPLING: Final = "sampling"

_ALL_ZERO_LENGTH: Final = 16
"""From this many tokens on, nothing but exact zeros is padding: a policy that is certain of each of them is not seen in practice,
and has no gradient there."""


def reason_name(reason: str) -> str:
    """The part of a reason that is counted: ``"usage contradicts ids: 12 reported, 11 sent"`` gives ``"usage contradicts ids"``."""
    return reason.partition(": ")[0]


def _not_zero(value: Any) -> bool:
    return bool(value)


def _filters(neutral: float) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, (int, float)) and value != neutral


def _below_one(value: Any) -> bool:
    return isinstance(value, (int, float)) and value < 1


def _above_zero(value: Any) -> bool:
    return isinstance(value, (int, float)) and value > 0


_DISTORTING: Final[dict[str, Callable[[Any], bool]]] = {
    "top_p": _below_one,
    "top_k": _above_zero,
    "min_p": _above_zero,
    "typical_p": _below_one,
    "top_n_sigma": _above_zero,
    "xtc_probability": _above_zero,
    "dry_multiplier": _above_zero,
    "dynatemp_range": _above_zero,
    "mirostat": _above_zero,
    "presence_penalty": _filters(0),
    "frequency_penalty": _filters(0),
    "repetition_penalty": _filters(1),
    "repeat_penalty": _filters(1),
    "logit_bias": _not_zero,
    "bad_words": _not_zero,
    "allowed_token_ids": _not_zero,
    "min_tokens": _above_zero,
    "use_beam_search": _not_zero,
    "echo": _not_zero,
}
"""Fields that make the reported logprobs something else than the policy's, and when each does."""

_IDS_END: Final = 2**31
_MAX_SHOWN: Final = 60
"""Characters of a value that is no id."""

_GRAMMAR_FIELDS: Final = (
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "grammar",
    "json_schema",
    "regex",
    "ebnf",
)
_GRAMMARS: Final = frozenset(_GRAMMAR_FIELDS)


def constraint(body: Mapping[str, Any]) -> str | None:
    """What in a request forces the reply into a grammar: ``"tool_choice required"``, ``"tool_choice named"``,
    ``"response_format json_schema"``, ``"text.format json_schema"``, ``"structured_outputs"`` ...; None if nothing does."""
    choice = tool_choice_constraint(body)
    if choice is not None:
        return choice
    for name, wanted in (("response_format", body.get("response_format")), ("text.format", _text_format(body))):
        kind = cast("Mapping[str, Any]", wanted).get("type") if isinstance(wanted, Mapping) else None
        if isinstance(kind, str) and kind != "text":
            return f"{name} {kind}"
    return None if _GRAMMARS.isdisjoint(body) else next((field for field in _GRAMMAR_FIELDS if body.get(field)), None)


def _text_format(body: Mapping[str, Any]) -> Any:
    """The Responses API's name of ``response_format``."""
    text = body.get("text")
    return cast("Mapping[str, Any]", text).get("format") if isinstance(text, Mapping) else None


def tool_choice_constraint(body: Mapping[str, Any]) -> str | None:
    """``"tool_choice required"`` or ``"tool_choice named"`` if the request forces a tool call, else None."""
    choice = body.get("tool_choice")
    if choice == "required":
        return "tool_choice required"
    if not isinstance(choice, Mapping):
        return None
    choice = cast("Mapping[str, Any]", choice)
    if choice.get("type") != "allowed_tools":
        return "tool_choice named"
    allowed = cast("Mapping[str, Any]", choice.get("allowed_tools") or choice)
    return "tool_choice required" if allowed.get("mode") == "required" else None


def sampling_reason(body: Mapping[str, Any]) -> str | None:
    """Why logprobs reported under this request are not the policy's own; None if they are."""
    temperature = body.get("temperature")
    if isinstance(temperature, (int, float)) and temperature <= 0:
        return f"{SAMPLING}: temperature 0"
    for field, distorts in () if _DISTORTING.keys().isdisjoint(body) else _DISTORTING.items():
        value = body.get(field)
        if value is not None and distorts(value):
            detail = f" {value}" if isinstance(value, (int, float)) and not isinstance(value, bool) else ""
            return f"{SAMPLING}: {field}{detail}"
    forced = constraint(body)
    return None if forced is None else f"{CONSTRAINED}: {forced}"


def as_ids(values: Sequence[Any] | None) -> tuple[TokenIds | None, str | None]:
    """The ids if each value is one (an int32 that is not negative), else None and the first that is none; None for None."""
    if values is None:
        return None, None
    try:
        packed = struct.pack(f"<{len(values)}i", *values)
    except struct.error:
        packed = b""
    if len(packed) == 4 * len(values) and packed[3::4].isascii():  # no number has its sign bit set
        return TokenIds(packed), None
    wrong = next(value for value in values if type(value) is not int or not 0 <= value < _IDS_END)
    return None, f"{NOT_AN_ID}: {str(wrong)[:_MAX_SHOWN]}"


def aligned(ids: TokenIds | None, values: Sequence[float | None] | None) -> tuple[Logprobs | None, str | None]:
    """The logprobs of ``ids`` if there is exactly one valid number for each id, else None and why not."""
    if not ids:
        return None, NO_IDS
    if not values:
        return None, NO_LOGPROBS
    if len(values) != len(ids):
        return None, f"{UNALIGNED}: {len(ids)} ids, {len(values)} logprobs"
    try:
        logprobs = Logprobs(cast("Sequence[float]", values))
    except TypeError:
        return None, LOGPROB_GAP
    lowest, highest = min(logprobs), max(logprobs)
    if not (highest <= 0 and math.isfinite(lowest)):
        return None, f"{NOT_A_LOGPROB}: {highest if highest > 0 else lowest}"
    if lowest == 0 and len(logprobs) >= _ALL_ZERO_LENGTH:
        return logprobs, PADDED
    return logprobs, None


def contradiction(choices: Sequence[Choice], prompt_token_ids: TokenIds | None, usage: Usage | None) -> str | None:
    """Which number of a complete reply is missing or contradicts another; None if all are there and agree."""
    if not choices:
        return NO_CHOICES
    if not prompt_token_ids:
        return NO_PROMPT_IDS
    if usage is None:
        return None
    sampled = sum(len(choice.token_ids or ()) for choice in choices)
    if usage.completion_tokens != sampled:
        return f"{USAGE_COMPLETION}: {usage.completion_tokens} reported, {sampled} sent"
    if usage.prompt_tokens != len(prompt_token_ids):
        return f"{USAGE_PROMPT}: {usage.prompt_tokens} reported, {len(prompt_token_ids)} sent"
    return None
