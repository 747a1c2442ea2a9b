"""The run folder: who may write in it, where a run stands, and what it can be continued from.

A checkpoint is written beside the others, synced, and renamed into place: it is there whole or not at all. The order of the rows,
the schedule and all seeds are functions of the step, so a state is small; weights, moments and random states are the engine's.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from rllm_trainer.engine.base import Engine
from rllm_trainer.exceptions import CheckpointError
from rllm_trainer.rollout.record import ROLLOUTS_FILE
from rllm_trainer.state import State

__all__ = [
    "SETTINGS_FILE",
    "Checkpoints",
    "export_model",
    "how_to_continue",
    "new_run_dir",
    "owned",
    "require_same",
    "standing",
    "write_json",
]

_FOLDER = "checkpoints"
_STATE = "state.json"
_ENGINE = "engine"
_LOCK = ".lock"
SETTINGS_FILE = "settings.json"
_OF_THE_ENGINE = re.compile(r"optimizer\.safetensors|random-\d+\.safetensors|engine\.json|rllm-files\.json")
_NAME = re.compile(r"step-(\d{6})")


class Checkpoints:
    """The checkpoints of one run folder."""

    def __init__(self, run_dir: Path, keep: int) -> None:
        self.folder = run_dir / _FOLDER
        self._keep = keep
        self.folder.mkdir(parents=True, exist_ok=True)

    def save(self, state: State, engine: Engine) -> Path:
        """Write one, then drop the oldest beyond ``keep``. Raises ``CheckpointError`` where the disk refuses."""
        final = self.folder / f"step-{state.step:06d}"
        if self._readable(final) is not None:
            return final
        temporary = self.folder / f".{final.name}.tmp"
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            shutil.rmtree(final, ignore_errors=True)
            temporary.mkdir()
            engine.save(temporary / _ENGINE)
            (temporary / _STATE).write_bytes(msgspec.json.encode(state))
            _sync_tree(temporary)
            temporary.rename(final)
            _sync(self.folder)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise CheckpointError(
                f"the checkpoint {final} could not be written: {error}; free space or choose another output_dir"
            ) from error
        for old in self._all()[: -self._keep]:
            shutil.rmtree(old, ignore_errors=True)
        return final

    def latest(self) -> tuple[State, Path] | None:
        """The newest whole checkpoint: its state, and the folder that the engine wrote."""
        for folder in reversed(self._all()):
            state = self._readable(folder)
            if state is not None:
                return state, folder / _ENGINE
        return None

    def _all(self) -> list[Path]:
        return sorted(folder for folder in self.folder.iterdir() if _NAME.fullmatch(folder.name))

    def _readable(self, folder: Path) -> State | None:
        try:
            return msgspec.json.decode((folder / _STATE).read_bytes(), type=State)
        except (OSError, msgspec.DecodeError):
            return None


def how_to_continue(call: str, run_dir: Path) -> str:
    """What is said of a run that was stopped; ``call`` is the function that made it."""
    return f"stopped; continue with {call}(..., output_dir={str(run_dir)!r}, resume=True), or --output and --resume on the command line"


def standing(
    run_dir: Path, *, keep: int, fingerprint: dict[str, Any], steps: int | None, resume: bool | str | Path
) -> tuple[State, Path | None]:
    """Where a run begins: a new one at step 0 with None, a continued one after its newest checkpoint with what the engine wrote.

    Raises ``CheckpointError`` where the run to continue was another one.
    """
    found = Checkpoints(run_dir, keep).latest() if resume else None
    if found is None:
        return State(steps=steps, fingerprint=fingerprint), None
    require_same(found[0].fingerprint, fingerprint)
    return msgspec.structs.replace(found[0], steps=steps), found[1]


def new_run_dir(output_dir: str | Path | None, *, name: str, resume: bool | str | Path) -> Path:
    """The folder of this run, made if it is new.

    Raises:
        CheckpointError: it holds a run that was not asked to be continued, or none where one was; or it is no path.
    """
    if not isinstance(resume, bool):
        output_dir = _path("resume", resume, "True, or the folder of the run to continue")
    if output_dir is None:
        if resume:
            raise CheckpointError("resume=True needs output_dir=, the folder of the run to continue; or give that folder as resume=")
        output_dir = Path("runs") / f"{_slug(name)}-{time.strftime('%Y%m%d-%H%M%S')}"
        output_dir = _free(output_dir)
    run_dir = _path("output_dir", output_dir, "the folder of the run").absolute()
    if resume and not (run_dir / SETTINGS_FILE).exists():
        raise CheckpointError(f"{run_dir} holds no run to continue; leave resume out to start one there")
    if resume:
        _require_settings(run_dir / SETTINGS_FILE)
    if not resume and _holds_run(run_dir):
        raise CheckpointError(
            f"{run_dir} already holds a run; continue it with resume=True (--resume), or choose another output_dir (--output)"
        )
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"the run folder {run_dir} cannot be made: {error}") from error
    return run_dir


@contextmanager
def owned(run_dir: Path) -> Generator[None]:
    """Hold the folder; a second run in it is refused with ``CheckpointError``. Freed by the system if this process dies."""
    with (run_dir / _LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise CheckpointError(f"another run is writing to {run_dir}; wait for it, or choose another output_dir") from None
        yield


def require_same(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises ``CheckpointError`` where a continued run would not be the same run."""
    for name, value in now.items():
        if name in saved and saved[name] != value:
            raise CheckpointError(
                f"the run to continue had {name}={saved[name]!r}, and now it is {value!r}; "
                "give the same, or start a new run in another output_dir"
            )


