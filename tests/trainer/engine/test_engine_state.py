"""What an engine holds and hands out: logprobs, steps, weights files, checkpoints, adapters; and what it leaves alone."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from rllm_trainer._digest import file_digest
from rllm_trainer.batching import make_batch
from rllm_trainer.config import make_settings
from rllm_trainer.engine.base import MostOff
from rllm_trainer.exceptions import CheckpointError, EngineError, SettingError
from rllm_trainer.types import Batch, Row

LORA = {"r": 4, "alpha": 8.0}


def ids(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(5, 250, length).tolist()


def batch_of(rows: list[Row], **given: Any) -> Batch:
    return make_batch(rows, settings=make_settings(given), step=1, policy_version=0)


@pytest.fixture
def batch(make_row: Any) -> Batch:
    return batch_of([make_row(ids(1, 20), [(6, 20, 1.0)], episode="e1"), make_row(ids(2, 24), [(10, 24, -1.0)], episode="e2")])


def weights_of(engine: Any, version: int, **given: Any) -> dict[str, Any]:
    return load_file(engine.export_weights(version, **given).path)


def assert_equal(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        np.testing.assert_array_equal(value, right[name], err_msg=name)


def test_logprobs_are_those_of_plain_transformers(fresh: Any, tiny: Path) -> None:
    """Rows of different lengths and temperatures, the first token NaN, all others within 1e-5 of a plain forward pass."""
    rows = [np.array(ids(seed, length), np.int32) for seed, length in ((1, 2), (2, 9), (3, 40))]
    temperatures = [1.0, 0.7, 2.0]
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    for row, temperature, found in zip(rows, temperatures, fresh().logprobs(rows, temperatures=temperatures), strict=True):
        tokens = torch.tensor(row.astype(np.int64))
        with torch.no_grad():
            logits = model(tokens[None]).logits[0] / temperature
        expected = torch.log_softmax(logits[:-1], -1).gather(1, tokens[1:, None])[:, 0].numpy()
        assert np.isnan(found[0])
        np.testing.assert_allclose(found[1:], expected, rtol=0, atol=1e-5)


def test_sum_pi_squared_is_that_of_the_distribution(fresh: Any, tiny: Path) -> None:
    """The sum of squared probabilities at each token's own distribution."""
    row = np.array(ids(3, 12), np.int32)
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    with torch.no_grad():
        probabilities = torch.softmax(model(torch.tensor(row.astype(np.int64))[None]).logits[0, :-1] / 0.7, -1)
    found = fresh().sum_pi_squared([row], temperatures=[0.7])[0]
    np.testing.assert_allclose(found[1:], probabilities.square().sum(-1).numpy(), rtol=1e-4, atol=1e-6)


def test_an_update_is_one_step_of_adamw(fresh: Any, tiny: Path, batch: Batch) -> None:
    """Clipped gradient, betas, epsilon and weight decay reach the optimizer: the weights are those of torch's AdamW."""
    given: dict[str, Any] = {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1, "clip_grad": 0.05}
    engine = fresh(**given)
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
    for step in (1, 2):
        _, gradients = engine.gradient(batch)
        for name, parameter in model.named_parameters():
            parameter.grad = torch.tensor(gradients[name])
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        report = engine.update(batch, lr=0.01)
        assert report.grad_norm == pytest.approx(float(norm), rel=1e-4)
        found = weights_of(engine, step)
        for name, parameter in model.named_parameters():
            np.testing.assert_allclose(found[name], parameter.detach().numpy(), rtol=0, atol=1e-6, err_msg=name)


def test_another_optimizer_of_verls(fresh: Any, tiny: Path, batch: Batch) -> None:
    """``verl={"optim": ...}`` reaches verl: one step of SGD is the clipped gradient times the learning rate."""
    engine = fresh(clip_grad=0.05, verl={"optim": {"optimizer": "SGD"}})
    _, gradients = engine.gradient(batch)
    norm = float(np.sqrt(sum((value.astype(float) ** 2).sum() for value in gradients.values())))
    engine.update(batch, lr=0.1)
    before = load_file(tiny / "model.safetensors")
    for name, value in weights_of(engine, 1).items():
        np.testing.assert_allclose(value, before[name] - 0.1 * gradients[name] * 0.05 / norm, rtol=0, atol=1e-6, err_msg=name)


def test_gradient_checkpointing_changes_nothing_but_memory(fresh: Any, batch: Batch) -> None:
    """``verl={"model": {"enable_gradient_checkpointing": True}}``: the same gradient."""
    plain = fresh().gradient(batch)[1]
    for name, value in fresh(verl={"model": {"enable_gradient_checkpointing": True}}).gradient(batch)[1].items():
        np.testing.assert_allclose(value, plain[name], rtol=0, atol=1e-6)


