"""A trainability report in, ``trainability.md`` of the run folder out: what became of every sampled token, as a table."""

from __future__ import annotations

from pathlib import Path

from rllm_trainer.trainability_report import TrainabilityReport

__all__ = ["TABLE_FILE", "write_table"]

TABLE_FILE = "trainability.md"


def write_table(run_dir: Path, found: TrainabilityReport) -> None:
    """Whole or not at all."""
    lines = ["| measure | value |", "|---|---|"]
    lines += [f"| {name} | {value:.6g} |" for name, value in found.metrics().items()]
    rows = found.table()
    if rows:
        lines += ["", "| | cause | count | tokens | such as |", "|---|---|---|---|---|"]
        lines += [f"| {what} | {_cell(cause)} | {count} | {tokens} | {_cell(example)} |" for what, cause, count, tokens, example in rows]
    temporary = run_dir / f".{TABLE_FILE}.tmp"
    temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")
    temporary.replace(run_dir / TABLE_FILE)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
