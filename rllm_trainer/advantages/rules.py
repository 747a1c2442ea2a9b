"""The rules by name, as verl names them."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

from rllm_trainer.advantages import (
    gae,
    gdpo,
    gpg,
    grpo,
    grpo_passk,
    grpo_vectorized,
    opo,
    optimal_token_baseline,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
    rloo,
    rloo_vectorized,
    tir_optimal_token_baseline,
)
from rllm_trainer.advantages.base import Rule
from rllm_trainer.advantages.registered import registered_in
from rllm_trainer.exceptions import SettingError

__all__ = ["RULES", "register", "rule_named", "rules_of"]

_MODULES: tuple[ModuleType, ...] = (
    gae,
    gdpo,
    gpg,
    grpo,
    grpo_passk,
    grpo_vectorized,
    opo,
    optimal_token_baseline,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
    rloo,
    rloo_vectorized,
    tir_optimal_token_baseline,
)
_OF_VERL: dict[str, Rule] = {module.RULE.name: module.RULE for module in _MODULES}
RULES: dict[str, Rule] = dict(_OF_VERL)
"""verl's, and those that ``register`` was given."""


def register(rule: Rule) -> Rule:
    """Make a rule of one's own known under its name: ``register(Rule(name="mine", function=..., ...))``, then ``algorithm="mine"``.

    Raises:
        SettingError: it has no function, or verl has an estimator of that name.
    """
    if rule.function is None:
        raise SettingError(f"rule {rule.name!r} has no function; expected one from Units to advantages, one for each trained token")
    if rule.name in _OF_VERL:
        raise SettingError(f"verl has an estimator {rule.name!r}; give your rule another name")
    RULES[rule.name] = rule
    return rule


def rules_of(algorithm: str | Mapping[str, str]) -> list[Rule]:
    """The rules that a run uses: one for all roles, or one for each.

    Raises:
        SettingError: one is unknown or cannot be used.
    """
    if isinstance(algorithm, Mapping) and not algorithm:
        raise SettingError("algorithm={} names no role; give one rule for all roles, such as 'grpo', or one for each")
    return [rule_named(name) for name in ([algorithm] if isinstance(algorithm, str) else algorithm.values())]


def rule_named(name: str) -> Rule:
    """The rule of that name.

    Raises:
        SettingError: there is none, or it cannot be used here.
    """
    found = RULES.get(name)
    if found is None and (module := registered_in("algorithm", name)) is not None:
        return Rule(name=name, summary=f"Registered by {module}.", grouped=False, inert_without_spread=False, module=module)
    if found is None:
        usable = ", ".join(known for known, rule in RULES.items() if rule.refused is None)
        raise SettingError(f"algorithm={name!r}: neither verl nor a module of yours has such an estimator; choose one of {usable}")
    if found.refused is not None:
        raise SettingError(f"algorithm={name!r} is refused: {found.refused}")
    return found
