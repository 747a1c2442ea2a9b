"""What the user calls a data set in, tasks out: rows with an id made of their content, in a fixed order.

Rows are a list of dicts or of strings, a path to JSONL or Parquet, a pandas or Hugging Face table, or any iterable, drawn lazily.
Two rows with equal content are one task, so a group can never mix rows. The order is a pure function of the number of rows,
the batch size and the seed; a batch never holds a task twice, also where it crosses the end of a pass.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, cast

import msgspec

from rllm_trainer.exceptions import DatasetError

__all__ = ["FixedTasks", "Row", "StreamedTasks", "Task", "columns_of", "read_rows", "read_tasks", "require_disjoint"]

Row = Any
"""A mapping from column to value, or anything else that the app takes as its one argument."""

_MOST_ROWS = 10_000_000
_MOST_REPEATS = 1_000
"""Rows drawn one after another that a batch holds already, after which an iterable is taken to have no others for it."""

_EXPECTED = "a list of dicts or of strings, a path to .jsonl, .json or .parquet, a pandas or Hugging Face table, or an iterable of rows"


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One row, and the id that its content makes."""

    id: str
    """16 hex digits; equal rows have equal ids."""
    row: Row


class FixedTasks:
    """All rows are known: passes over them in a seeded order."""

    def __init__(self, tasks: Sequence[Task], *, duplicates: int = 0) -> None:
        self.tasks = list(tasks)
        self.duplicates = duplicates
        """Rows that were left out because an equal one came before."""

    def __len__(self) -> int:
        return len(self.tasks)

    def steps(self, epochs: int, batch: int) -> int:
        """Batches that ``epochs`` passes make; the last one may be smaller."""
        return -(-epochs * len(self.tasks) // min(batch, len(self.tasks)))

    def batches(self, batch: int, *, epochs: int | None, seed: int, shuffle: bool, start: int = 0) -> Iterator[list[Task]]:
        """Batches from number ``start`` on; without ``epochs`` there is no last one."""
        size = min(batch, len(self.tasks))
        order = _order(len(self.tasks), size, epochs=epochs, seed=seed, shuffle=shuffle)
        while picked := list(islice(order, size)):
            if start > 0:
                start -= 1
                continue
            yield [self.tasks[i] for i in picked]

    def spare(self, step: int, *, seed: int) -> Iterator[Task]:
        """All tasks in an order that depends on seed and step alone: what a step may draw besides its batch."""
        order = list(range(len(self.tasks)))
        random.Random(f"{seed}:{step}:spare").shuffle(order)
        return (self.tasks[i] for i in order)


class StreamedTasks:
    """Rows come from an iterable, once, as they are needed. One that goes round fewer rows than a batch has makes smaller batches."""

    def __init__(self, rows: Iterable[Row], first: Task) -> None:
        self._rows = iter(rows)
        self.first = first
        self.duplicates = 0

    def batches(self, batch: int, *, start: int = 0) -> Iterator[list[Task]]:
        """Batches from number ``start`` on: the rows of earlier ones are drawn and passed over."""
        drawn = _chain_first(self.first, self._rows)
        number = 0
        while picked := self._draw(drawn, batch):
            if number >= start:
                yield picked
            number += 1

    def _draw(self, drawn: Iterator[Task], batch: int) -> list[Task]:
        picked: dict[str, Task] = {}
        repeats = 0
        for task in drawn:
            if task.id in picked:
                self.duplicates += 1
                repeats += 1
                if repeats == _MOST_REPEATS:
                    break
                continue
            repeats = 0
            picked[task.id] = task
            if len(picked) == batch:
                break
        return list(picked.values())


Tasks = FixedTasks | StreamedTasks


def read_tasks(dataset: Any, *, name: str = "dataset") -> Tasks:
    """Tasks of what the user gave.

    Raises:
        DatasetError: it is none of the kinds that are known, cannot be read, has no rows, or a row cannot be identified.
    """
    rows = _rows(dataset, name)
    if isinstance(rows, list):
        return _fixed(rows, name)
    iterator = iter(rows)
    for row in iterator:
        return StreamedTasks(iterator, make_task(row, 0, name))
    raise DatasetError(_empty(name))


def read_rows(dataset: Any, name: str) -> list[Row]:
    """All rows of what the user gave, as they are, equal ones too. Raises ``DatasetError`` as ``read_tasks``, or for too many to hold."""
    rows = list(islice(_rows(dataset, name), _MOST_ROWS + 1))
    if len(rows) > _MOST_ROWS:
        raise DatasetError(f"{name}: got more than {_MOST_ROWS} rows from an iterable; expected a number that memory can hold: give a list")
    return rows


def make_task(row: Row, number: int, name: str) -> Task:
    """The task of one row; ``number`` and ``name`` are for the message."""
    if row is None:
        raise DatasetError(f"{name}: row {number} is None; expected a dict or a string")
    plain = dict(cast("Mapping[str, Any]", row)) if isinstance(row, Mapping) else row
    try:
        content = json.dumps(plain, sort_keys=True, ensure_ascii=False, default=_plain)
    except (TypeError, ValueError) as error:
        raise DatasetError(f"{name}: row {number} cannot be identified by its content: {error}; use plain values in its columns") from None
    return Task(id=hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()[:16], row=plain)


def columns_of(row: Row) -> list[str] | None:
    """Column names of a row; None where a row is not a mapping."""
    return [str(key) for key in cast("Mapping[str, Any]", row)] if isinstance(row, Mapping) else None


def require_disjoint(training: Iterable[Task], evaluation: Iterable[Task]) -> None:
    """Raises ``DatasetError`` where a row is in both."""
    ids = {task.id for task in training}
    shared = [task for task in evaluation if task.id in ids]
    if shared:
        raise DatasetError(
            f"{len(shared)} of the evaluation rows are training rows too, such as {_short(shared[0].row)}; "
            "a rise on them shows memory, not skill: take them out of one of the two"
        )


def _rows(dataset: Any, name: str) -> list[Row] | Iterable[Row]:
    kind = type(dataset).__name__
    indexed = cast("Sequence[Row]", dataset) if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__") else None
    if isinstance(dataset, (str, Path)):
        return _read_file(Path(dataset), name)
    if isinstance(dataset, (bytes, bytearray)):
        raise DatasetError(f"{name}: got {kind}; expected {_EXPECTED}")
    if isinstance(dataset, Mapping):
        keys = _short(list(cast("Mapping[str, Any]", dataset)))
        raise DatasetError(
            f"{name}: got a {kind} with the keys {keys}; expected {_EXPECTED}: take one split of it, or put the one row into a list"
        )
    if type(dataset).__module__.partition(".")[0] == "pandas":
        return _rows_of_pandas(dataset, name)
    if kind == "DataFrame":
        raise DatasetError(f"{name}: got a {kind} of {type(dataset).__module__}; expected {_EXPECTED}: give its rows as a list of dicts")
    if callable(dataset) and not isinstance(dataset, Iterable):
        return _rows(cast("Callable[[], Any]", dataset)(), name)
    if indexed is not None:
        return [indexed[i] for i in range(len(indexed))]
    if isinstance(dataset, Iterable):
        return cast("Iterable[Row]", dataset)
    raise DatasetError(f"{name}: got {kind}; expected {_EXPECTED}")


def _rows_of_pandas(table: Any, name: str) -> list[Row]:
    """The records of a table, the values of a series."""
    if not hasattr(table, "columns"):
        return cast("list[Row]", table.tolist())
    if not table.columns.is_unique:
        twice = sorted({str(column) for column in table.columns[table.columns.duplicated()]})
        raise DatasetError(f"{name}: the table has several columns named {', '.join(twice)}; expected one of each name: rename the others")
    return cast("list[Row]", table.to_dict("records"))


def _read_file(path: Path, name: str) -> list[Row]:
    if not path.is_file():
        raise DatasetError(f"{name}: there is no file {path}; expected a path to .jsonl, .json or .parquet")
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return _read_parquet(path, name)
    if suffix not in (".jsonl", ".ndjson", ".json"):
        raise DatasetError(f"{name}: got {path.name}; expected a file that ends in .jsonl, .json or .parquet")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DatasetError(f"{name}: {path} is not UTF-8 ({error.reason} at byte {error.start}); write it as UTF-8") from None
    try:
        if suffix == ".json":
            rows = json.loads(text)
            if not isinstance(rows, list):
                raise DatasetError(f"{name}: {path} holds a {type(rows).__name__}; expected a list of rows")
            return cast("list[Row]", rows)
        return [json.loads(line) for line in _lines(text) if line.strip()]
    except json.JSONDecodeError as error:
        line = error.lineno if suffix == ".json" else _bad_line(text)
        raise DatasetError(f"{name}: {path}, line {line}: not JSON: {error.msg}") from None


def _lines(text: str) -> list[str]:
    """At line feeds alone: JSON strings may hold what ``splitlines`` takes for the end of a line, such as U+2028."""
    return text.split("\n")


def _bad_line(text: str) -> int:
    for number, line in enumerate(_lines(text), start=1):
        try:
            json.loads(line.strip() or "null")
        except json.JSONDecodeError:
            return number
    return 0


def _read_parquet(path: Path, name: str) -> list[Row]:
    import pyarrow.parquet as pq  # pyright: ignore[reportMissingTypeStubs]

    try:
        table: Any = cast("Any", pq).read_table(path)
    except (ValueError, OSError) as error:
        raise DatasetError(f"{name}: {path} is no Parquet file that can be read: {error}") from None
    return cast("list[Row]", table.to_pylist())


def _fixed(rows: list[Row], name: str) -> FixedTasks:
    if not rows:
        raise DatasetError(_empty(name))
    tasks: dict[str, Task] = {}
    for number, row in enumerate(rows):
        task = make_task(row, number, name)
        tasks.setdefault(task.id, task)
    return FixedTasks(list(tasks.values()), duplicates=len(rows) - len(tasks))


def _order(rows: int, batch: int, *, epochs: int | None, seed: int, shuffle: bool) -> Iterator[int]:
    generator = random.Random(f"rllm order {seed}")
    open_batch: list[int] = []
    done = 0
    while epochs is None or done < epochs:
        order = list(range(rows))
        if shuffle:
            generator.shuffle(order)
        if open_batch:
            held = set(open_batch)
            order = [i for i in order if i not in held] + [i for i in order if i in held]
        yield from order
        tail = (len(open_batch) + rows) % batch
        open_batch = order[rows - tail :] if tail else []
        done += 1


def _chain_first(first: Task, rows: Iterator[Row]) -> Iterator[Task]:
    yield first
    for number, row in enumerate(rows, start=1):
        yield make_task(row, number, "dataset")


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, (bytes, bytearray)):
        return hashlib.sha256(bytes(value)).hexdigest()
    if isinstance(value, (set, frozenset)):
        return sorted(cast("Iterable[Any]", value))
    if isinstance(value, msgspec.Struct):
        return msgspec.structs.asdict(value)
    if hasattr(value, "isoformat"):
        return value.isoformat()
    if hasattr(value, "to_dict"):  # a table shows a part of itself only
        return value.to_dict()
    if isinstance(value, Path):
        return str(value)
    text = repr(value)
    if " at 0x" in text:
        raise TypeError(f"a {type(value).__name__} has no stable content")
    return text


def _empty(name: str) -> str:
    return f"{name}: it has no rows; expected at least one: check the path, split or filter that made it"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
