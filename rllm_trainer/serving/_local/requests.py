"""Typed requests in, jobs for the scheduler out; whatever cannot be served is refused here, with what to change."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec

from rllm_trainer.serving._local.formats import FORMATS, format_of
from rllm_trainer.serving._local.formats.base import ToolParser
from rllm_trainer.serving._local.formats.reading import ReplyReader
from rllm_trainer.serving._local.formats.thinking import THINK_CLOSE, THINK_OPEN, Thinking
from rllm_trainer.serving._local.grammar import Grammars, json_grammar
from rllm_trainer.serving._local.jobs import Generation, GenerationParams, Scoring, Update
from rllm_trainer.serving._local.protocol import ApiError, ChatRequest, CompletionRequest, ScoreRequest
from rllm_trainer.serving._local.sampling import SamplingParams
from rllm_trainer.serving._local.template import ChatTemplate, TemplateError
from rllm_trainer.serving._local.tokens import Tokenizer
from rllm_trainer.serving.continuation import Conversations, Reply, Request

__all__ = ["Asked", "Intake", "ToolMode"]

ToolMode = Literal["off", "auto", "required", "named"]
_DEFAULT_COMPLETION_TOKENS = 16
_PROMPT_END = 16
"""Last tokens of a prompt, among which an opened thinking shows."""


class Asked(msgspec.Struct, kw_only=True, eq=False):
    """A request as the scheduler sees it."""

    prompt_ids: list[int]
    jobs: list[Generation]
    """One per choice."""
    news: asyncio.Queue[Any]
    """(job, update) of every choice."""
    tool_mode: ToolMode = "off"
    reader: Callable[[], ReplyReader] = lambda: ReplyReader(tools=None, thinking=None)
    """Makes what reads the text of one choice."""
    remember: Callable[[int, Update, dict[str, Any]], None] | None = None
    """To be called with a choice, its last update and its message before they are sent; None: its chat is not to be continued."""


class Intake:
    """What turning a request into jobs needs to know of the model."""

    def __init__(
        self,
        folder: Path,
        *,
        name: str,
        vocab: int,
        eos: Sequence[int],
        max_len: int,
        chat_template: str | None,
        tool_format: str | None,
        thinks: bool,
        continues: bool,
        fits: Any,
    ) -> None:
        self.name = name
        self.max_len = max_len
        self.tokenizer = Tokenizer(folder)
        self._template = ChatTemplate(folder, chat_template)
        self._format = FORMATS[tool_format] if tool_format is not None else format_of(self._template.source)
        self._thinks = thinks
        self._grammars = Grammars(folder, vocab, eos)
        self._vocab = vocab
        self._eos = frozenset(eos)
        self._fits = fits
        self.conversations = Conversations(encode=lambda text: self.tokenizer.encode(text, add_special_tokens=False)) if continues else None

    def check_model(self, model: str | None) -> None:
        if model is not None and model != self.name:
            raise ApiError(404, f"got model {model!r}; this server serves {self.name!r}", code="model_not_found", param="model")

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Any, *, generation: bool, extra: Mapping[str, Any] | None) -> list[int]:
        """The prompt's ids."""
        text = self._printed(messages, tools, generation=generation, extra=extra)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _printed(self, messages: Sequence[Mapping[str, Any]], tools: Any, *, generation: bool, extra: Mapping[str, Any] | None) -> str:
        for message in messages:
            if not isinstance(message.get("role"), str):
                raise ApiError(400, f"got a message without a role: {sorted(message)}", param="messages", code="invalid_value")
        try:
            return self._template.render(messages, tools or None, add_generation_prompt=generation, extra=extra)
        except TemplateError as error:
            raise ApiError(400, str(error), param="messages", code="invalid_value") from error

    def chat(self, request: ChatRequest, reference: str | None = None) -> Asked:
        """``reference``: the episode and trajectory of the call, where the caller tells it."""
        self.check_model(request.model)
        if request.max_tokens == 0:
            raise ApiError(400, "got max_tokens 0; expected 1 or more", param="max_tokens", code="invalid_value")
        if request.top_logprobs and not request.logprobs:
            raise ApiError(400, "got top_logprobs without logprobs; set logprobs to true", param="top_logprobs", code="invalid_value")
        if request.stream_options is not None and not request.stream:
            raise ApiError(400, "got stream_options without stream; set stream to true", param="stream_options", code="invalid_value")
        tools = _checked_tools(request.tools)
        _check_idle(request)
        mode, forced = _tool_mode(request, tools)
        grammar = self._grammar(request, forced)
        ids, chat = request.prompt_token_ids, None
        if ids is None and reference is not None and self.conversations is not None:
            chat = Request(
                reference=reference,
                messages=request.messages,
                setting=[tools, request.chat_template_kwargs, request.add_generation_prompt],
                room=self.max_len - (request.max_completion_tokens or request.max_tokens or 1),
            )
            ids = self._continued(chat, tools, request)
        if ids is None:
            ids = self.render(request.messages, tools, generation=request.add_generation_prompt, extra=request.chat_template_kwargs)
        read = (*(self._format.marks if mode != "off" else ()), *((THINK_OPEN, THINK_CLOSE) if self._thinks else ()))
        skip_special = request.skip_special_tokens and not any(map(self.tokenizer.is_special_text, read))
        asked = self._asked(
            request,
            ids,
            max_tokens=request.max_completion_tokens or request.max_tokens,
            top=request.top_logprobs or 0,
            grammar=grammar,
            skip_special=skip_special,
        )
        asked.tool_mode = mode
        asked.reader = self._reader(tools if mode != "off" else None, ids, several=request.parallel_tool_calls is not False)
        asked.remember = None if chat is None else partial(self._remember, chat, asked)
        return asked

    def _reader(self, tools: list[dict[str, Any]] | None, prompt_ids: Sequence[int], *, several: bool) -> Callable[[], ReplyReader]:
        end = self.tokenizer.decode(prompt_ids[-_PROMPT_END:], skip_special=False).rstrip() if self._thinks else ""

        def reader() -> ReplyReader:
            calls = None if tools is None else ToolParser(self._format, several=several, tools=tools)
            return ReplyReader(tools=calls, thinking=Thinking(begun=end.endswith(THINK_OPEN)) if self._thinks else None)

        return reader

    def _continued(self, chat: Request, tools: Any, request: ChatRequest) -> list[int] | None:
        """The prompt made of what was recorded of this chat; None where it is to be rendered whole."""
        assert self.conversations is not None
        return self.conversations.prompt(
            chat,
            lambda messages: self._template.render(
                messages, tools or None, add_generation_prompt=request.add_generation_prompt, extra=request.chat_template_kwargs
            ),
        ).ids

    def _remember(self, chat: Request, asked: Asked, choice: int, update: Update, message: dict[str, Any]) -> None:
        assert self.conversations is not None
        ids, reason = asked.jobs[choice].reply_ids, update.stop_reason
        ended = bool(ids) and update.finish_reason == "stop" and not isinstance(reason, str)
        text = self.tokenizer.decode(ids[:-1] if ended else ids, skip_special=asked.jobs[choice].params.skip_special)
        end = self.tokenizer.piece(ids[-1]).text if ended else None
        stop = reason if isinstance(reason, str) and not asked.jobs[choice].params.include_stop else ""
        self.conversations.record(chat, asked.prompt_ids, Reply(ids=ids, message=message, text=text, stop=stop, end=end))

    def completions(self, request: CompletionRequest) -> list[Asked]:
        """One for each prompt."""
        self.check_model(request.model)
        if request.stream_options is not None and not request.stream:
            raise ApiError(400, "got stream_options without stream; set stream to true", param="stream_options", code="invalid_value")
        if request.stream and (request.echo or request.prompt_logprobs is not None):
            raise ApiError(400, "got echo or prompt_logprobs with stream; leave stream out", param="stream", code="invalid_value")
        prompts = [self._prompt_ids(p, request.add_special_tokens) for p in _prompts(request.prompt)]
        most = _DEFAULT_COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
        if most == 0 and not (request.echo or request.prompt_logprobs is not None):
            raise ApiError(400, "got max_tokens 0 without echo or prompt_logprobs; there would be no answer", param="max_tokens")
        return [
            self._asked(request, ids, max_tokens=most, top=request.logprobs or 0, grammar=None, skip_special=request.skip_special_tokens)
            for ids in prompts
        ]

    def scorings(self, request: ScoreRequest) -> list[Scoring]:
        starts = request.start or [1] * len(request.rows)
        reuses = request.reuse or [0] * len(request.rows)
        for name, given in (("start", starts), ("reuse", reuses)):
            if len(given) != len(request.rows):
                raise ApiError(400, f"got {name} for {len(given)} rows, and {len(request.rows)} rows; expected one each", param=name)
        jobs: list[Scoring] = []
        for row, start, reuse in zip(request.rows, starts, reuses, strict=True):
            self._check_ids(row)
            if not 1 <= start <= len(row):
                raise ApiError(400, f"got start {start} for a row of {len(row)} tokens; expected 1 to {len(row)}", param="start")
            jobs.append(Scoring(row, start=start, temperature=request.temperature, top=0, reuse=reuse))
        return jobs

    def prompt_scoring(self, ids: Sequence[int], top: int) -> Scoring:
        """For ``echo`` and ``prompt_logprobs``: every prompt token at temperature 1."""
        return Scoring(ids, start=1, temperature=1.0, top=top, reuse=0)

    def _asked(
        self,
        request: ChatRequest | CompletionRequest,
        ids: list[int],
        *,
        max_tokens: int | None,
        top: int,
        grammar: str | None,
        skip_special: bool,
    ) -> Asked:
        self._check_ids(ids)
        room = self.max_len - len(ids)
        wanted = room if max_tokens is None else max_tokens
        if room < (max_tokens != 0) or wanted > room:
            asked_for = f" and {max_tokens} tokens of reply were asked for" if max_tokens else ""
            raise ApiError(
                400,
                f"This model's maximum context length is {self.max_len} tokens, the prompt has {len(ids)}{asked_for}. "
                "Shorten the prompt or the reply, or start the server with a larger max_model_len.",
                code="context_length_exceeded",
                param="max_tokens" if len(ids) < self.max_len else "messages",
            )
        if not self._fits(len(ids) + 1):
            raise ApiError(
                400, f"a prompt of {len(ids)} tokens does not fit this server's memory for keys and values; give it more kv_bytes"
            )
        sampling = _sampling(request, self._vocab)
        seed = secrets.randbits(63) if request.seed is None else request.seed
        news: asyncio.Queue[Any] = asyncio.Queue()
        jobs: list[Generation] = []
        for choice in range((request.n or 1) if wanted else 0):
            params = GenerationParams(
                sampling=sampling,
                max_tokens=wanted,
                stops=request.stops,
                stop_token_ids=frozenset(request.stop_token_ids or ()),
                eos=frozenset() if request.ignore_eos else self._eos,
                include_stop=request.include_stop_str_in_output,
                skip_special=skip_special,
                top=top,
                seed=seed,
                choice=choice,
                stream=bool(request.stream),
            )
            matcher = self._matcher(grammar) if grammar is not None else None
            jobs.append(Generation(ids, params, tokenizer=self.tokenizer, max_len=self.max_len, matcher=matcher, news=news))
        return Asked(prompt_ids=ids, jobs=jobs, news=news)

    def _matcher(self, grammar: str) -> Any:
        try:
            return self._grammars.matcher(grammar)
        except ValueError as error:
            raise _not_forced(error, "response_format") from error

    def _grammar(self, request: ChatRequest, forced: list[dict[str, Any]]) -> str | None:
        asked = request.response_format
        if asked is None or asked.type == "text":
            if not forced:
                return None
            if self._format.forced is None:
                raise ApiError(
                    400,
                    f"got tool_choice {request.tool_choice!r}; calls in the {self._format.name} format cannot be forced, expected 'auto'",
                    param="tool_choice",
                    code="unsupported",
                )
            try:
                return self._format.forced(forced, request.parallel_tool_calls is not False, self._grammars.mark)
            except ValueError as error:
                raise _not_forced(error, "tool_choice") from error
        if request.tools:
            raise ApiError(400, "got response_format together with tools; use one of them", param="response_format", code="unsupported")
        if asked.type == "json_object":
            return json_grammar({"type": "object"})
        schema = (asked.json_schema or {}).get("schema")
        if not isinstance(schema, dict):
            raise ApiError(400, "got response_format json_schema without json_schema.schema", param="response_format", code="invalid_value")
        return json_grammar(schema)  # pyright: ignore[reportUnknownArgumentType]

    def _prompt_ids(self, prompt: str | list[int], add_special_tokens: bool) -> list[int]:
        return self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens) if isinstance(prompt, str) else prompt

    def _check_ids(self, ids: Sequence[int]) -> None:
        if not ids:
            raise ApiError(400, "got an empty prompt; expected at least one token", code="invalid_value", param="prompt")
        if len(ids) > self.max_len:
            raise ApiError(
                400,
                f"This model's maximum context length is {self.max_len} tokens, got {len(ids)}. Shorten the prompt.",
                code="context_length_exceeded",
                param="prompt",
            )
        if not 0 <= min(ids) <= max(ids) < self._vocab:
            raise ApiError(400, f"got token ids outside 0 to {self._vocab - 1}", code="invalid_value", param="prompt")


