"""How fast calls are placed on the token tree: ``python benchmarks/token_tree.py [--json]``.

Each case builds an episode, then times ``build_samples`` on it from records to row plans, and the making of all rows apart from
that. The floor is ``numpy.array_equal`` over the same prompts in the same run: reading every token once and comparing it. Times are
CPU seconds on one core, the best of several runs; the ratio to the floor carries over to other machines, the times do not.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from rllm_trace.types import Episode, Logprobs, ModelCall, TokenIds
from rllm_trainer.samples import build_samples
from rllm_trainer.testing import make_call, make_choice, make_episode

SEED = 7
VOCABULARY = 50_000


class Chat:
    """A conversation whose turns continue each other, as records."""

    def __init__(self, random: np.random.Generator, *, system: list[int], turn_tokens: int) -> None:
        self._random = random
        self._turn = turn_tokens // 2
        self._ids = [*system, *self.tokens(self._turn)]
        self._messages: list[dict[str, Any]] = [{"role": "system", "content": "s"}, self._user()]

    def tokens(self, count: int) -> list[int]:
        return self._random.integers(10, VOCABULARY, count).tolist()

    def _user(self) -> dict[str, Any]:
        return {"role": "user", "content": str(self.tokens(4))}

    def call(self, span_id: str, started: int, *, drift: bool = False) -> ModelCall:
        """The next turn; with ``drift``, the last reply comes back with another last token."""
        if drift and len(self._messages) > 2:
            self._ids[-self._turn - 1] = 1
        reply = self.tokens(self._turn)
        text = str(reply[:4])
        choice = make_choice(reply, text, logprobs=Logprobs(np.full(len(reply), -0.5, np.float32).tobytes()))
        call = make_call(span_id, TokenIds(self._ids), choice, messages=list(self._messages), started=started, ended=started)
        self._ids = [*self._ids, *reply, *self.tokens(self._turn)]
        self._messages = [*self._messages, {"role": "assistant", "content": text}, self._user()]
        return call


def chats(*, agents: int, turns: int, turn_tokens: int, system_tokens: int = 100, drift_every: int = 0) -> Episode:
    """``agents`` conversations of ``turns`` turns each, in one episode, taking turns."""
    random = np.random.default_rng(SEED)
    system = random.integers(10, VOCABULARY, system_tokens).tolist()
    lines = [Chat(random, system=system, turn_tokens=turn_tokens) for _ in range(agents)]
    calls: list[list[ModelCall]] = [[] for _ in lines]
    for turn in range(turns):
        for agent, line in enumerate(lines):
            drift = drift_every > 0 and turn % drift_every == drift_every - 1
            calls[agent].append(line.call(f"{agent}-{turn}", turn * agents + agent, drift=drift))
    return make_episode(agents=[("agent", made) for made in calls])


def in_one_trajectory(episode: Episode) -> Episode:
    """The same calls, made by agents that were never named."""
    return make_episode(*[call for trajectory in episode.trajectories for call in trajectory.calls])


CASES: dict[str, Callable[[], Episode]] = {
    "50 turns, 100 tokens a turn": lambda: chats(agents=1, turns=50, turn_tokens=100),
    "50 turns, 400 tokens a turn": lambda: chats(agents=1, turns=50, turn_tokens=400),
    "50 turns, 2,000 tokens a turn": lambda: chats(agents=1, turns=50, turn_tokens=2000),
    "200 chats of 50 turns": lambda: chats(agents=200, turns=50, turn_tokens=100),
    "200 chats, agents not named": lambda: in_one_trajectory(chats(agents=200, turns=50, turn_tokens=100)),
    "200 chats, every second turn broken": lambda: chats(agents=200, turns=50, turn_tokens=100, drift_every=2),
    "200 chats, not named, every turn broken": lambda: in_one_trajectory(chats(agents=200, turns=50, turn_tokens=100, drift_every=1)),
    "one chat of 10,000 turns": lambda: chats(agents=1, turns=10_000, turn_tokens=4),
    "one chat of 10,000 turns, every one broken": lambda: chats(agents=1, turns=10_000, turn_tokens=4, drift_every=1),
    "10,000 questions": lambda: in_one_trajectory(chats(agents=10_000, turns=1, turn_tokens=100, system_tokens=1000)),
}
HEADLINE = "50 turns, 400 tokens a turn"


def best_of(runs: int, work: Callable[[], Any]) -> float:
    """CPU seconds of the fastest run."""
    times: list[float] = []
    for _ in range(runs):
        begun = time.process_time()
        work()
        times.append(time.process_time() - begun)
    return min(times)


def floor(episode: Episode) -> Callable[[], None]:
    """Compares every prompt and reply with a copy of itself."""
    arrays = [np.asarray(ids) for call in episode.calls for ids in (call.prompt_token_ids, call.choices[0].token_ids)]
    pairs = [(array, array.copy()) for array in arrays]

    def work() -> None:
        for array, copy in pairs:
            np.array_equal(array, copy)

    return work


def measure(name: str, episode: Episode) -> dict[str, Any]:
    """One case."""
    tokens = sum(len(call.prompt_token_ids or ()) + len(call.choices[0].token_ids or ()) for call in episode.calls)
    runs = 3 if len(episode.calls) > 1000 else 20
    gc.collect()
    gc.freeze()  # the records are not what is measured
    samples = build_samples(episode)
    place = best_of(runs, lambda: build_samples(episode))
    rows = best_of(runs, lambda: sum(len(row.token_ids) for row in samples.samples))
    least = best_of(runs, floor(episode))
    gc.unfreeze()
    assert samples.tree is not None
    assert samples.counters.share_trained == 1.0
    return {
        "case": name,
        "calls": samples.counters.calls,
        "tokens": tokens,
        "distinct_tokens": samples.counters.distinct_tokens,
        "rows": samples.counters.rows,
        "breaks": sum(samples.counters.breaks.values()),
        "seconds": place,
        "tokens_per_second": tokens / place,
        "times_floor": place / least,
        "rows_seconds": rows,
        "tree_bytes_per_distinct_token": samples.tree.nbytes / max(1, samples.counters.distinct_tokens),
    }


def one_core() -> None:
    """Keep this process on one core, where the system lets it."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def as_line(result: dict[str, Any]) -> str:
    return (
        f"{result['case']:42} {result['calls']:6} {result['tokens']:12,} {result['tokens_per_second'] / 1e6:10.1f} "
        f"{result['times_floor']:8.1f} {result['seconds']:9.4f} {result['rows_seconds']:9.4f} "
        f"{result['tree_bytes_per_distinct_token']:8.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="How fast calls are placed on the token tree.")
    parser.add_argument("--json", action="store_true", help="print the results as one line of JSON, last")
    parser.add_argument("--case", help="only cases whose name contains this")
    arguments = parser.parse_args()
    one_core()
    results: list[dict[str, Any]] = []
    say(f"{'case':42} {'calls':>6} {'tokens':>12} {'M tokens/s':>10} {'x floor':>8} {'seconds':>9} {'rows, s':>9} {'B/token':>8}")
    for name, make in CASES.items():
        if not arguments.case or arguments.case in name:
            results.append(measure(name, make()))
            say(as_line(results[-1]))
    if arguments.json:
        headline = next((result["tokens_per_second"] for result in results if result["case"] == HEADLINE), None)
        say(json.dumps({"benchmark": "token_tree", "tokens_per_second": headline, "cases": results}))


if __name__ == "__main__":
    main()
