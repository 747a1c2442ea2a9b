"""Episodes on disk: rows, logs, Parquet, crashes, many writers, later rewards, limits."""

from __future__ import annotations

import datetime
import errno
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import msgspec
import pytest

import rllm_trace as rllm
from rllm_trace import store as store_module
from rllm_trace._guard import counters
from rllm_trace._store_log import frame_of, row_of_frame
from rllm_trace._store_rows import episode_of, row_of, token_count
from rllm_trace.exceptions import ConfigurationError, RewardError, RllmWarning, UnknownEpisodeError
from rllm_trace.exporters import read_episodes
from rllm_trace.store import Store, open_store
from rllm_trace.types import Choice, Episode, Logprobs, ModelCall, Reward, TokenIds, Trajectory

DATA = Path(__file__).parent / "data"
SECOND = 1_700_000_000_000_000_000


def call(number: int, prompt: list[int] | None, *replies: list[int], messages: Any = (), tools: Any = None) -> ModelCall:
    return ModelCall(
        span_id=f"{number:016x}",
        parent_id=None,
        model="m",
        requested_model="m",
        messages=list(messages),
        tools=tools,
        sampling={},
        choices=[
            Choice(index=position, token_ids=TokenIds(reply), logprobs=Logprobs([-0.5] * len(reply)))
            for position, reply in enumerate(replies)
        ],
        prompt_token_ids=None if prompt is None else TokenIds(prompt),
        exact=True,
        complete=True,
        trainable=True,
        started=SECOND + number,
        ended=SECOND + number + 1,
    )


def episode(name: str, *calls: ModelCall, **fields: Any) -> Episode:
    trajectory = Trajectory(id="00000000000000a1", name="w", calls=list(calls), tools=[], rewards=[], reward=None, started=1, ended=2)
    defaults: dict[str, Any] = {
        "trace_id": "0" * 32,
        "span_id": "0" * 16,
        "workflow": "w",
        "termination": "completed",
        "trajectories": [trajectory],
        "rewards": [],
        "reward": None,
        "started": SECOND,
        "ended": SECOND + 1,
        "metadata": {},
    }
    return Episode(id=name, **(defaults | fields))


def ids(store: Store, **wanted: Any) -> list[str]:
    return [found.id for found in store.episodes(**wanted)]


# rows


def test_a_row_gives_the_equal_episode_back(full_episode: Episode) -> None:
    """Every field of every record, in columns of plain types."""
    assert episode_of(row_of(full_episode)) == full_episode
    assert episode_of(row_of_frame(frame_of(row_of(full_episode)))) == full_episode


def chat(turns: int) -> tuple[Episode, int]:
    """A chat in which each prompt is the one before, its reply and something new; and how many distinct tokens it has."""
    prompt, messages = list(range(100, 140)), [{"role": "system", "content": "be good"}]
    calls: list[ModelCall] = []
    total = len(prompt)
    for turn in range(turns):
        messages = [*messages, {"role": "user", "content": f"question {turn}"}]
        prompt = [*prompt, *range(1_000 * turn, 1_000 * turn + 30)]
        reply = list(range(1_000 * turn + 500, 1_000 * turn + 520))
        calls.append(call(turn, prompt, reply, messages=messages, tools=[{"name": "add"}]))
        total += 50
        prompt = [*prompt, *reply]
        messages = [*messages, {"role": "assistant", "content": f"answer {turn}"}]
    return episode("chat", *calls), total


def test_a_chat_of_fifty_turns_stores_each_token_once() -> None:
    """Ratio 1.0: the second prompt is written as what it adds to the first one and its reply; messages and tools likewise."""
    found, distinct = chat(50)
    row = row_of(found)
    assert token_count(row) == distinct
    second = row["calls"][1]
    assert (second["prompt_from"], second["prompt_choice"], second["prompt_shared"]) == (0, 0, 90)
    assert list(second["prompt_new"]) == list(range(1_000, 1_030))
    assert (second["messages_from"], second["messages_shared"]) == (0, 2)
    assert json.loads(second["messages"]) == [{"role": "assistant", "content": "answer 0"}, {"role": "user", "content": "question 1"}]
    assert (second["tools_from"], second["tools"]) == (0, None)
    assert episode_of(row) == found


