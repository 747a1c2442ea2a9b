"""A safetensors file on this host in, vLLM's model served from it out: the ``file`` backend of vLLM's weight transfer.

Runs inside vLLM's workers: ``--worker-extension-cls rllm_vllm_weights.FileSwaps --weight-transfer-config '{"backend": "file"}'``. The
whole change is one call of ``update_weights``: vLLM's own start, update and finish leave layers without tensors between the calls, and
a request that comes in between ends the engine. A file that does not fit is refused before anything is touched.
"""
# pyright: basic, reportMissingImports=false
# vLLM, torch and safetensors are those of vLLM's own environment

from __future__ import annotations

import glob
import hashlib
import json
import os
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

BACKEND = "file"

Shapes = dict[str, tuple[int, ...]]


@dataclass
class FileInit(WeightTransferInitInfo):
    """Nothing is set up."""


@dataclass
class FileUpdate(WeightTransferUpdateInfo):
    """Where the weights lie."""

    path: str


class FileTransfer(WeightTransferEngine[FileInit, FileUpdate]):
    """Loads a file into the running model, whole or not at all."""

    init_info_cls = FileInit
    update_info_cls = FileUpdate

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        self.received: str | None = None

    def init_transfer_engine(self, init_info: FileInit) -> None:
        """Nothing to set up."""

    def start_weight_update(self) -> None:
        """Nothing yet: see the module's docstring."""

    def receive_weights(self, update_info: FileUpdate) -> None:
        path = update_info.path
        _require_fitting(shapes_of(path), self.model_config.model, path)
        load(self.model, self.model_config, path)
        self.received = path

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def finish_weight_update(self) -> None:
        """Nothing is left."""

    def shutdown(self) -> None:
        """Nothing to close."""


class FileSwaps:
    """Mixed into vLLM's worker; its methods are reached through ``/collective_rpc``."""

    weight_transfer_engine: Any

    def rllm_received_digest(self) -> dict[str, Any]:
        """The digest of the tensors that were loaded last."""
        path = self.weight_transfer_engine.received
        return {"path": path, "digest": None if path is None else digest_of(path)}


def load(model: Any, model_config: Any, path: str) -> None:
    """Every tensor of the file into the model; called between two steps of the engine."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    with torch.no_grad():
        initialize_layerwise_reload(model)
        try:
            model.load_weights(_tensors(path))
        finally:
            finalize_layerwise_reload(model, model_config)
        _repack_tied(model)


def _repack_tied(model: Any) -> None:
    """vLLM 0.32.0 packs a tied output head into a copy of its own on the CPU, and reloads leave it. Goes when vLLM repacks it."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead) and module.quant_method is not None and not module.weight.is_meta:
            module.quant_method.process_weights_after_loading(module)


def _require_fitting(given: Shapes, boot: str, path: str) -> None:
    """Raises ``ValueError`` where the file lacks a tensor of the model's folder, or has one of another shape."""
    if not os.path.isdir(boot) or not glob.glob(os.path.join(boot, "*.safetensors")):
        return
    expected = shapes_of(boot)
    missing = sorted(set(expected) - set(given))
    if missing:
        raise ValueError(f"{path} lacks {len(missing)} of the model's tensors, such as {missing[0]}; the old weights stay served")
    for name, shape in expected.items():
        if given[name] != shape:
            raise ValueError(f"{path} has {name} of shape {given[name]}, the model has {shape}; the old weights stay served")


def _files(path: str) -> list[str]:
    files = sorted(glob.glob(os.path.join(path, "*.safetensors"))) if os.path.isdir(path) else [path]
    if not files or not all(map(os.path.isfile, files)):
        raise ValueError(f"there is no safetensors file at {path}; the old weights stay served")
    return files


def shapes_of(path: str) -> Shapes:
    """Shape of each tensor of a file or folder."""
    found: Shapes = {}
    for file in _files(path):
        for name, entry in _header(file)[0].items():
            found[name] = tuple(entry["shape"])
    return found


def digest_of(path: str) -> str:
    """As ``rllm_trainer._digest.file_digest`` takes it, over one file."""
    header, start = _header(path)
    taken = hashlib.sha256()
    with open(path, "rb") as file:
        for name in sorted(header):
            entry = header[name]
            taken.update(json.dumps([name, entry["dtype"], list(entry["shape"])], separators=(",", ":")).encode())
            begin, end = entry["data_offsets"]
            file.seek(start + begin)
            taken.update(file.read(end - begin))
    return taken.hexdigest()


def _header(path: str) -> tuple[dict[str, Any], int]:
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if not 2 <= size <= os.path.getsize(path) - 8:
            raise ValueError(f"{path} is no safetensors file; the old weights stay served")
        header: dict[str, Any] = json.loads(file.read(size))
    header.pop("__metadata__", None)
    return header, 8 + size


def _tensors(path: str) -> Any:
    for file in _files(path):
        with safe_open(file, framework="pt", device="cpu") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                yield name, opened.get_tensor(name)


WeightTransferEngineFactory.register_engine(BACKEND, FileTransfer)
