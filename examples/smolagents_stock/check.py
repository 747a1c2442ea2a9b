"""Works every figure of ``result.json`` out again from the recorded episodes: ``python examples/smolagents_stock/check.py runs/demo``.

Nothing of the trainer's arithmetic is used: answers come from the stock list and the question, rewards from the app's recorded output,
rows from the recorded token ids, the interval from a bootstrap of its own. Exit status 1 where a figure differs.
"""

import argparse
import csv
import itertools
import json
import operator
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np

from rllm_trace.exporters.jsonl import iter_episodes
from rllm_trace.types import Episode

WORDS = {"plus": operator.add, "minus": operator.sub, "times": operator.mul}
EXACT = 1e-9
CLOCK = 0.1
"""Seconds by which a figure that is rounded may be short."""
BOOTSTRAP = 0.03
"""How far two bootstraps of the same scores may lie apart at their ends."""


class Run:
    """The rollouts of one run folder, each with its episode."""

    def __init__(self, folder: Path) -> None:
        with (Path(__file__).parent / "stock.csv").open() as file:
            self._stock = {row["item"]: int(row["count"]) for row in csv.DictReader(file)}
        lines = [json.loads(line) for line in (folder / "rollouts.jsonl").read_bytes().splitlines()]
        self._lines = [line for line in lines if line["kind"] == "ended"]
        self._episodes = {episode.id: episode for episode in iter_episodes(folder / "episodes.jsonl")}
        self.steps = max(line["step"] for line in self._lines)
        spans = [(episode.started, episode.ended) for episode in self._episodes.values()]
        self.seconds = (max(ended for _, ended in spans) - min(started for started, _ in spans)) / 1e9
        """From the start of the first episode to the end of the last: less than the run took."""

    def episodes(self, split: str, step: int) -> dict[tuple[str, int], Episode]:
        """Question and number of the rollout -> its episode."""
        chosen = [line for line in self._lines if (line["split"], line["step"]) == (split, step)]
        return {
            (self._episodes[line["episode_id"]].input["question"], line["index"]): self._episodes[line["episode_id"]] for line in chosen
        }

    def scores(self, split: str, step: int) -> dict[str, float]:
        """Question -> 1 where the app's answer is the right number, else 0."""
        return {question: float(self.right(episode)) for (question, _), episode in self.episodes(split, step).items()}

    def right(self, episode: Episode) -> bool:
        """Whether the recorded output is the answer to the recorded question."""
        match = re.fullmatch(r"(\w+): how many (plus|minus|times) (\d)\?", episode.input["question"])
        assert match is not None, episode.input
        item, word, number = match.groups()
        return type(episode.output) is int and episode.output == WORDS[word](self._stock[item], int(number))

    def form(self, step: int) -> tuple[float, float]:
        """Share of held-out episodes that came to a number, and of those the share that is right."""
        episodes = list(self.episodes("eval", step).values())
        numbers = [episode for episode in episodes if type(episode.output) is int]
        return len(numbers) / len(episodes), sum(map(self.right, numbers)) / max(1, len(numbers))

    def shape(self, step: int) -> tuple[float, float]:
        """Share of a step's episodes with two or more calls, and of those the share whose tokens are one unbroken row."""
        episodes = list(self.episodes("train", step).values())
        several = [episode for episode in episodes if len(episode.calls) > 1]
        return len(several) / len(episodes), sum(map(unbroken, several)) / max(1, len(several))


def unbroken(episode: Episode) -> bool:
    """Whether each call's prompt begins with the prompt and the reply of the call before it, id by id."""
    calls = list(episode.calls)
    for earlier, later in itertools.pairwise(calls):
        ids = [*(earlier.prompt_token_ids or ()), *(earlier.choices[0].token_ids or ())]
        if not ids or list(later.prompt_token_ids or ())[: len(ids)] != ids:
            return False
    return True


def interval(rises: list[float]) -> list[float]:
    """95 % bootstrap interval of a mean."""
    values = np.array(rises)
    drawn = np.random.default_rng(12345).integers(0, len(values), size=(20_000, len(values)))
    return [float(end) for end in np.percentile(values[drawn].mean(axis=1), [2.5, 97.5])]