def test_a_prompt_extends_the_reply_that_was_chosen() -> None:
    """Of n=3, the next prompt may go on from any; it is written against that one."""
    prompt = list(range(32))
    replies = [[7] * 20, [8] * 20, [9] * 20]
    found = episode("n3", call(0, prompt, *replies), call(1, [*prompt, *replies[1], 5, 6], [1]))
    row = row_of(found)
    assert [row["calls"][1][name] for name in ("prompt_from", "prompt_choice", "prompt_shared")] == [0, 1, 52]
    assert list(row["calls"][1]["prompt_new"]) == [5, 6]
    assert episode_of(row) == found


def test_prompts_of_other_lineages_share_what_they_begin_with() -> None:
    """Two agents with one system prompt store it once; a branch of a chat stores its own tail."""
    common = list(range(64))
    found = episode("fork", call(0, [*common, 1, 2], [3]), call(1, [*common, 9], [4]), call(2, [*common, 1, 2, 3, 8], [5]))
    row = row_of(found)
    assert [list(made["prompt_new"]) for made in row["calls"]] == [[*common, 1, 2], [9], [8]]
    assert row["calls"][2]["prompt_from"] == 0
    assert episode_of(row) == found


def test_calls_without_tokens_and_with_empty_ones_keep_the_difference() -> None:
    """None is not an empty list, in prompts as in replies."""
    bare = Choice(index=0, token_ids=None, logprobs=None, text="x")
    found = episode("none", call(0, None), call(1, [], []), msgspec.structs.replace(call(2, [1]), choices=[bare]))
    assert episode_of(row_of_frame(frame_of(row_of(found)))) == found
    assert row_of(found)["calls"][0]["prompt_new"] is None


def test_rows_hold_for_random_episodes() -> None:
    """Whatever calls follow one another, restored ids and messages are those that were recorded."""
    rng = random.Random(3)
    for _ in range(60):
        calls: list[ModelCall] = []
        pool = [[rng.randrange(50) for _ in range(rng.randrange(80))] for _ in range(3)]
        talk = [{"role": "user", "content": rng.choice(["a", 1, True, 1.0, None])} for _ in range(5)]
        for number in range(rng.randrange(6)):
            base = rng.choice(pool)
            prompt = [*base[: rng.randrange(len(base) + 1)], *(rng.randrange(50) for _ in range(rng.randrange(20)))]
            replies = [[rng.randrange(50) for _ in range(rng.randrange(20))] for _ in range(rng.randrange(3))]
            pool += [[*prompt, *reply] for reply in replies]
            calls.append(
                call(
                    number, rng.choice([prompt, prompt, None]), *replies, messages=talk[: rng.randrange(6)], tools=rng.choice([None, talk])
                )
            )
        found = episode("random", *calls)
        back = episode_of(row_of_frame(frame_of(row_of(found))))
        assert back == found
        assert repr(back.calls) == repr(found.calls)


# one writer


def test_what_was_appended_is_read(full_episode: Episode, tmp_path: Path) -> None:
    """While the store is open, after it was closed, and by another one."""
    store = Store(tmp_path / "new" / "store")
    store.append(full_episode)
    assert list(store) == [full_episode]
    assert list(Store(tmp_path / "new" / "store")) == [full_episode]
    store.close()
    assert list(store) == [full_episode]
    assert list(Store(tmp_path / "new" / "store")) == [full_episode]


def test_closing_seals_the_log(full_episode: Episode, tmp_path: Path) -> None:
    """What is left is a Parquet file, and no log; a later append begins a new segment."""
    with Store(tmp_path) as store:
        store.append(full_episode)
    assert len(list((tmp_path / "episodes").glob("*.parquet"))) == 1
    assert list((tmp_path / "log").iterdir()) == []
    store.append(msgspec.structs.replace(full_episode, id="ep-2"))
    store.close()
    assert ids(store) == ["ep-1", "ep-2"]


def test_a_store_without_episodes_leaves_no_files(tmp_path: Path) -> None:
    """Opening and closing writes nothing."""
    Store(tmp_path).close()
    assert [path for path in tmp_path.rglob("*") if path.is_file() and path.name != ".lock"] == []


