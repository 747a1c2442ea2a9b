"""verl's own trainer on a simulated Ray cluster of two nodes trains what the direct engine would have trained, to five digits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from rllm_trainer.config import make_settings
from rllm_trainer.credit_log import CreditLine, credit_lines, read_credit
from rllm_trainer.engine.base import UpdateReport
from rllm_trainer.engine.verl import VerlEngine
from rllm_trainer.models import resolve_model
from rllm_trainer.rollout.record import read_rollouts
from rllm_trainer.types import Batch

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

GIVEN: dict[str, Any] = {
    "steps": 2,
    "batch_tasks": 2,
    "group_size": 3,
    "max_model_len": 512,
    "lr": 2e-4,
    "eps": 1e-5,
    "warmup_steps": 2,
    "kl_coef": 0.5,
    "kl_in": "reward",
    "kl_estimator": "k1",
}
LAYOUT = {"nodes": 2, "gpus_per_node": 1, "app_workers": 2, "app_cpus": 0}


@pytest.fixture(scope="module")
def run(cluster_run: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    run_dir = tmp_path_factory.mktemp("cluster") / "run"
    found = cluster_run(run_dir, eval_rows=4, cluster=LAYOUT, save_every=1, keep=3, **GIVEN)
    return {**found, "run_dir": run_dir}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VerlEngine]:
    settings = make_settings({**GIVEN, "threads": 1})
    with VerlEngine.start(resolve_model("tiny-qwen2"), settings, tmp_path_factory.mktemp("direct"), device="cpu") as engine:
        yield engine


@pytest.fixture(scope="module")
def batches(run: dict[str, Any], engine: VerlEngine, direct_batch: Any) -> dict[int, tuple[Batch, UpdateReport]]:
    """What the direct engine makes of each step, one after the other; it ends with the weights after the last one."""
    settings = make_settings({**GIVEN, "threads": 1})
    found: dict[int, tuple[Batch, UpdateReport]] = {}
    for step, lr in ((1, 1e-4), (2, 2e-4)):
        batch = direct_batch(read_rollouts(run["run_dir"], steps=[step])[step], step, settings, engine)
        found[step] = batch, engine.update(batch, lr=lr)
    return found


@pytest.fixture(scope="module")
def credited(batches: dict[int, tuple[Batch, UpdateReport]]) -> dict[int, list[CreditLine]]:
    """The direct engine's credit, a line for each reply of a step."""
    return {step: list(credit_lines(step, batch)) for step, (batch, _) in batches.items()}


def test_two_ranks_under_verls_trainer_do_what_the_direct_engine_does(
    run: dict[str, Any], engine: VerlEngine, batches: dict[int, tuple[Batch, UpdateReport]]
) -> None:
    """Same rollouts: loss and gradient norm within 1e-5 at every step, and the weights after the last one within 1e-5."""
    lines = {int(line["step"]): line for line in run["metrics"] if line["step"] > 0}
    assert sorted(lines) == [1, 2]
    for step, lr in ((1, 1e-4), (2, 2e-4)):
        batch, report = batches[step]
        assert lines[step]["loss"] == pytest.approx(report.loss, abs=1e-5)
        assert lines[step]["grad_norm"] == pytest.approx(report.grad_norm, rel=1e-4)
        assert report.grad_norm > 0.1
        assert lines[step]["lr"] == lr
        assert lines[step]["batch/denominator"] == batch.denominator
        assert lines[step]["update/rows"] == len(batch.rows)
    direct = load_file(engine.export_weights(1).path)
    trained = load_file(Path(run["model"]) / "model.safetensors")
    assert trained.keys() == direct.keys()
    for name, value in direct.items():
        np.testing.assert_allclose(trained[name], value, rtol=0, atol=1e-5, err_msg=name)
    before = load_file(resolve_model("tiny-qwen2") / "model.safetensors")
    assert max(float(np.abs(trained[name] - before[name]).max()) for name in trained) > 1e-4


def test_every_step_samples_from_the_weights_that_it_updates(run: dict[str, Any]) -> None:
    """The replicas' logprobs are the ranks' own before each update: weights reach them after every step."""
    for line in run["metrics"]:
        if line["step"] > 0:
            assert line["rollout/logprob_diff_max"] < 1e-4
            assert line["tokens/stale"] == 0


