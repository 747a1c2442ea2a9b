"""Steps per hour with rollouts ahead of the updates, over those with rollouts and updates in turns, where rollouts have a long tail.

Each rollout of the app waits as a slow tool would, lognormally (median 2 s, 99th percentile 20 s; seeded by row and rollout), and asks
the model once. Server, engine, corrections and swaps are the real ones, on the tiny model; both runs have the same rows, seeds, quorum
and concurrency, as many rollouts as the runs ahead ever have open. The reward after the run is held-out, sampled; the starts of engine and
server are not counted.

    python benchmarks/staleness.py                        # three seeds, 30 steps each: about 45 minutes
    python benchmarks/staleness.py --seeds 0 --steps 6
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import openai

import rllm_trace as rllm
from rllm_trainer import FitResult, fit

MEDIAN, P99 = 2.0, 20.0
SIGMA = math.log(P99 / MEDIAN) / 2.326
"""2.326: the 99th percentile of a standard normal variable."""
ROWS = [{"word": f"say {i}"} for i in range(256)]
HELD_OUT = [{"word": f"tell {i}"} for i in range(64)]

_lock = threading.Lock()
_runs: Counter[str] = Counter()
client = openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="unused", max_retries=0)


@rllm.workflow
def app(word: str) -> str:
    reply = client.chat.completions.create(
        model="gpt-4o-mini", messages=[{"role": "user", "content": word}], max_tokens=10, temperature=1.0
    )
    if word.startswith("say"):
        time.sleep(latency(word))
    return reply.choices[0].message.content or ""


@rllm.reward
def lowercase(output: str) -> float:
    """The share of lower-case letters in the reply; markup earns nothing, or "<tool_call>", one token, would be a place to stay at 0.73."""
    return 0.0 if "<" in output else sum(letter.islower() for letter in output) / max(1, len(output))


def latency(word: str) -> float:
    """Seconds: one draw from the lognormal for each run of the app on a row, the same in both kinds of run."""
    with _lock:
        number = _runs[word] = _runs[word] + 1
    return MEDIAN * math.exp(random.Random(f"{word} {number}").gauss(0.0, SIGMA))


def run(staleness: int, seed: int, steps: int, folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """One run: mean seconds a step, held-out reward after it, and how stale its tokens were."""
    _runs.clear()
    result: FitResult = fit(
        app,
        ROWS,
        eval_dataset=HELD_OUT,
        model="tiny-qwen2",
        output_dir=folder,
        steps=steps,
        staleness=staleness,
        seed=seed,
        lr=2e-3,
        entropy_coef=0.01,
        batch_tasks=8,
        group_size=8,
        concurrency=options.concurrency,
        quorum=options.quorum,
        eval_n=2,
        eval_greedy=False,
        threads=1,
        progress=False,
        save_every=1000,
    )
    lines: list[Any] = [line for line in result.metrics if "rollouts" in line]
    assert result.after is not None
    return {
        "seconds_per_step": sum(line["seconds"] for line in lines) / len(lines),
        "reward": result.after.sampled.mean,
        "oldest": max(line["tokens/oldest"] for line in lines),
        "stale_share": sum(line["tokens/stale"] for line in lines) / sum(line["tokens/trained"] for line in lines),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--staleness", type=int, default=2)
    parser.add_argument("--concurrency", type=int, default=192)
    parser.add_argument("--quorum", type=float, default=1.0)
    options = parser.parse_args()
    found: list[tuple[dict[str, float], dict[str, float]]] = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in options.seeds:
            turns, ahead = (run(s, seed, options.steps, Path(folder) / f"{seed}-{s}", options) for s in (0, options.staleness))
            found.append((turns, ahead))
            print(f"seed {seed}: in turns {_shown(turns)}; ahead {_shown(ahead)}", flush=True)
    ratios = [turns["seconds_per_step"] / ahead["seconds_per_step"] for turns, ahead in found]
    differences = [ahead["reward"] - turns["reward"] for turns, ahead in found]
    print(
        json.dumps(
            {
                "steps_per_hour_ratio": round(statistics.median(ratios), 2),
                "ratios": [round(ratio, 2) for ratio in ratios],
                "reward_difference": round(statistics.mean(differences), 3),
                "reward_differences": [round(difference, 3) for difference in differences],
            }
        )
    )


def _shown(run: dict[str, float]) -> str:
    return (
        f"{run['seconds_per_step']:.1f} s a step, reward {run['reward']:.3f}, "
        f"{run['stale_share']:.0%} of the tokens stale, by {run['oldest']:.0f} at most"
    )


if __name__ == "__main__":
    main()
