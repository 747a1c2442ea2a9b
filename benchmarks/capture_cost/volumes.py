"""What recording keeps, and how fast it is without a client: memory, disk, tokens of a long chat, records a second, an idle decorator.

    python -m capture_cost.volumes kept_bytes_2k256 TOKENIZER SINK COUNT

Each measure runs in a process of its own, with ``collect()``, a store and OTLP with content, as everywhere here, and prints one line of
JSON. Calls are made in runs of ten; for the disk each is an episode of its own.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

import rllm_trace as rllm
from capture_cost.apps import RUN
from capture_cost.prose import Passage, passages
from capture_cost.subjects import BATCHES
from rllm_trace.testing import Reply, ReplyChoice, ScriptedServer

__all__ = ["VOLUMES"]

_SIZE: Final = "2k+256"
_TURNS: Final = 50


def _configure(sink: str, folder: str) -> None:
    from rllm_trace.exporters import OTLPExporter

    rllm.configure(service_name="benchmark", exporters=[OTLPExporter(f"{sink}/v1/traces", capture_content=True)], store=folder)


def _flush() -> None:
    if not rllm.flush(120):
        raise RuntimeError(f"something was lost: {rllm.stats()}")


class _Calls:
    """Recorded calls whose answers come from memory: what the patch of the client does with them, without a client."""

    def __init__(self, found: list[Passage]) -> None:
        from rllm_trace._wire import whole_body
        from rllm_trace.clients._call import Destination

        asked = {"model": "m", "logprobs": True, "return_token_ids": True}
        self._destination = Destination("http://127.0.0.1:8000/v1", "127.0.0.1", "127.0.0.1:8000", False)
        self._turns = itertools.cycle([(passage, whole_body(asked, _reply(passage), chat=True, number=1)) for passage in found])

    @rllm.workflow
    def run(self, calls: int, text: bool) -> None:
        """An episode of some calls. Without ``text`` their prompts and replies are a word each, their ids the same."""
        for _ in range(calls):
            self._call(text)

    def _call(self, text: bool) -> None:
        from rllm_trace._calls import open_call
        from rllm_trace.clients._call import ClientCall

        passage, raw = next(self._turns)
        if not text:
            raw = raw.replace(msgspec.json.encode(passage.reply), b'"word"', 1)
        body = {"model": "m", "messages": [{"role": "user", "content": passage.prompt if text else "word"}], "temperature": 1.0}
        opened = open_call(operation="chat", requested_model="m")
        if opened is None:
            raise RuntimeError("the call is not recorded")
        call = ClientCall(opened, None, "chat", body, self._destination)
        call.plan()
        call.whole(raw)


def _reply(passage: Passage) -> Reply:
    choice = ReplyChoice(text=passage.reply, token_ids=passage.reply_ids, logprobs=passage.logprobs)
    return Reply(choices=[choice], prompt_token_ids=passage.prompt_ids)


def kept_bytes(found: list[Passage], sink: str, count: int) -> list[float]:
    """Growth of the memory for each call that has ended: with tokens only, and with text."""
    kept: list[float] = []
    for text in (False, True):
        calls = _Calls(found)
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            _configure(sink, folder)
            with rllm.collect() as episodes:
                calls.run(len(found), text)
                _flush()
                gc.collect()
                tracemalloc.start()
                for _ in range(0, count, RUN):
                    calls.run(RUN, text)
                _flush()
                gc.collect()
                kept.append(tracemalloc.get_traced_memory()[0] / count)
                tracemalloc.stop()
                _check_exact(episodes, len(found) + count)
            rllm.shutdown()
    return kept


def _check_exact(episodes: list[Any], count: int) -> None:
    exact = sum(call.exact and len(call.prompt_token_ids or ()) == 2_048 for episode in episodes for call in episode.calls)
    if exact != count:
        raise RuntimeError(f"{count} calls gave {exact} exact records")


def disk_bytes(found: list[Passage], sink: str, count: int) -> float:
    """Bytes of the store's folder for each of ``count`` first turns that have nothing in common, sealed as they are when it is closed."""
    calls = _Calls(found)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        _configure(sink, folder)
        with rllm.collect() as episodes:
            for _ in range(min(count, len(found))):
                calls.run(1, True)
            _flush()
        rllm.shutdown()
        _check_exact(episodes, min(count, len(found)))
        return sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file()) / len(episodes)


