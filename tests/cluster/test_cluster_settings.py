"""What a run on Ray can be asked for: every setting has an effect or is refused by name before Ray starts."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest

from rllm_trainer.cluster.refusals import mode_of, require_cluster, require_elsewhere
from rllm_trainer.cluster.verl_overrides import Facts, overrides
from rllm_trainer.config import make_settings
from rllm_trainer.exceptions import SettingError

FACTS = Facts(model="/models/m", run_dir="/runs/r", steps=7, device="cuda", rollout="vllm", resume=False, max_model_len=4096)


def composed(given: dict[str, Any], facts: Facts = FACTS) -> dict[str, str]:
    """Overrides by name."""
    settings = make_settings({"engine": "cluster", **given})
    require_cluster(settings, given)
    return dict(entry.split("=", 1) for entry in overrides(settings, facts))


@pytest.mark.parametrize(
    "given, words",
    [
        ({"port": 8000}, "port=8000 would have no effect with engine='cluster'"),
        ({"threads": 2}, "Ray sets the cores of its workers aside"),
        ({"refill": 1}, "use engine='direct-ray'"),
        ({"serving": "vllm"}, "cluster={'rollout': 'vllm'}"),
        ({"algorithm": "optimal_token_baseline"}, "use engine='direct-ray'"),
        ({"algorithm": "remax"}, "verl's trainer makes none with its groups"),
        ({"policy_loss": "gspo"}, "use engine='direct-ray'"),
        ({"cluster": {"mode": "colocate_async"}}, "set staleness=1 or more, got 0"),
        ({"staleness": 1, "cluster": {"mode": "sync"}}, "staleness=1 would have no effect"),
        ({"staleness": 1, "cluster": {"mode": "separate_async"}}, "separate_async needs both"),
        ({"cluster": {"rollout_nodes": 1, "rollout_gpus_per_node": 8}}, "no other mode reads them"),
        (
            {"cluster": {"gpus_per_node": 2, "rollout_tensor_parallel": 4}},
            "2 ranks cannot be cut into replicas of rollout_tensor_parallel=4",
        ),
        ({"verl": {"trainer": {"nnodes": 2}}}, "is the setting cluster={'nodes': ...} here"),
        ({"verl": {"actor_rollout_ref.actor.optim.lr": 1.0}}, "is the setting lr here"),
        ({"cluster": {"gpus": 2}}, "unknown setting 'gpus'"),
    ],
)
def test_what_the_cluster_does_not_honour_is_refused_with_what_to_use(given: dict[str, Any], words: str) -> None:
    """One sentence, before anything starts."""
    with pytest.raises(SettingError) as refused:
        composed(given)
    assert words in str(refused.value)


@pytest.mark.parametrize("given", [{"cluster": {"nodes": 2}}, {"ray": {"num_gpus": 2}}])
def test_settings_of_ray_are_refused_where_no_ray_is_started(given: dict[str, Any]) -> None:
    """They would do nothing."""
    with pytest.raises(SettingError, match="set engine='cluster'"):
        require_elsewhere(make_settings(given), given)


def test_direct_ray_reads_the_ranks_and_nothing_of_verls_trainer() -> None:
    """The layout's nodes and ranks are read; how verl's trainer would serve is not."""
    settings = make_settings({"engine": "direct-ray", "policy_loss": "gspo", "cluster": {"nodes": 2}})
    require_cluster(settings, {})
    for idle in ({"rollout": "vllm"}, {"app_workers": 2}, {"app_cpus": 2.0}, {"rollout_tensor_parallel": 2}):
        settings = make_settings({"engine": "direct-ray", "cluster": idle})
        with pytest.raises(SettingError, match="read by verl's trainer only"):
            require_cluster(settings, {})


def test_staleness_chooses_verls_trainer() -> None:
    """0: turn by turn; else rollouts go on, and verl keeps them within the bound."""
    assert mode_of(make_settings({"engine": "cluster"})) == "sync"
    assert mode_of(make_settings({"engine": "cluster", "staleness": 2})) == "colocate_async"
    entries = composed({"staleness": 2})
    assert entries["trainer.v1.trainer_mode"] == '"colocate_async"'
    assert entries["trainer.v1.sampler.max_off_policy_threshold"] == "3"
    assert entries["trainer.v1.colocate_async.num_warmup_batches"] == "2"


def test_one_optimizer_step_takes_the_whole_batch() -> None:
    """verl's mini-batch is the batch, and its own names for credit, loss and data are not left to chance."""
    entries = composed({"batch_tasks": 64, "group_size": 4, "lr": 1e-6, "steps": 7})
    assert entries["data.train_batch_size"] == entries["actor_rollout_ref.actor.ppo_mini_batch_size"] == "64"
    assert entries["actor_rollout_ref.rollout.n"] == "4"
    assert entries["actor_rollout_ref.actor.optim.lr"] == "1e-06"
    assert entries["trainer.total_training_steps"] == "7"
    assert entries["actor_rollout_ref.rollout.logprobs_mode"] == '"processed_logprobs"'
    assert entries["+actor_rollout_ref.rollout.agent.agent_loop_manager_class"] == ('"rllm_trainer.cluster._verl_manager.AgentLoopManager"')


