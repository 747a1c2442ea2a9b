"""What a user gets wrong gets one clear sentence; the run ends or goes on as it should; no process is left behind."""

import contextlib
import json
import shutil
import socket
import sys
import threading

import openai
import psutil
import pytest

import rllm_trace as rllm
from rllm_trainer import evaluate, fit, processes
from rllm_trainer.checkpoint import owned
from rllm_trainer.config import make_settings
from rllm_trainer.exceptions import (
    AppArgumentsError,
    CheckpointError,
    DatasetError,
    EngineError,
    ModelError,
    NoSignal,
    RewardError,
    ServerError,
    SettingError,
    TooManyFaults,
    TrainerError,
)
from rllm_trainer.models import resolve_model
from rllm_trainer.rollout.record import read_lines

ROWS = [{"word": f"say {i}"} for i in range(4)]
GIVEN = {"model": "tiny-qwen2", "lr": 1e-3, "batch_tasks": 2, "group_size": 2, "threads": 1, "progress": False, "steps": 1, "retries": 0}

client = openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="own", max_retries=0)


def ask(word, **sampling):
    messages = [{"role": "user", "content": word}]
    return client.chat.completions.create(model="gpt", messages=messages, max_tokens=4, **sampling).choices[0].message.content


def app(word):
    return ask(word)


def length(output):
    return len(output)


@pytest.fixture(autouse=True)
def _no_process_is_left():
    before = psutil.Process().children(recursive=True)
    yield
    assert psutil.Process().children(recursive=True) == before


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """An engine and a server, started once."""
    settings = make_settings({name: GIVEN[name] for name in ("lr", "threads")})
    with processes.running(settings, resolve_model("tiny-qwen2"), tmp_path_factory.mktemp("run"), threading.Event()) as both:
        yield both


@pytest.fixture
def on_started(started, monkeypatch):
    """Runs use the engine and the server that are up, and leave them up."""

    @contextlib.contextmanager
    def running(settings, model, run_dir, stop):
        yield started

    monkeypatch.setattr("rllm_trainer._fit.running", running)


def refused(error, words, *, app=app, dataset=ROWS, tmp_path, **given):
    """Asserts that ``fit`` raises ``error`` with these words, in one sentence that is not a traceback."""
    with pytest.raises(error) as caught:
        fit(app, dataset, output_dir=tmp_path / "run", **({"reward": length} | GIVEN | given))
    assert words in str(caught.value)
    assert "Traceback" not in str(caught.value)


# before anything is started


def test_a_wrong_model_path(tmp_path):
    """A path that is no model folder is named, with what a model may be."""
    refused(ModelError, "got model='/nowhere/model', which is no folder here", model="/nowhere/model", tmp_path=tmp_path)
    (tmp_path / "empty").mkdir()
    refused(ModelError, "config.json", model=tmp_path / "empty", tmp_path=tmp_path)


