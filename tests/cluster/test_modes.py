"""verl's two asynchronous trainers on two simulated nodes: rollouts go on while weights move, with async apps and children of apps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from rllm_trainer.config import make_settings
from rllm_trainer.engine.verl import VerlEngine
from rllm_trainer.models import resolve_model
from rllm_trainer.preparation import make_samples
from rllm_trainer.rollout.record import read_rollouts
from rllm_trainer.types import Rollout, Sample

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

GIVEN: dict[str, Any] = {
    "steps": 3,
    "batch_tasks": 2,
    "group_size": 3,
    "max_model_len": 512,
    "lr": 5e-4,
    "eps": 1e-5,
    "save_every": 1,
    "keep": 3,
    "staleness": 1,
    "shuffle": False,
}


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


def require_carried_over(trained: dict[int, list[Rollout]]) -> None:
    """The calls that the first update cut short are of the second step, went on after it, and say which token is of which version."""
    assert {step: {one.row["number"] for one in rollouts} for step, rollouts in trained.items()} == {1: {0, 1}, 2: {2, 3}, 3: {4, 5}}
    assert [len(trained[step]) for step in (1, 2, 3)] == [6, 6, 6]
    calls = [call for rollout in trained[2] if rollout.episode is not None for call in rollout.episode.calls]
    assert {call.policy_version_start for call in calls} <= {0, 1}
    across = [call for call in calls if (call.policy_version_start, call.policy_version_end) == (0, 1)]
    assert across
    first = [call for rollout in trained[1] if rollout.episode is not None for call in rollout.episode.calls]
    assert {(call.policy_version_start, call.policy_version_end) for call in first} == {(0, 0)}


def require_versions_of_the_weights(model: Path, trained: dict[int, list[Rollout]], folder: Path, direct_batch: Any) -> None:
    """Each token has the logprob of the weights whose version it has, and of no other; they are the direct engine's after each step."""
    settings = make_settings({**GIVEN, "threads": 1})
    with VerlEngine.start(resolve_model("tiny-qwen2"), settings, folder, device="cpu") as engine:
        samples = [
            one for found in make_samples(trained[2], settings=settings, vocab_size=engine.vocab_size).values() for one in found.samples
        ]
        under: list[list[Any]] = []
        for step in (1, 2, 3):
            if step < 3:
                under.append(engine.logprobs([one.token_ids for one in samples], temperatures=[one.temperature for one in samples]))
            engine.update(direct_batch(trained[step], step, settings, engine), lr=GIVEN["lr"])
        direct = load_file(engine.export_weights(3).path)
    both = 0
    for sample, *logprobs in zip(samples, *under, strict=True):
        both += require_right(sample, logprobs)
    assert both >= 1
    ours = load_file(model / "model.safetensors")
    for name, value in direct.items():
        np.testing.assert_allclose(ours[name], value, rtol=0, atol=1e-5, err_msg=name)


def require_right(sample: Sample, logprobs: list[Any]) -> bool:
    """Whether the row has tokens of both versions: first all of the older, then all of the newer one."""
    versions = sample.versions[sample.trained_mask]
    assert set(versions.tolist()) <= {0, 1}
    for version, under in enumerate(logprobs):
        at = sample.trained_mask & (sample.versions == version)
        np.testing.assert_allclose(sample.logprobs[at], under[at], rtol=0, atol=1e-4)
    if len(set(versions.tolist())) < 2:
        return False
    assert (np.diff(versions) >= 0).all()
    newer = sample.trained_mask & (sample.versions == 1)
    assert np.abs(sample.logprobs[newer] - logprobs[0][newer]).max() > 1e-3
    return True


def test_an_async_app_trains_while_what_an_update_cuts_short_goes_on(
    cluster_run: Any, optimizer_steps: Any, direct_batch: Any, trained_rollouts: Any, tmp_path: Path
) -> None:
    """``colocate_async``: two agents at once, over three updates, each of which is one optimizer step though it has twelve rows."""
    layout = {"mode": "colocate_async", "nodes": 2, "gpus_per_node": 1, "app_workers": 2, "app_cpus": 0}
    run_dir = tmp_path / "run"
    found = cluster_run(run_dir, app="two_at_once", cluster=layout, **GIVEN)
    require_sound(found, run_dir, calls=2)
    assert any(line["tokens/stale"] > 0 for line in found["metrics"] if line["step"] > 1)
    assert [line["update/rows"] for line in found["metrics"] if line["step"] > 0] == [12, 12, 12]
    assert [optimizer_steps(run_dir, step, ranks=2) for step in (1, 2, 3)] == [{1.0}, {2.0}, {3.0}]
    trained = trained_rollouts(run_dir)
    require_carried_over(trained)
    require_versions_of_the_weights(Path(found["model"]), trained, tmp_path / "direct", direct_batch)


def test_an_app_that_starts_children_trains_on_replicas_of_their_own(
    cluster_run: Any, direct_batch: Any, trained_rollouts: Any, tmp_path: Path
) -> None:
    """``separate_async``: weights go through Ray's store to replicas on other devices, and calls come from child processes."""
    layout = {"mode": "separate_async", "nodes": 2, "gpus_per_node": 1, "app_workers": 2, "app_cpus": 0}
    own = {"rollout_nodes": 2, "rollout_gpus_per_node": 1}
    run_dir = tmp_path / "run"
    found = cluster_run(run_dir, app="in_a_child", cluster=layout | own, gpus_a_node=2, **GIVEN)
    require_sound(found, run_dir, calls=1)
    trained = trained_rollouts(run_dir)
    require_carried_over(trained)
    require_versions_of_the_weights(Path(found["model"]), trained, tmp_path / "direct", direct_batch)
