"""Documents out of a file or a folder, in the order of their names: ``.json``, ``.jsonl``, ``.ndjson``, also gzipped, and ``.parquet``."""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from rllm_trace._plain import loads
from rllm_trace.exceptions import ConfigurationError

__all__ = ["documents"]

_LINES: Final = (".jsonl", ".ndjson")
_TABLE: Final = ".parquet"
_SUFFIXES: Final = (".json", *_LINES, _TABLE)


def documents(path: str | os.PathLike[str]) -> Iterator[tuple[Path, Any]]:
    """(file, document) for every document; a table is a list of its rows.

    Raises ConfigurationError if there is no file, ValueError that names a file that is no JSON.
    """
    start = Path(path)
    files = sorted(file for file in start.rglob("*") if _suffix(file) in _SUFFIXES) if start.is_dir() else [start]
    if not files or not start.exists():
        raise ConfigurationError(
            f"{str(path)!r} has no file to import; expected {', '.join(_SUFFIXES)} (also with .gz), or a folder of them"
        )
    for file in files:
        yield from _documents(file)


def _documents(file: Path) -> Iterator[tuple[Path, Any]]:
    if file.suffix == _TABLE:
        from rllm_trace._store_parquet import read_table

        yield file, read_table(file)
        return
    data = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    if _suffix(file) not in _LINES:
        try:
            yield file, loads(data)
            return
        except ValueError:
            if b"\n" not in data.strip():
                raise ValueError(f"{file} is no JSON") from None
    for number, line in enumerate(data.splitlines(), 1):
        if line.strip():
            try:
                yield file, loads(line)
            except ValueError as error:
                raise ValueError(f"{file}, line {number}: no JSON ({error})") from None


def _suffix(file: Path) -> str:
    return Path(file.stem).suffix if file.suffix == ".gz" else file.suffix
