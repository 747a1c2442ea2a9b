"""JSON bodies in, typed requests out; a field that is not in here is refused by name, never ignored.

Field names and meanings are OpenAI's, and vLLM's where OpenAI has none. ``store``, ``metadata`` and ``user`` are accepted and do nothing.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from rllm_trainer.serving_settings import InFlight

__all__ = [
    "ApiError",
    "ChatRequest",
    "CompletionRequest",
    "DetokenizeRequest",
    "PauseRequest",
    "ResponseFormat",
    "ScoreRequest",
    "StreamOptions",
    "SwapRequest",
    "TokenizeRequest",
    "decode",
    "error_body",
]

T = TypeVar("T")

_Text = dict[str, Any]
_Positive = Annotated[int, msgspec.Meta(ge=1)]
_Count = Annotated[int, msgspec.Meta(ge=0)]
_Temperature = Annotated[float, msgspec.Meta(ge=0, le=100)]
_Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
_Unit = Annotated[float, msgspec.Meta(ge=0, le=1)]
_Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
_Top = Annotated[int, msgspec.Meta(ge=0, le=50)]
_Bias = Annotated[float, msgspec.Meta(ge=-100, le=100)]
_Choices = Annotated[int, msgspec.Meta(ge=1, le=128)]


class ApiError(Exception):
    """An answer other than 200, in OpenAI's shape."""

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None, kind: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.kind = kind or ("invalid_request_error" if status < 500 else "server_error")


def error_body(error: ApiError) -> bytes:
    return msgspec.json.encode({"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}})


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    """Accepted; nothing is ever obfuscated."""


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None


class _Sampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What chat and completions share. None: the default."""

    model: str | None = None
    n: _Choices | None = None
    temperature: _Temperature | None = None
    top_p: _Share | None = None
    top_k: int | None = None
    """0 or -1: off."""
    min_p: _Unit | None = None
    max_tokens: _Count | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0)] | None = None
    logit_bias: dict[str, _Bias] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    user: str | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(s for s in given if s)


class ChatRequest(_Sampling, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/chat/completions``"""

    messages: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]
    max_completion_tokens: _Positive | None = None
    logprobs: bool | None = None
    top_logprobs: _Top | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    prompt_token_ids: list[int] | None = None
    """Ours: the prompt as ids, in place of rendering ``messages``; for a client that continues recorded ids exactly."""


class CompletionRequest(_Sampling, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/completions``"""

    prompt: str | list[int | str | list[int]]
    """Text, token ids, or a list of either."""
    echo: bool = False
    logprobs: _Top | None = None
    prompt_logprobs: _Top | None = None
    add_special_tokens: bool = True


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /tokenize``: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    """Default: True for a prompt, False for messages."""
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /detokenize``"""

    model: str | None = None
    tokens: list[int]


class SwapRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /rllm/swap``: serve the weights in a file of this host from now on."""

    path: str
    version: int
    digest: str | None = None
    """If given, what ``_digest.py`` says of the file's tensors: the new buffers are hashed and compared before they are served."""
    lora: bool = False
    """The file is an adapter over the weights that the server was started with."""
    in_flight: InFlight = "keep"
    """What becomes of replies that are being sampled: they go on, end as they are, or end first, while new requests wait."""


class PauseRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /rllm/pause``: answered once the server stands still; requests are taken in and kept until ``/rllm/resume``."""

    after_tokens: _Count = 0
    """How many more tokens are to be sampled before it does."""


class ScoreRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /rllm/score``: logprobs of given tokens under the served weights."""

    rows: list[list[int]]
    temperature: Annotated[float, msgspec.Meta(gt=0, le=100)] = 1.0
    start: list[int] | None = None
    """Per row, the first token whose logprob is wanted (1 or more). None: the second."""
    reuse: list[int] | None = None
    """Per row, how many of its first tokens may come from the prefix cache, as in generation: a wanted token among them has no
    logprob. None: every token is computed anew."""


def decode(body: bytes, kind: type[T]) -> T:
    """Raises ``ApiError`` 400 that names the field."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from error
    except msgspec.DecodeError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error


def _invalid(message: str) -> ApiError:
    unknown = re.search(r"unknown field `(.+?)`", message)
    where = re.search(r" - at `\$\.?(.*?)`$", message)
    inside = where.group(1) if where else ""
    if unknown:
        field = f"{inside}.{unknown.group(1)}".strip(".")
        return ApiError(
            400,
            f"got field {field!r}, which this server does not implement; leave it out (nothing is ever ignored silently)",
            code="unknown_parameter",
            param=field,
        )
    missing = re.search(r"missing required field `(.+?)`", message)
    field = f"{inside}.{missing.group(1)}".strip(".") if missing else inside
    return ApiError(400, f"field {field!r}: {message}" if field else message, code="invalid_value", param=field or None)
