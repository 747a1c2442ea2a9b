"""Trains solvers and judge and says what came of it: ``python examples/solver_judge/run.py --seed 0``.

Writes ``result.json`` and the run's own folder ``seed-N`` into the output folder; a run of the same seed in there is replaced.
"""

import argparse
import json
import shutil
import time
from pathlib import Path

STARTED = time.monotonic()

from app import decide  # noqa: E402 - the clock runs from the first import on
from figures import interval, role_rises, role_scores  # noqa: E402
from questions import held_out_rows, training_rows  # noqa: E402

from rllm_trainer import fit  # noqa: E402

STEPS = 6
N_EVAL = 96
RULES = {"solver": "grpo", "judge": "reinforce_plus_plus"}


def main() -> None:
    """One run, from the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=2e-5, help="0: the control run, whose rewards must not rise")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--n-eval", type=int, default=N_EVAL)
    parser.add_argument("--model", help="a model folder; the embedded default if left out")
    parser.add_argument("--out", type=Path, default=Path("runs/solver-judge"))
    options = parser.parse_args()

    run_dir = options.out / f"seed-{options.seed}"
    shutil.rmtree(run_dir, ignore_errors=True)
    fit(
        decide,
        training_rows(options.seed),
        model=options.model,
        reward=[],  # the app scores its agents itself
        eval_dataset=held_out_rows(options.n_eval),
        algorithm=RULES,
        output_dir=run_dir,
        seed=options.seed,
        steps=options.steps,
        batch_tasks=8,
        group_size=8,
        lr=options.lr,
        betas=(0.9, 0.99),
        max_model_len=512,
        micro_batch_tokens=1024,
        concurrency=64,
        eval_greedy=False,
        keep=1,
    )
    figures: dict[str, object] = {"n_eval": options.n_eval, "seed": options.seed}
    for role in RULES:
        before, after = (role_scores(run_dir, role, step=step) for step in (0, options.steps))
        figures |= {
            f"{role}_before": sum(before.values()) / len(before),
            f"{role}_after": sum(after.values()) / len(after),
            f"{role}_rise_ci95": interval(role_rises(before, after)),
        }
    figures["seconds"] = round(time.monotonic() - STARTED, 1)
    written = options.out / "result.json"
    written.write_text(json.dumps(figures, indent=2) + "\n")
    (run_dir / "demo.json").write_text(written.read_text())
    for role in RULES:
        low, high = figures[f"{role}_rise_ci95"]  # type: ignore[misc]
        print(f"{role}: {figures[f'{role}_before']:.2f} -> {figures[f'{role}_after']:.2f}, rise between {low:.2f} and {high:.2f}")
    print(f"{written}, and all of the run in {run_dir}")


if __name__ == "__main__":
    main()