def records_per_s(found: list[Passage], sink: str, count: int) -> float:
    """Calls a second from the bytes of an answer to the store's file, spans exported on the way; the median of five bursts."""
    calls = _Calls(found)
    rates: list[float] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        _configure(sink, folder)
        for _ in range(6):
            gc.collect()
            with rllm.collect() as episodes:
                start = time.perf_counter()
                for _ in range(0, count, RUN):
                    calls.run(RUN, True)
                _flush()
                rates.append(count / (time.perf_counter() - start))
            _check_exact(episodes, count)
        rllm.shutdown()
        stored = rllm.stats()["exported"].get("stored episode", 0)
        if stored * RUN != 6 * count:
            raise RuntimeError(f"{6 * count} calls were recorded and {stored * RUN} stored")
    return statistics.median(rates[1:])


def idle_us(found: list[Passage], sink: str, count: int) -> float:
    """Microseconds that ``@workflow`` adds to a call of a function while nothing collects."""

    def work(value: int) -> int:
        return value

    decorated = rllm.workflow(work)
    rounds = range(max(1, count // 10))
    added: list[float] = []
    for _ in range(21):
        times: list[float] = []
        for function in (work, decorated):
            start = time.perf_counter()
            for number in rounds:
                function(number)
            times.append((time.perf_counter() - start) / len(rounds) * 1e6)
        added.append(times[1] - times[0])
    return statistics.median(added)


def chat50_tokens(found: list[Passage], sink: str, count: int) -> float:
    """Ids in the store's file after a chat of 50 turns, divided by the ids of the chat."""
    from rllm_trace._store_parquet import read_rows
    from rllm_trace._store_rows import token_count

    words = found[0].prompt_ids
    spoken: list[int] = []

    def script(exchange: Any) -> Reply:
        turn = len(exchange.body["messages"]) // 2
        spoken.extend(words[turn * 30 : turn * 30 + 20])
        prompt = list(spoken)
        spoken.extend(words[turn * 30 + 20 : turn * 30 + 30])
        return Reply(choices=[ReplyChoice(text=f"answer {turn}", token_ids=spoken[-10:], logprobs=[-0.5] * 10)], prompt_token_ids=prompt)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, ScriptedServer(script) as server:
        _configure(sink, folder)
        _chat(server)
        _flush()
        rllm.shutdown()
        rows = [row for path in Path(folder, "episodes").glob("*.parquet") for row in read_rows(path, lambda row: True)]
    if sum(len(row["calls"]) for row in rows) != _TURNS:
        raise RuntimeError(f"{_TURNS} turns were made and {sum(len(row['calls']) for row in rows)} stored")
    return sum(map(token_count, rows)) / len(spoken)


@rllm.workflow
def _chat(server: ScriptedServer) -> None:
    import openai

    messages: list[Any] = []
    with openai.OpenAI(base_url=server.base_url, api_key=server.api_key, max_retries=0) as client:
        for turn in range(_TURNS):
            messages.append({"role": "user", "content": f"question {turn}"})
            answer = client.chat.completions.create(model="m", messages=messages)
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})


VOLUMES: Final[dict[str, tuple[Callable[[list[Passage], str, int], Any], int]]] = {
    "kept_bytes_2k256": (kept_bytes, 400),
    "disk_bytes_2k256": (disk_bytes, 40),
    "records_per_s": (records_per_s, 1_000),
    "idle_us": (idle_us, 200_000),
    "chat50_tokens": (chat50_tokens, _TURNS),
}
"""Key to what measures it, and how often."""


def main(arguments: Iterator[str]) -> None:
    os.environ.update(BATCHES)
    measure, usual = VOLUMES[next(arguments)]
    found = passages(Path(next(arguments)), (_SIZE,))[_SIZE]
    print(json.dumps(measure(found, next(arguments), int(next(arguments)) or usual)))


if __name__ == "__main__":
    main(iter(sys.argv[1:]))
