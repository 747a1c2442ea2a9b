"""What ``sampling={...}`` may hold: fields of a request by name and type, checked before anything is started.

A field that no server here knows, or a value of the wrong kind, would otherwise be refused by the server at the first call, once for
each rollout. Servers of one's own may know more fields: an unknown name is refused only where the embedded server would refuse it, or
where it looks like a slip.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from rllm_trainer.exceptions import SettingError

__all__ = ["check_sampling"]

_Count = Annotated[int, msgspec.Meta(ge=1)]
_Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
_Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class _Fields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """None takes a field that the app sets out of the request."""

    temperature: Annotated[float, msgspec.Meta(ge=0)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    min_p: _Share | None = None
    seed: int | None = None
    n: _Count | None = None
    max_tokens: _Count | None = None
    max_completion_tokens: _Count | None = None
    max_output_tokens: _Count | None = None
    min_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0)] | None = None
    logit_bias: dict[str, float] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


_NOT_SAMPLING = frozenset(
    {"input", "logprobs", "messages", "model", "prompt", "return_token_ids", "stream", "stream_options", "tools", "top_logprobs"}
)


def check_sampling(sampling: Mapping[str, Any], *, embedded: bool) -> None:
    """Raises ``SettingError`` for the first field that is none, or has a value of the wrong kind.

    Args:
        embedded: the embedded server answers, which knows no other fields than these.
    """
    known = _Fields.__struct_fields__
    for name, value in sampling.items():
        if name in _NOT_SAMPLING:
            raise SettingError(f"sampling[{name!r}]: {name} does not say how to sample, and is not overridden; leave it out")
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
            if close:
                raise SettingError(f"sampling: got the unknown field {name!r}; did you mean {close[0]!r}?")
            if embedded:
                raise SettingError(f"sampling: got the unknown field {name!r}; the embedded server knows {', '.join(sorted(known))}")
            continue
        try:
            msgspec.convert({name: value}, _Fields)
        except msgspec.ValidationError as error:
            expected = str(error).partition(" - at ")[0].replace("`", "").replace("null", "None")
            raise SettingError(f"sampling[{name!r}]={value!r}: {expected[0].lower()}{expected[1:]}") from None
