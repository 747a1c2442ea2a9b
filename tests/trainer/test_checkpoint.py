"""The run folder: checkpoints are whole or not there, rollouts come back equal, and one run owns it."""

import datetime
import os
import sys

import pytest

from rllm_trainer.checkpoint import SETTINGS_FILE, Checkpoints, new_run_dir, owned, require_same, write_json
from rllm_trainer.exceptions import CheckpointError
from rllm_trainer.rollout.record import EPISODES_FILE, ROLLOUTS_FILE, RolloutLog, groups_of, read_lines, read_rollouts
from rllm_trainer.state import State
from rllm_trainer.testing import make_call, make_episode
from rllm_trainer.types import Rollout


class EngineOnDisk:
    """Writes one file, or fails as a full disk does."""

    def __init__(self, *, full=False):
        self.full = full

    def save(self, folder):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"weights")
        if self.full:
            raise OSError(28, "No space left on device")


def rollout(task_id="t", index=0, reward=1.0, episode_id="e", row=None, **fields):
    episode = make_episode(make_call("a", [1, 2], [3, 4]), episode_id=episode_id, task_id=task_id)
    return Rollout(task_id=task_id, index=index, row=row or {"q": "x"}, episode=episode, reward=reward, rewards={"right": reward}, **fields)


def test_the_newest_whole_checkpoint_is_found(tmp_path):
    """Of several checkpoints the newest is continued, and only ``keep`` are kept."""
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 10):
        checkpoints.save(State(step=step, version=step), EngineOnDisk())
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-000002", "step-000010"]
    state, folder = Checkpoints(tmp_path, keep=2).latest()
    assert (state.step, folder.name) == (10, "engine")
    assert (folder / "model.safetensors").read_bytes() == b"weights"


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path):
    """What could not be written whole is not there; the one before it is."""
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(State(step=1), EngineOnDisk())
    with pytest.raises(CheckpointError, match=r"could not be written: .*No space left on device; free space"):
        checkpoints.save(State(step=2), EngineOnDisk(full=True))
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]


@pytest.mark.skipif(sys.platform != "linux", reason="the names of open files are read from /proc")
def test_a_checkpoint_is_written_aside_synced_and_renamed(tmp_path, monkeypatch):
    """Under its name there is nothing until every file of it has been synced; the rename is synced after it."""
    final = tmp_path / "checkpoints" / "step-000001"
    seen = []

    class Watching(EngineOnDisk):
        def save(self, folder):
            super().save(folder)
            seen.append(("written", final.exists()))

    def fsync(handle):
        seen.append((os.path.basename(os.readlink(f"/proc/self/fd/{handle}")), final.exists()))
        synced(handle)

    synced = os.fsync
    monkeypatch.setattr("os.fsync", fsync)
    Checkpoints(tmp_path, keep=1).save(State(step=1), Watching())
    assert seen[0] == ("written", False)
    assert {("model.safetensors", False), ("state.json", False), ("engine", False), (".step-000001.tmp", False)} <= set(seen)
    assert seen[-1] == ("checkpoints", True)
    assert [exists for _, exists in seen] == [False] * (len(seen) - 1) + [True]


def test_a_half_written_checkpoint_is_passed_over(tmp_path):
    """A folder without a readable state is no checkpoint."""
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(State(step=1), EngineOnDisk())
    (tmp_path / "checkpoints" / "step-000002").mkdir()
    (tmp_path / "checkpoints" / "step-000002" / "state.json").write_text('{"step": 2, "ver')
    assert checkpoints.latest()[0].step == 1
    assert Checkpoints(tmp_path / "new", keep=1).latest() is None


def test_rollouts_come_back_equal(tmp_path):
    """What was written is read back equal, episodes, rows of any kind and faults included."""
    log = RolloutLog(tmp_path)
    written = [
        rollout(index=0, episode_id="e0", row={"when": datetime.date(2020, 1, 2), "tags": ("a", "b")}),
        rollout(index=1, episode_id="e1", fault="policy", reason="it raised", policy_version=3, seconds=1.5),
        Rollout(task_id="t", index=2, row="text", episode=None, reward=None, rewards={}, fault="app", reason="no"),
    ]
    for one in written:
        log.write(one, step=4, split="train")
    log.write(rollout(episode_id="e9"), step=4, split="eval")
    log.close()
    assert read_rollouts(tmp_path) == {4: written}


