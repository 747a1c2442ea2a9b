"""A run folder in, the step up to which verl has saved it out.

The number of the step is the last thing that verl writes of a checkpoint. Where the disk had no room for it, the file is there and
empty, and the checkpoint that was written last is whole: the number is written again, so that verl finds it, too.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

__all__ = ["checkpoints_of", "refusal_of", "saved_step"]

_FOLDER = "checkpoints"
_LATEST = "latest_checkpointed_iteration.txt"
_STEP = "global_step_"
_PROBE, _PROBE_BYTES = ".probe", 1 << 20
_ROWS = "data.pt"
"""verl's place in the rows, written after the weights."""


def checkpoints_of(run_dir: Path) -> Path:
    """Where verl's checkpoints of a run are."""
    return run_dir / _FOLDER


def saved_step(run_dir: Path) -> int:
    """0: none is whole."""
    latest = checkpoints_of(run_dir) / _LATEST
    if not latest.exists():
        return 0
    text = latest.read_text().strip()
    if text:
        return int(text)
    written = sorted(checkpoints_of(run_dir).glob(f"{_STEP}*/{_ROWS}"), key=lambda file: file.stat().st_mtime_ns)
    step = int(written[-1].parent.name.removeprefix(_STEP)) if written else 0
    if step:
        _replace(latest, str(step))
    else:
        latest.unlink()  # verl would read no number, and end
    return step


def refusal_of(folder: Path) -> OSError | None:
    """What the disk says of a file of a megabyte there; None: it takes it."""
    probe = folder / _PROBE
    try:
        with probe.open("wb") as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()
    return None


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text)
    os.replace(temporary, path)