def test_dual_clip_of_verls_actor(fresh: Any, make_row: Any) -> None:
    """``verl={"actor": {"clip_ratio_c": 2.0}}``: with advantage -1 and a ratio far above, the loss is 2, not verl's default 3."""
    row = make_row(ids(1, 12), [(4, 12, -1.0)], old=[-30.0] * 12)
    assert fresh().gradient(batch_of([row]))[0] == pytest.approx(3.0, abs=1e-5)
    assert fresh(verl={"actor": {"clip_ratio_c": 2.0}}).gradient(batch_of([row]))[0] == pytest.approx(2.0, abs=1e-5)


def test_lora_targets_and_exclusions(fresh: Any) -> None:
    """``targets`` names the layers that get an adapter; verl's ``exclude_modules`` takes some away."""
    engine = fresh(lora={"r": 2, "targets": ["q_proj", "v_proj"]}, verl={"model": {"exclude_modules": ".*v_proj"}})
    names = load_file(engine.export_weights(1).path).keys()
    assert len(names) == 4
    assert all("q_proj" in name for name in names)


def test_an_update_moves_logprobs_where_the_advantage_points(fresh: Any, batch: Batch) -> None:
    """Tokens with a positive advantage become likelier, those with a negative one less likely."""
    engine = fresh()
    rows = [row.sample.token_ids for row in batch.rows]
    before = engine.logprobs(rows, temperatures=[1.0, 1.0])
    recorded = [
        msgspec.structs.replace(row, old_logprobs=np.where(row.sample.trained_mask, old, np.nan))
        for row, old in zip(batch.rows, before, strict=True)
    ]
    report = engine.update(msgspec.structs.replace(batch, rows=recorded), lr=1e-3)
    after = engine.logprobs(rows, temperatures=[1.0, 1.0])
    assert float((after[0] - before[0])[6:].sum()) > 0 > float((after[1] - before[1])[10:].sum())
    assert (report.rows, report.trained_tokens, report.lr) == (2, 28, 1e-3)
    assert report.tokens == 19 + 23, "the last token of a row goes through nothing"
    assert report.metrics["update/wanted_tokens"] == 28


def test_ppo_epochs_are_steps_on_the_same_batch(fresh: Any, batch: Batch) -> None:
    """Two epochs equal two updates."""
    engine = fresh(ppo_epochs=2)
    engine.update(batch, lr=1e-3)
    both = weights_of(engine, 1)
    engine = fresh()
    engine.update(batch, lr=1e-3)
    engine.update(batch, lr=1e-3)
    assert_equal(weights_of(engine, 2), both)


def test_a_learning_rate_of_zero_changes_no_weight(fresh: Any, batch: Batch) -> None:
    """lr=0 leaves every tensor as it was, bit for bit."""
    engine = fresh()
    before = weights_of(engine, 1)
    engine.update(batch, lr=0.0)
    assert_equal(weights_of(engine, 2), before)


def test_a_batch_without_signal_is_a_step_with_a_gradient_of_zeros(fresh: Any, make_row: Any, batch: Batch) -> None:
    """As with verl: momentum goes on, so the weights after a step without signal are those of AdamW with zero gradients."""
    engine = fresh()
    engine.update(batch, lr=1e-3)
    moved = weights_of(engine, 1)
    report = engine.update(batch_of([make_row(ids(1, 20), [(6, 20, 0.0)])]), lr=1e-3)
    assert (report.loss, report.grad_norm, report.tokens) == (0.0, 0.0, 0)
    coasted = weights_of(engine, 2)
    assert any((coasted[name] != value).any() for name, value in moved.items())


def test_a_gradient_that_is_not_finite_stops_and_changes_nothing(fresh: Any, batch: Batch) -> None:
    """An infinite advantage is refused at the door; an overflowing one is an error that leaves the weights."""
    engine = fresh()
    before = weights_of(engine, 1)
    huge = [msgspec.structs.replace(row, advantages=row.advantages * np.float32(3e38)) for row in batch.rows]
    with pytest.raises(EngineError, match="the weights were left as they were"):
        engine.update(msgspec.structs.replace(batch, rows=huge, denominator=1e-9), lr=1e-3)
    assert_equal(weights_of(engine, 2), before)
    infinite = [msgspec.structs.replace(row, advantages=np.full_like(row.advantages, np.inf)) for row in batch.rows]
    with pytest.raises(ValueError, match="not finite on a trained token"):
        engine.update(msgspec.structs.replace(batch, rows=infinite), lr=1e-3)


