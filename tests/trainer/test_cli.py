"""The command line calls ``fit`` and ``evaluate`` with what was asked for."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import rllm_trainer
from rllm_trainer import cli
from rllm_trainer.config import Settings
from rllm_trainer.exceptions import SettingError
from rllm_trainer.setting_docs import setting_docs

APP = """
def answer(question):
    return question.upper()

def right(output, question):
    return output == question.upper()

rows = [{"question": "a"}, {"question": "b"}]
"""


@pytest.fixture
def app_file(tmp_path):
    path = tmp_path / "an_app.py"
    path.write_text(APP)
    return path


def test_evaluate_from_files(app_file, tmp_path, capsys):
    """An app, its rewards and its rows are named by file; settings are JSON or text."""
    data = tmp_path / "rows.jsonl"
    data.write_text('{"question": "x"}\n{"question": "y"}\n')
    arguments = ["evaluate", f"{app_file}:answer", "--data", str(data), "--reward", f"{app_file}:right", "--n", "2"]
    assert cli.main([*arguments, "--output", str(tmp_path / "run"), "--set", "concurrency=2"]) == 0
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["evaluation"]["sampled"]["mean"] == 1.0
    assert result["evaluation"]["sampled"]["rollouts"] == 4
    assert "held-out reward of the app's own endpoints: sampled 1.000" in capsys.readouterr().out


def test_rows_from_a_module(app_file, tmp_path):
    """Rows may be an object of a file."""
    arguments = ["evaluate", f"{app_file}:answer", "--data", f"{app_file}:rows", "--reward", f"{app_file}:right"]
    assert cli.main([*arguments, "--output", str(tmp_path / "run")]) == 0


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["evaluate", "nowhere.py:app", "--data", "x.jsonl"], "'nowhere.py:app' cannot be found"),
        (["evaluate", "app", "--data", "x.jsonl"], "got 'app'; expected file.py:name or package.module:name"),
        (["train", "APP:answer", "--data", "x.jsonl", "--set", "steps"], "got --set 'steps'; expected --set name=value"),
        (["train", "APP:answer", "--data", "APP:rows", "--set", "stepz=1"], "got the unknown setting 'stepz'; did you mean 'steps'?"),
        (["train", "APP:answer", "--data", "/nowhere.jsonl", "--reward", "APP:right"], "there is no file /nowhere.jsonl"),
    ],
)
def test_what_is_refused_is_one_line(app_file, capsys, arguments, words):
    """What was refused is one line on stderr and exit code 2."""
    assert cli.main([a.replace("APP", str(app_file)) for a in arguments]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert "Traceback" not in error


def test_the_module_is_the_command(tmp_path):
    """``python -m rllm_trainer`` lists the settings, without loading torch, ray or verl."""
    code = (
        "import sys; from rllm_trainer.cli import main; main(['settings']);"
        "print([m for m in ('torch', 'ray', 'verl', 'transformers') if m in sys.modules])"
    )
    root = Path(cli.__file__).parent.parent
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, timeout=120, check=True).stdout
    assert "group_size" in out
    assert out.splitlines()[-1] == "[]"


def test_values_are_json_or_text():
    """A value that is JSON is that; other text stays text."""
    assert cli._values(["lr=1e-5", "schedule=cosine", 'lora={"r": 4}', "shuffle=false"]) == {
        "lr": 1e-5,
        "schedule": "cosine",
        "lora": {"r": 4},
        "shuffle": False,
    }
    with pytest.raises(SettingError):
        cli._values(["=3"])


def test_every_setting_is_listed_with_what_it_does(capsys):
    """``rllm settings`` explains each; with names, those."""
    assert cli.main(["settings"]) == 0
    assert list(setting_docs()) == list(Settings.__struct_fields__)
    assert all(text.endswith(".") for text in setting_docs().values())
    capsys.readouterr()
    assert cli.main(["settings", "seed"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "Fixes task order, per-call seeds" in shown
    assert "clip_high" not in shown
    assert cli.main(["settings", "sed"]) == 2
    assert "got the unknown setting 'sed'; did you mean 'seed'?" in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["numpy", "rich", "verl"])
def test_without_the_extra_the_command_and_the_functions_say_what_to_install(missing, monkeypatch, capsys):
    """One sentence, where the SDK alone is installed."""
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else found(name))
    sentence = f"rllm_trainer needs {missing}, which is not installed: pip install 'rllm-trace[trainer]'"
    assert cli.main(["settings"]) == 2
    assert capsys.readouterr().err == f"rllm: {sentence}\n"
    monkeypatch.delitem(vars(rllm_trainer), "fit", raising=False)
    with pytest.raises(ImportError, match=re.escape(sentence)):
        _ = rllm_trainer.fit
    assert rllm_trainer.TrainerError.__name__ == "TrainerError"
