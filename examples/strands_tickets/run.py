"""Trains the router for a few steps: ``python examples/strands_tickets/run.py --steps 4``."""

import argparse
from pathlib import Path

from app import route
from messages import held_out_rows, training_rows

from rllm_trainer import fit


def main() -> None:
    """One run, from the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", help="a folder, a hub name or an embedded model; default: SmolLM2-135M")
    parser.add_argument("--out", type=Path, help="a new run folder; default: one under runs/")
    options = parser.parse_args()
    result = fit(
        route,
        training_rows(options.seed),
        model=options.model,
        eval_dataset=held_out_rows(),
        output_dir=options.out,
        steps=options.steps,
        batch_tasks=8,
        group_size=8,
        lr=1e-5,
        seed=options.seed,
    )
    print(f"rise: {result.rise}")
    print(f"the trained model: {result.model_path}")


if __name__ == "__main__":
    main()