def test_each_reply_carries_the_version_that_sampled_it(run: dict[str, Any]) -> None:
    """Version 0 in the first step, 1 in the second."""
    for step in (1, 2):
        for rollout in read_rollouts(run["run_dir"], steps=[step])[step]:
            assert rollout.policy_version == step - 1
            assert rollout.episode is not None
            assert {(call.policy_version_start, call.policy_version_end) for call in rollout.episode.calls} == {(step - 1, step - 1)}


def test_kl_in_the_reward_gives_the_credit_that_the_direct_engine_gives(
    run: dict[str, Any], credited: dict[int, list[CreditLine]], engine: VerlEngine, direct_batch: Any
) -> None:
    """Reply by reply; against the initial weights it comes to nothing before the first update, and changes advantages after it."""
    plain = make_settings({name: value for name, value in GIVEN.items() if not name.startswith("kl_")} | {"threads": 1})
    lowered: dict[int, float] = {}
    for step in (1, 2):
        without = direct_batch(read_rollouts(run["run_dir"], steps=[step])[step], step, plain, engine)
        ours, theirs, base = (
            {(line.span_id, line.choice): line for line in lines}
            for lines in ([one for one in read_credit(run["run_dir"]) if one.step == step], credited[step], credit_lines(step, without))
        )
        assert len(ours) == 12
        assert ours.keys() == theirs.keys() == base.keys()
        for key, line in ours.items():
            assert (line.rule, line.level, line.tokens, line.score) == (*_of(theirs[key]), theirs[key].score)
            assert line.advantage == pytest.approx(theirs[key].advantage, rel=1e-3, abs=1e-3)
        lowered[step] = max(abs(ours[key].advantage - base[key].advantage) for key in ours)
    assert lowered[1] < 3e-4
    assert lowered[2] > 2e-3


def _of(line: CreditLine) -> tuple[str, str, int]:
    return line.rule, line.level, line.tokens


def test_both_nodes_take_part(run: dict[str, Any]) -> None:
    """A rank, a replica and an app worker on each of the two nodes."""
    seen = run["run_dir"].parent / "nodes"
    parts = json.loads((seen / "parts.json").read_bytes())
    apps = {path.name.removeprefix("app-") for path in seen.glob("app-*")}
    assert len(apps) == 2
    for kind in ("WorkerDict", "rllm_cpu_replica"):
        nodes = [node for name, node in parts.items() if kind in name]
        assert len(nodes) == 2, parts
        assert set(nodes) == apps


def test_a_batch_is_one_optimizer_step_whatever_the_number_of_its_rows(run: dict[str, Any], optimizer_steps: Any) -> None:
    """Six episodes of two calls a step, twelve calls trained: AdamW has counted one step after the first batch and two after both."""
    for line in run["metrics"]:
        if line["step"] > 0:
            assert (line["rollouts"], line["calls"], line["calls/trained"]) == (6, 12, 12)
            assert line["faults/infrastructure"] == 0
    assert [optimizer_steps(run["run_dir"], step, ranks=2) for step in (1, 2)] == [{1.0}, {2.0}]


def test_the_run_folder_is_that_of_any_run(run: dict[str, Any]) -> None:
    """Evaluations before and after on the same rows, a checkpoint, verl's own configuration, and a model that loads anywhere."""
    run_dir: Path = run["run_dir"]
    result = json.loads((run_dir / "result.json").read_bytes())
    assert result["before"]["sampled"]["tasks"].keys() == result["after"]["sampled"]["tasks"].keys()
    assert len(result["before"]["sampled"]["tasks"]) == 4
    assert (run_dir / "checkpoints" / "global_step_2" / "actor").is_dir()
    assert "custom_sampler" in (run_dir / "verl.yaml").read_text()
    assert (Path(run["model"]) / "tokenizer.json").exists()
    assert (Path(run["model"]) / "config.json").exists()


def test_the_cluster_was_looked_at_node_by_node(run: dict[str, Any]) -> None:
    """Both nodes answered before the first step, and nothing that depends on the machine's size aside, none has a fault."""
    assert run["nodes"] == [1, 1]
    assert [sentence for sentence in run["findings"] if "free" not in sentence] == []
