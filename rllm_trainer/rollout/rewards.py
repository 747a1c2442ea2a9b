"""Reward functions in, reward records out: found or given, filled by name, converted or refused.

A function's parameters are filled from ``output``, ``row``, ``episode`` and ``error`` (reserved words), then from the row's columns.
What it returns becomes records with finite values, or is refused with its name; a reward that the app gave while it ran is not given
again under the same name. A total is the sum of weight * value over the records of the episode's own scope.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import CodeType, ModuleType
from typing import Any, cast

import msgspec

from rllm_trace._rewards import RewardKind
from rllm_trace._values import rewards_of
from rllm_trace.types import Episode, Reward
from rllm_trainer.exceptions import RewardError
from rllm_trainer.rollout.app import kinds_of
from rllm_trainer.rollout.arguments import app_name

__all__ = ["RewardFunction", "RewardPlan", "Scored", "given_functions", "given_rewards", "plan_rewards", "read_value", "total_reward"]

OUTPUT, ROW, EPISODE, ERROR = "output", "row", "episode", "error"
_RESERVED = (OUTPUT, ROW, EPISODE, ERROR)
_LATER = "add_reward"


class Scored(msgspec.Struct, frozen=True, kw_only=True):
    """What a rollout is worth."""

    reward: float | None
    """The total; None where no reward was given."""
    rewards: dict[str, float]
    """By name, before weights."""


class RewardFunction:
    """One function of the user's, with the names that it takes."""

    def __init__(self, function: Callable[..., Any]) -> None:
        if not callable(function):
            raise RewardError(f"reward: got {function!r}; expected a function or a list of functions")
        kind = _kind_of(function)
        self.call: Callable[..., Any] = getattr(function, "__wrapped__", function) if kind is not None else function
        self.name: str = (kind and kind.name) or app_name(function).rpartition(".")[2]
        self.weight: float = kind.weight if kind is not None else 1.0
        self._parameters = _parameters(self.call, self.name)
        self.takes_error = any(p.name == ERROR or p.kind is inspect.Parameter.VAR_KEYWORD for p in self._parameters)

    def arguments(self, *, output: Any, row: Any, episode: Episode | None, error: BaseException | None) -> dict[str, Any]:
        """Its arguments for one rollout. Raises ``RewardError`` where a required parameter has no value."""
        columns: dict[str, Any] = {str(k): v for k, v in cast("Mapping[Any, Any]", row).items()} if isinstance(row, Mapping) else {}
        reserved: dict[str, Any] = {OUTPUT: output, ROW: row, EPISODE: episode, ERROR: error}
        values = columns | reserved
        if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in self._parameters):
            return values
        missing = [p.name for p in self._parameters if p.name not in values and p.default is inspect.Parameter.empty]
        if missing:
            raise RewardError(
                f"the reward {self.name} needs {', '.join(missing)}, and neither the reserved words ({', '.join(_RESERVED)}) "
                f"nor the row's columns ({', '.join(columns) or 'none'}) have it; rename the parameter or give it a default"
            )
        return {p.name: values[p.name] for p in self._parameters if p.name in values}


class RewardPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Where rewards come from in this run."""

    functions: list[RewardFunction]
    """Called after the app, in this order."""
    only_if_none: bool
    """True: they were found, not given, and an episode that the app gave any reward is left as it is."""
    source: str
    """One sentence for the start of the run."""

    def due(self, episode: Episode | None, error: BaseException | None) -> list[RewardFunction]:
        """The functions to call for one rollout: those whose name was not given, and, where the app raised, that take ``error``."""
        given = set(given_rewards(episode))
        if self.only_if_none and given:
            return []
        return [f for f in self.functions if f.name not in given and (error is None or f.takes_error)]


def plan_rewards(reward: Callable[..., Any] | Iterable[Callable[..., Any]] | None, app: Callable[..., Any]) -> RewardPlan:
    """The run's rewards: those given, else those decorated in the app's module, else those that the app gives itself.

    Raises:
        RewardError: none is given and none can be found, or two have one name.
    """
    functions = given_functions(reward)
    if functions is not None:
        names = ", ".join(f.name for f in functions)
        source = f"{names}, called after the app" if functions else "only those that the app gives while it runs"
        return RewardPlan(functions=functions, only_if_none=False, source=source)
    module = _module_of(app)
    found = _decorated(module)
    if found:
        functions = [RewardFunction(f) for f in found]
        _require_distinct(functions)
        names = ", ".join(f.name for f in functions)
        return RewardPlan(
            functions=functions,
            only_if_none=True,
            source=f"those that the app gives while it runs, else {names} of {module.__name__}, called after it",
        )
    if _gives_rewards(module):
        return RewardPlan(functions=[], only_if_none=True, source="only those that the app gives while it runs")
    raise RewardError(
        f"no reward: {app_name(app)} was given none, and its module {module.__name__} has no function decorated with @rllm.reward; "
        "pass reward=, decorate a function of that module, or pass reward=[] if the app gives rewards from elsewhere while it runs"
    )


def given_functions(reward: Callable[..., Any] | Iterable[Callable[..., Any]] | None) -> list[RewardFunction] | None:
    """What ``reward=`` was given; None where it was not. Raises ``RewardError`` for what is no function, or two of one name."""
    if reward is None:
        return None
    given = cast("Iterable[Callable[..., Any]]", reward) if isinstance(reward, Iterable) else [reward]
    functions = [RewardFunction(f) for f in given]
    _require_distinct(functions)
    return functions


def read_value(function: RewardFunction, value: Any, *, given: Iterable[str] = (), span_id: str | None = None) -> list[Reward]:
    """The records of what a reward function returned in the span ``span_id``; names that the app has given already are left out.

    Raises:
        rllm_trace.exceptions.RewardError: it is None, NaN, a string or something else that is no finite number.
    """
    skip = set(given)
    return [r for r in rewards_of(value, function.name, function.weight, target=None, span_id=span_id) if r.name not in skip]


def given_rewards(episode: Episode | None) -> dict[str, float]:
    """Name -> value of the rewards in an episode and its trajectories that still count; the episode's own win over a trajectory's."""
    if episode is None:
        return {}
    ofs = [r for t in episode.trajectories for r in t.rewards] + list(episode.rewards)
    return {r.name: r.value for r in ofs if not r.superseded}


def total_reward(episode: Episode) -> Scored:
    """What an episode is worth: its own total, else the mean of its trajectories' totals."""
    own = [t.reward for t in episode.trajectories if t.reward is not None]
    reward = episode.reward if episode.reward is not None else (sum(own) / len(own) if own else None)
    return Scored(reward=reward, rewards=given_rewards(episode))


def _parameters(function: Callable[..., Any], name: str) -> list[inspect.Parameter]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise RewardError(f"the parameters of the reward {name} cannot be read ({error}); wrap it in a function of your own") from None
    kept = [p for p in parameters if p.kind is not inspect.Parameter.VAR_POSITIONAL]
    unnamed = [p.name for p in kept if p.kind is inspect.Parameter.POSITIONAL_ONLY]
    if unnamed:
        raise RewardError(f"the reward {name} has positional-only parameters ({', '.join(unnamed)}); they are filled by name")
    return kept


def _require_distinct(functions: Sequence[RewardFunction]) -> None:
    names = [f.name for f in functions]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise RewardError(f"two rewards are named {sorted(twice)[0]!r}; give one another name: @rllm.reward(name=...)")


def _kind_of(function: Any) -> RewardKind | None:
    """The settings of its own ``@reward``; None without."""
    return next((kind for kind in kinds_of(function) if isinstance(kind, RewardKind)), None)


def _module_of(app: Callable[..., Any]) -> ModuleType:
    inner = inspect.unwrap(getattr(app, "func", app))
    name = getattr(inner, "__module__", None) or type(inner).__module__
    return sys.modules[name] if name in sys.modules else sys.modules["__main__"]


def _decorated(module: ModuleType) -> list[Callable[..., Any]]:
    found = [value for value in vars(module).values() if callable(value) and _kind_of(value) is not None]
    return list({id(value): value for value in found}.values())


def _gives_rewards(module: ModuleType) -> bool:
    """Whether code of the module calls ``add_reward``, or one of its classes has a decorated reward."""
    for value in vars(module).values():
        inner = inspect.unwrap(value) if callable(value) else value
        if getattr(inner, "__module__", None) != module.__name__:
            continue
        parts = list(vars(inner).values()) if inspect.isclass(inner) else [inner]
        if any(_kind_of(part) is not None or _names(getattr(part, "__code__", None), _LATER) for part in parts):
            return True
    return False


def _names(code: CodeType | None, name: str) -> bool:
    if code is None:
        return False
    return name in code.co_names or any(_names(const, name) for const in code.co_consts if isinstance(const, CodeType))
