"""Trains the assistant and says what came of it: ``python examples/smolagents_stock/run.py --seed 0``.

Writes ``result.json`` and the run's own folder ``seed-N`` into the output folder; a run of the same seed in there is replaced.
"""

import argparse
import json
import shutil
import time
from pathlib import Path

STARTED = time.monotonic()

from app import ask  # noqa: E402 - the clock runs from the first import on
from figures import format_figures, row_figures  # noqa: E402
from questions import held_out_rows, training_rows  # noqa: E402

from rllm_trainer import fit  # noqa: E402

STEPS = 6
N_EVAL = 128


def main() -> None:
    """One run, from the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=2e-5, help="0: the control run, whose reward must not rise")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--n-eval", type=int, default=N_EVAL)
    parser.add_argument("--serving", choices=["local", "vllm"], default="local", help="what serves the model; vllm: see `make vllm`")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"))
    options = parser.parse_args()

    run_dir = options.out / f"seed-{options.seed}"
    shutil.rmtree(run_dir, ignore_errors=True)
    result = fit(
        ask,
        training_rows(options.seed),
        eval_dataset=held_out_rows(options.n_eval),
        output_dir=run_dir,
        serving=options.serving,
        seed=options.seed,
        steps=options.steps,
        batch_tasks=8,
        group_size=8,
        lr=options.lr,
        betas=(0.9, 0.99),
        max_model_len=256,
        concurrency=64,
        keep=1,
    )
    before, after, rise = result.before, result.after, result.rise
    assert before is not None
    assert after is not None
    assert rise is not None
    assert before.greedy is not None
    assert after.greedy is not None
    (format_before, given_before), (format_after, given_after) = (format_figures(run_dir, step=s) for s in (0, options.steps))
    rows = [row_figures(run_dir, step=s) for s in (1, options.steps)]
    figures = {
        "before": before.sampled.mean,
        "after": after.sampled.mean,
        "rise_ci95": [rise.sampled.low, rise.sampled.high],
        "greedy_before": before.greedy.mean,
        "greedy_after": after.greedy.mean,
        "format_before": format_before,
        "format_after": format_after,
        "correct_given_format_before": given_before,
        "correct_given_format_after": given_after,
        "n_eval": options.n_eval,
        "share_multi_call": [multi_call for multi_call, _ in rows],
        "share_multi_span": [multi_span for _, multi_span in rows],
        "seconds": round(time.monotonic() - STARTED, 1),
        "seed": options.seed,
    }
    written = options.out / "result.json"
    written.write_text(json.dumps(figures, indent=2) + "\n")
    (run_dir / "demo.json").write_text(written.read_text())
    print(f"held-out reward {before.sampled.mean:.2f} -> {after.sampled.mean:.2f}, rise {rise.sampled}, in {figures['seconds']:.0f} s")
    print(f"{written}, and all of the run in {run_dir}")


if __name__ == "__main__":
    main()
