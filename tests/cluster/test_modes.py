"""verl's two asynchronous trainers on two simulated nodes: rollouts go on while weights move, with async apps and children of apps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rllm_trainer.rollout.record import read_rollouts

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

GIVEN: dict[str, Any] = {"steps": 3, "batch_tasks": 2, "group_size": 3, "max_model_len": 512, "lr": 2e-4, "save_every": 2, "staleness": 1}


def require_sound(found: dict[str, Any], run_dir: Path, calls: int) -> None:
    """Three steps of six episodes, none lost, every token at most one update old, and a version on each."""
    lines = [line for line in found["metrics"] if line["step"] > 0]
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert (line["rollouts"], line["calls"], line["rollouts/excluded"]) == (6, 6 * calls, 0)
        assert line["tokens/oldest"] <= 1
        assert line["grad_norm"] > 0
    for rollouts in read_rollouts(run_dir).values():
        for rollout in rollouts:
            assert rollout.episode is not None
            for call in rollout.episode.calls:
                assert call.policy_version_start is not None
                assert call.exact


def test_an_async_app_trains_while_what_an_update_cuts_short_goes_on(cluster_run: Any, tmp_path: Path) -> None:
    """``colocate_async``: two agents at once, over three updates."""
    layout = {"mode": "colocate_async", "nodes": 2, "gpus_per_node": 1, "app_workers": 2, "app_cpus": 0}
    found = cluster_run(tmp_path / "run", app="two_at_once", cluster=layout, **GIVEN)
    require_sound(found, tmp_path / "run", calls=2)
    assert any(line["tokens/stale"] > 0 for line in found["metrics"] if line["step"] > 1)


def test_an_app_that_starts_children_trains_on_replicas_of_their_own(cluster_run: Any, tmp_path: Path) -> None:
    """``separate_async``: weights go through Ray's store to replicas on other devices, and calls come from child processes."""
    layout = {"mode": "separate_async", "nodes": 2, "gpus_per_node": 1, "app_workers": 2, "app_cpus": 0}
    own = {"rollout_nodes": 2, "rollout_gpus_per_node": 1}
    found = cluster_run(tmp_path / "run", app="in_a_child", cluster=layout | own, gpus_a_node=2, **GIVEN)
    require_sound(found, tmp_path / "run", calls=1)