def test_entries_for_verl_pass_through_as_they_are() -> None:
    """Nested or dotted, whatever their type."""
    entries = composed(
        {
            "verl": {
                "actor_rollout_ref": {"rollout": {"gpu_memory_utilization": 0.6, "engine_kwargs.vllm": {}}},
                "+a.b": [1, "x", None, True],
            }
        }
    )
    assert entries["actor_rollout_ref.rollout.gpu_memory_utilization"] == "0.6"
    assert entries["actor_rollout_ref.rollout.engine_kwargs.vllm"] == "{}"
    assert entries["+a.b"] == '[1,"x",null,true]'


@pytest.mark.parametrize(
    "name, words",
    [
        ("trainer.v1.sampler.max_off_policy_threshold", "is fixed by the run, which sets trainer.v1.sampler.max_off_policy_threshold to 1"),
        ("trainer.default_local_dir", "to '/runs/r/checkpoints'; leave it out"),
        ("+actor_rollout_ref.rollout.calculate_log_probs", "to True; leave it out"),
        ("actor_rollout_ref.actor.use_dynamic_bsz", "to True; leave it out"),
        ("actor_rollout_ref.rollout.agent", "which sets actor_rollout_ref.rollout.agent.agent_loop_manager_class to"),
        ("~trainer.project_name", "entries are set, or added with a +, and not taken away"),
    ],
)
def test_what_the_run_fixes_for_verl_cannot_be_set_otherwise(name: str, words: str) -> None:
    """Bounds, folders, masks and order are the run's; an entry above or below one of them is refused as well."""
    with pytest.raises(SettingError, match=re.escape(words)):
        composed({"verl": {name: 9}})


def test_what_only_makes_verl_faster_or_smaller_is_the_users() -> None:
    """Also where the run sets it."""
    entries = composed({"verl": {"transfer_queue.backend.SimpleStorage.num_data_storage_units": 5, "trainer.logger": ["console"]}})
    assert entries["transfer_queue.backend.SimpleStorage.num_data_storage_units"] == "5"
    assert entries["trainer.logger"] == '["console"]'


@pytest.mark.parametrize(
    "layout, words", [("{nodes:2}", "got --layout '{nodes:2}', which is no JSON"), ('{"nods": 2}', "did you mean 'nodes'?")]
)
def test_a_layout_that_cannot_be_read_is_told_before_ray_is_asked(layout: str, words: str) -> None:
    """By the command itself."""
    command = [sys.executable, "-m", "rllm_trainer.cluster.preflight", "--model", "m", "--run-dir", "r", "--layout", layout]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert words in done.stderr
    assert "Traceback" not in done.stderr
