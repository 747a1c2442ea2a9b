"""Chat completions that pass in; out, the same ones with a prompt of the ids that were recorded, where their chat continues.

For a server that takes a prompt's ids beside a chat (``PROMPT_FIELD``): it reads and answers the chat as ever, tools and reasoning
included, and computes these ids in place of what its template would print. What it answers is read as a whole, and recorded before it is
passed on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rllm_trainer.serving._local.template import ChatTemplate, TemplateError
from rllm_trainer.serving._local.tokens import Tokenizer
from rllm_trainer.serving.continuation import Conversations, Reply, Request

__all__ = ["CONTINUED_HEADER", "PROMPT_FIELD", "Chat", "Continuing"]

CONTINUED_HEADER = "x-rllm-continued"
"""Says that a body has the field."""
PROMPT_FIELD = "rllm_prompt_token_ids"

_TEMPLATE_FIELDS = ("tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")


class Chat(msgspec.Struct, frozen=True, kw_only=True):
    """A chat completion on its way."""

    request: Request
    body: bytes
    """To send."""
    continued: bool
    """The body has the prompt's ids."""
    skip_special: bool


class Continuing:
    """The recorded chats of one server. One event loop."""

    def __init__(self, folder: Path, max_len: int) -> None:
        self._tokenizer = Tokenizer(folder)
        self._template = ChatTemplate(folder)
        self._max_len = max_len
        self.conversations = Conversations(encode=lambda text: self._tokenizer.encode(text, add_special_tokens=False))

    def begin(self, reference: str | None, body: bytes) -> Chat | None:
        """``reference``: episode and trajectory of the call; None out where it is no chat that can be recorded."""
        if reference is None:
            return None
        try:
            asked = msgspec.json.decode(body, type=dict[str, Any])
            messages = msgspec.convert(asked.get("messages"), list[dict[str, Any]])
        except (msgspec.DecodeError, msgspec.ValidationError):
            return None
        if not asked.get("return_token_ids") or asked.get("continue_final_message"):
            return None
        reply_tokens = asked.get("max_completion_tokens") or asked.get("max_tokens") or 1
        request = Request(
            reference=reference,
            messages=messages,
            setting=[asked.get(name) for name in _TEMPLATE_FIELDS],
            room=self._max_len - (reply_tokens if isinstance(reply_tokens, int) else 1),
        )
        ids = self.conversations.prompt(request, lambda changed: self._printed(changed, asked)).ids
        if ids is not None:
            body = msgspec.json.encode({**asked, PROMPT_FIELD: ids})
        skip_special = asked.get("skip_special_tokens") is not False
        return Chat(request=request, body=body, continued=ids is not None, skip_special=skip_special)

    def end(self, chat: Chat, answer: bytes) -> None:
        """Record the replies of a whole answer; one without ids is none that can be continued."""
        try:
            told = msgspec.json.decode(answer, type=dict[str, Any])
            prompt = msgspec.convert(told.get("prompt_token_ids"), list[int])
            choices = msgspec.convert(told.get("choices"), list[dict[str, Any]])
        except (msgspec.DecodeError, msgspec.ValidationError):
            return
        for choice in choices:
            ids, message = choice.get("token_ids"), choice.get("message")
            if ids and isinstance(message, dict):
                self.conversations.record(chat.request, prompt, self._reply(choice, ids, chat.skip_special))

    def stats(self) -> dict[str, Any]:
        return {"continued": self.conversations.continued, "not_continued": dict(self.conversations.causes)}

    def _reply(self, choice: Mapping[str, Any], ids: Sequence[int], skip_special: bool) -> Reply:
        stop = choice.get("stop_reason")
        ended = not isinstance(stop, str) and choice.get("finish_reason") != "length" and ids[-1] in self._tokenizer.special_ids
        text = self._tokenizer.decode(ids[:-1] if ended else ids, skip_special=skip_special)
        return Reply(
            ids=list(ids),
            message=choice["message"],
            text=text,
            stop=stop if isinstance(stop, str) else "",
            end=self._tokenizer.piece(ids[-1]).text if ended else None,
        )

    def _printed(self, messages: Sequence[Mapping[str, Any]], asked: Mapping[str, Any]) -> str:
        generation = asked.get("add_generation_prompt")
        try:
            return self._template.render(
                messages,
                asked.get("tools") or None,
                add_generation_prompt=generation is None or bool(generation),
                extra=asked.get("chat_template_kwargs"),
            )
        except TemplateError:
            return ""
