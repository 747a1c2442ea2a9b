"""How families of models write tool calls and thinking: one file for each, chosen by name or by what the chat template shows."""

from rllm_trainer.serving._local.formats.base import Format
from rllm_trainer.serving._local.formats.deepseek import DEEPSEEK
from rllm_trainer.serving._local.formats.hermes import HERMES
from rllm_trainer.serving._local.formats.llama import LLAMA
from rllm_trainer.serving._local.formats.qwen import QWEN

__all__ = ["FORMATS", "format_of"]

FORMATS: dict[str, Format] = {form.name: form for form in (HERMES, QWEN, LLAMA, DEEPSEEK)}

_SHOWN = ((DEEPSEEK, "tool▁calls▁begin"), (QWEN, "<function="), (HERMES, "<tool_call>"), (LLAMA, "<|python_tag|>"), (LLAMA, '"parameters"'))
"""What a template that prints calls of a format has in it, the more telling first."""


def format_of(template: str) -> Format:
    """The format that a chat template prints; Hermes where none is shown."""
    return next((form for form, shown in _SHOWN if shown in template), HERMES)
