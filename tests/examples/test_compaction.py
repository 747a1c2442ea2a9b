"""The chat whose history is compacted: without a model, and through the whole loop with the tiny one."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import rllm_trace as rllm
from rllm_trace.testing import Exchange, Reply, ReplyChoice, ScriptedServer
from rllm_trainer.samples import build_samples

FOLDER = Path(__file__).parents[2] / "examples" / "compaction"
MODULES = ("app", "questions", "check")
SENTENCES = ["A red pen.", "A blue cup.", "A green hat.", "A grey bag."]


def answer(exchange: Exchange) -> Reply:
    """The second word; its ids and the prompt's are its bytes, message by message, as a chat template would have them."""
    messages = exchange.body["messages"]
    word = messages[-1]["content"].split()[1]
    prompt = [token for m in messages for token in (1, *m["content"].encode(), 2)]
    return Reply(
        choices=[ReplyChoice(text=word, token_ids=[*word.encode(), 2], logprobs=[-0.5] * (len(word) + 1))], prompt_token_ids=[*prompt, 1]
    )


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch, lasting: list[ModuleType]) -> Iterator[ModuleType]:
    """The app, freshly imported, its endpoint a scripted server."""
    monkeypatch.syspath_prepend(FOLDER)
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    with ScriptedServer(answer) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
        monkeypatch.setenv("OPENAI_API_KEY", server.api_key)
        import app

        lasting.append(app)

        yield app
    for name in MODULES:
        sys.modules.pop(name, None)


def test_two_turns_are_kept_and_the_rest_is_one_line(app: ModuleType) -> None:
    """Up to two turns nothing is changed; of three the first is what was said in it."""
    turns = [("s1", "r1"), ("s2", "r2"), ("s3", "r3")]
    words = [[message["content"] for message in app.history_of(turns[:count])][len(app.START) :] for count in (1, 2, 3)]
    assert words == [["s1", "r1"], ["s1", "r1", "s2", "r2"], ["What did you say before?", "r1", "s2", "r2", "s3", "r3"]]


def test_a_chat_is_two_rows_in_which_every_sampled_token_is_trained_once(app: ModuleType) -> None:
    """Turns 1 to 3 are one row; the fourth breaks off, by compaction, and has a row of its own."""
    with rllm.collect() as episodes:
        assert asyncio.run(app.chat(SENTENCES)) == ["red", "blue", "green", "grey"]
    samples = build_samples(episodes[0])
    assert [(b.cause, b.span_id) for b in samples.breaks] == [("compaction", episodes[0].calls[3].span_id)]
    trained = [bytes(int(t) for t in row.token_ids[row.trained_mask]) for row in samples.samples]
    assert trained == [b"red\x02blue\x02green\x02", b"grey\x02"]
    assert samples.counters.share_trained == 1.0


def test_the_reward_is_the_share_of_right_turns(app: ModuleType) -> None:
    """Capitals, spaces and a full stop do not matter; other words do; a chat that failed has none right."""
    assert app.named.__wrapped__([" Red.", "blue", "the green", "grey"], ["red", "blue", "green", "grey"]) == 0.75
    assert app.named.__wrapped__(None, ["red", "blue"]) == 0.0


def test_learning_and_measuring_share_no_thing(app: ModuleType) -> None:
    """No thing of a held-out chat is in a training chat."""
    from questions import held_out_rows, training_rows

    def things(rows: list[dict[str, Any]]) -> set[str]:
        words = {word.rstrip(".") for row in rows for sentence in row["sentences"] for word in sentence.split()}
        return words - {colour for row in rows for colour in row["colours"]} - {"The", "is", "here", "I", "lost", "my", "She", "has", "a"}

    assert things(training_rows(0)) & things(held_out_rows(64)) == set()
    assert (len(training_rows(0)), len(held_out_rows(64))) == (400, 64)


@pytest.mark.timeout(600)
def test_the_tiny_model_is_trained_through_the_whole_loop(app: ModuleType, tmp_path: Path) -> None:
    """A step on real episodes: the checker finds every figure again, and each sampled token in the credit, once."""
    from check import Run, figures, unequal

    command = [sys.executable, FOLDER / "run.py", "--steps", "1", "--n-eval", "2", "--model", "tiny-qwen2", "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    run, written = Run(tmp_path / "seed-0"), json.loads((tmp_path / "result.json").read_text())
    found = figures(run)
    assert {name: written[name] for name in ("before", "after", "n_eval", "sampled_tokens", "trained_tokens", "calls")} == {
        name: found[name] for name in ("before", "after", "n_eval", "sampled_tokens", "trained_tokens", "calls")
    }
    assert unequal(run) == []
    assert found["sampled_tokens"] == found["trained_tokens"] > 0
    (tmp_path / "seed-0" / "credit.jsonl").write_text("".join(json.dumps(line) + "\n" for line in run.credit[1:]))
    assert len(unequal(Run(tmp_path / "seed-0"))) == 1