def test_pandas_reads_the_folder(full_episode: Episode, tmp_path: Path) -> None:
    """One row for each episode, with columns of plain names and times with a zone; calls are in it as records."""
    import pandas

    with Store(tmp_path) as store:
        store.append(full_episode)
    frame = pandas.read_parquet(tmp_path / "episodes")
    (row,) = frame.to_dict("records")
    assert (row["id"], row["workflow"], row["reward"], row["termination"]) == ("ep-1", "solve", 1.0, "failed")
    assert row["started"] == pandas.Timestamp(1_700_000_000_000_000_000, unit="ns", tz="UTC")
    assert row["calls"][0]["choices"][0]["token_ids"].tolist() == [52, 2]
    assert row["input"] == '{"question":"2+2?","options":{"$":"dict","v":[[3,"three"]]}}'


def test_duckdb_reads_the_folder(full_episode: Episode, tmp_path: Path) -> None:
    """SQL over the files, down to single calls."""
    import duckdb

    with Store(tmp_path) as store:
        store.append(full_episode)
    query = f"select id, unnest(calls, recursive := true) from '{tmp_path}/episodes/*.parquet'"
    (row,) = duckdb.sql(query).fetchall()
    assert row[0] == "ep-1"
    assert "policy" in row


def test_polars_reads_the_folder(full_episode: Episode, tmp_path: Path) -> None:
    """The same for Polars, lazily."""
    import polars

    with Store(tmp_path) as store:
        store.append(full_episode)
    frame = polars.scan_parquet(f"{tmp_path}/episodes/*.parquet").select("id", polars.col("calls").list.len()).collect()
    assert frame.rows() == [("ep-1", 1)]


def test_a_segment_ends_when_it_is_large(full_episode: Episode, tmp_path: Path) -> None:
    """Rotation loses nothing, and the order stays."""
    with Store(tmp_path, segment_bytes=3_000) as store:
        for number in range(12):
            store.append(msgspec.structs.replace(full_episode, id=f"ep-{number:02}"))
    assert len(list((tmp_path / "episodes").glob("*.parquet"))) > 2
    assert ids(Store(tmp_path)) == [f"ep-{number:02}" for number in range(12)]


def test_episodes_are_found_by_their_columns(tmp_path: Path) -> None:
    """Sealed or not, every filter gives the same; a later reward decides for ``min_reward``."""
    store = Store(tmp_path)
    for name, fields in {
        "a": {"workflow": "x", "task_id": "t1", "reward": 1.0, "rewards": [Reward(name="r", value=1.0)], "started": SECOND},
        "b": {"workflow": "y", "task_id": "t1", "session_id": "s", "started": SECOND + 10},
        "c": {"workflow": "y", "termination": "failed", "started": SECOND + 20},
    }.items():
        store.append(episode(name, **fields))
    store.add_reward(0.5, name="human", episode_id="c")
    for found in (store, Store(tmp_path)):
        assert ids(found) == ["a", "b", "c"]
        assert ids(found, workflow="y") == ["b", "c"]
        assert ids(found, task_id="t1", workflow="x") == ["a"]
        assert ids(found, session_id="s") == ["b"]
        assert ids(found, termination="failed") == ["c"]
        assert ids(found, ids=["c", "a", "z"]) == ["a", "c"]
        assert ids(found, since=SECOND + 10, until=SECOND + 20) == ["b"]
        assert ids(found, since=datetime.datetime.fromtimestamp(SECOND // 10**9 + 1, datetime.UTC)) == []
        assert ids(found, min_reward=0.5) == ["a", "c"]
        found.seal()
    with pytest.raises(ConfigurationError, match="expected a datetime with a time zone"):
        ids(store, since=datetime.datetime(2024, 1, 1))


def test_an_episode_that_was_written_twice_comes_once(full_episode: Episode, tmp_path: Path) -> None:
    """A reader never sees one episode as two."""
    store = Store(tmp_path)
    store.append(full_episode)
    store.seal()
    store.append(full_episode)
    assert ids(store) == ["ep-1"]


# crashes

WRITER = """
import os, sys
from pathlib import Path
from rllm_trace.exporters.jsonl import decode_episode
from rllm_trace.store import Store
import msgspec
found = decode_episode(Path(sys.argv[2]).read_bytes().splitlines()[0])
store = Store(sys.argv[1])
number = 0
while True:
    store.append(msgspec.structs.replace(found, id=f"ep-{number}"))
    os.write(1, f"ep-{number}\\n".encode())
    number += 1
"""


def test_a_killed_process_loses_at_most_the_episode_it_was_writing(full_episode: Episode, tmp_path: Path) -> None:
    """After SIGKILL in the middle of writing, every episode whose append had returned is there, equal, and the next one seals the log."""
    from rllm_trace.exporters import write_episodes

    write_episodes(tmp_path / "one.jsonl", [full_episode])
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path / "store"), str(tmp_path / "one.jsonl")], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    said = [process.stdout.readline().strip() for _ in range(50)]
    process.send_signal(signal.SIGKILL)
    said += process.stdout.read().split()
    process.stdout.close()
    process.wait(30)
    store = Store(tmp_path / "store")
    found = list(store)
    assert len(found) in (len(said), len(said) + 1)
    assert found == [msgspec.structs.replace(full_episode, id=f"ep-{number}") for number in range(len(found))]
    assert store.seal() == len(found)
    assert list((tmp_path / "store" / "log").iterdir()) == []
    assert len(list(store)) == len(found)