def _not_forced(error: Exception, param: str) -> ApiError:
    return ApiError(400, f"this reply cannot be forced: {error}", code="unsupported", param=param)


def _prompts(prompt: Any) -> list[Any]:
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return [prompt]
    if not prompt:
        raise ApiError(400, "got an empty prompt; expected text, token ids, or a list of either", code="invalid_value", param="prompt")
    return prompt


def _sampling(request: ChatRequest | CompletionRequest, vocab: int) -> SamplingParams:
    bias: dict[int, float] = {}
    for key, value in (request.logit_bias or {}).items():
        if not key.isdigit() or int(key) >= vocab:
            raise ApiError(400, f"got logit_bias for {key!r}; expected token ids from 0 to {vocab - 1}", param="logit_bias")
        bias[int(key)] = value
    top_k = request.top_k or 0
    if top_k < -1:
        raise ApiError(400, f"got top_k {top_k}; expected 1 or more, or 0 or -1 for off", param="top_k", code="invalid_value")
    return SamplingParams(
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        top_k=max(top_k, 0),
        min_p=request.min_p or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=1.0 if request.repetition_penalty is None else request.repetition_penalty,
        logit_bias=bias,
    )


def _checked_tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    for tool in tools or ():
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict) or not isinstance(function.get("name"), str):  # pyright: ignore[reportUnknownMemberType]
            raise ApiError(400, f"got tool {tool!r}; expected type 'function' with a function.name", param="tools", code="invalid_value")
    return tools or []


