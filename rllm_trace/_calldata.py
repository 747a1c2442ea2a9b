"""What a patched client knows about one call when it ends: handed to the recorder, turned into a ModelCall later.

The request is kept as the bytes that went over the wire: an exact snapshot that costs nothing on the app's thread.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from rllm_trace.types import Choice, ErrorInfo, TokenIds, Usage

__all__ = ["CallData"]


class CallData(msgspec.Struct, kw_only=True):
    """One ended call, before its scope (span, trajectory, late) is added. Fields mean what they mean in ``ModelCall``."""

    operation: Literal["chat", "text_completion", "responses"]
    model: str
    requested_model: str
    endpoint: Literal["policy", "own"] = "own"
    server: str = ""
    request: bytes
    """JSON body as sent, added token fields included."""
    requested: dict[str, Any] | None = None
    """The app's own value of each request field that was changed (model, sampling, tool_choice ...)."""
    choices: list[Choice] = []
    prompt_token_ids: TokenIds | None = None
    usage: Usage | None = None
    response_id: str | None = None
    response_model: str | None = None
    attempts: int = 1
    error: ErrorInfo | None = None
    status: Literal["ok", "error", "cancelled", "abandoned"] = "ok"
    """``abandoned``: a stream closed or dropped before its end."""
    exact: bool = False
    inexact_reason: str | None = None
    complete: bool = False
    streamed: bool = False
    multimodal: bool = False
    policy_version_start: int | None = None
    policy_version_end: int | None = None
    version_spans: list[tuple[int, int, int]] | None = None
    time_to_first_token: int | None = None
