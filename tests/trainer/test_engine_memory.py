"""Memory before the start, weights folders, and files of tensors: no process is needed for these."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rllm_trainer._digest import file_digest
from rllm_trainer.config import make_settings
from rllm_trainer.engine.memory import ModelShape, estimate_memory, model_shape, require_memory, with_micro_batch
from rllm_trainer.engine.tensor_file import RawTensor, write_tensors
from rllm_trainer.engine.weights_folder import WeightsFolder
from rllm_trainer.exceptions import ModelError, SettingError

SMOLLM = ModelShape(parameters=134_515_008, layers=30, hidden=576, intermediate=1536, vocab=49152)
GIB = 1 << 30


def test_the_parts_of_an_estimate() -> None:
    """Float32 everywhere: weights and gradients 4 bytes a parameter, moments 8; LoRA has gradients and moments of its adapter only."""
    full = estimate_memory(SMOLLM, make_settings({"micro_batch_tokens": 1024}))
    assert full.weights == full.gradients == 4 * 134_515_008
    assert full.moments == 2 * full.gradients
    assert full.reference == 0
    assert full.logits == 4 * 4 * 1024 * 49152
    assert 1.2 * GIB < full.activations < 2.2 * GIB
    lora = estimate_memory(SMOLLM, make_settings({"lora": {"r": 8}, "kl_coef": 0.1}))
    assert lora.gradients < full.gradients / 20
    assert lora.reference == 0
    assert estimate_memory(SMOLLM, make_settings({"kl_coef": 0.1})).reference == full.weights


def test_a_long_row_costs_its_own_length() -> None:
    """One row goes through whole, even beyond ``micro_batch_tokens``."""
    settings = make_settings({"micro_batch_tokens": 512})
    assert estimate_memory(SMOLLM, settings, longest_row=4096).activations == 8 * estimate_memory(SMOLLM, settings).activations


def test_what_does_not_fit_is_refused_with_what_does() -> None:
    """The largest micro-batch that fits is named, and it fits; below that, what to give up."""
    settings = make_settings({"micro_batch_tokens": 8192})
    with pytest.raises(SettingError, match="micro_batch_tokens=") as raised:
        require_memory(SMOLLM, settings, available=8 * GIB)
    named = int(str(raised.value).split("micro_batch_tokens=")[1].split(" ")[0])
    assert require_memory(SMOLLM, make_settings({"micro_batch_tokens": named}), available=8 * GIB).total <= 8 * GIB
    with pytest.raises(SettingError, match="lora="):
        require_memory(SMOLLM, settings, available=3 * GIB)
    with pytest.raises(SettingError, match="smaller model"):
        require_memory(SMOLLM, make_settings({"lora": {"r": 8}}), available=GIB)


def test_without_a_given_micro_batch_the_largest_usual_one_that_fits_is_taken() -> None:
    """2048 tokens with room, fewer with less, an error with too little; a given one is kept."""
    chosen = [with_micro_batch(SMOLLM, make_settings({}), available=gib * GIB).micro_batch_tokens for gib in (24, 7, 5)]
    assert chosen == [2048, 1024, 256]
    assert with_micro_batch(SMOLLM, make_settings({"micro_batch_tokens": 100}), available=24 * GIB).micro_batch_tokens == 100
    with pytest.raises(SettingError, match="are free"):
        with_micro_batch(SMOLLM, make_settings({}), available=3 * GIB)


def test_a_model_is_measured_by_its_headers(tmp_path: Path) -> None:
    """Parameters are counted over all shards without loading them; a folder without config or weights is an error."""
    with pytest.raises(ModelError, match=r"config\.json"):
        model_shape(tmp_path)
    config = {"hidden_size": 8, "num_hidden_layers": 2, "intermediate_size": 16, "vocab_size": 50}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="safetensors"):
        model_shape(tmp_path)
    save_file({"a": np.zeros((3, 4), np.float32)}, tmp_path / "model-1.safetensors")
    save_file({"b": np.zeros(5, np.float16)}, tmp_path / "model-2.safetensors")
    assert model_shape(tmp_path) == ModelShape(parameters=17, layers=2, hidden=8, intermediate=16, vocab=50)


def test_a_file_of_tensors_is_safetensors(tmp_path: Path) -> None:
    """Any reader reads it; digest and bytes are those of the tensors; nothing else is left in the folder."""
    arrays = {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.array(7, np.int64), "empty": np.zeros((0, 2), np.float32)}
    codes = {"a": "I64", "b": "F32", "empty": "F32"}
    raw = [RawTensor(name=n, dtype=codes[n], shape=v.shape, data=memoryview(v.tobytes())) for n, v in arrays.items()]
    digest, size = write_tensors(tmp_path / "file.safetensors", raw, {"note": "x"}, sync=True)
    assert (digest, size) == (file_digest(tmp_path / "file.safetensors"), 24 + 8)
    for name, value in load_file(tmp_path / "file.safetensors").items():
        np.testing.assert_array_equal(value, arrays[name])
    assert [path.name for path in tmp_path.iterdir()] == ["file.safetensors"]


def test_the_newest_two_weights_are_kept(tmp_path: Path) -> None:
    """By the time of writing, so a resumed run that starts again at a lower version keeps its own."""
    folder = WeightsFolder(tmp_path, 10, shared_memory=tmp_path / "none")
    for place, version in enumerate((7, 8, 1)):
        folder.file(version).touch()
        os.utime(folder.file(version), ns=(place, place))
    folder.keep_newest()
    assert [folder.file(version).exists() for version in (7, 8, 1)] == [False, True, True]
    folder.close()
    folder.close()
    assert list(tmp_path.iterdir()) == []


def test_shared_memory_is_used_only_where_there_is_room(tmp_path: Path) -> None:
    """Three versions must fit; else the run folder."""
    shared, run = tmp_path / "shm", tmp_path / "run"
    shared.mkdir()
    run.mkdir()
    small, large = WeightsFolder(run, 10, shared_memory=shared), WeightsFolder(run, 1 << 60, shared_memory=shared)
    assert (small.path.parent, large.path.parent) == (shared, run)
    small.close()
    large.close()


KILLED = """
import os, sys
from pathlib import Path
from rllm_trainer.engine.weights_folder import WeightsFolder

parent = Path(sys.argv[1])
folder = WeightsFolder(parent, 1, shared_memory=parent)
print(folder.path, flush=True)
os.kill(os.getpid(), 9)
"""


def test_weights_of_a_killed_run_are_swept_by_the_next(tmp_path: Path) -> None:
    """A folder whose holder is dead goes; one that is held stays."""
    held = WeightsFolder(tmp_path, 1, shared_memory=tmp_path)
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False)
    left = Path(killed.stdout.strip())
    assert left.is_dir()
    another = WeightsFolder(tmp_path, 1, shared_memory=tmp_path)
    assert not left.exists()
    assert held.path.is_dir()
    held.close()
    another.close()
