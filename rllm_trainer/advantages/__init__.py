"""Groups of scored rollouts and their rows in, rows with an advantage on every trained token out."""

from rllm_trainer.advantages.base import Estimates, Estimator, Rule, Units
from rllm_trainer.advantages.crediting import CreditCounters, Credited, credit
from rllm_trainer.advantages.greedy import greedy_rule, require_greedy
from rllm_trainer.advantages.rules import RULES, register, rule_named, rules_of

__all__ = [
    "RULES",
    "CreditCounters",
    "Credited",
    "Estimates",
    "Estimator",
    "Rule",
    "Units",
    "credit",
    "greedy_rule",
    "register",
    "require_greedy",
    "rule_named",
    "rules_of",
]
