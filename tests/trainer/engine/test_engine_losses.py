"""Parity with verl: with one row a trajectory, loss and aggregation are those of verl's own functions on verl's own matrices."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from rllm_trainer.advantages import Units
from rllm_trainer.batching import make_batch
from rllm_trainer.config import make_settings
from rllm_trainer.engine.policy_losses import POLICY_LOSSES
from rllm_trainer.exceptions import SettingError
from rllm_trainer.types import Row

LENGTHS = (8, 3, 12, 5)
PROMPT = 6
SCALE = 40
USABLE = sorted(POLICY_LOSSES)
AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
UNCLIPPED = ("dro", "gpg", "kl_cov", "sapo")
"""Losses that look at no clip range; the settings refuse one with them."""
ENTRIES: dict[str, dict[str, Any]] = {
    "bypass_mode": {"rollout_correction": {"loss_type": "reinforce"}},
    "clip_cov": {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.0},  # all that qualify: verl draws which ones otherwise
    "dro": {"dro_beta": 0.1},
}
"""verl's entries of each loss that has some."""
CASES = [(name, agg) for name in USABLE for agg in AGGREGATIONS if POLICY_LOSSES[name].loss_agg in (None, agg)]


@pytest.mark.parametrize("name, agg", CASES)
@pytest.mark.filterwarnings("ignore")
def test_losses_are_verls(fresh: Any, make_row: Any, name: str, agg: str) -> None:
    """The same number, clipped on both sides, importance weights included."""
    random = np.random.default_rng(3)
    actor: dict[str, Any] = {"loss_scale_factor": SCALE}
    actor["policy_loss"] = ENTRIES.get(name, {})
    given: dict[str, Any] = {"policy_loss": name, "loss_agg": agg, "verl": {"actor": actor}}
    if name not in UNCLIPPED:
        given |= {"clip_low": 0.15, "clip_high": 0.25}
    engine = fresh(**given)
    advantages = [1.0, -0.5, 0.7, -1.2]
    rows: list[Row] = []
    for number, length in enumerate(LENGTHS):
        tokens = random.integers(5, 250, PROMPT + length).tolist()
        row = make_row(tokens, [(PROMPT, PROMPT + length, advantages[number])], episode=f"e{number}")
        now = engine.logprobs([row.sample.token_ids], temperatures=[1.0])[0]
        old = np.where(row.sample.trained_mask, now + random.normal(0, 0.3, len(now)), np.nan).astype(np.float32)
        weights = random.uniform(0.5, 1.5, len(now)).astype(np.float32)
        rows.append(msgspec.structs.replace(row, old_logprobs=old, is_weights=weights))
    batch = make_batch(rows, settings=make_settings({"threads": 1, **given}), step=1, policy_version=0)
    assert engine.gradient(batch)[0] == pytest.approx(_verls(engine, rows, name, agg, given), rel=1e-4, abs=1e-5)


def _verls(engine: Any, rows: list[Row], name: str, agg: str, given: dict[str, Any]) -> float:
    import torch
    from verl.trainer.config.algorithm import RolloutCorrectionConfig
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import FSDPActorConfig
    from verl.workers.config.actor import PolicyLossConfig

    now = engine.logprobs([row.sample.token_ids for row in rows], temperatures=[1.0] * len(rows))

    def matrix(columns: list[Any]) -> Any:
        out = torch.zeros(len(rows), max(LENGTHS))
        for number, (values, length) in enumerate(zip(columns, LENGTHS, strict=True)):
            out[number, :length] = torch.from_numpy(np.ascontiguousarray(values[PROMPT:]))
        return out

    entries = dict(given["verl"]["actor"]["policy_loss"])
    if "rollout_correction" in entries:
        entries["rollout_correction"] = RolloutCorrectionConfig(**entries["rollout_correction"])
    config = FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        use_dynamic_bsz=True,
        clip_ratio_low=given.get("clip_low", 0.2),
        clip_ratio_high=given.get("clip_high", 0.2),
        policy_loss=PolicyLossConfig(loss_mode=name, **entries),
    )
    config.global_batch_info.update(dp_size=1, batch_num_tokens=sum(LENGTHS), global_batch_size=len(LENGTHS), loss_scale_factor=SCALE)
    loss, _ = get_policy_loss_fn(name)(
        old_log_prob=matrix([row.old_logprobs for row in rows]),
        log_prob=matrix(now),
        advantages=matrix([row.advantages for row in rows]),
        response_mask=matrix([row.weights for row in rows]),
        loss_agg_mode=agg,
        config=config,
        rollout_is_weights=matrix([row.is_weights for row in rows]),
    )
    return float(loss)


COVARIANCE = {
    "clip_cov": {"clip_cov_ratio": 0.1, "clip_cov_lb": 0.0},
    "kl_cov": {"kl_cov_ratio": 0.2, "ppo_kl_coef": 1.0},
}


