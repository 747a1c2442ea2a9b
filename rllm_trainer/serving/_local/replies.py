"""Sampled tokens in, OpenAI's response objects out, whole or as chunks, with vLLM's token fields and SGLang's weight versions.

A streamed reply carries exactly what the whole one does: every chunk has the ids and logprobs of its own tokens, and joining them gives
the whole.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rllm_trainer.serving._local.formats.base import Call
from rllm_trainer.serving._local.formats.thinking import Thought
from rllm_trainer.serving._local.jobs import Generation, Scoring, Update, VersionSpan
from rllm_trainer.serving._local.protocol import ChatRequest, CompletionRequest
from rllm_trainer.serving._local.requests import Asked
from rllm_trainer.serving._local.sampling import Sampled
from rllm_trainer.serving._local.tokens import Tokenizer

__all__ = ["ChatReply", "CompletionReply", "chat_logprobs", "usage", "version_metadata"]


def version_metadata(versions: Mapping[int, Sequence[VersionSpan]], now: int) -> dict[str, Any]:
    """Which policy version sampled which tokens of which choice; ``now`` where no token was sampled. ``choice`` is told above 0."""
    spans = [
        {"version": str(v.version), "start": v.start, "end": v.end} | ({"choice": choice} if choice else {})
        for choice, told in sorted(versions.items())
        for v in told
    ]
    return {"weight_version": str(max((int(span["version"]) for span in spans), default=now)), "weight_versions": spans}


def usage(asked: Sequence[Asked]) -> dict[str, Any]:
    prompt = sum(len(a.prompt_ids) for a in asked)
    completion = sum(len(job.reply_ids) for a in asked for job in a.jobs)
    cached = sum(a.jobs[0].cached_tokens for a in asked if a.jobs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def chat_logprobs(tokenizer: Tokenizer, sampled: Sequence[Sampled]) -> list[dict[str, Any]]:
    """OpenAI's entry for each token."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        piece = tokenizer.piece(token_id)
        return {"token": piece.text, "logprob": round(logprob, 8), "bytes": list(piece.data)}

    return [{**entry(s.token_id, s.logprob), "top_logprobs": [entry(i, p) for i, p in s.top]} for s in sampled]


