"""The engine that updates weights: verl's training worker in child processes of ours, behind plain arrays.

The app's process keeps its environment, random states, signal handlers and ``torch.distributed``: it never imports torch. One child a
rank; all get every call and each does its share of the rows, so any number of ranks gives one loss and one gradient.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextvars import copy_context
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rllm_trainer._child import Child, ChildDied, ChildError, to_array
from rllm_trainer.advantages.base import Estimates, Units
from rllm_trainer.config import Settings
from rllm_trainer.correction import Corrected, Correction
from rllm_trainer.engine.base import MostOff, UpdateReport, WeightsFile
from rllm_trainer.engine.memory import free_memory, model_shape, with_micro_batch
from rllm_trainer.engine.ranks import cause_of
from rllm_trainer.engine.verl_batch import pack_rows, pack_token_ids
from rllm_trainer.engine.verl_settings import Objective, child_settings, passed_to_verl, require_supported
from rllm_trainer.engine.weights_folder import WeightsFolder
from rllm_trainer.exceptions import CheckpointError, EngineError
from rllm_trainer.serving_settings import weights_kept
from rllm_trainer.types import Batch, Float32, Int32, Mask

__all__ = ["Device", "VerlEngine"]

Device = str
"""``cpu``, ``cuda``, or ``auto``: cuda where torch finds one."""

_MODULE = "rllm_trainer.engine._verl_worker"
_STATE_FILE = "engine.json"
_FORMAT = 1
_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".index.json")
_SHORT = 120.0
"""Seconds for calls that compute little."""


class VerlEngine:
    """Made with ``start``. Safe to use from one thread at a time."""

    def __init__(self, children: list[Child], settings: Settings, model_path: Path, run_dir: Path, call_timeout: float) -> None:
        self._children = children
        self._settings = settings
        self._model_path = model_path
        self._timeout = call_timeout
        self._pool = ThreadPoolExecutor(len(children), thread_name_prefix="rllm-engine")
        self._take(children[0].ready)
        numbers = self.trained_parameters if settings.lora else self.parameters
        self._weights = WeightsFolder(run_dir, 4 * numbers, keep=weights_kept(settings))

    @classmethod
    def start(
        cls,
        model_path: Path,
        settings: Settings,
        run_dir: Path,
        *,
        device: Device = "auto",
        ranks: int = 1,
        shared_prefix: bool = True,
        objective: Objective = "policy",
        start_timeout: float = 600.0,
        call_timeout: float = 7200.0,
    ) -> VerlEngine:
        """Load the model and be ready to train it.

        Args:
            model_path: Hugging Face folder of the run's initial weights; also the KL reference, whatever is loaded later.
            run_dir: gets the engine's log, and its weights files where shared memory has no room.
            ranks: processes that share the rows; more than one is for tests and for machines with several devices.
            shared_prefix: compute what rows begin with in common once, where the model allows it (checked at the start).
            objective: ``sft``: updates raise the likelihood of the rows' tokens, whatever their advantages.
            call_timeout: seconds that one update may take.

        Raises:
            SettingError: a setting that verl or this machine cannot honour, memory included.
            EngineError: the process did not come up; the message has its last log lines.
        """
        require_supported(settings)
        settings = with_micro_batch(model_shape(model_path), settings, available=free_memory())
        config = child_settings(settings, model_path, shared_prefix=shared_prefix, objective=objective)
        run_dir.mkdir(parents=True, exist_ok=True)
        meeting = Path(tempfile.mkdtemp(prefix="rllm-meet-")) if ranks > 1 else None

        def start_rank(rank: int) -> Child:
            return Child.start(
                _MODULE,
                {**config, "rank": rank, "ranks": ranks, "device": device, "meeting_file": str(meeting / "store") if meeting else ""},
                name="engine" if ranks == 1 else f"engine rank {rank}",
                log_path=run_dir / "logs" / ("engine.log" if ranks == 1 else f"engine-{rank}.log"),
                start_timeout=start_timeout,
            )

        with ThreadPoolExecutor(ranks) as pool:
            futures = [pool.submit(copy_context().run, start_rank, rank) for rank in range(ranks)]
        if meeting is not None:
            shutil.rmtree(meeting, ignore_errors=True)
        failed = next((error for future in futures if (error := future.exception()) is not None), None)
        if failed is not None:
            for future in futures:
                if future.exception() is None:
                    future.result().close()
            raise EngineError(str(failed)) from failed
        return cls([future.result() for future in futures], settings, model_path, run_dir, call_timeout)

    def restart(
        self, settings: Settings, *, model_path: Path | None = None, shared_prefix: bool = True, objective: Objective = "policy"
    ) -> None:
        """A model anew from its folder, with other settings, in the same processes: ready in a moment, where a start takes seconds.

        Raises:
            SettingError: as ``start``.
        """
        model_path = model_path or self._model_path
        require_supported(settings)
        settings = with_micro_batch(model_shape(model_path), settings, available=free_memory())
        config = child_settings(settings, model_path, shared_prefix=shared_prefix, objective=objective)
        self._take(self._call("restart", config, self._timeout)[0])
        self._settings, self._model_path, self._weights.keep = settings, model_path, weights_kept(settings)

    def logprobs(
        self, rows: Sequence[Int32], *, temperatures: Sequence[float], reference: bool = False, at: Sequence[Mask] | None = None
    ) -> list[Float32]:
        """For each row (T) the logprob of each token at the row's temperature, given the ones before it; (T) with NaN first.

        ``at``: (T) for each row, the tokens that are asked for; NaN elsewhere.
        """
        return self._per_token("logprobs", rows, temperatures, reference=reference, at=at)

    def sum_pi_squared(self, rows: Sequence[Int32], *, temperatures: Sequence[float]) -> list[Float32]:
        """For each row (T) the sum of squared probabilities of the distribution that each token was drawn from; (T) with NaN first."""
        return self._per_token("sum_pi_squared", rows, temperatures, reference=False)

    def update(self, batch: Batch, *, lr: float, most_off: MostOff | None = None) -> UpdateReport:
        """``ppo_epochs`` optimizer steps on the batch at ``lr``; the report is of the last one, its logprobs of the first.

        ``most_off``: take no step where trainer and server are further apart.

        Raises:
            EngineError: the gradient is not finite (the weights are then as before), or the process failed.
        """
        started = time.monotonic()
        how_far = {"most_off": most_off and most_off.factor, "counted": most_off and np.concatenate(most_off.at)}
        columns = self._batch_payload(batch)
        replies = self._call("update", {**columns, **how_far, "lr": lr, "epochs": self._settings.ppo_epochs}, self._timeout)
        terms, averages = _merged(replies)
        logprobs = np.fmax.reduce([to_array(reply["logprobs"]) for reply in replies], axis=0)
        return UpdateReport(
            loss=terms.pop("loss", 0.0),
            grad_norm=float(replies[0]["grad_norm"]),
            lr=lr,
            rows=len(batch.rows),
            tokens=sum(int(reply["tokens"]) for reply in replies),
            trained_tokens=sum(int(row.sample.trained_mask.sum()) for row in batch.rows),
            seconds=time.monotonic() - started,
            metrics={**terms, **averages, **_gap(logprobs - columns["recorded_logprobs"])},
            logprobs=_by_row(logprobs, [row.sample.token_ids for row in batch.rows]),
            applied=bool(replies[0]["applied"]),
        )

    def gradient(self, batch: Batch) -> tuple[float, dict[str, Float32]]:
        """Loss and whole gradient of a batch by parameter name, weights untouched: what proofs and tests compare."""
        replies = self._call("gradient", self._batch_payload(batch), self._timeout)
        return _merged(replies)[0].get("loss", 0.0), {name: to_array(value) for name, value in replies[0]["gradients"].items()}

    def estimate(self, rule: str, units: Units) -> Estimates:
        """verl's advantage estimator of that name, once over all units."""
        optional = {
            "old_logprobs": units.old_logprobs,
            "ref_logprobs": units.ref_logprobs,
            "sum_pi_squared": units.sum_pi_squared,
            "baselines": units.baselines,
        }
        payload = {
            "rule": rule,
            "arrays": {"lengths": units.lengths, "scores": units.scores, **{k: v for k, v in optional.items() if v is not None}},
            "groups": units.groups,
            "components": dict(units.components),
            "kl_coef": self._settings.kl_coef,
            "kl_estimator": self._settings.kl_estimator,
            "config": {"norm_adv_by_std_in_grpo": self._settings.norm_by_std, **passed_to_verl(self._settings).get("algorithm", {})},
        }
        reply = self._call_one("advantages", payload, _SHORT)
        return Estimates(advantages=to_array(reply["advantages"]), totals=to_array(reply["totals"]))

    def correction(self, lengths: Int32, *, old: Float32, recorded: Float32, correction: Correction) -> Corrected:
        """verl's rollout correction; ``lengths`` (sequences), ``old`` and ``recorded`` (tokens of all sequences)."""
        payload = {"lengths": lengths, "old_logprobs": old, "recorded_logprobs": recorded, "correction": correction}
        reply = self._call_one("correction", payload, _SHORT)
        return Corrected(weights=to_array(reply["weights"]), kept=to_array(reply["kept"]), metrics=reply["metrics"])

    def export_weights(self, version: int, *, merged: bool = False, digest_later: bool = False) -> WeightsFile:
        """One safetensors file with the current weights, in shared memory if there is room. The one before is kept where it may be needed.

        With LoRA it holds the adapter (PEFT names, alpha in its metadata), or base and adapter as one with ``merged``.
        ``digest_later``: the digest of the weights is taken when it is asked for, which must be before the next update; an adapter's is
        taken at once.
        """
        path, spare = self._weights.file(version), self._weights.spare(version)
        asked = {"path": str(path), "spare": spare and str(spare), "merged": merged, "digest_later": digest_later}
        found = self._call("export", asked, self._timeout)[0]
        self._weights.keep_newest()

        @cache
        def digest() -> str:
            return self._call("digest", {"merged": merged}, self._timeout)[0]["digest"]

        return WeightsFile(
            path=path,
            version=version,
            digest=found["digest"] or digest,
            tensors=int(found["tensors"]),
            num_bytes=int(found["num_bytes"]),
            lora=bool(found["lora"]),
        )

    def save(self, folder: Path) -> None:
        """A Hugging Face folder (float32 safetensors, config, tokenizer) with moments and random states beside; whole or not at all.

        With LoRA the weights are merged, so that the folder loads anywhere; the adapter stands in ``adapter/``.

        Raises:
            CheckpointError: the folder exists, or cannot be written.
        """
        folder = folder.absolute()
        if folder.exists():
            raise CheckpointError(f"{folder} exists already; a checkpoint is written once, into a folder of its own")
        temporary = folder.with_name(f".{folder.name}.tmp")
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            self._call("save", {"folder": str(temporary)}, self._timeout)
            self._copy_model_files(temporary)
            lora = None if self._settings.lora is None else msgspec.to_builtins(self._settings.lora)
            state = {"format": _FORMAT, "engine": "verl", "ranks": len(self._children), "lora": lora}
            (temporary / _STATE_FILE).write_bytes(msgspec.json.encode(state))
            _sync_tree(temporary)
            temporary.rename(folder)
            _sync(folder.parent)
        except OSError as error:
            raise CheckpointError(f"the engine's state could not be written to {folder}: {error}") from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def load(self, folder: Path) -> None:
        """Weights, moments and random states as ``save`` wrote them; the KL reference stays the run's initial weights.

        Raises:
            CheckpointError: the folder is not one of ours, or of another model or adapter shape.
        """
        folder = folder.absolute()
        try:
            state = json.loads((folder / _STATE_FILE).read_bytes())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"got {folder}, which is no complete engine checkpoint: {error}") from error
        lora = None if self._settings.lora is None else msgspec.to_builtins(self._settings.lora)
        if state.get("format") != _FORMAT or state.get("lora") != lora:
            raise CheckpointError(
                f"got a checkpoint with lora={state.get('lora')}, format {state.get('format')}; this run has lora={lora}, format {_FORMAT}"
            )
        try:
            self._call("load", {"folder": str(folder)}, self._timeout)
        except EngineError as error:
            raise CheckpointError(f"{folder} could not be loaded: {error}") from error

    def close(self) -> None:
        """End the processes and remove the weights files; safe to call twice."""
        for child in self._children:
            child.close()
        self._pool.shutdown(wait=False)
        self._weights.close()

    def __enter__(self) -> VerlEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _take(self, ready: Mapping[str, Any]) -> None:
        self.vocab_size = int(ready["vocab_size"])
        self.parameters = int(ready["parameters"])
        self.trained_parameters = int(ready["trained_parameters"])
        self.device = str(ready["device"])
        self.shares_prefixes = bool(ready["shared_prefix"])

    def _batch_payload(self, batch: Batch) -> dict[str, Any]:
        if not batch.rows:
            raise EngineError("got a batch without rows; there is nothing to take a gradient of")
        columns = pack_rows(batch)
        if self._settings.kl_coef > 0 and self._settings.kl_in == "loss" and columns.ref_logprobs is None:
            samples = [row.sample for row in batch.rows]
            found = self.logprobs([s.token_ids for s in samples], temperatures=[s.temperature for s in samples], reference=True)
            columns = msgspec.structs.replace(columns, ref_logprobs=np.concatenate(found))
        return {**msgspec.structs.asdict(columns), "denominator": batch.denominator}

    def _per_token(
        self, method: str, rows: Sequence[Int32], temperatures: Sequence[float], *, reference: bool, at: Sequence[Mask] | None = None
    ) -> list[Float32]:
        if len(rows) != len(temperatures):
            raise ValueError(f"got {len(rows)} rows and {len(temperatures)} temperatures; expected one for each row")
        if any(not temperature > 0 for temperature in temperatures):
            raise ValueError(f"got temperature {min(temperatures)}; logprobs are defined above 0 only")
        for number, row in enumerate(rows):
            if not len(row) or int(row.min()) < 0 or int(row.max()) >= self.vocab_size:
                raise ValueError(
                    f"row {number} is empty or has an id outside 0..{self.vocab_size - 1}; expected ids of this model's tokenizer"
                )
        if not rows:
            return []
        payload = {**pack_token_ids(rows, temperatures), "reference": reference, "at": None if at is None else np.concatenate(at)}
        shares = np.stack([to_array(reply["values"]) for reply in self._call(method, payload, self._timeout)])
        return _by_row(np.fmax.reduce(shares, axis=0), rows)

    def _call(self, method: str, payload: Mapping[str, Any], timeout: float) -> list[dict[str, Any]]:
        """Every rank at once: they meet inside."""
        if len(self._children) == 1:
            return [self._call_one(method, payload, timeout)]
        futures = [self._pool.submit(child.call, method, payload, timeout) for child in self._children]
        wait(futures, return_when=FIRST_EXCEPTION)  # a rank that failed will not meet the others, which would wait for it
        failed = cause_of(futures)
        try:
            if failed is not None:
                failed.result()
            return [future.result() for future in futures]
        except (ChildDied, ChildError, TimeoutError) as error:
            raise EngineError(f"the engine failed in {method!r}: {error}") from error

    def _call_one(self, method: str, payload: Mapping[str, Any], timeout: float) -> dict[str, Any]:
        try:
            return self._children[0].call(method, payload, timeout)
        except (ChildDied, ChildError, TimeoutError) as error:
            raise EngineError(f"the engine failed in {method!r}: {error}") from error

    def _copy_model_files(self, folder: Path) -> None:
        for file in sorted(self._model_path.iterdir()):
            if file.is_file() and not file.name.endswith(_NOT_COPIED) and not file.name.startswith("."):
                shutil.copyfile(file, folder / file.name)
        config = json.loads((folder / "config.json").read_bytes())
        config.pop("torch_dtype", None)
        config["dtype"] = "float32"
        (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def _merged(replies: Sequence[Mapping[str, Any]]) -> tuple[dict[str, float], dict[str, float]]:
    """Terms of the loss, summed over ranks, and verl's other metrics, averaged over the tokens computed."""
    terms: dict[str, float] = {}
    averages: dict[str, float] = {}
    tokens = sum(int(reply["wanted"]) for reply in replies)
    for reply in replies:
        for name, value in reply["terms"].items():
            terms[name] = terms.get(name, 0.0) + value
        for name, value in reply["averages"].items():
            averages[name] = averages.get(name, 0.0) + value * int(reply["wanted"]) / tokens
    return terms, averages


def _by_row(flat: Float32, rows: Sequence[Int32]) -> list[Float32]:
    """(S) -> (T) for each row."""
    return [np.ascontiguousarray(part) for part in np.split(flat, np.cumsum([len(row) for row in rows])[:-1])]


def _gap(differences: Float32) -> dict[str, float]:
    """How far the trainer's logprobs were from the recorded ones before the first step, over the tokens computed."""
    differences = differences[np.isfinite(differences)]  # of what nobody sampled there is no other logprob
    if not len(differences):
        return {"update/wanted_tokens": 0.0}
    size = np.abs(differences)
    return {
        "update/wanted_tokens": float(len(differences)),
        "rollout/logprob_diff_mean": float(size.mean()),
        "rollout/logprob_diff_p99": float(np.quantile(size, 0.99)),
        "rollout/logprob_diff_max": float(size.max()),
        "rollout/ratio_mean": float(np.exp(np.clip(differences, -20, 20)).mean()),
    }


def _sync_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
