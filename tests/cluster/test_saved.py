"""The step up to which verl has saved a run is the one that can be gone on from, whatever the disk had room for."""

from __future__ import annotations

import os
from pathlib import Path

from rllm_trainer.cluster.saved import refusal_of, saved_step


def checkpoint(run_dir: Path, step: int, *, at: int, rows: bool = True) -> Path:
    """As verl writes one: weights, then the place in the rows; the time at which that was written."""
    folder = run_dir / "checkpoints" / f"global_step_{step}"
    (folder / "actor").mkdir(parents=True)
    if rows:
        (folder / "data.pt").write_bytes(b"rows")
        os.utime(folder / "data.pt", (at, at))
    return run_dir / "checkpoints" / "latest_checkpointed_iteration.txt"


def test_the_number_on_file_is_the_step(tmp_path: Path) -> None:
    """A folder beyond it was not finished."""
    assert saved_step(tmp_path) == 0
    checkpoint(tmp_path, 3, at=2, rows=False)
    checkpoint(tmp_path, 2, at=1).write_text("2")
    assert saved_step(tmp_path) == 2


def test_a_number_that_the_disk_had_no_room_for_is_that_of_what_was_written_last(tmp_path: Path) -> None:
    """It is put on file; an older attempt at a later step is not taken for it."""
    checkpoint(tmp_path, 2, at=1)
    checkpoint(tmp_path, 4, at=2)
    checkpoint(tmp_path, 5, at=0, rows=False)
    latest = checkpoint(tmp_path, 3, at=3)
    latest.write_text("")
    assert saved_step(tmp_path) == 3
    assert latest.read_text() == "3"


def test_a_number_without_a_checkpoint_is_none(tmp_path: Path) -> None:
    """verl would read an empty file, and fail."""
    latest = checkpoint(tmp_path, 1, at=1, rows=False)
    latest.write_text("")
    assert saved_step(tmp_path) == 0
    assert not latest.exists()


def test_a_disk_that_takes_a_file_refuses_nothing(tmp_path: Path) -> None:
    """And one that does not says why; nothing is left of the question."""
    assert refusal_of(tmp_path) is None
    assert list(tmp_path.iterdir()) == []
    refusal = refusal_of(tmp_path / "nowhere")
    assert refusal is not None
    assert refusal.strerror == "No such file or directory"
