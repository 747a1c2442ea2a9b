"""The whole loop with rollouts that go on while weights are updated: stale tokens are corrected, bounded and told."""

import openai
import pytest

import rllm_trace as rllm
from rllm_trainer import fit
from rllm_trainer.correction import PRESETS
from rllm_trainer.exceptions import SettingError
from rllm_trainer.rollout.record import read_rollouts

ROWS = [{"word": f"say {i}"} for i in range(32)]

client = openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="the app's own key", max_retries=0)


@rllm.workflow
def app(word):
    return (
        client.chat.completions.create(model="gpt-4o-mini", messages=[{"role": "user", "content": word}], max_tokens=10, temperature=1.0)
        .choices[0]
        .message.content
    )


@rllm.reward
def lowercase(output):
    """The share of lower-case letters in the reply."""
    return sum(letter.islower() for letter in output) / max(1, len(output))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return fit(
        app,
        ROWS,
        model="tiny-qwen2",
        output_dir=tmp_path_factory.mktemp("runs") / "ahead",
        steps=6,
        staleness=2,
        lr=5e-3,
        batch_tasks=4,
        group_size=8,
        threads=1,
        progress=False,
    )


def test_each_batch_of_rows_is_trained_once(run):
    """Six steps train six batches of four groups of eight, one after another, on six versions of the weights."""
    lines = [line for line in run.metrics if "loss" in line]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["rollouts"] for line in lines] == [32.0] * 6
    assert [line["version"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert sorted((step, len(rollouts)) for step, rollouts in read_rollouts(run.run_dir).items()) == [(n, 32) for n in range(1, 7)]


def test_stale_tokens_are_corrected_and_told(run):
    """The first step has none; with two batches begun ahead the third has, and verl's correction says what it did."""
    lines = [line for line in run.metrics if "loss" in line]
    assert lines[0]["tokens/stale"] == 0
    assert not any(name.startswith("rollout_corr/") for name in lines[0])
    assert lines[2]["tokens/stale"] > 0
    assert any(name.startswith("rollout_corr/") for name in lines[2])
    assert max(line["tokens/oldest"] for line in lines) <= 2


def test_the_presets_are_verls():
    """Each name that is offered is one of verl's, and all of verl's decoupled ones are offered."""
    from verl.trainer.config.algorithm import RolloutCorrectionConfig

    assert [name for name in dir(RolloutCorrectionConfig) if name.startswith("decoupled_")] == sorted(PRESETS)


@pytest.mark.parametrize(
    "given, words",
    [
        ({"correction": "decoupled_seq_is"}, "staleness=0"),
        ({"staleness": 1, "correction": "decoupled"}, "decoupled_token_is"),
        ({"staleness": -1}, "staleness"),
    ],
)
def test_settings_without_effect_are_refused(given, words, tmp_path):
    """A correction where nothing is stale, and one that verl does not have, are refused before anything starts."""
    with pytest.raises(SettingError, match=words):
        fit(app, ROWS, model="tiny-qwen2", output_dir=tmp_path / "run", **given)
