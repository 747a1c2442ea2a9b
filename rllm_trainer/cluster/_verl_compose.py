"""Overrides in, verl's own configuration out: composed by Hydra from verl's files, and validated by verl's schema.

Imports verl, so it runs in a worker of the cluster (or a test), never in the app's process.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rllm_trainer.exceptions import SettingError

__all__ = ["compose", "composed_yaml"]


def compose(overrides: Sequence[str], *, validate: bool = True) -> Any:
    """The ``ppo_trainer`` configuration with these overrides.

    Raises:
        SettingError: verl has no such entry, or refuses its value; the message is verl's.
    """
    import hydra
    import verl
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    folder = Path(str(verl.__file__)).parent / "trainer" / "config"
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(config_dir=str(folder), version_base=None):
            config: Any = hydra.compose(config_name="ppo_trainer", overrides=list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        cause = error.__cause__
        raise SettingError(f"verl refuses an entry of its configuration: {error}{f' ({cause})' if cause else ''}") from error
    if validate:
        _validate(config)
    return config


def composed_yaml(overrides: Sequence[str]) -> str:
    """The validated configuration, to be read by people. Raises as ``compose``."""
    from omegaconf import OmegaConf

    return str(OmegaConf.to_yaml(compose(overrides)))


def _validate(config: Any) -> None:
    from omegaconf import OmegaConf
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils import config as verl_config

    try:
        OmegaConf.resolve(config)
        schema: Any = verl_config
        schema.validate_config(config=config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
        for part in ("rollout", "actor"):
            schema.omega_conf_to_dataclass(config.actor_rollout_ref[part])
    except (AssertionError, ValueError, TypeError, KeyError) as error:
        raise SettingError(f"verl refuses its configuration: {type(error).__name__}: {error}") from error
