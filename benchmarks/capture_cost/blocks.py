"""Runs in the environment of what it measures: interleaved blocks of bare and recorded calls in, seconds of each block out.

    python -m capture_cost.blocks '{"subject": "ours", "row": "small", "server": "http://127.0.0.1:1", "blocks": 9, "runs": 0}'

In each round every variant runs one block of calls on the same client, in an order that turns; ``bare`` and ``again`` are the same thing
twice, which shows the noise. What the process holds before the first block is out of the garbage collector's sight (``gc.freeze``), for
all variants: collecting it would be charged to whoever makes the most objects, the bare client that reads ids. What recorded a block is
drained after it, before the next variant's turn; that is in no wall time, but in the CPU of the process. The last line is JSON: variant to
the blocks' [wall, CPU of the calling thread, CPU of the process], seconds a call.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Generator
from typing import Any, Final, NamedTuple

from capture_cost.apps import CONCURRENT, RUN, run, run_async, run_streamed
from capture_cost.subjects import BATCHES, SUBJECTS, Subject

__all__ = ["ROWS", "Row"]


class Row(NamedTuple):
    """One kind of call."""

    size: str
    path: str
    """``ids``: the server gives ids and logprobs to whoever asks; ``plain``: to nobody."""
    app: Callable[..., Any]
    runs: int
    """Of a block; each makes ten calls."""


ROWS: Final[dict[str, Row]] = {
    "small": Row("200+100", "plain", run, 20),
    "ids_2k256": Row("2k+256", "ids", run, 10),
    "ids_8k2k": Row("8k+2k", "ids", run, 2),
    "stream": Row("200+256", "plain", run_streamed, 2),
    "stream_ids": Row("200+256", "ids", run_streamed, 2),
    "async_32": Row("200+100", "ids", run_async, CONCURRENT),
}


Times = tuple[float, float, float]
"""Wall, CPU of the calling thread, CPU of the process: seconds a call."""


class _Clock:
    """Runs from when it is made; wall and the thread's CPU until ``stop``, the CPU of the process until ``end``."""

    def __init__(self) -> None:
        self._times = [-time.perf_counter(), -time.thread_time(), -time.process_time()]

    def stop(self) -> None:
        self._times[1] += time.thread_time()
        self._times[0] += time.perf_counter()

    def end(self) -> None:
        self._times[2] += time.process_time()

    def per_call(self, calls: int) -> Times:
        wall, thread, process = self._times
        return wall / calls, thread / calls, process / calls


class _Switch:
    """The methods of the client's classes, as they were before a subject was set up and as they are with it."""

    def __init__(self) -> None:
        import openai
        from openai.resources.chat import completions

        self._classes = (openai.OpenAI, openai.AsyncOpenAI, completions.Completions, completions.AsyncCompletions)
        self._off = self._methods()
        self._on = self._off

    def _methods(self) -> list[dict[str, Any]]:
        return [{name: value for name, value in vars(cls).items() if callable(value)} for cls in self._classes]

    def learn(self) -> None:
        """The subject has been set up."""
        self._on = self._methods()
        pairs = ((now.get(name), method) for now, then in zip(self._off, self._on, strict=True) for name, method in then.items())
        if all(before is after for before, after in pairs):  # what wraps a method may claim to equal it
            raise RuntimeError("the subject has changed no method of the client: it would record nothing")

    def turn(self, *, on: bool) -> None:
        for cls, now, then in zip(self._classes, *((self._off, self._on) if on else (self._on, self._off)), strict=True):
            for name in (now.keys() - then.keys()) & vars(cls).keys():
                delattr(cls, name)
            for name, value in then.items():
                if vars(cls).get(name) is not value:
                    setattr(cls, name, value)


