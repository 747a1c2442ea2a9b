"""The gradient that is meant: compared with one written out in plain torch, and with itself however the batch is cut."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rllm_trainer.batching import make_batch
from rllm_trainer.config import Settings, make_settings
from rllm_trainer.engine.policy_losses import POLICY_LOSSES
from rllm_trainer.models import resolve_model
from rllm_trainer.types import Batch, Row

TOLERANCE = 1e-5
ENTRIES: dict[str, dict[str, Any]] = {
    "bypass_mode": {"rollout_correction": {"loss_type": "reinforce", "rollout_is": "token"}},
    "clip_cov": {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.0},  # all that qualify: verl draws which ones otherwise
    "dro": {"dro_beta": 0.1},
    "kl_cov": {"kl_cov_ratio": 0.2},
}
"""verl's entries of each loss that has some."""


def ids(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(5, 250, length).tolist()


def batch_of(rows: list[Row], **given: Any) -> Batch:
    return make_batch(rows, settings=make_settings(given), step=1, policy_version=0)


def near_the_policy(engine: Any, rows: list[Row], noise: float = 0.3) -> list[Row]:
    """The rows with old logprobs near the policy's own, so that ratios lie on both sides of the clip."""
    found = engine.logprobs([r.sample.token_ids for r in rows], temperatures=[r.sample.temperature for r in rows])
    random = np.random.default_rng(0)
    moved = [logprobs + random.normal(0, noise, len(logprobs)).astype(np.float32) for logprobs in found]
    return [
        msgspec.structs.replace(row, old_logprobs=np.where(row.sample.trained_mask, old, np.nan).astype(np.float32))
        for row, old in zip(rows, moved, strict=True)
    ]


def plain_gradient(model_path: Path, batch: Batch, settings: Settings) -> tuple[float, dict[str, Any]]:
    """verl's vanilla loss on whole rows, one at a time, every token of every row computed."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    total = torch.tensor(0.0)
    for row in batch.rows:
        tokens = torch.tensor(row.sample.token_ids.astype(np.int64))
        logits = model(tokens[None]).logits[0] / row.sample.temperature
        logprobs = torch.log_softmax(logits[:-1], -1).gather(1, tokens[1:, None])[:, 0]
        mask = torch.tensor(row.sample.trained_mask[1:])
        old, advantage = torch.tensor(row.old_logprobs[1:])[mask], torch.tensor(row.advantages[1:])[mask]
        ratio = torch.exp(logprobs[mask] - old)
        clipped = torch.clamp(ratio, 1 - settings.clip_low, 1 + settings.clip_high)
        loss = torch.maximum(-advantage * ratio, -advantage * clipped)
        loss = torch.where(advantage < 0, torch.minimum(loss, -advantage * 3.0), loss)
        total = total + (loss * torch.tensor(row.weights[1:])[mask]).sum() / batch.denominator
    total.backward()
    return float(total.detach()), {
        name: parameter.grad.numpy() for name, parameter in model.named_parameters() if parameter.grad is not None
    }


def assert_same(left: tuple[float, dict[str, Any]], right: tuple[float, dict[str, Any]]) -> None:
    largest = max(float(np.abs(value).max()) for value in right[1].values())
    assert largest > 1e-3, "the gradient compared must not be nothing"
    assert left[0] == pytest.approx(right[0], abs=TOLERANCE * max(1.0, abs(right[0])))
    assert left[1].keys() == right[1].keys()
    for name, value in left[1].items():
        np.testing.assert_allclose(value, right[1][name], rtol=0, atol=TOLERANCE * max(1.0, largest), err_msg=name)


@pytest.fixture
def rows(make_row: Any) -> list[Row]:
    """Two groups; several replies a row; lengths 12 to 40; one row without any signal; temperatures 1 and 0.7."""
    return [
        make_row(ids(1, 20), [(6, 12, 1.0), (15, 20, 1.0)], episode="e1", group="a"),
        make_row(ids(2, 40), [(10, 14, -1.0), (30, 33, -1.0)], episode="e2", group="a"),
        make_row(ids(3, 12), [(4, 12, 0.5)], episode="e3", group="b", temperature=0.7),
        make_row(ids(4, 25), [(5, 25, 0.0)], episode="e4", group="b"),
        make_row(ids(5, 16), [(3, 9, -0.5), (12, 16, 2.0)], episode="e5", group="b", temperature=0.7),
    ]


@pytest.mark.parametrize("loss_agg", ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_gradient_is_the_one_written_out(fresh: Any, tiny: Path, rows: list[Row], loss_agg: Any) -> None:
    """Loss and gradient equal those of plain torch on whole rows, zero-advantage rows and prompts computed in full."""
    engine = fresh(loss_agg=loss_agg)
    batch = batch_of(near_the_policy(engine, rows), loss_agg=loss_agg)
    assert_same(engine.gradient(batch), plain_gradient(tiny, batch, make_settings({})))


def test_micro_batches_do_not_matter(fresh: Any, rows: list[Row]) -> None:
    """One row at a time, all at once, or in between: one loss, one gradient."""
    found = {}
    for tokens in (1, 64, 4096):
        engine = fresh(micro_batch_tokens=tokens)
        found[tokens] = engine.gradient(batch_of(near_the_policy(engine, rows)))
    assert_same(found[1], found[4096])
    assert_same(found[64], found[4096])


def test_row_order_does_not_matter(fresh: Any, rows: list[Row]) -> None:
    """The order of rows changes nothing."""
    engine = fresh()
    rows = near_the_policy(engine, rows)
    assert_same(engine.gradient(batch_of(rows)), engine.gradient(batch_of(rows[::-1])))


@pytest.mark.parametrize("loss_agg", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_cutting_a_trajectory_does_not_matter(fresh: Any, make_row: Any, rows: list[Row], loss_agg: Any) -> None:
    """A trajectory as one row of two replies, or as two rows of one reply each: same loss, same gradient."""
    engine = fresh(loss_agg=loss_agg)
    whole = make_row(ids(7, 30), [(5, 11, 1.5), (20, 30, 1.5)], episode="cut")
    first = make_row(ids(7, 30)[:11], [(5, 11, 1.5)], episode="cut", name="first")
    second = make_row(ids(7, 30), [(20, 30, 1.5)], episode="cut", name="second")
    one = engine.gradient(batch_of([*rows, whole], loss_agg=loss_agg))
    two = engine.gradient(batch_of([*rows, first, second], loss_agg=loss_agg))
    assert_same(one, two)


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_every_policy_loss_is_invariant(fresh: Any, make_row: Any, rows: list[Row], name: str) -> None:
    """Every usable loss of verl: micro-batches and cuts change neither loss nor gradient."""
    loss = POLICY_LOSSES[name]
    given: dict[str, Any] = {"policy_loss": name, "loss_agg": loss.loss_agg or "token-mean"}
    if name in ENTRIES:
        given["verl"] = {"actor": {"policy_loss": ENTRIES[name]}}
    agg = given["loss_agg"]
    whole = make_row(ids(7, 30), [(5, 11, 1.5), (20, 30, 1.5)], episode="cut")
    first = make_row(ids(7, 30)[:11], [(5, 11, 1.5)], episode="cut", name="first")
    second = make_row(ids(7, 30), [(20, 30, 1.5)], episode="cut", name="second")
    engine = fresh(micro_batch_tokens=4096, **given)
    *others, one = near_the_policy(engine, [*rows, whole], noise=0.1)
    pieces = [
        msgspec.structs.replace(first, old_logprobs=_part(one, first)),
        msgspec.structs.replace(second, old_logprobs=_part(one, second)),
    ]
    expected = engine.gradient(batch_of([*others, one], loss_agg=agg))
    assert_same(engine.gradient(batch_of([*others, *pieces], loss_agg=agg)), expected)
    engine = fresh(micro_batch_tokens=32, **given)
    assert_same(engine.gradient(batch_of([pieces[0], *others, pieces[1]], loss_agg=agg)), expected)


def test_gspo_is_verls_on_one_row_per_trajectory(fresh: Any, tiny: Path, make_row: Any) -> None:
    """``gspo`` takes its ratio over the trajectory: exp of the mean log-ratio over all of its trained tokens."""
    engine = fresh(policy_loss="gspo", clip_low=10.0, clip_high=10.0)
    row = near_the_policy(engine, [make_row(ids(8, 20), [(4, 9, 1.0), (12, 20, 1.0)])])[0]
    now = engine.logprobs([row.sample.token_ids], temperatures=[1.0])[0]
    mask = row.sample.trained_mask
    ratio = float(np.exp((now[mask] - row.old_logprobs[mask]).mean()))
    assert engine.gradient(batch_of([row]))[0] == pytest.approx(-ratio, abs=TOLERANCE)


def test_shared_prefixes_are_computed_once_and_change_nothing(fresh: Any, process: Any, make_row: Any) -> None:
    """A group of eight on one prompt, two branches inside one episode, two equal rows: fewer tokens, same loss, gradient and logprobs."""
    prompt = ids(11, 30)
    rows = [make_row([*prompt, *ids(20 + n, 8)], [(30, 38, 1.0 - 0.3 * n)], episode=f"e{n}", group="a") for n in range(8)]
    rows.append(make_row([*prompt, *ids(20, 8), 7, 8, 9], [(38, 41, 0.5)], episode="e0", name="branch", group="a"))
    rows.append(make_row([*prompt, *ids(21, 8)], [(30, 38, -2.0)], episode="twin", group="a", temperature=0.7))
    engine = fresh()
    assert engine.shares_prefixes
    batch = batch_of(near_the_policy(engine, rows))
    shared, report = engine.gradient(batch), engine.update(batch, lr=0.0)
    logprobs = engine.logprobs([r.sample.token_ids for r in rows], temperatures=[r.sample.temperature for r in rows])
    process.restart(make_settings({"threads": 1}), shared_prefix=False)
    assert not engine.shares_prefixes
    assert_same(shared, engine.gradient(batch))
    assert (report.tokens, engine.update(batch, lr=0.0).tokens) == (30 + 8 * 7 + 3, 8 * 37 + 40 + 37)
    alone = engine.logprobs([r.sample.token_ids for r in rows], temperatures=[r.sample.temperature for r in rows])
    for left, right in zip(logprobs, alone, strict=True):
        np.testing.assert_allclose(left, right, rtol=0, atol=1e-5)


def test_llama_shares_prefixes_too(process: Any, make_row: Any) -> None:
    """The other family of the embedded models."""
    prompt = ids(11, 30)
    rows = [make_row([*prompt, *ids(20 + n, 8)], [(30, 38, 1.0 - 0.3 * n)], episode=f"e{n}") for n in range(4)]
    found = []
    for share in (True, False):
        process.restart(make_settings({"threads": 1}), model_path=resolve_model("tiny-llama"), shared_prefix=share)
        assert process.shares_prefixes is share
        found.append(process.gradient(batch_of(rows)))
    assert_same(*found)


def test_untrained_and_masked_tokens_are_inert(fresh: Any, make_row: Any, rows: list[Row]) -> None:
    """Tokens after the last trained one, weights of 0 and rows without a trained token add no gradient and no weight."""
    engine = fresh()
    rows = near_the_policy(engine, rows)
    expected = engine.gradient(batch_of(rows))
    row = rows[0]
    longer = make_row([*row.sample.token_ids.tolist(), 9, 8, 7], [(6, 12, 1.0), (15, 20, 1.0)], episode="e1", group="a")
    longer = msgspec.structs.replace(longer, old_logprobs=np.concatenate([row.old_logprobs, [np.nan] * 3]).astype(np.float32))
    context = make_row(ids(9, 50), [], episode="context")
    assert_same(engine.gradient(batch_of([longer, *rows[1:], context])), expected)
    weightless = make_row(ids(9, 50), [(10, 50, 5.0)], episode="weightless")
    batch = batch_of(rows)
    with_zero = msgspec.structs.replace(weightless, weights=np.zeros(50, np.float32))
    assert_same(engine.gradient(msgspec.structs.replace(batch, rows=[*batch.rows, with_zero])), expected)


def test_rows_without_advantage_count_in_the_denominator_only(fresh: Any, make_row: Any, rows: list[Row]) -> None:
    """Twenty trained tokens of advantage 0 scale loss and gradient by tokens / (tokens + 20), and do nothing else."""
    engine = fresh()
    rows = near_the_policy(engine, rows)
    loss, gradients = engine.gradient(batch_of(rows))
    tokens = sum(int(row.sample.trained_mask.sum()) for row in rows)
    more = make_row(ids(9, 30), [(10, 30, 0.0)], episode="zero")
    share = tokens / (tokens + 20)
    expected = (loss * share, {name: value * share for name, value in gradients.items()})
    assert_same(engine.gradient(batch_of([*rows, more])), expected)


def test_skipping_zero_rows_is_exact(fresh: Any, tiny: Path, make_row: Any) -> None:
    """A KL term reaches rows without advantage, so then nothing is skipped; without one their gradient is exactly 0."""
    row = make_row(ids(9, 30), [(10, 30, 0.0)])
    loss, gradients = fresh().gradient(batch_of([row]))
    assert loss == 0.0
    assert all(not value.any() for value in gradients.values())
    engine = fresh(kl_coef=0.1)
    reference = [np.full(30, -1.0, np.float32)]
    _, gradients = engine.gradient(batch_of([msgspec.structs.replace(row, ref_logprobs=reference[0])]))
    assert any(value.any() for value in gradients.values())


def test_entropy_and_kl_terms_carry_the_same_shares(fresh: Any, make_row: Any, rows: list[Row]) -> None:
    """With both terms the loss does not depend on micro-batches or cuts, in a mode whose shares differ."""
    given: dict[str, Any] = {"entropy_coef": 0.05, "kl_coef": 0.1, "loss_agg": "seq-mean-token-mean"}
    whole = make_row(ids(7, 30), [(5, 11, 1.5), (20, 30, 1.5)], episode="cut")
    first = make_row(ids(7, 30)[:11], [(5, 11, 1.5)], episode="cut", name="first")
    second = make_row(ids(7, 30), [(20, 30, 1.5)], episode="cut", name="second")
    agg = {"loss_agg": "seq-mean-token-mean"}

    def with_reference(made: list[Row]) -> list[Row]:
        return [
            msgspec.structs.replace(row, ref_logprobs=np.linspace(-2, -4, len(row.sample.token_ids)).astype(np.float32)) for row in made
        ]

    expected = fresh(micro_batch_tokens=4096, **given).gradient(batch_of(with_reference([*rows, whole]), **agg))
    pieces = with_reference([*rows, first, second])
    pieces[-2] = msgspec.structs.replace(pieces[-2], ref_logprobs=with_reference([whole])[0].ref_logprobs[:11])  # type: ignore[index]
    found = fresh(micro_batch_tokens=32, **given).gradient(batch_of(pieces, **agg))
    assert_same(found, expected)


def test_importance_weights_multiply_the_policy_term(fresh: Any, rows: list[Row]) -> None:
    """Weights of 0.5 on every token halve the gradient; the denominator stays."""
    engine = fresh()
    rows = near_the_policy(engine, rows)
    loss, gradients = engine.gradient(batch_of(rows))
    halved = [msgspec.structs.replace(row, is_weights=np.full(len(row.sample.token_ids), 0.5, np.float32)) for row in rows]
    assert_same(engine.gradient(batch_of(halved)), (loss / 2, {name: value / 2 for name, value in gradients.items()}))


def _part(whole: Row, piece: Row) -> Any:
    old = whole.old_logprobs[: len(piece.sample.token_ids)]
    return np.where(piece.sample.trained_mask, old, np.nan).astype(np.float32)


def test_a_model_that_cannot_share_computes_every_row_alone(process: Any, make_row: Any, tiny: Path, tmp_path: Path) -> None:
    """A sliding window is no mask of ours: the same rows go through one by one, without a word from the user, and nothing is shared."""
    windowed = tmp_path / "windowed"
    shutil.copytree(tiny, windowed)
    config = json.loads((windowed / "config.json").read_text())
    config |= {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}
    config["layer_types"] = ["sliding_attention"] * config["num_hidden_layers"]
    (windowed / "config.json").write_text(json.dumps(config))
    prompt = ids(11, 30)
    batch = batch_of([make_row([*prompt, *ids(20 + n, 8)], [(30, 38, 1.0 - 0.3 * n)], episode=f"e{n}") for n in range(4)])
    process.restart(make_settings({"threads": 1}), model_path=windowed)
    assert not process.shares_prefixes
    found = process.gradient(batch)
    assert process.update(batch, lr=0.0).tokens == 4 * 37
    process.restart(make_settings({"threads": 1}), model_path=windowed, shared_prefix=False)
    assert_same(found, process.gradient(batch))
    process.restart(make_settings({"threads": 1}), model_path=tiny)
    assert abs(process.gradient(batch)[0] - found[0]) > 1e-6, "the window matters"