class ChatReply:
    """One chat request's answer, fed with the updates of its choices."""

    def __init__(self, request: ChatRequest, asked: Asked, tokenizer: Tokenizer, *, model: str, version: int) -> None:
        self.id = "chatcmpl-" + secrets.token_hex(12)
        self._request = request
        self._asked = asked
        self._tokenizer = tokenizer
        self._model = model
        self._version = version
        self._created = int(time.time())
        self._readers = [asked.reader() for _ in asked.jobs]
        self._said: list[list[str | Thought | dict[str, Any]]] = [[] for _ in asked.jobs]
        """Of each choice, text, thinking and tool calls so far."""

    def whole(self, updates: Sequence[Update]) -> dict[str, Any]:
        """The response; ``updates`` has the one update of each choice, in order."""
        choices = [self._choice(index, update) for index, update in enumerate(updates)]
        body = {**self._head("chat.completion"), "choices": choices, "usage": usage([self._asked]), "metadata": self._metadata()}
        if self._request.return_token_ids:
            body["prompt_token_ids"] = self._asked.prompt_ids
        return body

    def message(self, index: int) -> dict[str, Any]:
        """What a choice has come to, as a message of the chat."""
        text, thought, calls = _told_apart(self._said[index])
        message: dict[str, Any] = {"role": "assistant", "content": text if text or not (calls or thought) else None, "refusal": None}
        if thought:
            message["reasoning_content"] = thought
        return {**message, "tool_calls": calls} if calls else message

    def first_chunks(self) -> Iterator[dict[str, Any]]:
        """The role of each choice; the first chunk has the prompt's ids."""
        for index in range(len(self._asked.jobs)):
            chunk = self._chunk(index, {"role": "assistant", "content": ""}, None, None)
            if index == 0 and self._request.return_token_ids:
                chunk["prompt_token_ids"] = self._asked.prompt_ids
            yield chunk

    def chunk(self, index: int, update: Update) -> dict[str, Any]:
        """What one update adds to one choice."""
        delta, finish = self._delta(index, update)
        chunk = self._chunk(index, delta, update, finish)
        if update.finish_reason is not None:
            chunk["metadata"] = self._metadata([index])
        return chunk

    def usage_chunk(self) -> dict[str, Any]:
        return {**self._head("chat.completion.chunk"), "choices": [], "usage": usage([self._asked]), "metadata": self._metadata()}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self._created, "model": self._model, "system_fingerprint": None}

    def _metadata(self, choices: Sequence[int] | None = None) -> dict[str, Any]:
        """Of these choices; None: of all."""
        jobs = self._asked.jobs
        told = version_metadata({i: jobs[i].versions for i in (range(len(jobs)) if choices is None else choices)}, self._version)
        malformed = [reason for reader in self._readers for reason in reader.malformed]
        return {**told, "malformed_tool_calls": malformed} if malformed else told

    def _choice(self, index: int, update: Update) -> dict[str, Any]:
        self._take(index, update)
        choice: dict[str, Any] = {
            "index": index,
            "message": self.message(index),
            "logprobs": self._logprobs(update.sampled),
            "finish_reason": self._finish_reason(index, update),
            "stop_reason": update.stop_reason,
        }
        if self._request.return_token_ids:
            choice["token_ids"] = [s.token_id for s in update.sampled]
        return choice

    def _logprobs(self, sampled: Sequence[Sampled]) -> dict[str, Any] | None:
        return {"content": chat_logprobs(self._tokenizer, sampled), "refusal": None} if self._request.logprobs else None

    def _delta(self, index: int, update: Update) -> tuple[dict[str, Any], str | None]:
        before = sum(isinstance(part, dict) for part in self._said[index])
        text, thought, calls = _told_apart(self._take(index, update))
        delta: dict[str, Any] = {}
        if thought:
            delta["reasoning_content"] = thought
        if text:
            delta["content"] = text
        if calls:
            delta["tool_calls"] = [{"index": before + n, **call} for n, call in enumerate(calls)]
        return delta, self._finish_reason(index, update)

    def _take(self, index: int, update: Update) -> list[str | Thought | dict[str, Any]]:
        """What an update adds to a choice: text, thinking and tool calls, in order."""
        parts = self._readers[index].feed(update.text, last=update.finish_reason is not None)
        new = [_tool_call(part) if isinstance(part, Call) else part for part in parts]
        self._said[index] += new
        return new

    def _finish_reason(self, index: int, update: Update) -> str | None:
        called = self._readers[index].calls > 0
        return "tool_calls" if called and update.finish_reason == "stop" and self._asked.tool_mode != "named" else update.finish_reason

    def _chunk(self, index: int, delta: dict[str, Any], update: Update | None, finish: str | None) -> dict[str, Any]:
        sampled = update.sampled if update is not None else []
        choice: dict[str, Any] = {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs(sampled) if sampled else None,
            "finish_reason": finish,
        }
        if finish is not None and update is not None:
            choice["stop_reason"] = update.stop_reason
        if self._request.return_token_ids:
            choice["token_ids"] = [s.token_id for s in sampled]
        return {**self._head("chat.completion.chunk"), "choices": [choice]}


def _told_apart(parts: Sequence[str | Thought | dict[str, Any]]) -> tuple[str, str, list[dict[str, Any]]]:
    """Text, thinking and tool calls."""
    text = "".join(part for part in parts if isinstance(part, str))
    thought = "".join(part.text for part in parts if isinstance(part, Thought))
    return text, thought, [part for part in parts if isinstance(part, dict)]


