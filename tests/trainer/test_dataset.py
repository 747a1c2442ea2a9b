"""Data sets of every kind become tasks, in an order that is fixed."""

import itertools
import json

import pytest

from rllm_trainer.exceptions import DatasetError
from rllm_trainer.rollout.dataset import FixedTasks, StreamedTasks, Task, columns_of, make_task, read_tasks, require_disjoint

ROWS = [{"question": "a", "answer": 1}, {"question": "b", "answer": 2}]


def rows_of(dataset):
    tasks = read_tasks(dataset)
    assert isinstance(tasks, FixedTasks)
    return [task.row for task in tasks.tasks]


def names(batches):
    return [[task.row for task in batch] for batch in batches]


def test_lists_of_dicts_and_strings():
    """A list is taken as it is, a tuple too."""
    assert rows_of(ROWS) == ROWS
    assert rows_of(("x", "y")) == ["x", "y"]


def test_jsonl_file(tmp_path):
    """A JSONL path gives one row a line; empty lines are none."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "a", "answer": 1}\n\n{"question": "b", "answer": 2}\n')
    assert rows_of(str(path)) == ROWS
    assert rows_of(path) == ROWS


def test_lines_end_at_line_feeds_alone(tmp_path):
    """Text with a line separator inside stays one row; a byte order mark and carriage returns are none of the rows."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes('\ufeff{"question": "a\u2028b\x85c"}\r\n\r\n{"question": "d"}\r\n'.encode())
    assert rows_of(path) == [{"question": "a\u2028b\x85c"}, {"question": "d"}]
    path.write_bytes('{"question": "a\u2028b"}\r\n\r\n{"question"\r\n'.encode())
    with pytest.raises(DatasetError, match="line 3: not JSON"):
        read_tasks(path)


def test_files_that_cannot_be_read_are_named(tmp_path):
    """Another encoding, and what only calls itself Parquet, get one sentence with the file in it."""
    latin, parquet = tmp_path / "latin.jsonl", tmp_path / "rows.parquet"
    latin.write_bytes('{"a": "\u00e9"}\n'.encode("latin-1"))
    parquet.write_bytes(b"no Parquet")
    with pytest.raises(DatasetError, match=r"latin.jsonl is not UTF-8 \(invalid continuation byte at byte 7\); write it as UTF-8"):
        read_tasks(latin)
    with pytest.raises(DatasetError, match=r"rows.parquet is no Parquet file that can be read: "):
        read_tasks(parquet)


def test_json_file(tmp_path):
    """A JSON path holds the list of rows."""
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(ROWS))
    assert rows_of(path) == ROWS


