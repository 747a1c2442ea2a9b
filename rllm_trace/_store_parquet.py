"""Rows of episodes to a Parquet file and back. The only file that imports pyarrow.

One row is one episode; its rewards, trajectories, calls and tools are lists of structs, so that DuckDB, Polars and pandas read it as it
is. Times of episodes are UTC timestamps, those inside are Unix nanoseconds. The version of the schema is in the file's metadata; a column
that an older file lacks has its default, one that this release does not know is passed over. A file is written aside, synced and renamed:
it is whole or not there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

from rllm_trace._store_rows import Row
from rllm_trace.exceptions import ConfigurationError
from rllm_trace.types import Logprobs, TokenIds

__all__ = ["FILTERED", "count_rows", "has_parquet", "read_column", "read_metadata", "read_rows", "read_table", "write_rows"]

_VERSION_KEY: Final = "rllm.episodes.version"
_VERSION: Final = 1
_BATCH_ROWS: Final = 256
_LEVEL: Final = 6

_ERROR: Final = {"type": "string", "message": "string", "status_code": "int64"}
_REWARD: Final = {
    "name": "string", "value": "double", "weight": "double", "target": "string", "span_id": "string", "superseded": "bool",
}  # fmt: skip
_CHOICE: Final[dict[str, Any]] = {
    "index": "int32",
    "text": "string",
    "reasoning": "string",
    "refusal": "string",
    "tool_calls": "string",
    "finish_reason": "string",
    "stop_reason": "string",
    "version_spans": "string",
    "token_ids": ["int32"],
    "logprobs": ["float"],
}
_CALL: Final[dict[str, Any]] = {
    "trajectory": "int32",
    "span_id": "string",
    "parent_id": "string",
    "operation": "string",
    "model": "string",
    "requested_model": "string",
    "endpoint": "string",
    "server": "string",
    "messages_from": "int32",
    "messages_shared": "int32",
    "messages": "string",
    "tools_from": "int32",
    "tools": "string",
    "sampling": "string",
    "requested_sampling": "string",
    "prompt_from": "int32",
    "prompt_choice": "int32",
    "prompt_shared": "int32",
    "prompt_new": ["int32"],
    "choices": [_CHOICE],
    "usage": {"prompt_tokens": "int64", "completion_tokens": "int64"},
    "response_id": "string",
    "response_model": "string",
    "attempts": "int32",
    "error": _ERROR,
    "exact": "bool",
    "inexact_reason": "string",
    "complete": "bool",
    "streamed": "bool",
    "no_train": "bool",
    "late": "bool",
    "multimodal": "bool",
    "trainable": "bool",
    "policy_version_start": "int64",
    "policy_version_end": "int64",
    "version_spans": "string",
    "started": "int64",
    "ended": "int64",
    "time_to_first_token": "int64",
}
_COLUMNS: Final[dict[str, Any]] = {
    "id": "string",
    "task_id": "string",
    "workflow": "string",
    "termination": "string",
    "reward": "double",
    "started": "time",
    "ended": "time",
    "session_id": "string",
    "parent_episode_id": "string",
    "trace_id": "string",
    "span_id": "string",
    "open_calls": "int32",
    "input": "string",
    "output": "string",
    "metadata": "string",
    "error": _ERROR,
    "rewards": [_REWARD],
    "trajectories": [
        {
            "id": "string",
            "name": "string",
            "parent_id": "string",
            "reward": "double",
            "rewards": [_REWARD],
            "started": "int64",
            "ended": "int64",
        }
    ],
    "calls": [_CALL],
    "tools": [
        {
            "trajectory": "int32",
            "span_id": "string",
            "parent_id": "string",
            "name": "string",
            "arguments": "string",
            "result": "string",
            "error": _ERROR,
            "started": "int64",
            "ended": "int64",
        }
    ],
}
"""The schema: a type by name, ``[of]`` a list, ``{...}`` a struct. Open values are JSON text."""

_ARRAYS: Final[dict[str, type[TokenIds] | type[Logprobs]]] = {"int32": TokenIds, "float": Logprobs}
"""What lists of these come back as."""

FILTERED: Final = ("id", "task_id", "workflow", "started", "ended", "reward", "session_id", "termination")
"""Columns by which rows are looked for; the others need no statistics, which would outweigh a small file."""

_SPLIT: Final = (
    "calls.list.element.prompt_new.list.element",
    "calls.list.element.choices.list.element.token_ids.list.element",
    "calls.list.element.choices.list.element.logprobs.list.element",
)
"""Columns that are written as byte planes; of all others a dictionary pays."""


def has_parquet() -> bool:
    """Whether pyarrow is installed."""
    import importlib.util

    return importlib.util.find_spec("pyarrow") is not None


def write_rows(path: Path, rows: Iterable[Row], *, metadata: Mapping[str, str]) -> int:
    """Writes the file, whole or not at all; gives how many rows. ``metadata``: the writer's own, by key."""
    pa, pq = _arrow()
    schema = pa.schema([(name, _type(pa, kind)) for name, kind in _COLUMNS.items()])
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    count = 0
    try:
        with pq.ParquetWriter(
            aside,
            schema,
            compression="zstd",
            compression_level=_LEVEL,
            use_dictionary=[name for name in _leaves(_COLUMNS) if name not in _SPLIT],
            use_byte_stream_split=list(_SPLIT),
            write_statistics=list(FILTERED),
            store_schema=False,
        ) as writer:
            for batch in _batches(rows):
                writer.write_table(pa.Table.from_pylist(batch, schema=schema))
                count += len(batch)
            writer.add_key_value_metadata({_VERSION_KEY: str(_VERSION), **metadata})
        _sync(aside)
        os.replace(aside, path)
        _sync(path.parent)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    return count


