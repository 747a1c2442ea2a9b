"""A run that is killed, or whose disk is full: it ends with the cause, leaves nothing running, and goes on as if nothing had been."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file

pytestmark = pytest.mark.faults

SCRIPT = Path(__file__).with_name("run.py")


def start(folder, *options, **env):
    command = [sys.executable, str(SCRIPT), str(folder / "run"), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=env or os.environ, check=False)


def result_of(process):
    assert process.returncode == 0, process.stderr[-3000:]
    return json.loads(process.stdout.splitlines()[-1])


def assert_nothing_is_left(folder):
    """Every process that the run had started ends within seconds of it."""
    pids = json.loads((folder / "children.json").read_text())
    assert set(pids) == {"server", "engine"}
    ends_at = time.monotonic() + 30
    left = dict(pids)
    while left and time.monotonic() < ends_at:
        left = {kind: pid for kind, pid in left.items() if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE}
        time.sleep(0.05)
    assert left == {}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What three steps come to when nothing happens."""
    return result_of(start(tmp_path_factory.mktemp("whole")))


def assert_same_run(found, whole):
    """The same tokens in every step, and the same weights up to what a warm prefix cache does to the last bit of a logprob."""
    assert found["tokens"] == whole["tokens"]
    assert [step[0] for step in found["steps"]] == [1, 2, 3]
    for mine, its in zip(found["steps"], whole["steps"], strict=True):
        assert mine == pytest.approx(its, rel=1e-4, abs=1e-6)
    mine, its = (load_file(Path(run["model"]) / "model.safetensors") for run in (found, whole))
    assert max(float(np.abs(mine[name] - its[name]).max()) for name in its) < 1e-4


def goes_on_to_the_same(folder, whole):
    """A resumed run takes the steps that were left, on the same rows and the same optimizer state, to the same weights."""
    assert_same_run(result_of(start(folder, "--resume")), whole)


def test_a_killed_server_ends_the_run_with_its_last_words(tmp_path, whole):
    """In the second step the server is killed: the error says so and names its log, and a resumed run is the same run."""
    broken = start(tmp_path, "--do", "server", "--at", "9")
    assert broken.returncode == 1
    assert (
        "ServerError: the local server has ended" in broken.stderr or "ServerError: the local server was killed by SIGKILL" in broken.stderr
    )
    assert "server.log" in broken.stderr
    assert_nothing_is_left(tmp_path)
    goes_on_to_the_same(tmp_path, whole)


def test_a_server_that_dies_mid_stream_ends_the_run_with_its_last_words(tmp_path, whole):
    """Killed between two tokens of a streamed reply: that reply is of no use, and a resumed run is the same run."""
    broken = start(tmp_path, "--do", "stream", "--at", "9")
    assert broken.returncode == 1
    assert "ServerError: the local server" in broken.stderr
    assert "server.log" in broken.stderr
    assert_nothing_is_left(tmp_path)
    goes_on_to_the_same(tmp_path, whole)


def test_a_killed_engine_ends_the_run_with_its_last_words(tmp_path, whole):
    """The same for the process that updates the weights."""
    broken = start(tmp_path, "--do", "engine", "--at", "9")
    assert broken.returncode == 1
    assert "killed by SIGKILL" in broken.stderr
    assert "engine.log" in broken.stderr
    assert_nothing_is_left(tmp_path)
    goes_on_to_the_same(tmp_path, whole)


def test_a_killed_trainer_leaves_nothing_and_goes_on(tmp_path, whole):
    """kill -9 in the middle of the second step's rollouts."""
    assert start(tmp_path, "--do", "self", "--at", "9").returncode == -signal.SIGKILL
    assert_nothing_is_left(tmp_path)
    goes_on_to_the_same(tmp_path, whole)


def test_a_trainer_that_is_killed_between_an_update_and_its_checkpoint_takes_the_step_again(tmp_path, whole):
    """The second update is in nothing that is on disk: the same rollouts make it again, from the same moments."""
    assert start(tmp_path, "--update", "2").returncode == -signal.SIGKILL
    assert_nothing_is_left(tmp_path)
    goes_on_to_the_same(tmp_path, whole)


def test_a_trainer_that_is_killed_in_a_checkpoint_goes_on_from_the_one_before(tmp_path, whole):
    """The second checkpoint is complete and not yet named: it does not count, and the second step is taken again."""
    assert start(tmp_path, "--save", "2").returncode == -signal.SIGKILL
    assert_nothing_is_left(tmp_path)
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == [".step-000002.tmp", "step-000001"]
    goes_on_to_the_same(tmp_path, whole)


