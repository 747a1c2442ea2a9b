"""One file for each program that can stand behind the door; what they have in common is in ``base``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rllm_trainer.serving._door.flow import Flow
from rllm_trainer.serving._door.kinds.base import Kind
from rllm_trainer.serving._door.kinds.fireworks import Fireworks
from rllm_trainer.serving._door.kinds.openai_compatible import OpenAICompatible
from rllm_trainer.serving._door.kinds.sglang import SGLang
from rllm_trainer.serving._door.kinds.vllm import Vllm
from rllm_trainer.serving._door.upstream import Upstream

__all__ = ["KINDS"]

KINDS: dict[str, Callable[[Upstream, Flow, dict[str, Any]], Kind]] = {
    "vllm": Vllm,
    "sglang": SGLang,
    "fireworks": Fireworks,
    "openai-compatible": OpenAICompatible,
}
