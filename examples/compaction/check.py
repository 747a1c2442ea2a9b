"""Works every figure of ``result.json`` out again from the recorded episodes: ``python examples/compaction/check.py runs/compaction``.

Nothing of the trainer's arithmetic is used. Rewards come from the recorded replies and the row. Of every reply that was sampled for
training, ``credit.jsonl`` must say that all of its tokens were trained, and trained once; compactions are counted as the requests whose
prompt begins with no recorded conversation, although the episode has one. Exit status 1 where a figure differs.
"""

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from rllm_trace.exporters.jsonl import iter_episodes
from rllm_trace.types import Episode

EXACT = 1e-9
BOOTSTRAP = 0.03
"""How far two bootstraps of the same scores may lie apart at their ends."""

Reply = tuple[str, str, int]
"""Episode id, span id of the call, choice."""


class Run:
    """One run folder."""

    def __init__(self, folder: Path) -> None:
        lines = [json.loads(line) for line in (folder / "rollouts.jsonl").read_bytes().splitlines()]
        self.lines = [line for line in lines if line["kind"] == "ended"]
        self.episodes = {episode.id: episode for episode in iter_episodes(folder / "episodes.jsonl")}
        self.credit = [json.loads(line) for line in (folder / "credit.jsonl").read_bytes().splitlines()]
        self.steps = max(line["step"] for line in self.lines)

    def scores(self, step: int) -> dict[str, float]:
        """Chat -> what its held-out rollout was worth after ``step``."""
        chosen = [line for line in self.lines if (line["split"], line["step"]) == ("eval", step)]
        return {str(line["row"]["sentences"]): worth(self.episodes[line["episode_id"]], line["row"]["colours"]) for line in chosen}

    def trained_episodes(self) -> list[Episode]:
        return [self.episodes[line["episode_id"]] for line in self.lines if line["split"] == "train"]


def worth(episode: Episode, colours: list[str]) -> float:
    """The share of turns whose recorded reply is the colour and nothing else."""
    replies = [(call.choices[0].text or "") if call.choices else "" for call in episode.calls]
    return sum(reply.strip().lower().rstrip(".") == colour for reply, colour in zip(replies, colours, strict=False)) / len(colours)


def sampled(episodes: list[Episode]) -> dict[Reply, int]:
    """Every reply that the policy sampled -> its tokens."""
    return {
        (episode.id, call.span_id, choice.index): len(choice.token_ids or ())
        for episode in episodes
        for call in episode.calls
        for choice in call.choices
        if choice.token_ids
    }


def compactions(episode: Episode) -> int:
    """Requests after the first whose prompt does not begin with the prompt and the reply of any request before them."""
    known: list[list[int]] = []
    found = 0
    for call in episode.calls:
        prompt = list(call.prompt_token_ids or ())
        if known and not any(prompt[: len(ids)] == ids for ids in known):
            found += 1
        known.append(prompt + list(call.choices[0].token_ids or ()))
    return found


def interval(rises: list[float]) -> list[float]:
    """95 % bootstrap interval of a mean."""
    values = np.array(rises)
    drawn = np.random.default_rng(12345).integers(0, len(values), size=(20_000, len(values)))
    return [float(end) for end in np.percentile(values[drawn].mean(axis=1), [2.5, 97.5])]


def figures(run: Run) -> dict[str, Any]:
    """Every figure but compactions, seed and time, from the episodes alone."""
    before, after = run.scores(0), run.scores(run.steps)
    assert before.keys() == after.keys(), "before and after must score the same chats"
    episodes = run.trained_episodes()
    return {
        "before": sum(before.values()) / len(before),
        "after": sum(after.values()) / len(after),
        "rise_ci95": interval([after[chat] - before[chat] for chat in before]),
        "n_eval": len(before),
        "sampled_tokens": sum(sampled(episodes).values()),
        "trained_tokens": sum(line["tokens"] for line in run.credit),
        "calls": sum(len(episode.calls) for episode in episodes),
    }


def unequal(run: Run) -> list[str]:
    """One line for each reply whose trained tokens are not its sampled ones, each once."""
    expected, found = sampled(run.trained_episodes()), Counter[Reply]()
    for line in run.credit:
        found[line["episode_id"], line["span_id"], line["choice"]] += line["tokens"]
    different = [reply for reply in expected.keys() | found.keys() if expected.get(reply, 0) != found[reply]]
    return [f"reply {reply}: sampled {expected.get(reply, 0)} tokens, trained {found[reply]}" for reply in sorted(different)]


def main() -> int:
    """Check one result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--control", action="store_true", help="the interval of the rise must contain 0")
    options = parser.parse_args()

    result = json.loads((options.folder / "result.json").read_text())
    run = Run(options.folder / f"seed-{result['seed']}")
    found = figures(run)
    wrong = [f"{name}: not among the figures" for name in sorted(result.keys() ^ (found.keys() | {"compactions", "seed", "seconds"}))]
    for name in found.keys() & result.keys():
        if not np.allclose(result[name], found[name], rtol=0, atol=BOOTSTRAP if name == "rise_ci95" else EXACT):
            wrong.append(f"{name}: written {result[name]}, found {found[name]}")
    wrong += unequal(run)[:5]
    print("\n".join(wrong) or "all figures found again from the episodes")
    broken = [compactions(episode) for episode in run.trained_episodes()]
    low, high = result["rise_ci95"]
    total, trained = found["sampled_tokens"], found["trained_tokens"]
    bars = {
        f"every one of {total} sampled tokens was trained, once": total == trained,
        f"a compacted history in every episode (least {min(broken)}, in all {sum(broken)})": min(broken) >= 1,
        f"each was recognised as one ({result['compactions']})": result["compactions"] >= len(broken),
        f"the interval of the rise [{low:.3f}, {high:.3f}]": low <= 0 <= high if options.control else low > 0,
    }
    for bar, reached in bars.items():
        print(f"  {'yes' if reached else 'NO '}  {bar}")
    return int(bool(wrong) or not all(bars.values()))


if __name__ == "__main__":
    sys.exit(main())