def export_model(saved: Path, target: Path) -> None:
    """The Hugging Face folder in what an engine saved, as a folder of its own: linked, not copied, where the disk can."""
    temporary = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    for file in saved.iterdir():
        if not _OF_THE_ENGINE.fullmatch(file.name):
            _link_or_copy(file, temporary / file.name)
    _sync_tree(temporary)
    shutil.rmtree(target, ignore_errors=True)
    temporary.rename(target)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file whole or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(value, enc_hook=str), indent=2) + b"\n")
    _sync(temporary)
    temporary.replace(path)


def _link_or_copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target)
        return
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _holds_run(run_dir: Path) -> bool:
    """Whether anything was collected or saved there; a run that ended while it started left nothing to lose."""
    rollouts = run_dir / ROLLOUTS_FILE
    return (rollouts.exists() and rollouts.stat().st_size > 0) or any((run_dir / _FOLDER).glob("step-*"))


def _require_settings(path: Path) -> None:
    """Raises ``CheckpointError`` where a run's settings cannot be read: what else of the folder is whole is not known then."""
    try:
        found: Any = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); restore it, or start a new run in another output_dir") from error
    if not isinstance(found, dict) or "settings" not in found:
        raise CheckpointError(f"{path} holds no settings of a run; restore it, or start a new run in another output_dir")


def _path(setting: str, given: Any, expected: str) -> Path:
    """The folder that a setting names. Raises ``CheckpointError`` for what no folder can be named."""
    if given == "":
        raise CheckpointError(f"got {setting}='', which names no folder; expected {expected}, or '.' for the working folder")
    try:
        Path(given).stat()
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"got {setting}={given!r}, which is no path ({error}); expected {expected}") from error
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise CheckpointError(f"got {setting}={str(given)[:40]!r}..., a name too long for a file; give a shorter one") from error
    return Path(given)


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_]+", "-", name.rpartition(".")[2]).strip("-") or "run"


def _free(path: Path) -> Path:
    number = 2
    free = path
    while free.exists():
        free = path.with_name(f"{path.name}-{number}")
        number += 1
    return free


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sync_tree(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        if path.is_file() or path.is_dir():
            _sync(path)
