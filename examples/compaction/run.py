"""Trains the model and says what came of it: ``python examples/compaction/run.py --seed 0``.

Writes ``result.json`` and the run's own folder ``seed-N`` into the output folder; a run of the same seed in there is replaced.
"""

import argparse
import json
import shutil
import time
from pathlib import Path

STARTED = time.monotonic()

from app import chat, named  # noqa: E402 - the clock runs from the first import on
from questions import held_out_rows, training_rows  # noqa: E402

from rllm_trainer import fit  # noqa: E402

STEPS = 5
N_EVAL = 64


def main() -> None:
    """One run, from the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=2e-5, help="0: the control run, whose reward must not rise")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--n-eval", type=int, default=N_EVAL)
    parser.add_argument("--model", help="a model folder; the embedded default if left out")
    parser.add_argument("--out", type=Path, default=Path("runs/compaction"))
    options = parser.parse_args()

    run_dir = options.out / f"seed-{options.seed}"
    shutil.rmtree(run_dir, ignore_errors=True)
    result = fit(
        chat,
        training_rows(options.seed),
        model=options.model,
        reward=named,
        eval_dataset=held_out_rows(options.n_eval),
        output_dir=run_dir,
        seed=options.seed,
        steps=options.steps,
        batch_tasks=8,
        group_size=8,
        lr=options.lr,
        betas=(0.9, 0.99),
        max_model_len=1024,
        micro_batch_tokens=1024,
        concurrency=64,
        eval_greedy=False,
        keep=1,
    )
    assert result.before is not None
    assert result.after is not None
    assert result.rise is not None
    counters = result.trainability
    figures = {
        "before": result.before.sampled.mean,
        "after": result.after.sampled.mean,
        "rise_ci95": [result.rise.sampled.low, result.rise.sampled.high],
        "n_eval": options.n_eval,
        "sampled_tokens": counters.sampled_tokens,
        "trained_tokens": counters.trained_tokens,
        "calls": counters.calls,
        "compactions": counters.breaks.get("compaction", 0),
        "seed": options.seed,
        "seconds": round(time.monotonic() - STARTED, 1),
    }
    written = options.out / "result.json"
    written.write_text(json.dumps(figures, indent=2) + "\n")
    (run_dir / "demo.json").write_text(written.read_text())
    print(f"held-out reward {figures['before']:.2f} -> {figures['after']:.2f}, rise {result.rise.sampled}")
    print(f"{counters.trained_tokens} of {counters.sampled_tokens} sampled tokens were trained; {figures['compactions']} compactions")
    print(f"{written}, and all of the run in {run_dir}")


if __name__ == "__main__":
    main()