@pytest.mark.parametrize(
    "given, words",
    [
        ({"model": 3}, "got model=3 of type int; expected a Hugging Face model folder"),
        ({"output_dir": 3}, "got output_dir=3, which is no path"),
        ({"output_dir": ""}, "got output_dir='', which names no folder"),
        ({"output_dir": "a\0b"}, "got output_dir='a\\x00b', which is no path"),
        ({"output_dir": "x" * 300}, f"got output_dir='{'x' * 40}'..., a name too long for a file"),
        ({"resume": 3}, "got resume=3, which is no path"),
    ],
)
def test_what_is_no_path(tmp_path, monkeypatch, given, words):
    """A folder that cannot be one is named, with the setting."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TrainerError) as caught:
        fit(app, ROWS, reward=length, **GIVEN | given)
    assert words in str(caught.value)


def test_an_empty_dataset(tmp_path):
    """No rows, nothing to train on."""
    refused(DatasetError, "dataset: it has no rows; expected at least one", dataset=[], tmp_path=tmp_path)
    refused(DatasetError, "eval_dataset: it has no rows", eval_dataset=[], tmp_path=tmp_path)


def test_rows_that_do_not_match_the_app(tmp_path):
    """Both sides are listed: what the app needs and what the rows have."""
    words = "needs the parameter 'word', and the row has no such column; its required parameters are word; the row's columns are text"
    refused(AppArgumentsError, words, dataset=[{"text": "a"}], tmp_path=tmp_path)


def test_rows_that_do_not_match_the_reward(tmp_path):
    """A reward whose parameter no column fills is refused before the first rollout."""
    words = (
        "the reward exact needs answer, and neither the reserved words (output, row, episode, error) nor the row's columns (word) have it"
    )

    def exact(output, answer): ...

    refused(RewardError, words, reward=exact, tmp_path=tmp_path)


def test_an_unknown_setting(tmp_path):
    """The nearest setting is suggested."""
    refused(SettingError, "got the unknown setting 'learning_rate'", learning_rate=1e-5, tmp_path=tmp_path)
    refused(SettingError, "did you mean 'batch_tasks'?", batch_task=2, tmp_path=tmp_path)
    refused(
        SettingError,
        "algorithm='ppo': neither verl nor a module of yours has such an estimator; choose one of",
        algorithm="ppo",
        tmp_path=tmp_path,
    )
    refused(SettingError, "eval_every=2 would have no effect: there is no eval_dataset", eval_every=2, tmp_path=tmp_path)


def test_no_reward_at_all(tmp_path):
    """Without a reward anywhere there is nothing to learn from."""
    refused(RewardError, "no reward: app was given none, and its module", reward=None, tmp_path=tmp_path)


def test_training_rows_in_the_evaluation(tmp_path):
    """A held-out row that is a training row is refused."""
    refused(DatasetError, "1 of the evaluation rows are training rows too", eval_dataset=[{"word": "say 1"}], tmp_path=tmp_path)


def test_nothing_is_written_for_what_is_refused(tmp_path):
    """A run that was refused leaves no folder."""
    refused(SettingError, "unknown setting", learning_rate=1, tmp_path=tmp_path)
    refused(ModelError, "no folder here", model="/nowhere/model", tmp_path=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_evaluate_refuses_what_it_does_not_use(tmp_path):
    """Settings of training have no effect on an evaluation; without a model, those of serving have none."""
    with pytest.raises(SettingError, match=r"lr=0\.1 would have no effect: evaluate trains nothing"):
        evaluate(app, ROWS, reward=length, lr=0.1, output_dir=tmp_path / "run")
    with pytest.raises(SettingError, match="would have no effect: without a model the app's calls keep their own endpoints"):
        evaluate(app, ROWS, reward=length, sampling={"temperature": 1}, output_dir=tmp_path / "run")
    with pytest.raises(SettingError, match="resume=True would have no effect: an evaluation is not continued"):
        evaluate(app, ROWS, reward=length, resume=True, output_dir=tmp_path / "run")


@pytest.mark.parametrize(
    "given, words",
    [
        ({"group_size": 10**9}, "batch_tasks=2 and group_size=1000000000 make 2000000000 rollouts a step; at most 100000 can be held"),
        ({"sampling": {"temperature": "hot"}}, "sampling['temperature']='hot': expected float | None, got str"),
        ({"sampling": {"top_p": 2}}, "sampling['top_p']=2: expected float <= 1.0"),
        ({"sampling": {"temprature": 1}}, "sampling: got the unknown field 'temprature'; did you mean 'temperature'?"),
        ({"sampling": {"beam_width": 4}}, "sampling: got the unknown field 'beam_width'; the embedded server knows"),
        ({"sampling": {"messages": []}}, "sampling['messages']: messages does not say how to sample"),
        ({"limits": {"share": 1}}, "limits: got the unknown setting 'share'"),
        ({"shuffle": True, "dataset": iter(ROWS)}, "shuffle=True would have no effect: the rows come from an iterable"),
    ],
)
def test_values_that_could_only_fail_later(tmp_path, given, words):
    """What every rollout would fail of, or the memory, is refused before anything is started."""
    refused(SettingError, words, tmp_path=tmp_path, **given)
    assert list(tmp_path.iterdir()) == []


def test_evaluate_into_what_is_no_path(tmp_path):
    """A folder that cannot be one is named by ``evaluate`` too."""
    with pytest.raises(TrainerError, match="got output_dir=3, which is no path"):
        evaluate(app, ROWS, reward=length, output_dir=3)


def test_a_second_run_in_a_folder_changes_nothing_there(tmp_path):
    """While a run holds the folder another one is refused, and the first one's settings stay."""
    (tmp_path / "run").mkdir()
    with owned(tmp_path / "run"):
        refused(CheckpointError, "another run is writing to", tmp_path=tmp_path)
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]