def _check_idle(request: ChatRequest) -> None:
    """Refuses fields that would change nothing."""
    form = request.response_format
    if form is not None and form.json_schema is not None and form.type != "json_schema":
        raise ApiError(
            400,
            f"got response_format.json_schema with type {form.type!r}, which has no use for it; expected type 'json_schema'",
            param="response_format.json_schema",
            code="invalid_value",
        )
    if request.parallel_tool_calls is not None and not request.tools:
        raise ApiError(
            400,
            "got parallel_tool_calls without tools, where it does nothing; leave it out",
            param="parallel_tool_calls",
            code="invalid_value",
        )


def _tool_mode(request: ChatRequest, tools: list[dict[str, Any]]) -> tuple[ToolMode, list[dict[str, Any]]]:
    """How tool calls are read, and the tools that a grammar must choose from."""
    choice = request.tool_choice
    if choice is None or choice in ("auto", "none"):
        return ("auto" if tools and choice != "none" else "off"), []
    if not tools:
        raise ApiError(400, f"got tool_choice {choice!r} without tools", param="tool_choice", code="invalid_value")
    if choice == "required":
        return "required", tools
    name = choice.get("function", {}).get("name") if isinstance(choice, dict) else None
    named = [tool for tool in tools if tool["function"]["name"] == name]
    if not named:
        known = [tool["function"]["name"] for tool in tools]
        raise ApiError(
            400, f"got tool_choice {choice!r}; expected none, auto, required or one of the functions {known}", param="tool_choice"
        )
    return "named", named
