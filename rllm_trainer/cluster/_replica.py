"""A replica on a CPU: token ids in, sampled token ids with their logprobs and versions out, from the embedded server's own core.

One actor a replica. Requests are batched as they come; new weights are swapped in between two tokens and no request is lost, so what
verl calls aborting is a pause here. Weights come as arrays through Ray's object store, from whichever node trains.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec

__all__ = ["VERSIONS", "CpuReplicaServer", "Reply"]

VERSIONS = "versions"
"""Of a reply's extra fields, where versions are told by token: (version, start, end) of each span."""

_KV_BYTES = 512 * 2**20
_MAX_WAITING = 65_536
_HEAD = "lm_head.weight"


class Reply(msgspec.Struct, kw_only=True):
    """verl's ``TokenOutput``, field by field; a class of our own so that this process need not import verl."""

    token_ids: list[int]
    log_probs: list[float]
    stop_reason: str
    num_preempted: int = 0
    routed_experts: None = None
    extra_fields: dict[str, Any]


class CpuReplicaServer:
    """An async actor with the methods that verl calls on a server."""

    def __init__(self, model: str, *, max_len: int, threads: int, response_length: int) -> None:
        import torch

        from rllm_trainer.serving._local.loader import open_model
        from rllm_trainer.serving._local.scheduler import Scheduler
        from rllm_trainer.serving._local.spec import eos_token_ids, read_config, read_spec
        from rllm_trainer.serving._local.tokens import Tokenizer

        torch.set_num_threads(threads)
        folder = Path(model)
        described = read_config(folder)
        self._tied = bool(described.get("tie_word_embeddings"))
        self._eos = frozenset(eos_token_ids(folder, described))
        self._loader = open_model(folder, read_spec(described))
        self._max_len = min(max_len, self._loader.max_positions)
        self._response_length = response_length
        self._tokenizer = Tokenizer(folder)
        kv_tokens = max(_KV_BYTES // self._loader.kv_bytes_per_token, 2 * self._max_len)
        runner = self._loader.runner(kv_tokens=kv_tokens, max_len=self._max_len, max_rows=64)
        self._loop = asyncio.get_event_loop()
        self._scheduler = Scheduler(runner, version=0, max_waiting=_MAX_WAITING, deliver=self._deliver)
        self._updates = 0
        threading.Thread(target=_or_die, args=(self._scheduler.run,), name="rllm-steps", daemon=True).start()
        _say(f"replica of {folder}: {kv_tokens} tokens of keys and values, at most {self._max_len} of one request, {threads} threads")

    async def ready(self) -> str:
        """The node that it is on."""
        from rllm_trainer.cluster._ray_api import ray

        return str(ray.util.get_node_ip_address())

    async def generate(self, prompt_ids: list[int], sampling_params: Mapping[str, Any], request_id: str | None = None, **_: Any) -> Reply:
        """Sample one reply."""
        from rllm_trainer.serving._local.jobs import Generation

        news: asyncio.Queue[Any] = asyncio.Queue()
        job = Generation(
            list(prompt_ids), self._params(sampling_params), tokenizer=self._tokenizer, max_len=self._max_len, matcher=None, news=news
        )
        self._scheduler.submit([job])
        try:
            _, update = await news.get()
        except asyncio.CancelledError:
            self._scheduler.cancel([job])
            raise
        if update.error is not None:
            raise RuntimeError(update.error)
        versions = [(span.version, span.start, span.end) for span in job.versions]
        told = [version for version, _, _ in versions]
        return Reply(
            token_ids=[one.token_id for one in update.sampled],
            log_probs=[one.logprob for one in update.sampled],
            stop_reason="completed" if update.finish_reason == "stop" else "length",
            extra_fields={
                "global_steps": told[-1],
                "min_global_steps": min(told),
                "max_global_steps": max(told),
                VERSIONS: versions,
            },
        )

    async def load_weights(self, tensors: Mapping[str, Any], version: int) -> int:
        """Serve these from the next token on; gives how many there were. ``tensors``: Hugging Face name -> float32 array."""
        from rllm_trainer.engine.tensor_file import RawTensor, write_tensors

        given = {name: array for name, array in tensors.items() if not (self._tied and name == _HEAD)}
        raw = [RawTensor(name=n, dtype="F32", shape=tuple(a.shape), data=memoryview(a).cast("B")) for n, a in given.items()]
        with tempfile.TemporaryDirectory(prefix="rllm-replica-", dir=_shared_memory()) as folder:
            path = Path(folder) / "model.safetensors"
            await asyncio.to_thread(write_tensors, path, raw)
            weights = await asyncio.to_thread(self._loader.load, path, lora=False)
            swapped = self._scheduler.swap(weights, version)
            self._scheduler.resume()  # the swap comes before the next token, and is done with it
            found = await asyncio.wrap_future(_future(swapped))
        _say(f"version {version}: {len(given)} tensors taken in {found.seconds:.2f} s with {found.in_flight} replies under way")
        self._loader.served = weights
        self._updates += 1
        return len(given)

    async def stats(self) -> dict[str, int]:
        """Version served, weights taken, tokens sampled."""
        found = self._scheduler.stats
        return {"version": found.version, "updates": self._updates, "sampled_tokens": found.sampled_tokens}

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """A pause: what is under way goes on, under the weights that come, when it ends."""
        self._scheduler.pause(0)

    async def resume_generation(self) -> None:
        self._scheduler.resume()

    async def wake_up(self, **_: Any) -> None:
        self._scheduler.resume()

    async def sleep(self, **_: Any) -> None:
        """Nothing to free."""

    async def clear_kv_cache(self) -> None:
        """A swap clears it."""

    async def release_kv_cache(self) -> None:
        """Nothing to free."""

    async def resume_kv_cache(self) -> None:
        """Nothing was freed."""

    async def start_profile(self, **_: Any) -> None:
        """There is no profiler here."""

    async def stop_profile(self) -> None:
        """There is no profiler here."""

    def _params(self, asked: Mapping[str, Any]) -> Any:
        from rllm_trainer.serving._local.jobs import GenerationParams
        from rllm_trainer.serving._local.sampling import SamplingParams

        sampling = SamplingParams(
            temperature=float(asked.get("temperature", 1.0)),
            top_p=float(asked.get("top_p", 1.0)),
            top_k=max(int(asked.get("top_k", -1)), 0),
            min_p=float(asked.get("min_p", 0.0)),
            presence_penalty=float(asked.get("presence_penalty", 0.0)),
            frequency_penalty=float(asked.get("frequency_penalty", 0.0)),
            repetition_penalty=float(asked.get("repetition_penalty", 1.0)),
        )
        limit = asked.get("max_tokens") or asked.get("max_new_tokens") or self._response_length
        return GenerationParams(
            sampling=sampling,
            max_tokens=int(limit),
            stop_token_ids=frozenset(asked.get("stop_token_ids") or ()),
            eos=frozenset() if asked.get("ignore_eos") else self._eos,
            seed=int(asked["seed"]) if asked.get("seed") is not None else int.from_bytes(os.urandom(7), "little"),
        )

    def _deliver(self, news: Any) -> None:
        def put() -> None:
            for job, update in news:
                if update is not None:
                    job.news.put_nowait((job, update))

        self._loop.call_soon_threadsafe(put)


def _future(future: Any) -> Future[Any]:
    return future


def _shared_memory() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _say(line: str) -> None:
    """On the log of this process, whose last lines are told where it dies."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def _or_die(run: Any) -> None:
    """A replica without its stepping thread would only look alive."""
    try:
        run()
    except BaseException:  # noqa: BLE001 - the process ends with it
        traceback.print_exc()
    finally:
        os._exit(70)
