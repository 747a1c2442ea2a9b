"""Settings in, one sentence for the first that an engine on Ray cannot honour out. Pure: nothing is started to find out.

Each refusal names the setting and what to use instead. What is not named here has an effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rllm_trainer.advantages.rules import rules_of
from rllm_trainer.batching import require_scale_factor
from rllm_trainer.cluster.dotted import dotted
from rllm_trainer.cluster.layout import ClusterLayout, Mode
from rllm_trainer.cluster.layout_rules import require_device, require_sizes
from rllm_trainer.config import Settings
from rllm_trainer.engine.policy_losses import policy_loss
from rllm_trainer.exceptions import SettingError

__all__ = ["ON_RAY", "mode_of", "require_cluster", "require_elsewhere"]

ON_RAY = ("cluster", "direct-ray")
"""Values of ``engine`` that start Ray."""

_ONLY_DIRECT: dict[str, str] = {
    "fireworks": "verl serves the policy itself",
    "in_flight": "verl's own modes say what becomes of requests at an update: cluster={'mode': ...}",
    "limits": "verl's trainer takes the steps; use engine='direct-ray'",
    "port": "replicas have no port of their own; each node's front takes a free one",
    "refill": "verl draws the rows of a step at once; use engine='direct-ray'",
    "replicas": "their number follows from the ranks and cluster={'rollout_tensor_parallel': ...}",
    "serving": "verl starts the replicas; choose them with cluster={'rollout': 'vllm'}",
    "serving_key": "verl serves the policy itself",
    "serving_url": "verl serves the policy itself",
    "threads": "Ray sets the cores of its workers aside; give cluster={'app_cpus': ...} or ray={'num_cpus': ...}",
    "vllm": "verl starts vLLM; entries for it go by verl's names: verl={'actor_rollout_ref.rollout.gpu_memory_utilization': 0.6}",
}
_ONLY_RAY = ("cluster", "ray")
_LAYOUT_OF_THE_TRAINER = (
    "mode",
    "strategy",
    "rollout",
    "rollout_tensor_parallel",
    "rollout_nodes",
    "rollout_gpus_per_node",
    "app_workers",
    "app_cpus",
    "offload",
)


def mode_of(settings: Settings) -> Mode:
    """verl's trainer that the settings ask for.

    Raises:
        SettingError: ``mode`` and ``staleness`` contradict each other.
    """
    asked = settings.cluster.mode
    if asked is None:
        return "sync" if settings.staleness == 0 else "colocate_async"
    if asked == "sync" and settings.staleness:
        raise SettingError(
            f"staleness={settings.staleness} would have no effect: cluster={{'mode': 'sync'}} takes turns; leave one of them out"
        )
    if asked != "sync" and not settings.staleness:
        raise SettingError(f"cluster={{'mode': {asked!r}}} lets rollouts go on while weights move: set staleness=1 or more, got 0")
    return asked


def require_elsewhere(settings: Settings, given: Mapping[str, Any]) -> None:
    """Raises ``SettingError`` where a setting of the cluster is given to an engine that does not read it."""
    if settings.engine in ON_RAY:
        return
    for name in _ONLY_RAY:
        if name in given:
            raise SettingError(f"{name}= would have no effect: engine={settings.engine!r} starts no Ray; set engine='cluster'")


def require_cluster(settings: Settings, given: Mapping[str, Any]) -> None:
    """Raises ``SettingError`` for the first setting that the engine on Ray cannot honour."""
    if settings.engine == "direct-ray":
        _require_direct_ray(settings, given)
        return
    for name, reason in _ONLY_DIRECT.items():
        if name in given:
            raise SettingError(f"{name}={given[name]!r} would have no effect with engine='cluster': {reason}")
    mode = mode_of(settings)
    layout = settings.cluster
    own = (layout.rollout_nodes, layout.rollout_gpus_per_node)
    if any((mode == "separate_async") != (value is not None) for value in own):
        raise SettingError(
            f"cluster: got mode={mode!r} with rollout_nodes={own[0]} and rollout_gpus_per_node={own[1]}; separate_async needs both, "
            "and no other mode reads them"
        )
    require_sizes(layout, mode, dict(dotted(settings.verl)))
    if layout.device != "auto":
        require_device(layout, layout.device)
    _require_credit(settings)
    _require_loss(settings)
    if settings.lora is not None and layout.strategy == "megatron":
        raise SettingError("lora with cluster={'strategy': 'megatron'} is shaped by verl's own entries; use strategy='fsdp2'")


def _require_credit(settings: Settings) -> None:
    for rule in rules_of(settings.algorithm):
        if "greedy" in rule.needs:
            raise SettingError(
                f"algorithm={rule.name!r} takes a greedy rollout of each row, and verl's trainer makes none with its groups; "
                "use engine='direct-ray', or another algorithm"
            )
        if "sum_pi_squared" in rule.needs:
            raise SettingError(
                f"algorithm={rule.name!r} needs the sum of squared probabilities at each token, which verl's trainer does not hand out; "
                "use engine='direct-ray', or another algorithm"
            )
        if rule.function is not None:
            raise SettingError(
                f"algorithm={rule.name!r} is a rule of this process, and verl's trainer runs in another; use engine='direct-ray', "
                "or one of verl's"
            )


def _require_loss(settings: Settings) -> None:
    loss = policy_loss(settings.policy_loss, loss_agg=settings.loss_agg)
    if loss.over_sequences or loss.whole_batch:
        raise SettingError(
            f"policy_loss={loss.name!r} looks at whole trajectories or batches, which verl's trainer cuts into micro-batches; "
            "use engine='direct-ray', or a loss over tokens such as 'vanilla'"
        )
    if loss.needs:
        raise SettingError(
            f"policy_loss={loss.name!r} needs {loss.needs[0]}, which engine='cluster' does not pass; use engine='direct-ray'"
        )
    require_scale_factor(settings)


def _require_direct_ray(settings: Settings, given: Mapping[str, Any]) -> None:
    defaults = ClusterLayout()
    for name in _LAYOUT_OF_THE_TRAINER:
        if getattr(settings.cluster, name) != getattr(defaults, name):
            raise SettingError(
                f"cluster={{{name!r}: {getattr(settings.cluster, name)!r}}} is read by verl's trainer only; leave it out, "
                "or use engine='cluster'"
            )
