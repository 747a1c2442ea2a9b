"""An app is scored at a server of which only OpenAI's API is known; training with it is refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import rllm_trace as rllm
from rllm_trace.testing import ScriptedServer
from rllm_trainer import evaluate, fit
from rllm_trainer.exceptions import ServerError, SettingError

ROWS = [{"word": "one"}, {"word": "two"}]


def scored(output: str) -> float:
    return float(bool(output))


@pytest.fixture
def app() -> Any:
    from openai import OpenAI

    client = OpenAI(base_url="http://127.0.0.1:9/v1", api_key="the-apps-own", max_retries=0)

    @rllm.workflow
    def say(word: str) -> str:
        return client.chat.completions.create(model="any", messages=[{"role": "user", "content": word}]).choices[0].message.content or ""

    return say


def test_an_app_is_scored_at_a_given_server(app: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its calls go there under the name that was given, with the key of the variable that was named, and not with the app's."""
    with ScriptedServer() as server:
        monkeypatch.setenv("HOST_KEY", server.api_key)
        result = evaluate(
            app,
            ROWS,
            model="their-model",
            reward=scored,
            output_dir=tmp_path / "run",
            serving="openai-compatible",
            serving_url=server.base_url,
            serving_key="HOST_KEY",
            eval_greedy=False,
            progress=False,
        )
        asked = [exchange.body for exchange in server.log if exchange.path.endswith("/chat/completions")]
    assert result.mean == 1.0
    assert [body["model"] for body in asked] == ["their-model", "their-model"]
    written = b"".join(file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file())
    assert server.api_key.encode() not in written


def test_a_key_that_is_not_there_is_named(app: Any, tmp_path: Path) -> None:
    """The variable's name is in the error."""
    with pytest.raises(ServerError, match="'NO_SUCH_KEY', and the environment has no variable of that name"):
        evaluate(
            app,
            ROWS,
            model="m",
            reward=scored,
            output_dir=tmp_path / "run",
            serving="openai-compatible",
            serving_url="http://127.0.0.1:9/v1",
            serving_key="NO_SUCH_KEY",
            progress=False,
        )


def test_training_is_refused_before_anything_starts(app: Any, tmp_path: Path) -> None:
    """No run folder is made."""
    with pytest.raises(SettingError, match="no way to give it new weights"):
        fit(app, ROWS, reward=scored, output_dir=tmp_path / "run", serving="openai-compatible", serving_url="http://127.0.0.1:9/v1")
    assert not (tmp_path / "run").exists()