def test_a_port_in_use(tmp_path):
    """A port that is taken is named before anything is started."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        words = f"port {port} on 127.0.0.1 cannot be used: Address already in use; give another port"
        refused(ServerError, words, port=port, tmp_path=tmp_path)


# while it starts


def test_an_engine_that_cannot_start(tmp_path):
    """Where one of the two cannot start, the error has its last words, and the other one is gone too."""
    folder = tmp_path / "model"
    shutil.copytree(resolve_model("tiny-qwen2"), folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(TrainerError) as caught:
        fit(app, ROWS, output_dir=tmp_path / "run", reward=length, **GIVEN | {"model": folder})
    assert isinstance(caught.value, (ServerError, EngineError, ModelError))


# while it runs


def test_an_app_that_raises(on_started, tmp_path):
    """An app that always fails before its first call ends the run with the error and how often it came."""

    def broken(word):
        raise KeyError("api_token")

    words = (
        "100% of 4 rollouts were lost to faults that are not the policy's; at most 50% may be: the app raised KeyError: 'api_token' before"
    )
    refused(TooManyFaults, words, app=broken, tmp_path=tmp_path)


def test_an_app_that_hangs(on_started, tmp_path, capfd):
    """An app that hangs is given up at its deadline, its stack printed, and the run ends."""
    release = threading.Event()

    def hanging(word):
        release.wait(60)

    words = "it ran past rollout_timeout=1 s (4 times)"
    refused(TooManyFaults, words, app=hanging, rollout_timeout=1.0, tmp_path=tmp_path)
    release.set()
    assert "release.wait(60)" in capfd.readouterr().err


def test_an_app_that_never_calls_the_model(on_started, tmp_path):
    """An app without a model call cannot be trained, and the error says what counts as a call."""
    refused(
        NoSignal, "no rollout called a model: the app must make its calls with an OpenAI client", app=lambda word: word, tmp_path=tmp_path
    )


def test_temperature_zero_everywhere(on_started, tmp_path):
    """An app that samples at temperature 0 stops with the setting that changes it; with that setting it trains."""

    def cold(word):
        return ask(word, temperature=0)

    refused(NoSignal, "fit(sampling={'temperature': 1.0}) changes it", app=cold, tmp_path=tmp_path)
    result = fit(cold, ROWS, output_dir=tmp_path / "warm", sampling={"temperature": 1.0}, reward=length, **GIVEN)
    assert result.metrics[0]["tokens/trained"] > 0


def test_one_seed_for_all(on_started, tmp_path):
    """An app with a fixed seed stops with the setting that changes it."""

    def seeded(word):
        return ask(word, seed=7)

    refused(NoSignal, "fit(sampling={'seed': None}) changes it", app=seeded, tmp_path=tmp_path)


def test_a_name_that_replaces_nothing(on_started, tmp_path):
    """A model name that no call asks for is an error that lists the names asked for."""
    with contextlib.suppress(openai.APIConnectionError):
        refused(SettingError, "replaces names 'gpt-5'", app=_both_models, replaces=["gpt", "gpt-5"], tmp_path=tmp_path)


def _both_models(word):
    return ask(word)


@pytest.mark.parametrize(
    "reward, words",
    [
        (lambda output: None, "got None; return a finite number"),
        (lambda output: float("nan"), "got nan; return a finite number"),
        (lambda output: "good", "got 'good' of type str; return a finite number"),
        (lambda output: 1 / 0, "raised ZeroDivisionError: division by zero"),
        (lambda output: sys.exit(3), "the reward <lambda> raised SystemExit: 3"),
    ],
)
def test_a_reward_that_is_none(on_started, tmp_path, reward, words):
    """A reward that never gives a number ends the run; the sentence has the value and the task."""
    refused(TooManyFaults, words, reward=reward, tmp_path=tmp_path)
    assert read_lines(tmp_path / "run")[0].reason.endswith(f"(task {read_lines(tmp_path / 'run')[0].task_id})")


def test_one_bad_row_does_not_end_the_run(on_started, tmp_path):
    """A reward that fails on one row costs that row's rollouts; the run goes on and counts them."""

    def picky(output, word):
        return None if word == "say 0" else len(output)

    result = fit(app, ROWS, output_dir=tmp_path / "run", reward=picky, **GIVEN | {"batch_tasks": 4})
    (line,) = result.metrics
    assert (line["faults/reward"], line["rollouts/excluded"], line["rollouts"]) == (2, 2, 8)
    assert any("25% of step 1's rollouts were lost" in warning for warning in result.warnings)


def test_a_reward_inside_the_app_that_raises(on_started, tmp_path):
    """A decorated reward that raises inside the app is told as the reward's fault."""

    @rllm.reward
    def inner(output):
        raise ValueError("no gold answer")

    @rllm.workflow
    def scored(word):
        inner(ask(word))

    refused(TooManyFaults, "the reward inner failed", app=scored, reward=[], tmp_path=tmp_path)


def test_a_server_that_dies(started, monkeypatch, tmp_path):
    """A server that ends in the middle of a batch ends the run with that, not with what the app saw of it."""

    @contextlib.contextmanager
    def running(settings, model, run_dir, stop):
        with processes.serving(settings, model, run_dir, stop) as server:
            alive.append(server)
            yield started[0], server

    alive = []
    monkeypatch.setattr("rllm_trainer._fit.running", running)

    def killer(word):
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(alive[0].pid).kill()
        return ask(word)

    refused(ServerError, "the local server", app=killer, tmp_path=tmp_path)


def test_the_result_of_a_run_that_ended_itself_is_on_file(on_started, tmp_path):
    """The rollouts of a run that stopped are in its folder, with their reasons."""

    def broken(word):
        raise KeyError("api_token")

    refused(TooManyFaults, "KeyError", app=broken, tmp_path=tmp_path)
    assert [line.fault for line in read_lines(tmp_path / "run")] == ["app"] * 4
    assert json.loads((tmp_path / "run" / "settings.json").read_text())["given"]