def test_of_a_rollout_made_twice_the_later_counts(tmp_path):
    """A step that was run again after an interruption is read with its later rollouts; retried attempts are not read."""
    log = RolloutLog(tmp_path)
    log.write(rollout(episode_id="old", reward=0.0), step=1, split="train")
    log.write(rollout(episode_id="failed"), step=1, split="train", kind="retried")
    log.write(rollout(episode_id="new", reward=0.5), step=1, split="train")
    log.extra(rollout(episode_id="new"), [make_episode(episode_id="side")], step=1, split="train")
    log.close()
    assert [r.episode.id for r in read_rollouts(tmp_path)[1]] == ["new"]
    assert [line.kind for line in read_lines(tmp_path)] == ["ended", "retried", "ended", "extra"]
    assert len((tmp_path / EPISODES_FILE).read_bytes().splitlines()) == 4


def test_a_line_that_a_crash_cut_is_left_out(tmp_path):
    """After a crash the file goes on with whole lines."""
    log = RolloutLog(tmp_path)
    log.write(rollout(episode_id="e0"), step=1, split="train")
    log.close()
    with (tmp_path / ROLLOUTS_FILE).open("ab") as file:
        file.write(b'{"step": 2, "split"')
    log = RolloutLog(tmp_path)
    log.write(rollout(episode_id="e1"), step=2, split="train")
    log.close()
    assert [line.step for line in read_lines(tmp_path)] == [1, 2]


def test_groups_depend_on_ids_alone():
    """The order in which rollouts ended does not change the groups."""
    rollouts = [rollout("b", 1), rollout("a", 1), rollout("b", 0), rollout("a", 0)]
    groups = groups_of(rollouts)
    assert groups == groups_of(rollouts[::-1])
    assert [(g.task_id, [r.index for r in g.rollouts]) for g in groups] == [("a", [0, 1]), ("b", [0, 1])]


def test_a_folder_with_a_run_is_not_written_over(tmp_path):
    """A run is continued only where that was asked for, and only where there is one; one that never began is started anew."""
    assert new_run_dir(tmp_path / "new", name="app", resume=False) == tmp_path / "new"
    write_json(tmp_path / "new" / SETTINGS_FILE, {"settings": {}})
    assert new_run_dir(tmp_path / "new", name="app", resume=False) == tmp_path / "new"
    (tmp_path / "new" / ROLLOUTS_FILE).write_text("{}\n")
    with pytest.raises(CheckpointError, match="already holds a run; continue it with resume=True"):
        new_run_dir(tmp_path / "new", name="app", resume=False)
    assert new_run_dir(tmp_path / "new", name="app", resume=True) == tmp_path / "new"
    assert new_run_dir(None, name="app", resume=tmp_path / "new") == tmp_path / "new"
    with pytest.raises(CheckpointError, match="holds no run to continue"):
        new_run_dir(tmp_path / "other", name="app", resume=True)
    with pytest.raises(CheckpointError, match="resume=True needs output_dir="):
        new_run_dir(None, name="app", resume=True)


def test_a_run_without_a_folder_gets_its_own(tmp_path, monkeypatch):
    """Without ``output_dir`` each run has a new folder under runs/."""
    monkeypatch.chdir(tmp_path)
    first = new_run_dir(None, name="tests.<locals>.my app", resume=False)
    second = new_run_dir(None, name="tests.<locals>.my app", resume=False)
    assert first != second
    assert first.parent == second.parent == tmp_path / "runs"
    assert first.name.startswith("my-app-")


def test_one_run_owns_a_folder(tmp_path):
    """A second run in the folder of a running one is refused."""
    with owned(tmp_path), pytest.raises(CheckpointError, match="another run is writing to"), owned(tmp_path):
        pass
    with owned(tmp_path):
        pass


def test_a_continued_run_must_be_the_same(tmp_path):
    """Other rows or another seed would not continue the run."""
    require_same({"seed": 0, "rows": "abc"}, {"seed": 0, "rows": "abc"})
    with pytest.raises(CheckpointError, match="the run to continue had seed=0, and now it is 1"):
        require_same({"seed": 0}, {"seed": 1})


@pytest.mark.parametrize(
    "text, words", [("{broken", "settings.json cannot be read"), ("[]", "holds no settings of a run"), ("{}", "holds no settings of a run")]
)
def test_a_run_whose_settings_are_broken_is_not_continued(tmp_path, text, words):
    """Nothing is continued from a folder that does not say what it was."""
    (tmp_path / SETTINGS_FILE).write_text(text)
    with pytest.raises(CheckpointError, match=words):
        new_run_dir(tmp_path, name="app", resume=True)
