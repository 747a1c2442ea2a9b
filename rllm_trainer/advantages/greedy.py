"""Settings in, whether each group needs one more rollout at temperature 0 out: the baseline of rules such as ``remax``.

That rollout is made with the weights that sampled its group, scored like it, and never trained. Where there can be none, the rule is
refused before anything is started.
"""

from __future__ import annotations

from collections.abc import Mapping

from rllm_trainer.advantages.rules import rules_of
from rllm_trainer.config import Settings
from rllm_trainer.exceptions import SettingError

__all__ = ["greedy_rule", "require_greedy"]


def greedy_rule(algorithm: str | Mapping[str, str]) -> str | None:
    """The name of a rule that takes the reward of a greedy rollout of each row; None: no role has such a rule."""
    return next((rule.name for rule in rules_of(algorithm) if "greedy" in rule.needs), None)


def require_greedy(settings: Settings) -> None:
    """Raises ``SettingError`` where a rule takes a greedy rollout of each row, and another setting leaves it none."""
    name = greedy_rule(settings.algorithm)
    if name is None:
        return
    whole = "the greedy rollout is worth something as a whole, and gives single calls no baseline"
    reasons = {
        f"staleness={settings.staleness}": (
            settings.staleness,
            "the greedy rollout must be of the weights that its group was sampled with",
        ),
        f"refill={settings.refill}": (settings.refill, "which groups say nothing is decided by what their own rollouts are worth"),
        f"returns={settings.returns!r}": (settings.returns == "to_go", whole),
    }
    for setting, (is_set, reason) in reasons.items():
        if is_set:
            raise SettingError(f"algorithm={name!r} is refused with {setting}: {reason}; leave one of them out, or use 'rloo' or 'grpo'")
