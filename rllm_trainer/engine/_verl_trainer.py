"""verl's training worker behind calls: columns of rows in; logprobs, one optimizer step, weights and state out.

One instance a process. Micro-batches are ours (rows of like length, cut where no gradient is), so are the denominators; the worker,
its engine, losses, optimizer and clipping are verl's. All ranks get the same calls and do their share of the rows.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np

from rllm_trainer._child import to_array
from rllm_trainer.engine import _verl_estimators, _verl_state
from rllm_trainer.engine._verl_api import torch
from rllm_trainer.engine._verl_loss import TokenLoss
from rllm_trainer.engine._verl_rows import FlatRows
from rllm_trainer.engine._verl_setup import make_loss, make_worker
from rllm_trainer.engine._verl_worker import DEVICE_VARIABLE
from rllm_trainer.engine.shared_prefix import Trie, build_tries
from rllm_trainer.engine.tensor_file import TensorFiles, tensors_digest, write_tensors
from rllm_trainer.engine.verl_batch import Columns, plan_micro_batches, rows_of_sequences, wanted_for_update

__all__ = ["VerlTrainer"]

_LOGIT_BYTES = 1 << 29
"""Most bytes of one matrix of logits; about three live at once."""
_SAME_LOGPROBS = {"cpu": 1e-3, "cuda": 0.1}
"""Nats by which logprobs of one row may differ between two ways of computing them: float32, and bfloat16 on a GPU."""
_ATTENTION_EFFICIENCY = 0.5
"""Attention's share of the speed of a plain matrix product."""
_FEW = 0.01
"""Share of the tokens that may be further off than asked."""


