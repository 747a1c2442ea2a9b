"""Supervised fine-tuning: which tokens of chats and of stored episodes are trained, and that a run lowers their loss."""

import contextlib
import json
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from rllm_trace.exporters.jsonl import write_episodes
from rllm_trace.types import ErrorInfo
from rllm_trainer import processes, sft
from rllm_trainer.chats import Chat, chats_of, tokenize_chats
from rllm_trainer.checkpoint import Checkpoints
from rllm_trainer.cli import main
from rllm_trainer.config import make_settings
from rllm_trainer.exceptions import CheckpointError, DatasetError, SettingError
from rllm_trainer.models import resolve_model
from rllm_trainer.sft_rows import read_units
from rllm_trainer.testing import make_call, make_choice, make_episode

TURNS = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "and?"},
    {"role": "assistant", "content": "no"},
]
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}}]
WITH_TOOLS = [{"role": "user", "content": "add"}, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
CHATS = [{"messages": [{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": f"it is {i}"}]} for i in range(12)]
SMALL = {"model": "tiny-qwen2", "lr": 3e-3, "batch_tasks": 4, "threads": 1, "progress": False}


@pytest.fixture(scope="module")
def tiny():
    return resolve_model("tiny-qwen2")


@pytest.fixture(scope="module")
def started(tiny, tmp_path_factory):
    """An engine, started once."""
    with processes.training(make_settings({"threads": 1}), tiny, tmp_path_factory.mktemp("run"), threading.Event()) as engine:
        yield engine


@pytest.fixture
def on_started(started, monkeypatch):
    """Runs get the model anew in the engine that is up."""

    @contextlib.contextmanager
    def training(settings, model, run_dir, stop, **given):
        started.restart(settings, model_path=model, **given)
        yield started

    monkeypatch.setattr("rllm_trainer._sft.training", training)


def with_template(tiny, folder, change):
    """The tiny model with another chat template."""
    shutil.copytree(tiny, folder)
    path = folder / "chat_template.jinja"
    path.write_text(change(path.read_text()))
    return folder


def said(rows, tiny):
    """For each row its text and the pieces of it that are trained, by the model's tokenizer."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(tiny) / "tokenizer.json"))
    pieces = []
    for ids, mask in rows:
        edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(int), [0]]))).reshape(-1, 2)
        pieces.append([tokenizer.decode(ids[start:stop].tolist(), skip_special_tokens=False) for start, stop in edges])
    return pieces


def test_what_the_assistant_says_is_trained(tiny):
    """The template's marks decide: each turn with its end of turn, tool calls as the model would write them, nothing else."""
    chats = chats_of([{"messages": TURNS}, {"messages": WITH_TOOLS, "tools": TOOLS}], "chats")
    plain, tools = tokenize_chats(chats, tiny)
    assert said(plain, tiny) == [["yes<|im_end|>", "no<|im_end|>"]]
    assert said(tools, tiny) == [['<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>']]


def test_templates_without_marks(tiny, tmp_path):
    """Turns that extend the prompt made for them: the same tokens in one row; where earlier turns are rewritten, a row for each turn."""
    chats = [*chats_of([{"messages": TURNS}], "chats"), Chat(id="last", messages=TURNS, only_last=True)]
    (marked,) = tokenize_chats(chats[:1], tiny)

    def unmarked(text):
        return text.replace("{%- generation %}", "").replace("{%- endgeneration %}", "")

    plain = with_template(tiny, tmp_path / "plain", unmarked)
    whole, last = tokenize_chats(chats, plain)
    assert [(ids.tolist(), mask.tolist()) for ids, mask in whole] == [(ids.tolist(), mask.tolist()) for ids, mask in marked]
    assert said(last, tiny) == [["no<|im_end|>"]]

    def forgets(text):
        return unmarked(text).replace(
            "{{- text(m['content']) }}\n{%- for call", "{{- text(m['content']) if loop.last else '' }}\n{%- for call"
        )

    (turns,) = tokenize_chats(chats[:1], with_template(tiny, tmp_path / "forgets", forgets))
    assert said(turns, tiny) == [["yes<|im_end|>"], ["no<|im_end|>"]]


def test_a_template_that_gives_no_exact_mask(tiny, tmp_path):
    """Where the prompt of a turn is not what the turn follows, the chat is refused with the place and what to do."""

    def thinks(text):
        unmarked = text.replace("{%- generation %}", "").replace("{%- endgeneration %}", "")
        return unmarked.replace(
            "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}",
            "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>' }}",
        )

    folder = with_template(tiny, tmp_path / "thinks", thinks)
    with pytest.raises(DatasetError, match=r"chat 0 cannot be trained exactly: message 1 does not continue the prompt .* part at token"):
        tokenize_chats(chats_of([{"messages": TURNS}], "chats"), folder)


def test_what_is_no_chat():
    """A row that is no chat, or in which the assistant says nothing, is named."""
    with pytest.raises(DatasetError, match=r"chats: row 1 is .*; expected {\"messages\""):
        chats_of([CHATS[0], {"text": "x"}], "chats")
    with pytest.raises(DatasetError, match="row 0 has no message of the assistant"):
        chats_of([{"messages": TURNS[:1]}], "chats")
    with pytest.raises(DatasetError, match="the messages of row 0 are 'hi'"):
        chats_of([{"messages": "hi"}], "chats")


def units_of(source, min_reward=None, **given):
    def none(chats):
        raise AssertionError("there are no chats")

    return read_units(source, "store_or_chats", min_reward=min_reward, settings=make_settings(given), tokenize=none)


def test_episodes_are_filtered_by_reward(tmp_path):
    """Sampled tokens once, of the episodes that earned enough; the others are counted by why."""
    chain = (make_call("a", [1, 2], [3, 4]), make_call("b", [1, 2, 3, 4, 5], [6], started=1))
    boom = ErrorInfo(type="openai.InternalServerError", message="500", status_code=500)
    episodes = [
        make_episode(*chain, episode_id="1", reward=1.0),
        make_episode(*chain, episode_id="2", reward=0.2, task_id=None),
        make_episode(make_call("a", [1], [2]), episode_id="3"),
        make_episode(make_call("a", [1], [2]), episode_id="4", reward=1.0, termination="failed", error=boom),
    ]
    found = units_of(episodes, min_reward=0.5)
    (unit,) = found.units
    (row,) = unit.rows
    assert (row.sample.token_ids.tolist(), row.sample.trained_mask.tolist()) == (
        [1, 2, 3, 4, 5, 6],
        [False, False, True, True, False, True],
    )
    assert found.set_aside == {
        "its reward is below 0.5": 1,
        "it has no reward": 1,
        "it failed, and not because of the policy (infrastructure)": 1,
    }
    write_episodes(tmp_path / "episodes.jsonl", episodes)
    assert len(units_of(tmp_path / "episodes.jsonl").units) == 3


def test_episodes_without_ids_are_trained_on_their_texts(tiny):
    """What was recorded elsewhere has texts only: each call is a chat of which the reply is trained, and that is said."""
    call = make_call(
        "a", [], make_choice([], text="yes", logprobs=None), exact=False, trainable=False, inexact_reason="no ids", messages=TURNS[:1]
    )
    settings = make_settings({})
    tokenize = lambda chats: tokenize_chats(chats, tiny)  # noqa: E731
    found = read_units([make_episode(call, reward=1.0)], "store", min_reward=1, settings=settings, tokenize=tokenize)
    rows = [(row.sample.token_ids, row.sample.trained_mask) for unit in found.units for row in unit.rows]
    assert said(rows, tiny) == [["yes<|im_end|>"]]
    assert found.notes == {"episodes trained on their texts, because no token ids were recorded": 1}


def test_a_run_lowers_the_loss_and_can_be_continued(on_started, tmp_path):
    """Held-out loss falls; a run that is continued has the weights of one that was never stopped."""
    given = SMALL | {"eval_dataset": CHATS[8:], "schedule": "cosine"}
    whole = sft(CHATS[:8], output_dir=tmp_path / "whole", steps=6, eval_every=3, save_every=3, **given)
    assert whole.after < whole.before - 0.3
    losses = [line["loss"] for line in whole.metrics if "loss" in line]
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    assert [line["step"] for line in whole.metrics if "eval/nll" in line] == [0, 3, 6]
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in whole.model_path.iterdir()}

    shutil.copytree(tmp_path / "whole", tmp_path / "half")
    shutil.rmtree(tmp_path / "half" / "checkpoints" / "step-000006")
    assert Checkpoints(tmp_path / "half", 2).latest()[0].step == 3
    half = sft(CHATS[:8], output_dir=tmp_path / "half", steps=6, eval_every=3, save_every=3, resume=True, **given)
    assert (half.model_path / "model.safetensors").read_bytes() == (whole.model_path / "model.safetensors").read_bytes()
    assert (half.before, half.after) == (whole.before, whole.after)
    with pytest.raises(CheckpointError, match="had rows="):
        sft(CHATS[:7], output_dir=tmp_path / "half", resume=True, **SMALL)


def test_from_the_command_line(on_started, tmp_path, capsys):
    """``rllm sft`` trains on a file of chats and says what it did."""
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(chat) + "\n" for chat in CHATS))
    settings = [part for pair in ("threads=1", "steps=1", "lr=1e-3") for part in ("--set", pair)]
    assert main(["sft", str(path), "--model", "tiny-qwen2", "--output", str(tmp_path / "run"), *settings]) == 0
    out = capsys.readouterr().out
    assert "12, " in out
    assert "step 1/1" in out
    assert main(["sft", str(path), "--model", "tiny-qwen2", "--min-reward", "1"]) == 2
    assert "chats have no rewards" in capsys.readouterr().err


@pytest.mark.parametrize(
    "given, words",
    [
        ({"algorithm": "rloo"}, "algorithm='rloo' would have no effect: sft runs no app, serves nothing and gives no credit"),
        ({"eval_every": 2}, "eval_every=2 would have no effect: there is no eval_dataset"),
        ({"sample_mode": "call"}, "sample_mode='call' would have no effect: it is about recorded calls, and these are chats"),
        ({"verl": {"actor": {"clip_ratio_c": 3.0}}}, "verl['actor']['clip_ratio_c'] would have no effect: sft has no policy loss"),
        ({"min_reward": "high"}, "got min_reward='high'; expected a finite number"),
        ({"overlong": "split"}, "overlong='split' cuts the rows of episodes"),
        ({"max_model_len": 8}, "tokens long, max_model_len is 8; raise it, or set overlong='mask'"),
    ],
)
def test_what_has_no_effect_is_refused(tmp_path, given, words):
    """Nothing is started, and no folder is left."""
    with pytest.raises(SettingError) as caught:
        sft(CHATS, output_dir=tmp_path / "run", **SMALL | given)
    assert words in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_training_chats_in_the_evaluation(tmp_path):
    """A held-out chat that is trained too is refused."""
    with pytest.raises(DatasetError, match="1 of the evaluation's units are trained too"):
        sft(CHATS, eval_dataset=CHATS[:1], output_dir=tmp_path / "run", **SMALL)
