"""Episodes as JSON lines and back; and any Python value as JSON and back."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import json
import math
import uuid
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rllm_trace._plain import dumps, from_plain, loads, to_plain
from rllm_trace.exceptions import RllmWarning
from rllm_trace.exporters import JSONLExporter, iter_episodes, read_episodes, write_episodes
from rllm_trace.types import Episode


def named(episode: Episode, name: str) -> Episode:
    return msgspec.structs.replace(episode, id=name)


def test_an_episode_comes_back_equal(full_episode: Episode, tmp_path: Path) -> None:
    """Every field of every record, token arrays bit for bit, values that JSON cannot spell included."""
    path = tmp_path / "new folder" / "episodes.jsonl"
    assert write_episodes(path, [full_episode, named(full_episode, "ep-2")]) == 2
    assert read_episodes(path) == [full_episode, named(full_episode, "ep-2")]


def test_the_fixture_leaves_no_field_at_its_default(full_episode: Episode) -> None:
    """A field that the round trip drops would otherwise go unnoticed."""
    call = full_episode.trajectories[0].calls[0]
    for record in (full_episode, full_episode.trajectories[0], call, full_episode.trajectories[0].tools[0], call.choices[0]):
        defaults = {field.name: field.default for field in msgspec.structs.fields(record)}
        assert [name for name, default in defaults.items() if getattr(record, name) == default] == []


def test_a_line_names_its_schema_and_version(full_episode: Episode, tmp_path: Path) -> None:
    """A later reader knows what it has before it."""
    path = tmp_path / "episodes.jsonl"
    write_episodes(path, [full_episode])
    line = json.loads(path.read_text())
    assert (line["schema"], line["version"]) == ("rllm.episode", 1)
    assert line["episode"]["trajectories"][0]["calls"][0]["prompt_token_ids"] == "AQAAADIAAAAKAAAAMgAAAA=="


def test_a_line_of_a_newer_version_is_refused_by_name(full_episode: Episode, tmp_path: Path) -> None:
    """Half-understood records would be worse than none."""
    path = tmp_path / "episodes.jsonl"
    path.write_text('{"schema": "rllm.episode", "version": 99, "episode": {"whatever": 1}}\n')
    with pytest.raises(ValueError, match=r"version 99; this rllm_trace reads 'rllm.episode' up to version 1"):
        read_episodes(path)


def test_unknown_fields_of_a_line_are_passed_over(full_episode: Episode, tmp_path: Path) -> None:
    """A field that a later release of the same version adds does not make the file unreadable."""
    path = tmp_path / "episodes.jsonl"
    write_episodes(path, [full_episode])
    path.write_text(path.read_text().replace('"workflow":', '"brand_new":[1],"workflow":'))
    assert read_episodes(path) == [full_episode]


def test_a_line_that_a_crash_cut_short_is_skipped_and_said(full_episode: Episode, tmp_path: Path) -> None:
    """The episodes before and after it are there, and the next writer does not glue its line to the rest."""
    path = tmp_path / "episodes.jsonl"
    write_episodes(path, [full_episode, full_episode])
    path.write_bytes(path.read_bytes()[:-40])
    write_episodes(path, [named(full_episode, "ep-3")])
    with pytest.warns(RllmWarning, match=r"1 line\(s\) cut short or damaged, skipped; the first is line 2"):
        assert [episode.id for episode in iter_episodes(path)] == ["ep-1", "ep-3"]


def test_text_with_lone_surrogates_comes_back(full_episode: Episode, tmp_path: Path) -> None:
    """A lone surrogate, which UTF-8 cannot spell, costs neither the line nor the character."""
    odd = msgspec.structs.replace(full_episode, task_id="half \ud83d", input={"\ud83d": ["\udc00"]})
    write_episodes(tmp_path / "odd.jsonl", [odd])
    assert read_episodes(tmp_path / "odd.jsonl") == [odd]


def append(path: Path, name: str, episode: Episode) -> None:
    write_episodes(path, [named(episode, f"{name}-{number}") for number in range(20)])


def test_processes_may_share_a_file(full_episode: Episode, tmp_path: Path, forked: Any) -> None:
    """Lines of concurrent writers never mix."""
    path = tmp_path / "episodes.jsonl"
    forked(append, (path, "a", full_episode), (path, "b", full_episode))
    assert sorted(episode.id for episode in read_episodes(path)) == sorted(f"{name}-{number}" for name in "ab" for number in range(20))


def test_the_exporter_goes_on_after_shutdown(full_episode: Episode, tmp_path: Path) -> None:
    """A late episode opens the file again instead of being lost."""
    exporter = JSONLExporter(tmp_path / "episodes.jsonl")
    exporter.export_episode(full_episode)
    exporter.shutdown()
    exporter.export_episode(full_episode)
    exporter.shutdown()
    assert len(read_episodes(tmp_path / "episodes.jsonl")) == 2


class Colour(enum.Enum):
    RED = "red"


class Shade(enum.StrEnum):
    DARK = "dark"


@dataclasses.dataclass
class Point:
    x: int
    tags: tuple[str, ...] = ("a",)


class Spiteful:
    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        1,
        -(2**63),
        2**64 - 1,
        2**64,
        -(10**40),
        1.5,
        math.inf,
        -math.inf,
        "text",
        "half \ud83d surrogate",
        b"\x00\xff",
        bytearray(b"ab"),
        [1, [2, []]],
        (1, (2,)),
        {1, 2},
        frozenset({"a"}),
        {"a": {"b": (1,)}},
        {1: "one", (2, 3): "pair", None: 0},
        {"$": "not a tag", "v": [1]},
        {"$": "tuple", "v": {"$": 1}},
        {"\ud83d": 1},
        datetime.datetime(2024, 5, 6, 7, 8, 9, 10, tzinfo=datetime.UTC),
        datetime.datetime(2024, 5, 6),
        datetime.date(2024, 5, 6),
        datetime.time(1, 2, 3),
        datetime.timedelta(days=-1, microseconds=3),
        uuid.UUID(int=7),
        decimal.Decimal("1.10"),
    ],
    ids=repr,
)
def test_a_value_comes_back_equal_and_of_its_type(value: Any) -> None:
    """Through JSON text, as the recorder keeps what a workflow got and returned."""
    back = from_plain(loads(dumps(to_plain(value))))
    assert back == value
    assert type(back) is type(value)


def test_nan_comes_back_as_nan() -> None:
    """JSON has none; it neither becomes null nor breaks the text."""
    back = from_plain(loads(dumps(to_plain({"x": [float("nan")]}))))
    assert math.isnan(back["x"][0])


def test_other_objects_become_what_describes_them_best() -> None:
    """A dataclass its fields, an enum its value, an array its list, a path its text, anything else its repr."""
    import numpy

    assert from_plain(to_plain(Point(1))) == {"x": 1, "tags": ("a",)}
    assert from_plain(to_plain([Colour.RED, Shade.DARK])) == ["red", "dark"]
    assert from_plain(to_plain(numpy.arange(3))) == [0, 1, 2]
    assert from_plain(to_plain(numpy.float32(0.5))) == 0.5
    assert from_plain(to_plain(Path("/tmp/x"))) == "/tmp/x"
    assert from_plain(to_plain(range(3))) == "range(0, 3)"
    assert from_plain(to_plain(Spiteful())) == "<Spiteful, unreadable: RuntimeError>"


def test_a_cycle_is_cut() -> None:
    """An object graph of the app's that points back at itself ends, and says where."""
    loop: list[Any] = [1]
    loop.append(loop)
    assert from_plain(to_plain(loop)) == [1, "<cycle to a list>"]


def test_a_bottomless_value_is_cut() -> None:
    """Depth has an end, so that the writer's stack has one."""
    value: list[Any] = []
    for _ in range(5_000):
        value = [value]
    text = dumps(to_plain(value))
    assert "cut: the value is too large to record" in text