def log_of(store: Store) -> Path:
    (path,) = (store._folder.log).glob("*.log")
    return path


def test_a_log_that_is_cut_anywhere_keeps_what_was_whole(full_episode: Episode, tmp_path: Path) -> None:
    """Cut in the last frame at any byte, the episodes before it are there, and sealing says that one was lost."""
    writer = Store(tmp_path / "a")
    for name in ("ep-1", "ep-2"):
        writer.append(msgspec.structs.replace(full_episode, id=name))
    whole = log_of(writer).read_bytes()
    first = 8 + 8 + len(frame_of(row_of(full_episode)))
    before = counters.get("dropped", "episode cut short by a crash")
    for cut in range(first + 1, len(whole), 97):
        folder = tmp_path / f"cut-{cut}"
        reader = Store(folder)
        (folder / "log" / "00000000000000000001-1-00000000.log").write_bytes(whole[:cut])
        assert ids(reader) == ["ep-1"]
    assert reader.seal() == 1
    assert counters.get("dropped", "episode cut short by a crash") - before == 1
    assert ids(reader) == ["ep-1"]


def test_a_damaged_frame_costs_one_episode(full_episode: Episode, tmp_path: Path) -> None:
    """A flipped bit is found by the checksum, counted, and the frames after it are read."""
    writer = Store(tmp_path)
    for name in ("ep-1", "ep-2", "ep-3"):
        writer.append(msgspec.structs.replace(full_episode, id=name))
    path = log_of(writer)
    data = bytearray(path.read_bytes())
    data[8 + 8 + len(frame_of(row_of(full_episode))) + 100] ^= 1
    path.write_bytes(data)
    before = counters.get("failed", "damaged episode")
    assert ids(writer) == ["ep-1", "ep-3"]
    assert counters.get("failed", "damaged episode") - before == 1