def _tool_call(call: Call) -> dict[str, Any]:
    return {"id": "call_" + secrets.token_hex(12), "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


class CompletionReply:
    """One completions request's answer, over all its prompts."""

    def __init__(self, request: CompletionRequest, asked: Sequence[Asked], tokenizer: Tokenizer, *, model: str, version: int) -> None:
        self.id = "cmpl-" + secrets.token_hex(12)
        self._request = request
        self._asked = asked
        self._tokenizer = tokenizer
        self._model = model
        self._version = version
        self._created = int(time.time())
        self._n = request.n or 1
        self._text_sent: dict[int, int] = {}

    def whole(self, updates: Sequence[Sequence[Update]], scored: Sequence[Scoring | None]) -> dict[str, Any]:
        """``updates[p][c]``: the one update of choice c of prompt p; no choices where nothing was to be sampled."""
        choices: list[dict[str, Any]] = []
        for prompt, (asked, replies, scoring) in enumerate(zip(self._asked, updates, scored, strict=True)):
            for choice in range(self._n):
                update = replies[choice] if replies else None
                choices.append(self._choice(prompt * self._n + choice, asked, update, scoring))
        now = next((s.version for s in scored if s is not None), self._version)
        body = {**self._head(), "choices": choices, "usage": usage(self._asked), "metadata": version_metadata(self._versions(), now)}
        if self._request.return_token_ids and len(self._asked) == 1:
            body["prompt_token_ids"] = self._asked[0].prompt_ids
        return body

    def chunk(self, prompt: int, job: Generation, update: Update) -> dict[str, Any]:
        """What one update adds to one choice."""
        index = prompt * self._n + job.params.choice
        choice: dict[str, Any] = {
            "index": index,
            "text": update.text,
            "logprobs": self._logprobs([], update.sampled, None, self._text_sent.get(index, 0))
            if self._request.logprobs is not None
            else None,
            "finish_reason": update.finish_reason,
            "stop_reason": update.stop_reason,
        }
        first = index not in self._text_sent
        self._text_sent[index] = self._text_sent.get(index, 0) + len(update.text)
        chunk = {**self._head(), "choices": [choice]}
        if self._request.return_token_ids:
            choice["token_ids"] = [s.token_id for s in update.sampled]
            if first:
                choice["prompt_token_ids"] = self._asked[prompt].prompt_ids
                if len(self._asked) == 1 and index == 0:
                    chunk["prompt_token_ids"] = self._asked[prompt].prompt_ids
        if update.finish_reason is not None:
            chunk["metadata"] = version_metadata({index: job.versions}, self._version)
        return chunk

    def usage_chunk(self) -> dict[str, Any]:
        told = version_metadata(self._versions(), self._version)
        return {**self._head(), "choices": [], "usage": usage(self._asked), "metadata": told}

    def _versions(self) -> dict[int, list[VersionSpan]]:
        return {prompt * self._n + job.params.choice: job.versions for prompt, asked in enumerate(self._asked) for job in asked.jobs}

    def _head(self) -> dict[str, Any]:
        return {"id": self.id, "object": "text_completion", "created": self._created, "model": self._model}

    def _choice(self, index: int, asked: Asked, update: Update | None, scoring: Scoring | None) -> dict[str, Any]:
        request = self._request
        sampled = update.sampled if update is not None else []
        echoed = asked.prompt_ids if request.echo else []
        text = update.text if update is not None else ""
        if request.echo:
            text = self._tokenizer.decode(asked.prompt_ids, skip_special=request.skip_special_tokens) + text
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(echoed, sampled, scoring, 0) if request.logprobs is not None else None,
            "finish_reason": update.finish_reason if update is not None else "length",
            "stop_reason": update.stop_reason if update is not None else None,
        }
        if request.return_token_ids:
            choice["token_ids"] = [s.token_id for s in sampled]
            choice["prompt_token_ids"] = asked.prompt_ids
        if request.prompt_logprobs is not None and scoring is not None:
            choice["prompt_logprobs"] = self._prompt_logprobs(scoring)
        return choice

    def _logprobs(self, echoed: Sequence[int], sampled: Sequence[Sampled], scoring: Scoring | None, offset: int) -> dict[str, Any]:
        tokens = [self._tokenizer.piece(i).text for i in (*echoed, *(s.token_id for s in sampled))]
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        count = self._request.logprobs or 0
        for position, token_id in enumerate(echoed):
            value = float(scoring.logprobs[position]) if scoring is not None and position else None
            values.append(None if value is None else round(value, 8))
            top = scoring.tops[position][:count] if scoring is not None else []
            tops.append(None if value is None else self._top(token_id, value, top))
        for one in sampled:
            values.append(round(one.logprob, 8))
            tops.append(self._top(one.token_id, one.logprob, one.top))
        offsets: list[int] = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops if count else None, "text_offset": offsets}

    def _top(self, token_id: int, logprob: float, top: Sequence[tuple[int, float]]) -> dict[str, float]:
        """The likeliest tokens and the token itself, by text as OpenAI has it; equal texts keep the likelier."""
        out: dict[str, float] = {}
        for i, value in [*top, (token_id, logprob)]:
            out.setdefault(self._tokenizer.piece(i).text, round(value, 8))
        return out

    def _prompt_logprobs(self, scoring: Scoring) -> list[dict[str, Any] | None]:
        """vLLM's shape: per prompt token, the entry of the token itself and of the likeliest; None for the first."""
        out: list[dict[str, Any] | None] = [None]
        for position in range(1, len(scoring.ids)):
            own = (scoring.ids[position], float(scoring.logprobs[position]))
            entries: dict[str, Any] = {
                str(i): {"logprob": round(p, 8), "rank": rank, "decoded_token": self._tokenizer.piece(i).text}
                for rank, (i, p) in enumerate(scoring.tops[position][: self._request.prompt_logprobs], start=1)
            }
            entries.setdefault(
                str(own[0]), {"logprob": round(own[1], 8), "rank": None, "decoded_token": self._tokenizer.piece(own[0]).text}
            )
            out.append(entries)
        return out