def test_parquet_file(tmp_path):
    """A Parquet path gives one row a record."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"question": ["a", "b"], "answer": [1, 2]}), path)
    assert rows_of(path) == ROWS


def test_pandas_table():
    """A DataFrame gives one row a record."""
    import pandas

    assert rows_of(pandas.DataFrame(ROWS)) == ROWS
    assert rows_of(pandas.DataFrame(ROWS, index=[7, 8])["question"]) == ["a", "b"]
    with pytest.raises(DatasetError, match="the table has several columns named a; expected one of each name"):
        read_tasks(pandas.DataFrame([[1, 2]], columns=["a", "a"]))


def test_tables_in_a_row_are_told_apart_by_all_their_cells():
    """What a table does not show of itself counts too."""
    import pandas

    left, right = pandas.DataFrame({"a": range(1000)}), pandas.DataFrame({"a": [*range(500), -1, *range(501, 1000)]})
    assert make_task({"table": left}, 0, "dataset").id == make_task({"table": left.copy()}, 0, "dataset").id
    assert make_task({"table": left}, 0, "dataset").id != make_task({"table": right}, 0, "dataset").id


def test_hugging_face_table():
    """A Hugging Face data set gives one row a record."""
    import datasets

    assert rows_of(datasets.Dataset.from_list(ROWS)) == ROWS


def test_generator_is_drawn_lazily():
    """Of a generator only as many rows are drawn as the batches need, and each once."""
    drawn = []

    def rows():
        for i in range(10):
            drawn.append(i)
            yield {"n": i}

    tasks = read_tasks(rows())
    assert isinstance(tasks, StreamedTasks)
    assert next(tasks.batches(3))[0].row == {"n": 0}
    assert drawn == [0, 1, 2]


def test_an_iterable_that_goes_round_makes_smaller_batches():
    """Three rows without end fill no batch of four: each has the three, and none waits for a fourth."""
    tasks = read_tasks(itertools.cycle("abc"))
    assert [sorted(batch) for batch in names(itertools.islice(tasks.batches(4), 3))] == [["a", "b", "c"]] * 3
    assert names(itertools.islice(read_tasks(itertools.cycle("abc")).batches(2), 3)) == [["a", "b"], ["c", "a"], ["b", "c"]]


def test_generator_continues_where_it_was():
    """Batches of a generator can start at a later number; earlier rows are passed over."""
    tasks = read_tasks(lambda: ({"n": i} for i in range(7)))
    assert [[row["n"] for row in batch] for batch in names(tasks.batches(2, start=2))] == [[4, 5], [6]]


def test_id_is_the_content():
    """Equal rows are one task whatever the order of their columns; an unequal row is another."""
    one = make_task({"a": 1, "b": "x"}, 0, "d")
    assert make_task({"b": "x", "a": 1}, 1, "d").id == one.id
    assert make_task({"a": 1, "b": "y"}, 2, "d").id != one.id
    assert len(one.id) == 16


def test_equal_rows_are_used_once_and_counted():
    """The second of two equal rows is left out, and says so in a count."""
    tasks = read_tasks(["a", "b", "a"])
    assert rows_of(["a", "b", "a"]) == ["a", "b"]
    assert tasks.duplicates == 1


def test_order_is_fixed_by_the_seed():
    """Same seed, same order; another seed, another order; every row once a pass."""
    tasks = read_tasks([str(i) for i in range(20)])
    first = names(tasks.batches(5, epochs=1, seed=1, shuffle=True))
    assert first == names(tasks.batches(5, epochs=1, seed=1, shuffle=True))
    assert first != names(tasks.batches(5, epochs=1, seed=2, shuffle=True))
    assert sorted(int(row) for batch in first for row in batch) == list(range(20))


def test_unshuffled_order_is_the_rows_own():
    """Without shuffling, batches follow the rows, and the last one is smaller."""
    tasks = read_tasks(["a", "b", "c", "d", "e"])
    assert names(tasks.batches(2, epochs=1, seed=0, shuffle=False)) == [["a", "b"], ["c", "d"], ["e"]]
    assert tasks.steps(1, 2) == 3


def test_a_batch_across_two_passes_holds_no_task_twice():
    """Where a batch takes the end of one pass and the start of the next, it never takes a row twice."""
    tasks = read_tasks([str(i) for i in range(7)])
    batches = names(tasks.batches(4, epochs=40, seed=3, shuffle=True))
    assert len(batches) == 70 == tasks.steps(40, 4)
    assert all(len(set(batch)) == 4 for batch in batches)
    assert all(sum(batch.count(str(i)) for batch in batches) == 40 for i in range(7))


def test_order_can_be_continued():
    """Batches from number 5 on are the batches that would have come there."""
    tasks = read_tasks([str(i) for i in range(7)])
    whole = names(tasks.batches(3, epochs=4, seed=0, shuffle=True))
    assert names(tasks.batches(3, epochs=4, seed=0, shuffle=True, start=5)) == whole[5:]


def test_fewer_rows_than_a_batch():
    """A batch is never larger than the number of rows."""
    tasks = read_tasks(["a", "b"])
    assert names(tasks.batches(8, epochs=2, seed=0, shuffle=False)) == [["a", "b"], ["a", "b"]]


def test_columns():
    """Columns are a mapping's keys; a string has none."""
    assert columns_of({"a": 1, "b": 2}) == ["a", "b"]
    assert columns_of("text") is None


def test_training_rows_in_the_evaluation_are_refused():
    """A row in both data sets is an error that shows the row."""
    a, b = Task(id="1", row="a"), Task(id="2", row="b")
    require_disjoint([a], [b])
    with pytest.raises(DatasetError, match=r"1 of the evaluation rows are training rows too, such as 'b'"):
        require_disjoint([a, b], [b])


@pytest.mark.parametrize(
    "dataset, words",
    [
        ([], "it has no rows"),
        (iter([]), "it has no rows"),
        (None, "got NoneType; expected a list of dicts"),
        (3, "got int; expected a list of dicts"),
        (b"rows.jsonl", "got bytes; expected a list of dicts"),
        ({"train": []}, "got a dict with the keys \\['train'\\]"),
        ("/nowhere/rows.jsonl", "there is no file /nowhere/rows.jsonl"),
        ([None], "row 0 is None"),
        ([{"a": object()}], "row 0 cannot be identified by its content: a object has no stable content"),
    ],
)
def test_what_is_no_data_set_is_refused(dataset, words):
    """Each kind of unusable data set gets one sentence."""
    with pytest.raises(DatasetError, match=words):
        read_tasks(dataset)


def test_a_broken_line_is_named(tmp_path):
    """A JSONL line that is not JSON is named by its number."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n{"a": \n')
    with pytest.raises(DatasetError, match="line 2: not JSON"):
        read_tasks(path)


def test_an_unknown_file_kind_is_named(tmp_path):
    """A file that ends otherwise is refused with the endings that are known."""
    path = tmp_path / "rows.csv"
    path.write_text("a\n1\n")
    with pytest.raises(DatasetError, match=r"got rows.csv; expected a file that ends in .jsonl, .json or .parquet"):
        read_tasks(path)