def test_a_full_disk_leaves_the_log_as_it_was(full_episode: Episode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The episode that did not fit raises and is taken back, a flush says so once, and the next one is whole."""
    store = Store(tmp_path)
    store.append(full_episode)
    real = os.write

    def full(file: int, data: bytes) -> int:
        if len(data) > 100:
            return real(file, data[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("rllm_trace._store_log.os.write", full)
    with pytest.raises(OSError, match="No space left"):
        store.append(msgspec.structs.replace(full_episode, id="lost"))
    monkeypatch.undo()
    assert store.flush(5) is False
    assert store.flush(5) is True
    store.append(msgspec.structs.replace(full_episode, id="ep-2"))
    assert ids(store) == ["ep-1", "ep-2"]


def test_a_seal_that_fails_leaves_the_log(full_episode: Episode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The episodes stay readable, half a file is not left, and the next seal succeeds."""
    store = Store(tmp_path)
    store.append(full_episode)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("rllm_trace._store_parquet.os.replace", full)
    with pytest.raises(OSError, match="No space left"):
        store.seal()
    monkeypatch.undo()
    assert list((tmp_path / "episodes").glob("*.parquet")) + list((tmp_path / "episodes").glob(".*.tmp")) == []
    assert ids(store) == ["ep-1"]
    assert store.seal() == 1
    assert ids(store) == ["ep-1"]


def test_a_log_whose_seal_was_done_and_not_removed_counts_once(full_episode: Episode, tmp_path: Path) -> None:
    """A crash between the two leaves both files; readers take the sealed one, and the next seal removes the other."""
    store = Store(tmp_path)
    store.append(full_episode)
    data, stem = log_of(store).read_bytes(), log_of(store).stem
    store.seal()
    (tmp_path / "log" / f"{stem}.log").write_bytes(data)
    assert ids(store) == ["ep-1"]
    assert store.seal() == 0
    assert list((tmp_path / "log").iterdir()) == []


# many writers


def write_some(folder: Path, name: str, found: Episode) -> None:
    with Store(folder) as store:
        for number in range(30):
            store.append(msgspec.structs.replace(found, id=f"{name}-{number}"))


def test_processes_and_threads_write_at_once(full_episode: Episode, tmp_path: Path, forked: Any) -> None:
    """Every process has a file of its own; nothing is lost, nothing doubled, and reading meanwhile sees whole episodes."""
    store = Store(tmp_path)

    def append(name: str) -> None:
        for number in range(30):
            store.append(msgspec.structs.replace(full_episode, id=f"{name}-{number}"))

    threads = [threading.Thread(target=append, args=(name,)) for name in ("t0", "t1")]
    for thread in threads:
        thread.start()
    forked(write_some, (tmp_path, "p0", full_episode), (tmp_path, "p1", full_episode))
    seen = ids(store)
    assert len(seen) == len(set(seen))
    for thread in threads:
        thread.join(30)
    store.close()
    assert sorted(ids(store)) == sorted(f"{name}-{number}" for name in ("p0", "p1", "t0", "t1") for number in range(30))


def test_a_living_writers_log_is_left_alone(full_episode: Episode, tmp_path: Path) -> None:
    """Another store in the folder seals the logs of the dead, never one that is being written."""
    writer, other = Store(tmp_path), Store(tmp_path)
    writer.append(full_episode)
    assert other.seal() == 0
    assert log_of(writer).exists()
    writer.append(msgspec.structs.replace(full_episode, id="ep-2"))
    assert ids(other) == ["ep-1", "ep-2"]


def in_child(store: Store, found: Episode) -> None:
    store.append(msgspec.structs.replace(found, id="child"))
    store.close()


def test_a_forked_child_writes_its_own_file(full_episode: Episode, tmp_path: Path, forked: Any) -> None:
    """A store that was open at the fork is used by both; neither touches the other's log."""
    store = Store(tmp_path)
    store.append(full_episode)
    forked(in_child, (store, full_episode))
    store.append(msgspec.structs.replace(full_episode, id="parent"))
    assert sorted(ids(store)) == ["child", "ep-1", "parent"]
    store.close()
    assert sorted(ids(store)) == ["child", "ep-1", "parent"]


def test_a_segment_that_is_sealed_while_it_is_read_is_read_once(full_episode: Episode, tmp_path: Path) -> None:
    """A reader that was about to open a log finds it as Parquet."""
    store = Store(tmp_path)
    store.append(full_episode)
    store.seal()
    store.append(msgspec.structs.replace(full_episode, id="ep-2"))
    reading = Store(tmp_path).episodes()
    assert next(reading).id == "ep-1"
    store.seal()
    assert [found.id for found in reading] == ["ep-2"]


def test_small_files_are_merged(full_episode: Episode, tmp_path: Path) -> None:
    """Many short-lived processes leave one file in the end, in the old order; what a merge that died left behind is removed."""
    store = Store(tmp_path)
    for number in range(32):
        store.append(msgspec.structs.replace(full_episode, id=f"ep-{number:02}"))
        store.seal()
    (merged,) = (tmp_path / "episodes").glob("*.parquet")
    assert ids(store) == [f"ep-{number:02}" for number in range(32)]
    from rllm_trace._store_parquet import read_metadata

    replaced = read_metadata(merged)["rllm.replaces"].split(",")
    assert len(replaced) == 32
    leftover = tmp_path / "episodes" / f"{replaced[3]}.parquet"
    leftover.write_bytes(merged.read_bytes())
    assert len(ids(store)) == 32
    store.seal()
    assert not leftover.exists()


# rewards


def test_a_reward_comes_later_from_another_process(full_episode: Episode, tmp_path: Path) -> None:
    """It is part of the episode that the store gives back: for the whole, an agent or a call; the last of a name counts."""
    with Store(tmp_path) as store:
        store.append(full_episode)
    program = (
        "import sys; from rllm_trace.store import Store; store = Store(sys.argv[1])\n"
        "store.add_reward(0.25, name='human', episode_id='ep-1', weight=2.0)\n"
        "store.add_reward(True, name='human', episode_id='ep-1', weight=2.0)\n"
        "store.add_reward({'a': 1, 'b': 2}, episode_id='ep-1', span_id='00000000000000a1')\n"
        "store.add_reward(3, name='step', episode_id='ep-1', span_id='00000000000000c1')\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=60)
    (found,) = store.episodes()
    assert [(reward.name, reward.value, reward.superseded) for reward in found.rewards] == [
        ("exact", 1.0, False),
        ("human", 0.25, True),
        ("human", 1.0, False),
    ]
    assert found.reward == 3.0
    (solver,) = found.trajectories
    assert [(reward.name, reward.target) for reward in solver.rewards[1:]] == [
        ("a", "00000000000000a1"),
        ("b", "00000000000000a1"),
        ("step", "00000000000000c1"),
    ]


def test_a_reward_for_nobody_is_refused(full_episode: Episode, tmp_path: Path) -> None:
    """An id that the store does not have, and a value that is no reward, each get a sentence."""
    store = Store(tmp_path)
    store.append(full_episode)
    with pytest.raises(UnknownEpisodeError, match="has no episode 'ep-9'"):
        store.add_reward(1, episode_id="ep-9")
    with pytest.raises(UnknownEpisodeError, match="needs episode_id="):
        store.add_reward(1)
    with pytest.raises(RewardError, match="'human' got nan"):
        store.add_reward(float("nan"), name="human", episode_id="ep-1")
    assert store.give("ep-9", [Reward(name="human", value=1.0)]) is False
    assert list((tmp_path / "rewards").iterdir()) == []
    store.append(msgspec.structs.replace(full_episode, id="ep-9"))
    store.add_reward(1, episode_id="ep-9")


def test_a_reward_that_scores_no_span_of_its_episode_is_counted(full_episode: Episode, tmp_path: Path) -> None:
    """It does not make the episode unreadable."""
    store = Store(tmp_path)
    store.append(full_episode)
    store.add_reward(1, episode_id="ep-1", span_id="f" * 16)
    before = counters.get("orphan", "stored reward")
    assert list(store) == [full_episode]
    assert counters.get("orphan", "stored reward") - before == 1


def test_a_torn_line_of_rewards_costs_that_line(full_episode: Episode, tmp_path: Path) -> None:
    """What a crash cut short is counted, and the next reward begins a line of its own."""
    store = Store(tmp_path)
    store.append(full_episode)
    store.add_reward(1, name="x", episode_id="ep-1")
    (path,) = (tmp_path / "rewards").iterdir()
    path.write_bytes(path.read_bytes()[:-9])
    store.add_reward(2, name="y", episode_id="ep-1")
    before = counters.get("failed", "damaged reward")
    (found,) = store.episodes()
    assert [reward.name for reward in found.rewards] == ["exact", "y"]
    assert counters.get("failed", "damaged reward") - before == 1


# limits, content, versions


def test_the_oldest_go_when_the_folder_is_too_large(full_episode: Episode, tmp_path: Path) -> None:
    """Whole segments, counted; the newest stay."""
    before = counters.get("dropped", "stored episode")
    store = Store(tmp_path)
    for number in range(6):
        store.append(msgspec.structs.replace(full_episode, id=f"ep-{number}"))
        store.seal()
    size = max(path.stat().st_size for path in (tmp_path / "episodes").glob("*.parquet"))
    bounded = Store(tmp_path, max_bytes=2 * size + 1_000)
    bounded.seal()
    assert ids(bounded) == ["ep-4", "ep-5"]
    assert counters.get("dropped", "stored episode") - before == 4


def test_the_old_go_when_they_are_too_old(full_episode: Episode, tmp_path: Path) -> None:
    """Age is that of a segment's last episode, and merging or sealing does not make it younger."""
    store = Store(tmp_path)
    for number in range(3):
        store.append(msgspec.structs.replace(full_episode, id=f"ep-{number}"))
        if number < 2:
            os.utime(log_of(store), (1_000_000_000, 1_000_000_000))
        store.seal()
    Store(tmp_path, max_age=3_600).seal()
    assert ids(store) == ["ep-2"]


@pytest.mark.parametrize("options", [{"max_bytes": 0}, {"max_age": -1}, {"segment_bytes": 0}])
def test_limits_that_cannot_be_are_refused(options: dict[str, Any], tmp_path: Path) -> None:
    """One sentence names the limit."""
    with pytest.raises(ConfigurationError, match=f"got {next(iter(options))}=.*expected a number above 0"):
        Store(tmp_path, **options)


def test_a_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    """A file in its place gets a sentence at the start, not at the first episode."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigurationError, match="give a folder that can be written"):
        Store(tmp_path / "file")


def test_without_content_nothing_of_it_is_on_disk(full_episode: Episode, tmp_path: Path) -> None:
    """No text, ids or logprobs; who, when, how long and how good stay."""
    (tool,) = full_episode.trajectories[0].tools
    secret = msgspec.structs.replace(full_episode, input="SECRET", output=["SECRET"])
    secret.trajectories[0].tools[0] = msgspec.structs.replace(tool, arguments="SECRET")
    with Store(tmp_path, capture_content=False) as store:
        store.append(secret)
        assert b"SECRET" not in log_of(store).read_bytes()
        (found,) = store
    assert (found.id, found.reward, found.metadata["index"]) == ("ep-1", 1.0, 3)
    (shown,) = found.calls
    assert (shown.messages, shown.prompt_token_ids, shown.trainable) == ([], None, False)
    assert [(choice.text, choice.token_ids, choice.logprobs) for choice in shown.choices] == [(None, None, None)] * 2
    assert found.trajectories[0].tools[0].arguments is None


def test_redaction_runs_before_anything_is_written(full_episode: Episode, tmp_path: Path) -> None:
    """The user's function decides; ids of a call that it changed stay behind, since they spell the old text."""

    def redact(record: dict[str, Any]) -> dict[str, Any]:
        return json.loads(json.dumps(record).replace("2+2?", "[removed]"))

    store = Store(tmp_path, redact=redact)
    store.append(full_episode)
    (found,) = store
    assert found.input["question"] == "[removed]"
    (shown,) = found.calls
    assert shown.messages == [{"role": "user", "content": [{"type": "text", "text": "[removed]"}]}]
    assert (shown.prompt_token_ids, shown.exact) == (None, False)


def test_a_file_of_an_older_release_is_read(full_episode: Episode, tmp_path: Path) -> None:
    """The files of version 1 that are checked in, log, Parquet and rewards, give the episodes that were written then."""
    for part in ("log", "episodes", "rewards"):
        (tmp_path / part).mkdir()
    (tmp_path / "log" / "00000000000000000002-1-00000002.log").write_bytes((DATA / "store_v1.log").read_bytes())
    (tmp_path / "episodes" / "00000000000000000001-1-00000001.parquet").write_bytes((DATA / "store_v1.parquet").read_bytes())
    (tmp_path / "rewards" / "00000000000000000001-1-00000001.jsonl").write_bytes((DATA / "store_v1.jsonl").read_bytes())
    assert list(Store(tmp_path)) == read_episodes(DATA / "store_v1_expected.jsonl")


def test_a_log_of_version_2_is_read(tmp_path: Path) -> None:
    """The log that is checked in, of the episodes that the log of version 1 holds, gives them; large ids and odd logprobs among them."""
    found: list[list[Episode]] = []
    for version in ("v1", "v2"):
        (tmp_path / version / "log").mkdir(parents=True)
        (tmp_path / version / "log" / "00000000000000000001-1-00000001.log").write_bytes((DATA / f"store_{version}.log").read_bytes())
        found.append(list(Store(tmp_path / version)))
    assert found[1][: len(found[0])] == found[0] != []
    (last,) = found[1][len(found[0]) :]
    (of_last,) = last.calls
    assert (of_last.prompt_token_ids, of_last.choices[0].token_ids) == ([0, 255, 65_536, 2**31 - 1], [151_643, 7])
    assert of_last.choices[0].logprobs == Logprobs([-0.5, -1e-30])


def test_columns_that_an_older_file_lacks_have_their_defaults(full_episode: Episode, tmp_path: Path) -> None:
    """And columns that this release does not know are passed over."""
    import pyarrow
    import pyarrow.parquet

    with Store(tmp_path) as store:
        store.append(full_episode)
    (path,) = (tmp_path / "episodes").glob("*.parquet")
    table = pyarrow.parquet.read_table(path)
    metadata = pyarrow.parquet.read_metadata(path).metadata
    older = table.drop_columns(["session_id", "parent_episode_id", "open_calls", "error"]).append_column("new", pyarrow.array([1]))
    with pyarrow.parquet.ParquetWriter(path, older.schema) as writer:
        writer.write_table(older)
        writer.add_key_value_metadata({"rllm.episodes.version": metadata[b"rllm.episodes.version"].decode()})
    assert list(store) == [msgspec.structs.replace(full_episode, session_id=None, parent_episode_id=None, open_calls=0, error=None)]


def test_a_file_of_a_newer_release_is_refused_by_name(full_episode: Episode, tmp_path: Path) -> None:
    """Log, Parquet and rewards alike; what is no file of a store says so."""
    store = Store(tmp_path)
    store.append(full_episode)
    path = log_of(store)
    data = path.read_bytes()
    path.write_bytes(b"rllmlog\x63" + data[8:])
    with pytest.raises(ValueError, match="is of version 99, this rllm_trace reads up to 2"):
        list(store)
    path.write_bytes(b"something else")
    with pytest.raises(ValueError, match="is no log of episodes"):
        list(store)


# configure


@pytest.fixture
def configured(tmp_path: Path) -> Any:
    rllm.configure(store=tmp_path)
    yield tmp_path
    rllm.shutdown()
    rllm.configure()


def test_a_workflow_is_stored(configured: Path) -> None:
    """``configure(store=folder)`` is all it takes; what was recorded is on disk after a flush."""

    @rllm.workflow
    def solve(question: str) -> tuple[str, int]:
        return "4", 2

    assert solve("2+2?") == ("4", 2)
    assert rllm.flush(20) is True
    (found,) = Store(configured)
    assert (found.workflow, found.input, found.output) == ("solve", {"question": "2+2?"}, ("4", 2))


def test_a_store_with_limits_of_its_own_may_be_configured(tmp_path: Path) -> None:
    """A Store object stands for its folder; the options of configure hold for it."""
    own = Store(tmp_path, max_bytes=10_000_000)
    assert open_store(own, capture_content=False) is own
    assert own._disclosure.content is False


def test_without_pyarrow_everything_but_parquet_works(full_episode: Episode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Episodes are written, read and scored in logs; one warning says what is missing, and sealing says it again."""
    monkeypatch.setattr(store_module, "has_parquet", lambda: False)
    counters._told.discard("warning:store without pyarrow")
    with pytest.warns(RllmWarning, match=r"pandas and DuckDB cannot read them until pyarrow is there: pip install 'rllm-trace\[store\]'"):
        store = open_store(tmp_path)
    store.append(full_episode)
    store.add_reward(1, name="late", episode_id="ep-1")
    store.close()
    assert [found.reward for found in Store(tmp_path)] == [2.0]
    with pytest.raises(ConfigurationError, match="sealing needs pyarrow"):
        store.seal()
    monkeypatch.undo()
    assert Store(tmp_path).seal() == 1


def test_prose_with_its_ids_takes_less_than_twelve_kilobytes(tmp_path: Path) -> None:
    """2,048 tokens of prompt and 256 of reply, text, ids and random logprobs, as a log and sealed."""
    words = re.findall(r"\s?\w+|\s?[^\w\s]|\s", "\n".join(topics.values()))
    rng = random.Random(1)
    vocabulary = {word: rng.randrange(49_152) for word in dict.fromkeys(words)}
    with Store(tmp_path) as store:
        for number in range(40):
            own = words[number * 2_400 : number * 2_400 + 2_304]
            made = call(number, [vocabulary[word] for word in own[:2_048]], messages=[{"role": "user", "content": "".join(own[:2_048])}])
            reply = Choice(
                index=0,
                token_ids=TokenIds(vocabulary[word] for word in own[2_048:]),
                logprobs=Logprobs(-3 * rng.random() for _ in range(256)),
                text="".join(own[2_048:]),
            )
            store.append(episode(f"ep-{number}", msgspec.structs.replace(made, choices=[reply])))
        assert log_of(store).stat().st_size / 40 < 12_000
    (sealed,) = (tmp_path / "episodes").glob("*.parquet")
    assert sealed.stat().st_size / 40 < 12_000