def test_the_reference_stays_the_initial_weights(fresh: Any, batch: Batch) -> None:
    """KL is 0 at step 0, above 0 after an update, and the reference's logprobs never move."""
    engine = fresh(kl_coef=0.1, kl_estimator="k3")
    rows, ones = [row.sample.token_ids for row in batch.rows], [1.0, 1.0]
    initial = engine.logprobs(rows, temperatures=ones)
    first = engine.update(batch, lr=1e-2)
    second = engine.update(batch, lr=1e-2)
    assert abs(first.metrics["kl_loss"]) < 1e-6
    assert second.metrics["kl_loss"] > 1e-4
    for found, expected in zip(engine.logprobs(rows, temperatures=ones, reference=True), initial, strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("given, kept", [({}, [False, False, True]), ({"replicas": 2}, [False, True, True])])
def test_weights_files_are_whole_and_digested(fresh: Any, tiny: Path, batch: Batch, given: dict[str, Any], kept: list[bool]) -> None:
    """Every tensor of the model under its Hugging Face name, the tied head once; the digest is the file's; the newest is kept, or
    the newest two where servers may be given the one before again."""
    engine = fresh(**given)
    files = [engine.export_weights(version) for version in (1, 2, 3)]
    assert [file.path.exists() for file in files] == kept
    assert stat.S_IMODE(files[-1].path.parent.stat().st_mode) == 0o700
    newest = files[-1]
    assert newest.digest == file_digest(newest.path) == files[0].digest
    stored = load_file(newest.path)
    assert stored.keys() == load_file(tiny / "model.safetensors").keys()
    assert (newest.tensors, newest.num_bytes) == (len(stored), sum(value.nbytes for value in stored.values()))
    engine.update(batch, lr=1e-3)
    assert engine.export_weights(4).digest != newest.digest


@pytest.mark.parametrize("given, kept", [({}, [4]), ({"replicas": 2}, [3, 4])])
def test_a_weights_file_is_written_over_one_that_is_no_longer_needed(
    fresh: Any, batch: Batch, given: dict[str, Any], kept: list[int]
) -> None:
    """In shared memory there is one file, or two take turns; a digest that is taken later is that of the file."""
    engine = fresh(**given)
    inodes: list[int] = []
    for version in range(1, 5):
        engine.update(batch, lr=1e-3)
        file = engine.export_weights(version, digest_later=True)
        assert file.taken_digest() == file_digest(file.path)
        inodes.append(file.path.stat().st_ino)
    assert [file.name for file in sorted(file.path.parent.glob("*.safetensors"))] == [
        f"weights-{version:06d}.safetensors" for version in kept
    ]
    if file.path.is_relative_to("/dev/shm"):
        assert inodes[2:] == inodes[2 - len(kept) : 4 - len(kept)]


def test_an_update_says_what_it_began_with_and_may_be_declined(fresh: Any, batch: Batch) -> None:
    """Its logprobs are those before the step, on tokens that the loss needed; where too many are too far off, no step is taken."""
    engine = fresh()
    rows, ones = [row.sample.token_ids for row in batch.rows], [1.0, 1.0]
    before = engine.logprobs(rows, temperatures=ones)
    trained = [row.sample.trained_mask for row in batch.rows]
    own = [np.abs(ours - row.sample.logprobs)[row.sample.trained_mask] for ours, row in zip(before, batch.rows, strict=True)]
    most = float(np.exp(np.concatenate(own).max()))
    declined = engine.update(batch, lr=1e-2, most_off=MostOff(factor=most * 0.99, at=trained))
    assert not declined.applied
    for found, expected in zip(engine.logprobs(rows, temperatures=ones), before, strict=True):
        np.testing.assert_array_equal(found, expected)
    nobodys = MostOff(factor=1.0, at=[np.zeros_like(mask) for mask in trained])
    assert engine.update(batch, lr=0.0, most_off=nobodys).applied
    report = engine.update(batch, lr=1e-2, most_off=MostOff(factor=most * 1.01, at=trained))
    assert report.applied
    for found, expected, mask in zip(report.logprobs, before, trained, strict=True):
        np.testing.assert_allclose(found[mask], expected[mask], atol=1e-5)
        assert np.isnan(found[~mask]).all()
    assert np.nanmax(np.abs(engine.logprobs(rows, temperatures=ones, at=trained)[0] - before[0])) > 1e-3


def test_resume_is_bit_identical(fresh: Any, batch: Batch, tmp_path: Path) -> None:
    """Six steps equal three, a checkpoint, a new engine that loads it, and three more."""
    engine = fresh(weight_decay=0.01)
    for _ in range(6):
        engine.update(batch, lr=1e-3)
    whole = weights_of(engine, 6)
    engine = fresh(weight_decay=0.01)
    for _ in range(3):
        engine.update(batch, lr=1e-3)
    engine.save(tmp_path / "checkpoint")
    engine = fresh(weight_decay=0.01)
    engine.load(tmp_path / "checkpoint")
    for _ in range(3):
        engine.update(batch, lr=1e-3)
    assert_equal(weights_of(engine, 7), whole)


def test_a_checkpoint_is_a_hugging_face_folder(fresh: Any, batch: Batch, tmp_path: Path) -> None:
    """transformers loads it as it is: the trained weights in float32, config and tokenizer beside; no pickle anywhere."""
    engine = fresh()
    engine.update(batch, lr=1e-2)
    engine.save(tmp_path / "checkpoint")
    names = {file.name for file in (tmp_path / "checkpoint").iterdir()}
    assert {"config.json", "model.safetensors", "optimizer.safetensors", "tokenizer.json", "engine.json"} <= names
    assert not [name for name in names if name.endswith((".pt", ".bin", ".pkl"))]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint")
    assert next(model.parameters()).dtype == torch.float32
    found = weights_of(engine, 1)
    for name, parameter in model.named_parameters():
        np.testing.assert_array_equal(found[name], parameter.detach().numpy())


def test_a_checkpoint_is_written_once_and_whole(fresh: Any, tmp_path: Path) -> None:
    """An existing folder is refused; one that is not ours, or cut short, cannot be loaded; nothing is left beside."""
    engine = fresh()
    engine.save(tmp_path / "checkpoint")
    with pytest.raises(CheckpointError, match="exists already"):
        engine.save(tmp_path / "checkpoint")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
    with pytest.raises(CheckpointError, match="no complete engine checkpoint"):
        engine.load(tmp_path)
    (tmp_path / "checkpoint" / "optimizer.safetensors").unlink()
    with pytest.raises(CheckpointError, match="could not be loaded"):
        engine.load(tmp_path / "checkpoint")
    with pytest.raises(CheckpointError, match="lora"):
        fresh(lora=LORA).load(tmp_path / "checkpoint")


def test_lora_trains_the_adapter_alone(fresh: Any, tiny: Path, batch: Batch) -> None:
    """The base stays bit for bit, the adapter moves, and without it the model is the initial one: the reference costs nothing."""
    plain = fresh()
    rows, ones = [row.sample.token_ids for row in batch.rows], [1.0, 1.0]
    initial = plain.logprobs(rows, temperatures=ones)
    engine = fresh(lora=LORA)
    assert engine.trained_parameters < engine.parameters / 2
    before = weights_of(engine, 1, merged=True)
    assert_equal(before, load_file(tiny / "model.safetensors"))
    engine.update(batch, lr=1e-2)
    engine.update(batch, lr=1e-2)
    moved = engine.logprobs(rows, temperatures=ones)
    assert max(float(np.nanmax(np.abs(a - b))) for a, b in zip(moved, initial, strict=True)) > 1e-3
    for found, expected in zip(engine.logprobs(rows, temperatures=ones, reference=True), initial, strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


def test_lora_exports_adapter_and_merged_weights_that_agree(fresh: Any, tiny: Path, batch: Batch) -> None:
    """The adapter file has PEFT names and its alpha; base + alpha / r * B @ A are the merged weights, and these give the same logprobs."""
    engine = fresh(lora=LORA)
    for _ in range(3):
        engine.update(batch, lr=1e-2)
    rows, ones = [row.sample.token_ids for row in batch.rows], [1.0, 1.0]
    live = engine.logprobs(rows, temperatures=ones)
    file = engine.export_weights(1)
    adapter, merged = load_file(file.path), weights_of(engine, 2, merged=True)
    assert file.lora
    base = load_file(tiny / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj"
    a, b = (adapter[f"base_model.model.{name}.lora_{side}.weight"] for side in "AB")
    np.testing.assert_allclose(merged[f"{name}.weight"], base[f"{name}.weight"] + 2.0 * b @ a, rtol=0, atol=1e-6)
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    model.load_state_dict({name: torch.tensor(value) for name, value in merged.items()}, strict=False)
    tokens = torch.tensor(rows[0].astype(np.int64))
    with torch.no_grad():
        logprobs = torch.log_softmax(model(tokens[None]).logits[0, :-1], -1).gather(1, tokens[1:, None])[:, 0]
    np.testing.assert_allclose(live[0][1:], logprobs.numpy(), rtol=0, atol=1e-5)


def test_lora_resumes_bit_identical(fresh: Any, batch: Batch, tmp_path: Path) -> None:
    """Adapter and its moments come back; the folder's own weights are the merged ones."""
    engine = fresh(lora=LORA)
    for _ in range(2):
        engine.update(batch, lr=1e-2)
    engine.save(tmp_path / "checkpoint")
    merged = weights_of(engine, 1, merged=True)
    assert_equal(load_file(tmp_path / "checkpoint" / "model.safetensors"), merged)
    engine.update(batch, lr=1e-2)
    expected = weights_of(engine, 2)
    engine = fresh(lora=LORA)
    engine.load(tmp_path / "checkpoint")
    engine.update(batch, lr=1e-2)
    assert_equal(weights_of(engine, 3), expected)


@pytest.mark.parametrize(
    "given, says",
    [
        ({"policy_loss": "ppo"}, "choose one of"),
        ({"algorithm": "gae"}, "critic"),
        ({"loss_agg": "seq-mean-token-sum-norm"}, "loss_scale_factor"),
        ({"policy_loss": "bypass_mode"}, "rollout_correction"),
        ({"policy_loss": "vanilla", "verl": {"actor": {"policy_loss": {"dro_beta": 0.1}}}}, "no effect with policy_loss='vanilla'"),
        ({"policy_loss": "sapo"}, "seq-mean-token-mean"),
        ({"policy_loss": "dro"}, "dro_beta"),
        ({"verl": {"trainer": {}}}, "unknown section"),
        ({"verl": {"actor": {"entropy_coeff": 0.1}}}, "setting entropy_coef"),
        ({"verl": {"actor": {"shuffle": True}}}, "has no effect"),
        ({"micro_batch_tokens": 10_000_000}, "micro_batch_tokens="),
    ],
)
def test_what_would_have_no_effect_is_refused(fresh: Any, given: dict[str, Any], says: str) -> None:
    """Before anything starts, with what to do."""
    with pytest.raises(SettingError, match=says):
        fresh(**given)


def test_ids_outside_the_vocabulary_are_refused(fresh: Any) -> None:
    """An id that the model does not know is an error here, not a crash in the engine's process."""
    with pytest.raises(ValueError, match="above 0 only"):
        fresh().logprobs([np.array([1, 2], np.int32)], temperatures=[0.0])
    with pytest.raises(ValueError, match="outside 0"):
        fresh().logprobs([np.array([1, 5000], np.int32)], temperatures=[1.0])


ALONE = """
import os, random, signal, sys
import numpy as np
from pathlib import Path
from rllm_trainer.config import make_settings
from rllm_trainer.engine.verl import VerlEngine
from rllm_trainer.exceptions import EngineError

random.seed(1); np.random.seed(1)
before = (dict(os.environ), random.getstate(), np.random.get_state()[1].tolist(), [signal.getsignal(n) for n in (2, 13, 15, 17)])
for number in range(2):
    with VerlEngine.start(Path(sys.argv[1]), make_settings({"threads": 1}), Path(sys.argv[2]), device="cpu") as engine:
        pids = [child.pid for child in engine._children]
        engine.logprobs([np.arange(5, dtype=np.int32)], temperatures=[1.0])
        weights = engine._weights.path
        if number:
            os.kill(pids[0], 9)
            try:
                engine.export_weights(1)
                raise SystemExit("a dead engine answered")
            except EngineError as error:
                assert "killed by SIGKILL" in str(error) and "engine.log" in str(error), error
after = (dict(os.environ), random.getstate(), np.random.get_state()[1].tolist(), [signal.getsignal(n) for n in (2, 13, 15, 17)])
assert before == after, "the app's process was changed"
assert not {"torch", "verl", "ray", "transformers"} & set(sys.modules), "the app's process imported a giant"
assert not any(Path(f"/proc/{pid}").exists() for pid in pids), "a process is left"
assert not weights.exists(), "weights are left"
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_apps_process_is_left_alone(tiny: Path, tmp_path: Path) -> None:
    """Two engines in a row: environment, random states, signal handlers and modules as before; no process and no file is left.

    The second is killed: the next call is an error with the engine's last log lines.
    """
    done = subprocess.run([sys.executable, "-c", ALONE, str(tiny), str(tmp_path)], capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 0, done.stderr
