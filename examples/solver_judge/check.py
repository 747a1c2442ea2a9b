"""Works every figure of ``result.json`` out again from the recorded episodes: ``python examples/solver_judge/check.py runs/solver-judge``.

Nothing of the trainer's arithmetic is used: who was right is worked out from the recorded replies and the row, and the credit of every
trained reply (``credit.jsonl``) is compared with it, so that no agent was trained on another's reward. Exit status 1 where it differs.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from rllm_trace.exporters.jsonl import iter_episodes
from rllm_trace.types import Episode

ROLES = ("solver", "judge")
EXACT = 1e-9
BOOTSTRAP = 0.03
"""How far two bootstraps of the same scores may lie apart at their ends."""
CLOCK = 0.1


class Run:
    """One run folder."""

    def __init__(self, folder: Path) -> None:
        lines = [json.loads(line) for line in (folder / "rollouts.jsonl").read_bytes().splitlines()]
        self.lines = [line for line in lines if line["kind"] == "ended"]
        self.episodes = {episode.id: episode for episode in iter_episodes(folder / "episodes.jsonl")}
        self.credit = [json.loads(line) for line in (folder / "credit.jsonl").read_bytes().splitlines()]
        self.steps = max(line["step"] for line in self.lines)
        spans = [(episode.started, episode.ended) for episode in self.episodes.values()]
        self.seconds = (max(ended for _, ended in spans) - min(started for started, _ in spans)) / 1e9

    def scores(self, role: str, step: int) -> dict[str, float]:
        """Sentence -> mean over the role's agents, in the evaluation after ``step``."""
        found: dict[str, float] = {}
        for line in self.lines:
            if (line["split"], line["step"]) == ("eval", step):
                worth = worth_of(self.episodes[line["episode_id"]])
                values = [value for (of, _), value in worth.items() if of == role]
                found[line["row"]["sentence"]] = sum(values) / len(values)
        return found


def said(reply: str | None) -> str:
    return (reply or "").strip()


def worth_of(episode: Episode) -> dict[tuple[str, str], float]:
    """(role, trajectory id) -> 1 where that agent was right by the recorded replies, else 0."""
    colour = episode.input["colour"]
    replies = {t.id: said(t.calls[0].choices[0].text) for t in episode.trajectories if t.name == "solver"}
    right = {id: reply.lower().rstrip(".") == colour for id, reply in replies.items()}
    worth = {("solver", id): float(value) for id, value in right.items()}
    for trajectory in episode.trajectories:
        if trajectory.name == "judge":
            letter = said(trajectory.calls[0].choices[0].text)
            picked = episode.output["replies"]["AB".index(letter)] if letter in ("A", "B") else ""
            worth["judge", trajectory.id] = float(picked.lower().rstrip(".") == colour)
    return worth


def interval(rises: list[float]) -> list[float]:
    """95 % bootstrap interval of a mean."""
    values = np.array(rises)
    drawn = np.random.default_rng(12345).integers(0, len(values), size=(20_000, len(values)))
    return [float(end) for end in np.percentile(values[drawn].mean(axis=1), [2.5, 97.5])]


def figures(run: Run) -> dict[str, Any]:
    """Every figure but seed and time, from the episodes alone."""
    found: dict[str, Any] = {}
    for role in ROLES:
        before, after = run.scores(role, 0), run.scores(role, run.steps)
        assert before.keys() == after.keys(), "before and after must score the same sentences"
        found |= {
            f"{role}_before": sum(before.values()) / len(before),
            f"{role}_after": sum(after.values()) / len(after),
            f"{role}_rise_ci95": interval([after[sentence] - before[sentence] for sentence in before]),
            "n_eval": len(before),
        }
    return found


def miscredited(run: Run) -> list[str]:
    """One line for each kind of reply that was trained on a score that is not its own agent's, or by another role's rule."""
    wrong: list[str] = []
    calls = {(episode.id, call.span_id): (trajectory.name, trajectory.id)
             for episode in run.episodes.values() for trajectory in episode.trajectories for call in trajectory.calls}  # fmt: skip
    worth = {id: worth_of(episode) for id, episode in run.episodes.items()}
    for line in run.credit:
        role, trajectory_id = calls[line["episode_id"], line["span_id"]]
        own = worth[line["episode_id"]][role, trajectory_id]
        if (line["role"], line["level"], line["score"], line["shares"]) != (role, "trajectory", own, {trajectory_id: 1.0}):
            wrong.append(f"credit of {role} {trajectory_id}: written {line}, its own reward is {own}")
    trained = {(line["episode_id"], line["span_id"], line["choice"]) for line in run.credit}
    if len(trained) != len(run.credit):
        wrong.append(f"credit: {len(run.credit) - len(trained)} replies were trained twice")
    return wrong


def differences(written: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """One line for each figure that was not found again."""
    lines = [f"{name}: not among the figures" for name in sorted(written.keys() ^ (found.keys() | {"seconds", "seed"}))]
    for name in found.keys() & written.keys():
        tolerance = BOOTSTRAP if name.endswith("_ci95") else EXACT
        if not np.allclose(written[name], found[name], rtol=0, atol=tolerance):
            lines.append(f"{name}: written {written[name]}, found {found[name]}")
    return lines


def main() -> int:
    """Check one result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--control", action="store_true", help="the intervals of the rises must contain 0")
    options = parser.parse_args()

    result = json.loads((options.folder / "result.json").read_text())
    run = Run(options.folder / f"seed-{result['seed']}")
    wrong = differences(result, figures(run)) + miscredited(run)[:5]
    if result.get("seconds", 0.0) < run.seconds - CLOCK:
        wrong.append(f"seconds: written {result.get('seconds')}, found episodes {run.seconds:.1f} s apart")
    print("\n".join(wrong) or f"all figures found again from the episodes; {len(run.credit)} trained replies have their own agent's reward")
    failed = bool(wrong)
    for role in ROLES:
        low, high = result[f"{role}_rise_ci95"]
        reached = low <= 0 <= high if options.control else low > 0
        bar = "contains 0" if options.control else "lies above 0"
        print(f"  {'yes' if reached else 'NO '}  {role}: the interval of its rise [{low:.3f}, {high:.3f}] {bar}")
        failed |= not reached
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