def read_rows(path: Path, keep: Callable[[Row], bool] | None = None) -> Iterator[Row]:
    """The rows of the file in order. ``keep`` is asked with the columns of ``FILTERED`` before the rest of a row is looked at.

    Raises ValueError if the file is of a newer version or was not written by a store, FileNotFoundError if it is gone.
    """
    pa, pq = _arrow()
    with pq.ParquetFile(path) as file:
        _check(path, file.metadata.metadata or {})
        for batch in file.iter_batches(batch_size=_BATCH_ROWS):
            found = _with_integers(pa, batch)
            if keep is not None:
                columns = found.select([name for name in FILTERED if name in found.schema.names])
                found = found.filter(pa.array([keep(row) for row in columns.to_pylist()], pa.bool_()))
            if found.num_rows:
                yield from _values(pa, found.to_struct_array())


def read_column(path: Path, name: str) -> list[Any]:
    """One column of the file."""
    _, pq = _arrow()
    return pq.read_table(path, columns=[name]).column(name).to_pylist()


def read_table(path: Path) -> list[Row]:
    """The rows of any Parquet file as plain values, times as Unix nanoseconds."""
    pa, pq = _arrow()
    table = pq.read_table(path)
    for position, field in enumerate(table.schema):
        if pa.types.is_timestamp(field.type):
            nanoseconds = table.column(position).cast(pa.timestamp("ns", tz=field.type.tz)).cast(pa.int64())
            table = table.set_column(position, field.name, nanoseconds)
    return table.to_pylist()


def count_rows(path: Path) -> int:
    """How many rows the file has, from its footer."""
    _, pq = _arrow()
    return pq.read_metadata(path).num_rows


def read_metadata(path: Path) -> dict[str, str]:
    """The writer's own metadata."""
    _, pq = _arrow()
    found: dict[bytes, bytes] = pq.read_metadata(path).metadata or {}
    return {key.decode(): value.decode() for key, value in found.items()}


def _arrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigurationError("Parquet files of a store need pyarrow: pip install 'rllm-trace[store]'") from error
    return pyarrow, pyarrow.parquet


def _type(pa: Any, kind: Any) -> Any:
    if isinstance(kind, list):
        return pa.list_(_type(pa, cast("list[Any]", kind)[0]))
    if isinstance(kind, dict):
        return pa.struct([(name, _type(pa, of)) for name, of in cast("dict[str, Any]", kind).items()])
    return pa.timestamp("ns", tz="UTC") if kind == "time" else pa.type_for_alias(kind)


def _leaves(kind: Any, path: str = "") -> Iterator[str]:
    """Paths of all columns, as Parquet names them."""
    if isinstance(kind, list):
        yield from _leaves(cast("list[Any]", kind)[0], f"{path}.list.element")
    elif isinstance(kind, dict):
        for name, of in cast("dict[str, Any]", kind).items():
            yield from _leaves(of, f"{path}.{name}" if path else name)
    else:
        yield path


def _batches(rows: Iterable[Row]) -> Iterator[list[Row]]:
    batch: list[Row] = []
    for row in rows:
        batch.append(row)
        if len(batch) == _BATCH_ROWS:
            yield batch
            batch = []
    if batch:
        yield batch


def _with_integers(pa: Any, batch: Any) -> Any:
    """The batch with its times as integers: Python's own datetime has no nanoseconds."""
    fields = [field.with_type(pa.int64()) if pa.types.is_timestamp(field.type) else field for field in batch.schema]
    return batch.cast(pa.schema(fields))


def _values(pa: Any, column: Any) -> list[Any]:
    """The column as Python values, token arrays copied as they lie in memory."""
    if pa.types.is_struct(column.type):
        named = {field.name: _values(pa, of) for field, of in zip(column.type, column.flatten(), strict=True)}
        rows: list[Any] = [dict(zip(named, row, strict=True)) for row in zip(*named.values(), strict=True)]
        return rows if not column.null_count else [row if valid else None for row, valid in zip(rows, column.is_valid(), strict=True)]
    if pa.types.is_list(column.type):
        inner = column.flatten()
        kind = _ARRAYS.get(str(inner.type))
        whole = _values(pa, inner) if kind is None else _buffer(inner)
        return list(_parts(column.value_lengths().to_pylist(), whole, kind))
    return column.to_pylist()


def _parts(lengths: Sequence[int | None], whole: Any, kind: type[TokenIds] | type[Logprobs] | None) -> Iterator[Any]:
    start = 0
    for length in lengths:
        if length is None:
            yield None
            continue
        end = start + length
        yield whole[start:end] if kind is None else kind(whole[4 * start : 4 * end])
        start = end


def _buffer(numbers: Any) -> memoryview:
    """The bytes of a column of 4-byte numbers without nulls."""
    data = numbers.buffers()[1]
    start = 4 * numbers.offset
    return memoryview(b"" if data is None else data)[start : start + 4 * len(numbers)]


def _check(path: Path, metadata: Mapping[bytes, bytes]) -> None:
    version = metadata.get(_VERSION_KEY.encode(), b"")
    if not version.isdigit():
        raise ValueError(f"{path} was not written by a store of episodes")
    if int(version) > _VERSION:
        raise ValueError(f"{path} is of version {int(version)}, this rllm_trace reads up to {_VERSION}: use the release that wrote it")


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
