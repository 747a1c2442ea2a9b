"""The embedded server's sets of weights: written in place, read back bit for bit, and the one that is served untouched by the next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rllm_trainer._digest import file_digest
from rllm_trainer.models import resolve_model
from rllm_trainer.serving._local import kernels
from rllm_trainer.serving._local.checkpoint import Checkpoint, WeightsError
from rllm_trainer.serving._local.kernels import Linear
from rllm_trainer.serving._local.loader import NativeLoader
from rllm_trainer.serving._local.spec import read_config, read_spec
from rllm_trainer.serving._local.weights import Weights, build, digest

pytestmark = pytest.mark.skipif(not kernels._packing_available(), reason="this torch packs no matrices")


@pytest.fixture(params=["tiny-qwen2", "tiny-llama"])
def folder(request: pytest.FixtureRequest) -> Path:
    return resolve_model(request.param)


def changed(folder: Path, to: Path, seed: int, **tensors: Tensor) -> Path:
    """The folder's weights, all of them moved; and some as given."""
    torch.manual_seed(seed)
    plain: dict[str, Any] = load_file(folder / "model.safetensors")
    save_file({**{name: tensor + 0.01 * torch.randn_like(tensor) for name, tensor in plain.items()}, **tensors}, to)
    return to


def matrices(weights: Weights) -> list[Linear]:
    """Those of the layers that can be written in place; the tiny models' keys and vocabularies have other numbers of rows."""
    return [matrix for layer in weights.layers for matrix in (layer.o, layer.gate_up, layer.down)]


@pytest.mark.parametrize("rows, width", [(64, 16), (128, 64), (1536, 576), (576, 1536)])
def test_a_matrix_written_over_is_one_packed_anew(rows: int, width: int) -> None:
    """In parts, it gives the products and the plain matrix of one that oneDNN packed from the new values."""
    torch.manual_seed(0)
    with torch.inference_mode():
        first, second = torch.randn(rows, width), torch.randn(rows, width)
        matrix, anew = Linear(first), Linear(second)
        assert matrix.takes([64, rows - 64])
        matrix.put(64, second[64:])
        matrix.put(0, second[:64])
        x = torch.randn(5, width)
        assert torch.equal(matrix.dense(), second)
        assert torch.equal(matrix(x), anew(x))


@pytest.mark.parametrize("rows, width, parts", [(261, 64, [261]), (96, 64, [96]), (64, 20, [64]), (128, 64, [100, 28])])
def test_what_is_packed_otherwise_is_not_written_to(rows: int, width: int, parts: list[int]) -> None:
    """A layout that is not the one we know, or a part that ends inside a panel, is packed anew by oneDNN."""
    assert not Linear(torch.randn(rows, width)).takes(parts)


def test_values_that_say_nothing_of_the_layout_are_no_evidence() -> None:
    """A matrix of zeros looks alike however it is packed; what is known of its shape is found out on another."""
    assert not Linear(torch.zeros(192, 48)).takes([192])
    assert Linear(torch.randn(192, 48)).takes([192])
    assert Linear(torch.zeros(192, 48)).takes([192])


def test_two_sets_take_turns(folder: Path, tmp_path: Path) -> None:
    """However often weights change, there are two sets; each holds its own file, bit for bit, while the other is written."""
    loader = NativeLoader(folder, read_spec(read_config(folder)))  # pyright: ignore[reportArgumentType]
    files = [changed(folder, tmp_path / f"{n}.safetensors", n) for n in (1, 2)]
    served, spare = loader.load(files[0], lora=False), loader.served
    own = [{id(matrix) for matrix in matrices(one)} for one in (spare, served)]
    for turn in range(6):
        loaded = loader.load(files[1 - turn % 2], lora=False, over=spare)
        assert digest(loaded) == file_digest(files[1 - turn % 2])
        assert digest(served) == file_digest(files[turn % 2])
        assert {id(matrix) for matrix in matrices(loaded)} == own[turn % 2]
        served, spare = loaded, served


def test_a_file_that_is_refused_halfway_leaves_what_is_served(folder: Path, tmp_path: Path) -> None:
    """The tensor at fault is the last that is read: the spare set is spoiled and can be written over again, the served one is whole."""
    spec = read_spec(read_config(folder))
    assert spec is not None
    first, good = folder / "model.safetensors", changed(folder, tmp_path / "good.safetensors", 1)
    spoilt = {"model.norm.weight": torch.full((spec.hidden,), float("nan"))}
    bad = changed(folder, tmp_path / "bad.safetensors", 2, **spoilt)
    spare, served = build(spec, Checkpoint(first)), build(spec, Checkpoint(first))
    with pytest.raises(WeightsError, match=r"got model\.norm\.weight with a value that is not finite"):
        build(spec, Checkpoint(bad), over=spare)
    assert digest(served) == file_digest(first) != digest(spare)
    assert digest(build(spec, Checkpoint(good), over=spare)) == file_digest(good)