@pytest.mark.parametrize("name", [*COVARIANCE, "bypass_mode"])
@pytest.mark.filterwarnings("ignore")
def test_losses_over_a_batch_do_not_see_micro_batches(fresh: Any, make_row: Any, name: str) -> None:
    """Which tokens verl picks is decided over the whole batch: loss and gradient are the same in one micro-batch and in many."""
    entries = COVARIANCE.get(name, {"rollout_correction": {"loss_type": "reinforce", "rollout_is": "token"}})
    given: dict[str, Any] = {"policy_loss": name, "verl": {"actor": {"policy_loss": entries}}}
    found = []
    for tokens in (4096, 24):
        engine = fresh(**given, micro_batch_tokens=tokens)
        if not found:
            rows = _rows_near(engine, make_row)
        batch = make_batch(rows, settings=make_settings({"threads": 1, **given}), step=1, policy_version=0)
        found.append(engine.gradient(batch))
    (loss, gradient), (again, other) = found
    assert again == pytest.approx(loss, abs=1e-6)
    largest = max(float(np.abs(value).max()) for value in gradient.values())
    assert largest > 1e-3
    assert all(float(np.abs(gradient[key] - other[key]).max()) < 1e-5 * max(1.0, largest) for key in gradient)
    if name == "kl_cov":
        plain = fresh(policy_loss="vanilla", clip_low=9.0, clip_high=9.0).gradient(batch)[0]
        assert loss > plain + 1e-3, "the tokens picked have a penalty that the plain loss has not"


def _rows_near(engine: Any, make_row: Any) -> list[Row]:
    random = np.random.default_rng(4)
    rows: list[Row] = []
    for number, length in enumerate(LENGTHS):
        tokens = random.integers(5, 250, PROMPT + length).tolist()
        row = make_row(tokens, [(PROMPT, PROMPT + length, [2.0, -1.5, 0.5, 1.0][number])], episode=f"e{number}")
        now = engine.logprobs([row.sample.token_ids], temperatures=[1.0])[0]
        old = np.where(row.sample.trained_mask, now + random.normal(0, 0.3, len(now)), np.nan).astype(np.float32)
        rows.append(msgspec.structs.replace(row, old_logprobs=old))
    return rows


REGISTERS = """
from verl.trainer.ppo.core_algos import agg_loss, register_adv_est, register_policy_loss

@register_adv_est("twice_the_score")
def twice(token_level_rewards, response_mask, index, **kwargs):
    found = 2 * token_level_rewards.sum(-1, keepdim=True) * response_mask
    return found, found

@register_policy_loss("spread")
def spread(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None, rollout_is_weights=None):
    mean = (log_prob * response_mask).sum() / response_mask.sum()
    return agg_loss((log_prob - mean) ** 2, response_mask, loss_agg_mode, **config.global_batch_info), {"spread/mean": mean.item()}
"""


@pytest.mark.filterwarnings("ignore")
def test_what_a_module_registers_with_verl_is_used_by_its_name(fresh: Any, make_row: Any, tmp_path: Any, monkeypatch: Any) -> None:
    """An estimator, and a loss that looks at the whole batch: the same over any micro-batches, and verl's own value of it."""
    (tmp_path / "registers_with_verl.py").write_text(REGISTERS)
    monkeypatch.syspath_prepend(tmp_path)
    import registers_with_verl  # noqa: F401
    import torch
    from verl.trainer.ppo import core_algos

    given: dict[str, Any] = {"algorithm": "twice_the_score", "policy_loss": "spread"}
    try:
        found = []
        for tokens in (4096, 24):
            engine = fresh(**given, micro_batch_tokens=tokens)
            rows = _rows_near(engine, make_row)
            batch = make_batch(rows, settings=make_settings({"threads": 1, **given}), step=1, policy_version=0)
            found.append(engine.gradient(batch))
        now = engine.logprobs([row.sample.token_ids for row in rows], temperatures=[1.0] * len(rows))
        values = np.concatenate([line[row.sample.trained_mask] for line, row in zip(now, rows, strict=True)])
        assert found[0][0] == pytest.approx(found[1][0], abs=1e-5) == pytest.approx(float(values.var()), rel=1e-4)
        for key, gradient in found[0][1].items():
            np.testing.assert_allclose(found[1][1][key], gradient, rtol=0, atol=1e-4)
        units = Units(lengths=np.array([2, 1], np.int32), scores=np.array([1.0, 3.0], np.float32), groups=["a", "a"])
        assert engine.estimate("twice_the_score", units).advantages.tolist() == [2.0, 2.0, 6.0]
        assert torch.is_tensor(core_algos.ADV_ESTIMATOR_REGISTRY["twice_the_score"](torch.ones(1, 1), torch.ones(1, 1), ["a"])[0])
    finally:
        core_algos.ADV_ESTIMATOR_REGISTRY.pop("twice_the_score", None)
        core_algos.POLICY_LOSS_REGISTRY.pop("spread", None)
    with pytest.raises(SettingError, match="neither verl nor a module of yours"):
        fresh(policy_loss="spread")
