"""A name in, the user's module that registered it with verl in this process out: for estimators and policy losses that verl lacks.

``@register_adv_est("mine")`` and ``@register_policy_loss("mine")`` of verl put a function into a table of verl's. verl itself is never
imported here: where nobody has, nobody has registered anything. The engine's process imports the module, and finds it registered too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, Literal, cast

from rllm_trainer.exceptions import SettingError

__all__ = ["registered_in"]

_TABLES = {"algorithm": "ADV_ESTIMATOR_REGISTRY", "policy_loss": "POLICY_LOSS_REGISTRY"}
_VERL = "verl.trainer.ppo.core_algos"


def registered_in(setting: Literal["algorithm", "policy_loss"], name: str) -> str | None:
    """The name of the module; None where nothing is registered under that name, or verl is not imported.

    Raises:
        SettingError: it was registered by the script that runs, which another process cannot import.
    """
    table = cast("Mapping[str, Callable[..., Any]]", getattr(sys.modules.get(_VERL), _TABLES[setting], {}))
    found = table.get(name)
    if found is None or found.__module__.partition(".")[0] == "verl":
        return None
    if found.__module__ == "__main__":
        raise SettingError(
            f"{setting}={name!r} is registered with verl by the script that runs, and the engine's process cannot import a script; "
            "move the function into a module that the script imports"
        )
    return found.__module__
