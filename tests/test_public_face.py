"""The names that users may rely on, written out: a change here is a change of the product."""

import importlib
import types

import pytest

import rllm_trace
import rllm_trainer

PROMISED = {
    "rllm_trace": {
        "workflow", "reward", "agent", "tool", "no_train", "collect", "configure", "flush", "shutdown", "stats", "instrument",
        "uninstrument", "add_reward", "current_episode", "headers", "attach", "bind",
        "Episode", "Trajectory", "ModelCall", "Choice", "Reward", "ToolCall",
    },
    "rllm_trainer": {"fit", "evaluate", "replay", "sft"},
}  # fmt: skip


@pytest.mark.parametrize("module", [rllm_trace, rllm_trainer], ids=lambda module: module.__name__)
def test_the_public_names_are_sorted_and_there(module: types.ModuleType) -> None:
    """``__all__`` is sorted, without doubles, and each of its names resolves."""
    assert module.__all__ == sorted(set(module.__all__))
    assert [name for name in module.__all__ if not hasattr(module, name)] == []


@pytest.mark.parametrize("module", [rllm_trace, rllm_trainer], ids=lambda module: module.__name__)
def test_the_promised_names_are_public(module: types.ModuleType) -> None:
    """Every name that the documentation promises is in ``__all__``."""
    assert PROMISED[module.__name__] - set(module.__all__) == set()


@pytest.mark.parametrize("module", [rllm_trace, rllm_trainer], ids=lambda module: module.__name__)
def test_everything_public_says_what_it_is(module: types.ModuleType) -> None:
    """Each public name has a docstring."""
    assert [name for name in module.__all__ if not (getattr(module, name).__doc__ or "").strip()] == []


@pytest.mark.parametrize(
    "name", ["rllm_trace.rollouts", "rllm_trace.routing", "rllm_trace.testing", "rllm_trace.types", "rllm_trainer.models"]
)
def test_public_modules_import_alone(name: str) -> None:
    """A module that others build on can be imported by itself."""
    assert importlib.import_module(name).__doc__


def test_an_unknown_name_is_an_attribute_error() -> None:
    """A name that does not exist is refused as Python does it, although names are resolved late."""
    with pytest.raises(AttributeError, match="nonsense"):
        rllm_trainer.nonsense  # noqa: B018
