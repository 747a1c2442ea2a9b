"""The rules by name, as verl names them."""

from __future__ import annotations

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
from rllm_trainer.exceptions import SettingError

__all__ = ["RULES", "rule_named"]

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
RULES: dict[str, Rule] = {module.RULE.name: module.RULE for module in _MODULES}


def rule_named(name: str) -> Rule:
    """The rule of that name.

    Raises:
        SettingError: there is none, or it cannot be used here.
    """
    found = RULES.get(name)
    if found is None:
        usable = ", ".join(known for known, rule in RULES.items() if rule.refused is None)
        raise SettingError(f"algorithm={name!r}: verl has no such estimator; choose one of {usable}")
    if found.refused is not None:
        raise SettingError(f"algorithm={name!r} is refused: {found.refused}")
    return found