def figures(run: Run) -> dict[str, Any]:
    """Every figure but seed and time, from the episodes alone."""
    first, last = run.scores("eval", 0), run.scores("eval", run.steps)
    assert first.keys() == last.keys(), "before and after must score the same questions"
    trained = {question for step in range(1, run.steps + 1) for question, _ in run.episodes("train", step)}
    assert not trained & first.keys(), "a held-out question was trained on"
    (format_before, given_before), (format_after, given_after) = run.form(0), run.form(run.steps)
    shapes = [run.shape(1), run.shape(run.steps)]
    return {
        "before": mean(first),
        "after": mean(last),
        "rise_ci95": interval([last[question] - first[question] for question in first]),
        "greedy_before": mean(run.scores("eval_greedy", 0)),
        "greedy_after": mean(run.scores("eval_greedy", run.steps)),
        "format_before": format_before,
        "format_after": format_after,
        "correct_given_format_before": given_before,
        "correct_given_format_after": given_after,
        "n_eval": len(first),
        "share_multi_call": [multi_call for multi_call, _ in shapes],
        "share_multi_span": [multi_span for _, multi_span in shapes],
    }


def mean(scores: dict[str, float]) -> float:
    return sum(scores.values()) / len(scores)


def differences(written: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """One line for each figure that was not found again."""
    lines = [f"{name}: not among the figures" for name in sorted(written.keys() ^ (found.keys() | {"seconds", "seed"}))]
    for name in found.keys() & written.keys():
        tolerance = BOOTSTRAP if name == "rise_ci95" else EXACT
        if not np.allclose(written[name], found[name], rtol=0, atol=tolerance):
            lines.append(f"{name}: written {written[name]}, found {found[name]}")
    return lines


def contradictions(folder: Path, seed: int) -> list[str]:
    """One line for each figure of a seed that its run folder does not bear out; of the newest seed ``result.json`` itself is looked at."""
    run_dir = folder / f"seed-{seed}"
    run, written, newest = Run(run_dir), read(run_dir / "demo.json"), read(folder / "result.json")
    lines = differences(written, figures(run))
    if written.get("seed") != seed:
        lines.append(f"seed: written {written.get('seed')}, found the folder of seed {seed}")
    if written.get("seconds", 0.0) < run.seconds - CLOCK:
        lines.append(f"seconds: written {written.get('seconds')}, found episodes {run.seconds:.1f} s apart")
    if newest["seed"] == seed and newest != written:
        lines.append(f"result.json: {newest}, and in the folder of that run {written}")
    return lines


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def bars(result: dict[str, Any], *, within: int) -> dict[str, bool]:
    """What the demo is to show, and whether it did; ``within``: in how many seconds."""
    return {
        "before >= 0.1": result["before"] >= 0.1,
        "rise >= 0.4": result["after"] - result["before"] >= 0.4,
        "its interval lies above 0": result["rise_ci95"][0] > 0,
        "at least 128 held-out questions": result["n_eval"] >= 128,
        "correct given valid format does not fall": result["correct_given_format_after"] >= result["correct_given_format_before"],
        "60 % make two or more calls": min(result["share_multi_call"]) >= 0.6,
        "50 % of those are one unbroken row": min(result["share_multi_span"]) >= 0.5,
        f"within {within} s": result["seconds"] <= within,
    }


def main() -> int:
    """Check one result, or those of several seeds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", help="check these seeds' results, and that each reached every bar")
    parser.add_argument("--control", action="store_true", help="the interval of the rise must contain 0")
    parser.add_argument("--within", type=int, default=600, help="seconds that the run may have taken")
    options = parser.parse_args()

    failed = False
    for seed in options.seeds or [read(options.folder / "result.json")["seed"]]:
        result = read(options.folder / f"seed-{seed}" / "demo.json")
        wrong = contradictions(options.folder, seed)
        print("\n".join(wrong) or f"seed {seed}: all figures found again from the episodes; rise {result['after'] - result['before']:.2f}")
        failed |= bool(wrong)
        if options.control:
            low, high = result["rise_ci95"]
            print(f"control: the interval [{low:.3f}, {high:.3f}] {'contains' if low <= 0 <= high else 'DOES NOT CONTAIN'} 0")
            failed |= not low <= 0 <= high
            continue
        for bar, reached in bars(result, within=options.within).items():
            print(f"  {'yes' if reached else 'NO '}  {bar}")
        failed |= options.seeds is not None and not all(bars(result, within=options.within).values())
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