class VerlTrainer:
    """Methods named like a call answer it."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._place: dict[str, Any] = {name: config[name] for name in ("rank", "ranks", "meeting_file")} | {
            "device": os.environ[DEVICE_VARIABLE]
        }
        self._rank, self._ranks = int(config["rank"]), int(config["ranks"])
        self._files = TensorFiles()
        _join_group(self._place)
        self._build(config)

    def _build(self, config: dict[str, Any]) -> None:
        self._config: dict[str, Any] = {**config, **self._place}
        torch.set_num_threads(int(config["threads"]))
        _verl_state.seed_all(int(config["seed"]) + self._rank)
        self._reference: Any = None
        _import_modules(config)
        self._worker: Any = make_worker(self._config, trained=True)
        self._loss = make_loss(self._config)
        self._worker.set_loss_fn(self._loss)
        model_config = self._worker.engine.module.config.get_text_config()
        self._vocab = int(model_config.vocab_size)
        self._pairs_per_token = _pairs_per_token(self._worker.engine.module, model_config)
        self._shares = bool(self._config["shared_prefix"]) and _attends_to_all(model_config) and self._tree_mask_holds()
        self._use_tree_mask(self._shares)

    def restart(self, payload: dict[str, Any]) -> dict[str, Any]:
        """The model anew from its folder, with other settings, in this process."""
        self._worker = None
        self._build(payload)
        return self.ready()

    def ready(self) -> dict[str, Any]:
        module = self._worker.engine.module
        return {
            "vocab_size": self._vocab,
            "parameters": sum(parameter.numel() for parameter in module.parameters()),
            "trained_parameters": sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad),
            "device": self._config["device"],
            "shared_prefix": self._shares,
        }

    def handlers(self) -> dict[str, Callable[[dict[str, Any]], Mapping[str, Any] | None]]:
        return {
            "restart": self.restart,
            "logprobs": self.logprobs,
            "sum_pi_squared": self.sum_pi_squared,
            "update": self.update,
            "gradient": self.gradient,
            "export": self.export,
            "digest": self.digest,
            "save": self.save,
            "load": self.load,
            "advantages": _verl_estimators.advantages,
            "correction": _verl_estimators.correction,
        }

    def logprobs(self, payload: dict[str, Any]) -> dict[str, Any]:
        """(S) logprob of each token but the first of its row, by this rank's share of the rows; NaN elsewhere."""
        return {"values": self._read(payload, "log_probs")}

    def sum_pi_squared(self, payload: dict[str, Any]) -> dict[str, Any]:
        """(S) sum of squared probabilities where each token was drawn, likewise."""
        return {"values": self._read(payload, "sum_pi_squared")}

    def _read(self, payload: dict[str, Any], name: str) -> Any:
        rows = FlatRows(payload)
        wanted = np.ones(len(rows.token_ids), np.bool_) if payload["at"] is None else to_array(payload["at"]).copy()
        wanted[rows.offsets[:-1]] = False
        worker, flags = self._policy_or_reference(bool(payload["reference"]))
        return self._read_at(rows, wanted, name, worker, flags)

    def _read_at(self, rows: FlatRows, wanted: Any, name: str, worker: Any, flags: dict[str, Any]) -> Any:
        out = np.full(len(rows.token_ids), np.nan, np.float32)
        flags["calculate_sum_pi_squared"] = name == "sum_pi_squared"
        for tries, live in self._micro_batches(rows, wanted):
            distinct = [trie.distinct(rows.token_ids, rows.temperatures) for trie in tries]
            output = worker.infer_batch(rows.tensordict([trie for trie, _ in distinct], {}, compute_loss=False, **flags))
            if live:
                for trie, (_, which), values in zip(tries, distinct, output[name].unbind(), strict=True):
                    out[trie.places] = values.numpy()[which]
        return out

    def update(self, payload: dict[str, Any]) -> dict[str, Any]:
        """``epochs`` optimizer steps on one batch; none where the tokens ``counted`` are further off than ``most_off``."""
        steps = [self._step(payload, first=True)]
        while steps[0]["applied"] and len(steps) < int(payload["epochs"]):
            steps.append(self._step(payload))
        return {**steps[-1], "steps": len(steps), "logprobs": steps[0]["logprobs"]}

    def gradient(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Loss and gradient of one batch, without a step: by parameter name, whole."""
        self._worker.optimizer_zero_grad()
        found = self._forward_backward(payload)
        self._require_gradients()
        gradients = {
            name: _verl_state.whole(parameter.grad).float().cpu().numpy()
            for name, parameter in self._worker.engine.module.named_parameters()
            if parameter.requires_grad
        }
        self._worker.optimizer_zero_grad()
        return {**found, "gradients": gradients}

    def export(self, payload: dict[str, Any]) -> dict[str, Any]:
        """One file with the current weights, or with the adapter alone."""
        engine = self._worker.engine
        lora: dict[str, Any] | None = self._config["lora"]
        metadata: dict[str, str] = {}
        if lora is None:
            tensors = _verl_state.weights(engine)
        elif payload["merged"]:
            tensors = _verl_state.merged_weights(engine)
        else:
            tensors = _verl_state.adapter(engine)
            metadata = {"lora_alpha": str(lora["alpha"]), "r": str(lora["r"])}
        if self._rank != 0:
            return {}
        spare = None if payload["spare"] is None else Path(payload["spare"])
        digest, size = self._files.write(
            Path(payload["path"]),
            list(_verl_state.raw(tensors)),
            metadata,
            spare=spare,
            hashed=bool(metadata) or not payload["digest_later"],
        )
        return {"digest": digest, "num_bytes": size, "tensors": len(tensors), "lora": bool(metadata)}

    def digest(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Of the weights as they are now, as ``export`` takes it."""
        engine = self._worker.engine
        merged = bool(payload["merged"]) and self._config["lora"] is not None
        tensors = _verl_state.merged_weights(engine) if merged else _verl_state.weights(engine)
        return {"digest": tensors_digest(list(_verl_state.raw(tensors)))} if self._rank == 0 else {}

    def save(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Weights, moments and random states as files of a folder that the parent makes whole."""
        engine, folder = self._worker.engine, Path(payload["folder"])
        lora = self._config["lora"] is not None
        tensors = _verl_state.merged_weights(engine) if lora else _verl_state.weights(engine)
        adapter = _verl_state.adapter(engine) if lora else {}
        moments = _verl_state.optimizer_state(engine)
        _write(folder / f"random-{self._rank}.safetensors", _verl_state.random_states())
        if self._rank == 0:
            _write(folder / "model.safetensors", tensors)
            _write(folder / "optimizer.safetensors", moments)
            if lora:
                (folder / "adapter").mkdir()
                _write(folder / "adapter" / "adapter_model.safetensors", adapter)
                config = engine.module.peft_config["default"]
                (folder / "adapter" / "adapter_config.json").write_bytes(msgspec.json.encode(_plain(config.to_dict())))
        return {}

    def load(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Back to what ``save`` wrote."""
        engine, folder = self._worker.engine, Path(payload["folder"])
        lora = self._config["lora"] is not None
        _verl_state.load_into(
            engine, _verl_state.read_tensors(folder / ("adapter/adapter_model.safetensors" if lora else "model.safetensors"))
        )
        _verl_state.load_optimizer(engine, _verl_state.read_tensors(folder / "optimizer.safetensors"))
        random_file = folder / f"random-{self._rank}.safetensors"
        if random_file.exists():
            _verl_state.set_random_states(_verl_state.read_tensors(random_file))
        return {}

    def _step(self, payload: dict[str, Any], *, first: bool = False) -> dict[str, Any]:
        self._worker.optimizer_zero_grad()
        found = {**self._forward_backward(payload), "applied": True}
        if first and self._too_far_off(payload, found["logprobs"]):
            self._worker.optimizer_zero_grad()
            return {**found, "applied": False, "grad_norm": float("nan")}
        self._require_gradients()
        norm = float(self._worker.optimizer_step({"lr": float(payload["lr"])})["grad_norm"])
        if not np.isfinite(norm):
            raise FloatingPointError(
                f"the gradient's norm is {norm}, so the weights were left as they were; "
                "lower lr, or look for a reward or logprob out of range"
            )
        return {**found, "grad_norm": norm}

    def _too_far_off(self, payload: dict[str, Any], logprobs: Any) -> bool:
        """Whether more than 1 % of the counted tokens differ from what was recorded by more than the factor ``most_off``."""
        if payload["most_off"] is None:
            return False
        gap = np.abs(logprobs - to_array(payload["recorded_logprobs"]))[to_array(payload["counted"])]
        gap = gap[~np.isnan(gap)]
        counts = torch.tensor([len(gap), int((gap > np.log(payload["most_off"])).sum())])
        if self._ranks > 1:
            torch.distributed.all_reduce(counts)
        return bool(counts[1] > _FEW * counts[0])

    def _forward_backward(self, payload: dict[str, Any]) -> dict[str, Any]:
        rows = FlatRows(payload)
        columns = rows.columns(payload)
        wanted = wanted_for_update(columns, zero_is_inert=self._zero_is_inert(), whole_sequences=self._loss.kind.over_sequences)
        together = rows_of_sequences(columns, wanted) if self._loss.kind.over_sequences else ()
        fields = {name: getattr(columns, name) for name in _LOSS_FIELDS if getattr(columns, name) is not None}
        settings = {"denominator": float(payload["denominator"]), "calculate_entropy": self._loss.entropy}
        whole: tuple[float, dict[str, float]] | None = None
        if self._loss.kind.whole_batch and wanted.any():
            fields["coefficients"], value, averages = self._over_batch(rows, columns, wanted, float(payload["denominator"]))
            whole = (value, averages)
        logprobs = np.full(len(rows.token_ids), np.nan, np.float32)
        tokens = computed = 0
        self._loss.clear()
        for tries, live in self._micro_batches(rows, wanted, together):
            share = fields if live else {**fields, **dict.fromkeys(_SHARES & fields.keys(), np.zeros_like(columns.weights))}
            output = self._worker.forward_backward(rows.tensordict(tries, share, live=float(live), **settings))
            if live:
                places = np.concatenate([trie.places for trie in tries])
                logprobs[places] = output["log_probs"].values().numpy()
                tokens += sum(trie.tokens for trie in tries)
                computed += len(places)
        terms, averages = self._loss.totals()
        terms = {name: value / self._ranks for name, value in terms.items()}
        if whole is not None:
            value, averages = whole
            surrogate = terms.get("actor/pg_loss", 0.0)
            terms |= {"actor/pg_loss": value / self._ranks, "loss": terms.get("loss", 0.0) - surrogate + value / self._ranks}
        return {
            "terms": terms,
            "averages": averages,
            "logprobs": logprobs,
            "tokens": tokens,
            "wanted": computed,
        }

    def _over_batch(self, rows: FlatRows, columns: Columns, wanted: Any, denominator: float) -> tuple[Any, float, dict[str, float]]:
        """(S) each wanted token's part of the gradient, the loss and its metrics: the same on every rank."""
        mine = np.nan_to_num(self._read_at(rows, wanted, "log_probs", self._worker, {}))
        if self._ranks > 1:
            whole = torch.from_numpy(mine)
            torch.distributed.all_reduce(whole)
            mine = whole.numpy()
        found = np.zeros(len(wanted), np.float32)
        assert isinstance(self._loss, TokenLoss), "only policy losses are taken over a whole batch"
        found[wanted], loss, metrics = self._loss.over_batch(mine[wanted], columns, wanted, denominator=denominator)
        return found, loss, metrics

    def _micro_batches(self, rows: FlatRows, wanted: Any, together: Any = ()) -> list[tuple[list[Trie], bool]]:
        limits = {
            "max_tokens": int(self._config["micro_batch_tokens"]),
            "max_wanted": max(1, _LOGIT_BYTES // (4 * self._vocab)),
        }
        tries = build_tries(rows.token_ids, rows.offsets, wanted, share=self._shares, pairs_per_token=self._pairs_per_token, **limits)
        plan = plan_micro_batches(tries, together=together, rank=self._rank, ranks=self._ranks, **limits)
        live = len(plan.micro_batches) - plan.idle
        return [(micro_batch, number < live) for number, micro_batch in enumerate(plan.micro_batches)]

    def _tree_mask_holds(self) -> bool:
        """Whether this model gives rows in a trie the logprobs that it gives them alone."""
        stem = [index * 7919 % self._vocab for index in range(12)]
        ids = np.array([*stem, 1, 2, 3, *stem, 4, 5, *stem, 1, 6], np.int64) % self._vocab
        payload = {"token_ids": ids, "lengths": np.array([15, 14, 14]), "temperatures": np.ones(3, np.float32)}
        travelled = {name: {"dtype": a.dtype.str, "shape": a.shape, "data": a.tobytes()} for name, a in payload.items()}
        found: list[Any] = []
        for self._shares in (False, True):
            self._use_tree_mask(self._shares)
            found.append(self._read({**travelled, "reference": False, "at": None}, "log_probs"))
        difference = float(np.nanmax(np.abs(found[0] - found[1])))
        if difference > _SAME_LOGPROBS[self._config["device"]]:
            print(f"shared prefixes are computed row by row: a tree of this model's tokens is off by {difference:.1e} nats")  # noqa: T201
            return False
        return True

    def _use_tree_mask(self, use: bool) -> None:
        for worker in (self._worker, self._reference):
            if worker is not None:
                worker.engine.tree_mask = use

    def _zero_is_inert(self) -> bool:
        return self._loss.kind.zero_is_inert and not self._loss.entropy and not self._config["kl_coef"]

    def _require_gradients(self) -> None:
        """A batch without any wanted token has a gradient of zeros, not none: the optimizer's step is then the same as verl's."""
        for parameter in self._worker.engine.module.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def _policy_or_reference(self, reference: bool) -> tuple[Any, dict[str, Any]]:
        if not reference:
            return self._worker, {}
        if self._config["lora"] is not None:
            return self._worker, {"no_lora_adapter": True}
        if self._reference is None:
            self._reference = make_worker(self._config, trained=False)
            self._use_tree_mask(self._shares)
        return self._reference, {}


_SHARES = frozenset({"weights", "coefficients"})
_LOSS_FIELDS = ("advantages", "weights", "old_logprobs", "sequences", "ref_logprobs", "is_weights")


def _pairs_per_token(module: Any, model_config: Any) -> float:
    """How many pairs of tokens attention looks at in the time that all else takes for one token."""
    embeddings = {
        id(parameter) for layer in (module.get_input_embeddings(), module.get_output_embeddings()) for parameter in layer.parameters()
    }
    inner = sum(parameter.numel() for parameter in module.parameters() if id(parameter) not in embeddings)
    width = model_config.num_hidden_layers * model_config.hidden_size
    return _ATTENTION_EFFICIENCY * 2 * inner / (4 * width)


def _attends_to_all(model_config: Any) -> bool:
    """False for models with windows or layers without attention: a mask of ours would replace theirs."""
    kinds = set(getattr(model_config, "layer_types", None) or ["full_attention"])
    windowed = getattr(model_config, "sliding_window", None) is not None and getattr(model_config, "use_sliding_window", True)
    return kinds == {"full_attention"} and not windowed and model_config._attn_implementation in ("sdpa", "eager")


def _write(path: Path, tensors: Mapping[str, Any]) -> None:
    write_tensors(path, list(_verl_state.raw(tensors)), sync=True)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, (set, frozenset)):
        return sorted(str(item) for item in cast("set[Any]", value))
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in cast("list[Any]", value)]
    if value is None or isinstance(value, (bool, int, float, str)):
        return getattr(value, "value", value)
    return str(value)


def _import_modules(config: Mapping[str, Any]) -> None:
    """The user's modules that register estimators and losses with verl, found where the app's process finds them."""
    if config["modules"]:
        sys.path += [entry for entry in config["import_path"] if entry not in sys.path]
    for module in config["modules"]:
        importlib.import_module(module)


def _join_group(config: Mapping[str, Any]) -> None:
    """The process group, made before verl looks for one: verl would ask for backend 'cpu:gloo,cpu:gloo', which torch refuses."""
    ranks = int(config["ranks"])
    store = torch.distributed.HashStore() if ranks == 1 else torch.distributed.FileStore(config["meeting_file"], ranks)
    backend = "gloo" if config["device"] == "cpu" else "cpu:gloo,cuda:nccl"
    torch.distributed.init_process_group(backend, store=store, rank=int(config["rank"]), world_size=ranks)