class _Bench:
    """One subject, one row."""

    def __init__(self, subject: Subject, switch: _Switch, row: Row, server: str, passages: list[dict[str, Any]]) -> None:
        self._subject = subject
        self._switch = switch
        self._row = row
        self._base_url = f"{server}/{row.path}/v1"
        self._passages = passages
        self._prompts = [passage["prompt"] for passage in passages]
        self._wrapped = subject.wrapped(row.app)

    def measure(self, blocks: int, runs: int) -> dict[str, list[Times]]:
        is_ids = self._row.path == "ids"
        variants: dict[str, tuple[bool, bool]] = {"bare": (False, is_ids), "again": (False, is_ids)}
        variants["recorded"] = (True, is_ids and self._subject.asks)
        if is_ids:
            variants["plain"] = (False, False)
        found: dict[str, list[Times]] = {name: [] for name in variants}
        names = list(variants)
        for number in range(-1, blocks):
            for place in range(len(names)):
                name = names[(place + number) % len(names)]
                times = self._block(runs, *variants[name])
                if number >= 0:
                    found[name].append(times)
        return found

    def _block(self, runs: int, recorded: bool, asks: bool) -> Times:
        import openai

        self._switch.turn(on=recorded)
        app = self._wrapped if recorded else self._row.app
        if self._row.app is run_async:
            return asyncio.run(self._async_block(app, -(-runs // CONCURRENT) * CONCURRENT, recorded, asks))
        with openai.OpenAI(base_url=self._base_url, api_key="benchmark", max_retries=0) as client:
            self._check(app(client, self._prompts[:1], asks), asks)
            with self._recording(recorded, runs) as clock:
                for _ in range(runs):
                    app(client, self._prompts, asks)
                clock.stop()
                if recorded:
                    self._subject.drain()
        return clock.per_call(runs * RUN)

    async def _async_block(self, app: Callable[..., Any], runs: int, recorded: bool, asks: bool) -> Times:
        import openai

        async with openai.AsyncOpenAI(base_url=self._base_url, api_key="benchmark", max_retries=0) as client:
            first = await asyncio.gather(*(app(client, self._prompts[:1], asks) for _ in range(CONCURRENT)))
            self._check(first[0], asks)
            with self._recording(recorded, runs) as clock:
                for _ in range(0, runs, CONCURRENT):
                    await asyncio.gather(*(app(client, self._prompts, asks) for _ in range(CONCURRENT)))
                clock.stop()
                if recorded:
                    self._subject.drain()
        return clock.per_call(runs * RUN)

    @contextlib.contextmanager
    def _recording(self, recorded: bool, runs: int) -> Generator[_Clock]:
        gc.collect()
        with self._subject.recording() if recorded else contextlib.nullcontext([]) as records:
            clock = _Clock()
            yield clock
            clock.end()
        for record in records[:1] or ():
            self._check_record(record)
        if records and len(records) != runs:
            raise RuntimeError(f"{runs} runs gave {len(records)} records")

    def _check(self, answer: Any, asks: bool) -> None:
        passage = self._passages[0]
        ids = (passage["prompt_ids"], passage["reply_ids"], passage["logprobs"]) if asks else ([], [], [])
        if tuple(answer) != (passage["reply"], *ids):
            raise RuntimeError("the app has read something else than the server has sent")

    def _check_record(self, record: Any) -> None:
        for call, passage in zip(record.calls, self._passages, strict=True):
            (choice,) = call.choices
            wants = self._row.path == "ids"
            told = (call.prompt_token_ids, choice.token_ids, choice.logprobs) if wants else ()
            sent = (passage["prompt_ids"], passage["reply_ids"], passage["logprobs"]) if wants else ()
            if choice.text != passage["reply"] or told != sent or call.exact is not wants:
                raise RuntimeError("a record is something else than the server has sent")


def main() -> None:
    asked = json.loads(sys.argv[1])
    row = ROWS[asked["row"]]
    with urllib.request.urlopen(f"{asked['server']}/passages") as answer:
        passages = json.load(answer)[row.size][:RUN]
    os.environ.update(BATCHES)
    switch = _Switch()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        subject = SUBJECTS[asked["subject"]](asked["server"], folder)
        switch.learn()
        gc.collect()
        gc.freeze()
        found = _Bench(subject, switch, row, asked["server"], passages).measure(asked["blocks"], asked["runs"] or row.runs)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
