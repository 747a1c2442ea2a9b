"""Parity with verl: with one row a trajectory, loss and aggregation are those of verl's own functions on verl's own matrices."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from rllm_trainer.batching import make_batch
from rllm_trainer.config import make_settings
from rllm_trainer.engine.policy_losses import POLICY_LOSSES
from rllm_trainer.types import Row

LENGTHS = (8, 3, 12, 5)
PROMPT = 6
SCALE = 40
USABLE = sorted(name for name, loss in POLICY_LOSSES.items() if loss.refused is None)
AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
UNCLIPPED = ("dro", "gpg", "sapo")
"""Losses that look at no clip range; the settings refuse one with them."""
CASES = [(name, agg) for name in USABLE for agg in AGGREGATIONS if POLICY_LOSSES[name].loss_agg in (None, agg)]


@pytest.mark.parametrize("name, agg", CASES)
@pytest.mark.filterwarnings("ignore")
def test_losses_are_verls(fresh: Any, make_row: Any, name: str, agg: str) -> None:
    """The same number, clipped on both sides, importance weights included."""
    random = np.random.default_rng(3)
    actor: dict[str, Any] = {"loss_scale_factor": SCALE}
    if name == "dro":
        actor["policy_loss"] = {"dro_beta": 0.1}
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
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import FSDPActorConfig
    from verl.workers.config.actor import PolicyLossConfig

    now = engine.logprobs([row.sample.token_ids for row in rows], temperatures=[1.0] * len(rows))

    def matrix(columns: list[Any]) -> Any:
        out = torch.zeros(len(rows), max(LENGTHS))
        for number, (values, length) in enumerate(zip(columns, LENGTHS, strict=True)):
            out[number, :length] = torch.from_numpy(np.ascontiguousarray(values[PROMPT:]))
        return out

    config = FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        use_dynamic_bsz=True,
        clip_ratio_low=given.get("clip_low", 0.2),
        clip_ratio_high=given.get("clip_high", 0.2),
        policy_loss=PolicyLossConfig(loss_mode=name, **given["verl"]["actor"].get("policy_loss", {})),
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
