"""Every setting is effective or refused."""

import typing

import msgspec
import numpy as np
import pytest

from rllm_trainer.config import LoraSettings, Settings, SettingsKw, make_settings, table
from rllm_trainer.exceptions import SettingError

OWN_PARAMETERS_OF_FIT = {"algorithm", "group_size", "replaces", "sampling", "serving", "engine"}
NOT_IN_THE_TABLE = {"resume"}


def test_the_keywords_are_the_table():
    """What a type checker lets through as a keyword is what the table holds."""
    keywords = set(typing.get_type_hints(SettingsKw)) - NOT_IN_THE_TABLE
    assert keywords == set(Settings.__struct_fields__) - OWN_PARAMETERS_OF_FIT


def test_defaults():
    """Nothing given: one pass, GRPO over groups of 8, all weights at 1e-5."""
    settings = make_settings({})
    assert (settings.algorithm, settings.group_size, settings.batch_tasks) == ("grpo", 8, 8)
    assert (settings.steps, settings.epochs, settings.lr) == (None, 1, 1e-5)


def test_lora_has_its_own_learning_rate():
    """An adapter learns at 1e-4 unless told otherwise."""
    assert make_settings({"lora": {"r": 4}}).lora == LoraSettings(r=4, alpha=32.0, targets="all-linear")
    assert make_settings({"lora": {"r": 4}}).lr == 1e-4
    assert make_settings({"lora": {"r": 4}, "lr": 3e-4}).lr == 3e-4


def test_max_tokens_is_a_sampling_field():
    """``max_tokens`` is short for the sampling field of that name."""
    assert make_settings({"max_tokens": 64, "sampling": {"temperature": 0.7}}).sampling == {"temperature": 0.7, "max_tokens": 64}
    assert make_settings({}).sampling is None


@pytest.mark.parametrize(
    "given, words",
    [
        ({"learning_rate": 1e-5}, "got the unknown setting 'learning_rate'; the settings are algorithm, "),
        ({"batch_task": 4}, "got the unknown setting 'batch_task'; did you mean 'batch_tasks'?"),
        ({"lr": "fast"}, "lr='fast': expected float | null, got str"),
        ({"lr": -1}, "lr=-1: expected float >= 0.0, got -1"),
        ({"steps": 0}, "steps=0: expected int >= 1, got 0"),
        ({"steps": 2.5}, "steps=2.5: expected int"),
        ({"schedule": "cos"}, "choose one of 'constant', 'linear', 'cosine'"),
        ({"betas": (0.9, 1.0)}, "betas[1]=(0.9, 1.0): expected float < 1.0"),
        ({"lora": {"rank": 8}}, "lora: got the unknown setting 'rank'; the settings are alpha, r, targets"),
        ({"lora": {"r": 0}}, "lora.r=0: expected int >= 1, got 0"),
        ({"cluster": {"nodes": 0}}, "cluster.nodes=0: expected int >= 1, got 0"),
        (
            {"cluster": {"strategy": "ddp"}},
            "cluster.strategy='ddp': invalid enum value 'ddp', got 'ddp'; choose one of 'fsdp', 'fsdp2', 'megatron'",
        ),
        ({"replaces": "gpt-4o"}, "got a string, expected a list of model names: replaces=['gpt-4o']"),
        ({"replaces": []}, "replaces=[] names no model, so no call would go to the policy"),
        ({"steps": 3, "epochs": 1}, "got steps=3 and epochs=1; expected one of them"),
        ({"max_tokens": 3, "sampling": {"max_tokens": 4}}, "got max_tokens as a setting and inside sampling"),
        ({"kl_in": "loss"}, "kl_in='loss' would have no effect: kl_coef=0 means no KL term"),
        ({"kl_estimator": "k3"}, "kl_estimator='k3' would have no effect"),
        ({"algorithm": "rloo", "norm_by_std": False}, "norm_by_std=False would have no effect: algorithm='rloo' does not use it"),
        ({"policy_loss": "gpg", "clip_high": 0.3}, "clip_high=0.3 would have no effect: policy_loss='gpg' does not use it"),
        ({"quorum_grace": 3}, "quorum_grace=3 would have no effect: quorum=1 means no giving up of stragglers"),
        ({"schedule": "cosine", "steps": 4, "warmup_steps": 4}, "leaves no step for the cosine schedule: steps is 4"),
        ({"port": 70000}, "port=70000: expected int <= 65535"),
        ({"lr": float("inf")}, "lr=inf: expected a finite number"),
        ({"entropy_coef": float("nan")}, "entropy_coef=nan: expected a finite number"),
        ({"rollout_timeout": float("inf")}, "rollout_timeout=inf: expected a finite number"),
        ({"seed": -1}, "seed=-1: expected int >= 0"),
        ({"seed": 1 << 63}, "seed=9223372036854775808: expected int <= 9223372036854775807"),
        ({"max_model_len": 1}, "max_model_len=1: expected int >= 2"),
        ({"faults": {"network": "train"}}, "faults={'network': 'train'}: invalid enum value 'network'"),
    ],
)
def test_what_cannot_take_effect_is_refused(given, words):
    """Unknown names, wrong values and idle settings each get one sentence."""
    with pytest.raises(SettingError) as caught:
        make_settings(given)
    assert words in str(caught.value)


def test_scalars_of_numpy_are_numbers():
    """What a sweep over ``np.logspace`` gives is a setting like any other."""
    settings = make_settings({"lr": np.float64(0.25), "batch_tasks": np.int64(2), "shuffle": np.bool_(False)})
    assert (settings.lr, settings.batch_tasks, settings.shuffle) == (0.25, 2, False)
    assert type(settings.lr) is float
    with pytest.raises(SettingError, match=r"expected int, got float"):
        make_settings({"batch_tasks": np.float64(2.0)})


def test_a_command_refuses_what_it_does_not_use():
    """A setting that a command has no use for is refused with its reason."""
    with pytest.raises(SettingError, match=r"lr=0\.1 would have no effect: evaluate trains nothing; leave it out"):
        make_settings({"lr": 0.1}, refused={"lr": "evaluate trains nothing"})


def test_the_table_says_what_was_given():
    """One line a setting, in order, marked where the user gave it."""
    rows = table(make_settings({"lr": 0.5}), ["lr"])
    assert [row.name for row in rows] == list(Settings.__struct_fields__)
    assert [(row.name, row.value) for row in rows if row.given] == [("lr", "0.5")]


def test_settings_survive_a_file():
    """The saved table reads back equal."""
    settings = make_settings({"lora": {"r": 2}, "betas": (0.5, 0.9), "sampling": {"stop": ["x"]}})
    assert msgspec.json.decode(msgspec.json.encode(settings), type=Settings) == settings