def test_sigterm_ends_at_a_whole_step(tmp_path, whole):
    """SIGTERM in the second step: the exit code says so, what a resume needs is on file."""
    ended = start(tmp_path, "--do", "term", "--at", "9")
    assert ended.returncode == 128 + signal.SIGTERM
    assert "resume=True" in ended.stderr
    assert_nothing_is_left(tmp_path)
    goes_on_to_the_same(tmp_path, whole)


def test_a_hung_app_costs_its_rollout_and_no_more(tmp_path):
    """One run of the app hangs: it is given up at its deadline, its stack is shown, and the other seventeen are trained."""
    ended = result_of(start(tmp_path, "--do", "hang", "--at", "9"))
    assert [step for step, *_ in ended["steps"]] == [1, 2, 3]
    (warning,) = [w for w in ended["warnings"] if "was given up" in w]
    assert "rollout_timeout=20" in warning
    assert "threading.Event().wait(600)" in warning


def test_a_full_disk_ends_the_run_and_once_there_is_room_it_is_the_same_run(tmp_path, whole):
    """The run folder is a file system that has no room for the second checkpoint; the error names it, and with more room it goes on."""
    folder = tmp_path / "disk"
    folder.mkdir()
    run, kept = f"{sys.executable} {SCRIPT} {folder}/run", f"cp -r {folder}/. {tmp_path}/kept"
    steps = [
        f"mount -t tmpfs -o size=2m tmpfs {folder}",
        f"{{ {run} 2>{tmp_path}/full; test $? = 1; }}",
        f"mount -o remount,size=64m {folder}",
        f"{run} --resume",
        kept,
    ]
    both = subprocess.run(
        ["unshare", "--mount", "--map-root-user", "sh", "-c", " && ".join(steps)], capture_output=True, text=True, timeout=480, check=False
    )
    full = (tmp_path / "full").read_text()
    assert both.returncode == 0, full[-2000:] + both.stderr[-2000:]
    assert "No space left on device" in full
    assert_nothing_is_left(tmp_path / "kept")
    found = json.loads(both.stdout.splitlines()[-1])
    assert_same_run(found | {"model": str(tmp_path / "kept" / "run" / "model")}, whole)


def test_two_trainers_on_one_folder(tmp_path):
    """The second one is refused, with the reason, and the first one ends as if alone."""
    folder = tmp_path / "run"
    first = subprocess.Popen([sys.executable, str(SCRIPT), str(folder)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with first:
        ends_at = time.monotonic() + 120
        while not (tmp_path / "children.json").exists():
            assert first.poll() is None
            assert time.monotonic() < ends_at
            time.sleep(0.05)
        second = start(tmp_path, "--resume")
        assert second.returncode == 1
        assert f"another run is writing to {folder}" in second.stderr
        out, err = first.communicate(timeout=240)
    assert first.returncode == 0, err[-2000:]
    assert [step for step, *_ in json.loads(out.splitlines()[-1])["steps"]] == [1, 2, 3]


def test_a_proxy_in_the_environment_is_passed_by(tmp_path, whole):
    """With every proxy variable naming a port where nobody listens, and none that exempts a host, the run is the same run."""
    proxies = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), "http://127.0.0.1:9")
    exempt = {name: value for name, value in os.environ.items() if name.lower() != "no_proxy"}
    assert_same_run(result_of(start(tmp_path, **exempt, **proxies)), whole)


def test_a_run_that_is_ahead_goes_on_after_a_kill(tmp_path, whole):
    """Killed with groups begun for later steps, a run with staleness 1 takes all its steps: each group is trained once, none is lost."""
    assert start(tmp_path, "--staleness", "1", "--do", "self", "--at", "14").returncode == -signal.SIGKILL
    assert_nothing_is_left(tmp_path)
    ended = result_of(start(tmp_path, "--staleness", "1", "--resume"))
    assert [step for step, *_ in ended["steps"]] == [1, 2, 3]
    trained = [(task, len(tokens)) for groups in ended["groups"].values() for task, tokens in groups.items()]
    assert [len(groups) for groups in ended["groups"].values()] == [2, 2, 2]
    assert sorted(trained) == sorted((task, 3) for groups in whole["groups"].values() for task in groups)
