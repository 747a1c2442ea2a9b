"""The bodies of a stream's events in, one by one; out comes the ``Reply`` that the unstreamed response would have given.

Fragments of text, reasoning, refusal and tool calls are joined, ids and logprobs appended in order, versions and usage taken from wherever
they are told.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, cast

from rllm_trace import _exact
from rllm_trace.clients._decode import (
    Body,
    ChoiceBody,
    Message,
    Reply,
    UsageBody,
    error_of,
    ints,
    legacy_call,
    make_choice,
    prompt_of,
    tool_call,
    version_spans,
    with_versions,
)
from rllm_trace.types import Choice

__all__ = ["Gathered"]


class _Growing:
    """One choice while it arrives."""

    __slots__ = ("finish_reason", "function_call", "ids", "logprobs", "no_logprobs", "reasoning", "refusal", "stop_reason", "text", "tools")

    def __init__(self) -> None:
        self.text: list[str] = []
        self.reasoning: list[str] = []
        self.refusal: list[str] = []
        self.ids: list[Any] | None = None
        self.logprobs: list[float | None] = []
        self.no_logprobs = True
        self.tools: dict[int, dict[str, Any]] = {}
        self.function_call: dict[str, Any] = {}
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None

    def add(self, part: ChoiceBody) -> None:
        delta = part.delta
        if delta is not None:
            content = delta.content
            if content:
                self.text.append(content if isinstance(content, str) else str(content))
            if delta.tool_calls or delta.reasoning_content or delta.reasoning or delta.refusal or delta.function_call:
                self._add_message(delta)
        elif part.text:
            self.text.append(part.text)
        ids = part.ids()
        if ids is not None:
            if self.ids is None:
                self.ids = ids
            else:
                self.ids += ids
        if part.logprobs:
            values = part.logprob_values()
            if values is not None:
                self.no_logprobs = False
                self.logprobs += values
        if part.finish_reason is not None:
            self.finish_reason = part.finish_reason
        if part.stop_reason is not None or part.matched_stop is not None:
            self.stop_reason = part.stop_reason if part.stop_reason is not None else part.matched_stop

    def _add_message(self, delta: Message) -> None:
        reasoning = delta.reasoning_content or delta.reasoning
        if reasoning and isinstance(reasoning, str):
            self.reasoning.append(reasoning)
        if delta.refusal:
            self.refusal.append(delta.refusal)
        for position, fragment in enumerate(delta.tool_calls or ()):
            index = fragment.get("index")
            _merge(self.tools.setdefault(index if isinstance(index, int) else position, {}), fragment)
        if delta.function_call:
            _merge(self.function_call, delta.function_call)

    def choice(self, index: int) -> tuple[Choice, str | None]:
        token_ids, wrong = _exact.as_ids(self.ids)
        logprobs, fault = _exact.aligned(token_ids, None if self.no_logprobs else self.logprobs)
        record = make_choice(
            index=index,
            token_ids=token_ids,
            logprobs=logprobs,
            text="".join(self.text),
            tool_calls=[tool_call(self.tools[position]) for position in sorted(self.tools)] + legacy_call(self.function_call),
            reasoning="".join(self.reasoning),
            refusal="".join(self.refusal),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )
        return record, wrong or fault


_WHOLE: Final = frozenset({"id", "type", "index"})
"""Fields of a fragment that are told whole, and again; the other texts are appended."""


def _merge(into: dict[str, Any], fragment: dict[str, Any]) -> None:
    for key, value in fragment.items():
        known = into.get(key)
        if value is None:
            continue
        if isinstance(value, dict):
            inner = cast("dict[str, Any]", into.setdefault(key, {}))
            _merge(inner, cast("dict[str, Any]", value))
        elif known is None:
            into[key] = value
        elif isinstance(known, str) and isinstance(value, str) and key not in _WHOLE:
            into[key] = known + value


class Gathered:
    """What has been received of a stream."""

    __slots__ = ("_choices", "_error", "_id", "_model", "_prompts", "_usage", "_versions", "finished", "unreadable")

    def __init__(self) -> None:
        self._choices: dict[int, _Growing] = {}
        self._prompts: list[list[Any] | None] = []
        self._usage: UsageBody | None = None
        self._versions: dict[int, list[tuple[int, int, int]]] = {}
        self._id: str | None = None
        self._model: str | None = None
        self._error: dict[str, Any] | None = None
        self.finished = False
        """Every choice that was begun has its finish reason."""
        self.unreadable = False
        """A part could not be read."""

    def take(self, bodies: Iterable[Body]) -> None:
        """The next events, in their order."""
        choices = self._choices
        if self._id is None:
            bodies = list(bodies)
            first = next((body for body in bodies if body.id), None)
            if first is not None:
                self._id, self._model = first.id, first.model or None
        for body in bodies:
            for part in body.choices or ():
                choice = choices.get(part.index)
                if choice is None:
                    choice = choices[part.index] = _Growing()
                choice.add(part)
                if part.finish_reason is not None:
                    self.finished = all(choice.finish_reason is not None for choice in choices.values())
                if part.prompt_token_ids:
                    self._prompts.append(ints(part.prompt_token_ids))
            if body.prompt_token_ids:
                self._prompts.append(ints(body.prompt_token_ids))
            if body.usage is not None:
                self._usage = body.usage
            if body.metadata:
                self._versions.update(version_spans(body.metadata))
            if body.error:
                self._error = error_of(body.error)

    def reply(self) -> Reply:
        """What has been received so far."""
        choices: list[Choice] = []
        fault: str | None = _exact.UNREADABLE if self.unreadable else None
        for index in sorted(self._choices):
            record, choice_fault = self._choices[index].choice(index)
            fault = fault or choice_fault
            choices.append(record)
        prompt_ids, prompt_fault = prompt_of(self._prompts)
        usage = self._usage.usage() if self._usage is not None else None
        return Reply(
            choices=with_versions(choices, self._versions),
            prompt_token_ids=prompt_ids,
            usage=usage,
            response_id=self._id,
            response_model=self._model,
            version_spans=self._versions.get(0),
            fault=prompt_fault or fault or _exact.contradiction(choices, prompt_ids, usage),
            finished=self.finished,
            error=self._error,
        )
