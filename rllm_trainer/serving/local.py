"""The embedded server, parent side: a model folder in, an OpenAI-compatible address on loopback out, with swaps that are proven.

The server is a child process of ours (``_local``): it computes in float32 with its own copy of the weights, and ends when we do. All
talk with it after the start is HTTP on loopback with a token, past any proxy that the environment names.
"""

from __future__ import annotations

import http.client
import os
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from rllm_trainer._child import Child, ChildDied
from rllm_trainer.engine.base import WeightsFile
from rllm_trainer.exceptions import ServerError
from rllm_trainer.serving.base import CONTINUED, Capabilities, Probe, SwapReport
from rllm_trainer.serving.owned import PROXY_NAMES, OwnedServer
from rllm_trainer.serving.proof import SwapNotProven, Verdict, judge
from rllm_trainer.serving_settings import InFlight
from rllm_trainer.types import Float32, Int32

__all__ = ["LocalServer"]

_MODULE = "rllm_trainer.serving._local.main"
_MALLOC = "glibc.malloc.hugetlb=1:glibc.malloc.arena_max=1:glibc.malloc.mmap_threshold=1073741824:glibc.malloc.trim_threshold=4294967296"
"""Weights are streamed through at every step: side by side in one heap of 2 MB pages, where the kernel grants them, a step takes a fifth
less time, and a swap finds the memory of the set before the last one still mapped."""
_SPIN = "10000"
"""Rounds that an idle thread of a product waits awake: enough for the gap between two products, not for the one between two steps,
which belongs to the app and the engine."""
_CALL_TIMEOUT = 600.0
_MOST_KV_BYTES = 2 * 2**30


class LocalServer(OwnedServer):
    """A ``Server``. Made by ``start``; ``close`` ends it, and so does the end of this process."""

    capabilities = Capabilities(
        token_ids=True, logprobs=True, processed_logprobs=True, swap=True, lora_swap=True, per_token_versions=True, token_prompts=True
    )

    def __init__(self, child: Child, *, api_key: str, model: str, version: int, in_flight: InFlight = "keep") -> None:
        super().__init__(child, api_key=api_key, model=model, version=version)
        self._in_flight: InFlight = in_flight
        self.max_model_len: int = child.ready["max_model_len"]
        """Most tokens of prompt and reply together."""
        self.vocab: int = child.ready["vocab"]
        """Number of token ids."""

    @classmethod
    def start(
        cls,
        model_path: str | Path,
        *,
        run_dir: Path,
        max_model_len: int | None = None,
        threads: int | None = None,
        port: int = 0,
        name: str | None = None,
        version: int = 0,
        kv_bytes: int | None = None,
        max_rows: int = 64,
        max_waiting: int = 1024,
        chat_template: str | None = None,
        continuation: Literal["rendered", "exact"] = "rendered",
        tool_format: Literal["hermes", "qwen", "llama", "deepseek"] | None = None,
        reasoning: Literal["think"] | None = None,
        in_flight: InFlight = "keep",
        swaps: bool = True,
        start_timeout: float = 180.0,
        module: str = _MODULE,
    ) -> LocalServer:
        """Start serving a model folder and wait until it answers.

        Args:
            model_path: a Hugging Face folder (config.json, safetensors, tokenizer.json).
            run_dir: the server's log is written into it.
            max_model_len: most tokens of prompt and reply together; None: what model and memory allow.
            threads: torch threads; None: all cores.
            port: on loopback; 0: a free one.
            name: the model's name to clients; None: the folder's.
            version: policy version of the weights in the folder.
            kv_bytes: memory for keys and values, prefix cache included; None: a quarter of this machine's, at most 2 GiB.
            max_rows: most sequences that decode at once; more wait.
            max_waiting: most sequences that wait; more are answered with 429.
            chat_template: Jinja text used instead of the folder's template.
            continuation: where the next prompt of a recorded chat comes from: all of it through the template, or the ids that were
                sampled and sent before and the template for what is new.
            tool_format: how the model writes tool calls; None: as its chat template shows.
            reasoning: ``think``: what stands between <think> and </think> is told apart, as ``reasoning_content``; None: it is content.
            in_flight: what becomes of replies that are being sampled when weights are swapped.
            swaps: it is to be given weights: memory for a second set is made at the start, not at the first swap.
            start_timeout: seconds.
            module: the child's main module.

        Raises:
            ServerError: it could not start; the message says why.
        """
        folder = Path(model_path).expanduser().resolve()
        api_key = secrets.token_urlsafe(32)
        cores = threads or os.cpu_count() or 1
        config: dict[str, Any] = {
            "model_path": str(folder),
            "name": name or folder.name,
            "api_key": api_key,
            "version": version,
            "port": port,
            "threads": cores,
            "max_model_len": max_model_len,
            "kv_bytes": kv_bytes or _default_kv_bytes(),
            "max_rows": max_rows,
            "max_waiting": max_waiting,
            "chat_template": chat_template,
            "continues": continuation == "exact",
            "tool_format": tool_format,
            "thinks": reasoning is not None,
            "swaps": swaps,
        }
        try:
            child = Child.start(
                module, config, name="local server", log_path=run_dir / "server.log", env=_environment(cores), start_timeout=start_timeout
            )
        except ChildDied as error:
            raise ServerError(str(error)) from error
        failed = child.ready.get("failed")
        if failed is not None:
            child.close(timeout=1.0)
            raise ServerError(f"the local server could not start: {failed}")
        return cls(child, api_key=api_key, model=config["name"], version=version, in_flight=in_flight)

    def stats(self) -> dict[str, Any]:
        """Counters of the server since its start: steps, tokens computed, tokens taken from the prefix cache, swaps ..."""
        return self._call("GET", "/rllm/stats")

    def continuations(self) -> Counter[str]:
        """See ``Continues``."""
        told = self.stats()
        return Counter({CONTINUED: told["continued"], **told["not_continued"]}) if "continued" in told else Counter()

    def check(self) -> None:
        """Raises ``ServerError``, with the last log lines, if the server is gone."""
        if not self._child.alive:
            raise ServerError(f"the local server has ended; last lines of {self._child.log_path}:\n{self._child.log_tail()}")
        self._call("GET", "/health", timeout=30.0)

    def pause(self, *, after_tokens: int = 0, timeout: float = 60.0) -> None:
        """Stand still, once so many more tokens have been sampled, until ``resume`` or the next pause; requests are taken in and kept.

        Returns when the server stands still. A swap meanwhile is done at once, and reported with the first token after the pause.
        Raises ``ServerError`` if it does not within ``timeout`` seconds.
        """
        self._call("POST", "/rllm/pause", {"after_tokens": after_tokens}, timeout)

    def resume(self) -> None:
        """Go on after a pause."""
        self._call("POST", "/rllm/resume", {})

    def swap(self, weights: WeightsFile, *, probe: Probe | None = None) -> SwapReport:
        """Serve other weights of the same model from the next token on; requests in flight go on with them.

        Raises:
            ServerError: the file was refused, and the old weights are still served.
            SwapNotProven: what was served was not what the file holds; the old weights are served again.
        """
        before = self._before(probe) if probe is not None else None
        report = self.swap_unproven(weights, check_digest=probe is None or weights.lora)
        if probe is None or before is None:
            return report
        try:
            verdict = self._proven(weights, probe, before)
        except Exception as error:
            told = self._go_back()
            if isinstance(error, SwapNotProven):
                raise SwapNotProven(f"{error}; {told}") from error
            raise
        return msgspec.structs.replace(report, proof=verdict.proof, max_difference=verdict.max_difference)

    def swap_unproven(self, weights: WeightsFile, *, check_digest: bool = False) -> SwapReport:
        """The swap alone. ``check_digest``: the new buffers are hashed and compared before they are served."""
        body = {"path": str(weights.path), "version": weights.version, "lora": weights.lora, "in_flight": self._in_flight}
        done = self._call("POST", "/rllm/swap", {**body, "digest": weights.taken_digest() if check_digest else None})
        self._version = int(self.stats()["version"])
        if self._version != weights.version:
            raise SwapNotProven(f"after the swap to version {weights.version} the server says {self._version}")
        return SwapReport(
            version=weights.version,
            seconds=done["seconds"],
            requests_in_flight=done["requests_in_flight"],
            proof="digest" if check_digest else "none",
            max_difference=0.0,
        )

    def prompt_logprobs(self, rows: Sequence[Int32], *, temperature: float = 1.0) -> list[Float32]:
        return self._score(rows, temperature)

    def served_digest(self) -> str:
        """Digest of the weights read back from the server's own buffers."""
        return self._call("GET", "/rllm/digest")["digest"]

    def close(self) -> None:
        self._child.close(timeout=2.0)

    def _before(self, probe: Probe) -> list[Float32]:
        """The probe's logprobs under the old weights; afterwards its rows lie in the prefix cache, where they could be found by mistake."""
        first = [_ends(old)[0] for old in probe.old]
        return _logprobs(self._scored(probe.rows, probe.temperature, first, [one - 1 for one in first]))

    def _read(self, probe: Probe) -> tuple[list[Float32], bool]:
        """The probe's logprobs as a generation would have them, and whether any of its tokens came from the prefix cache.

        What comes before the first token that counts may be cached, or half of the way to the last one."""
        ends = [_ends(old) for old in probe.old]
        reuse = [max(first - 1, last // 2) for first, last in ends]
        answer = self._scored(probe.rows, probe.temperature, [first for first, _ in ends], reuse)
        return _logprobs(answer), any(answer["cached"])

    def _proven(self, weights: WeightsFile, probe: Probe, before: list[Float32]) -> Verdict:
        now, cached = self._read(probe)
        verdict = judge(probe, before, self._score(probe.rows, probe.temperature) if cached else now)
        if cached:
            behind = judge(probe, before, now, what="logprobs behind a cached prefix")
            verdict = msgspec.structs.replace(verdict, max_difference=max(verdict.max_difference, behind.max_difference))
        if verdict.proof == "digest" and not weights.lora:
            self._prove_by_digest(weights)
        return verdict

    def _go_back(self) -> str:
        """Have the weights before the last swap served again; what came of it, in words."""
        try:
            self._version = int(self._call("POST", "/rllm/back", {})["version"])
        except ServerError as error:
            return f"the weights before it could not be put back: {error}"
        return f"version {self._version} is served again"

    def _prove_by_digest(self, weights: WeightsFile) -> None:
        held = self.served_digest()
        if held != weights.taken_digest():
            raise SwapNotProven(
                f"after the swap to version {weights.version} the server holds tensors of digest {held}, not {weights.taken_digest()}"
            )

    def _score(self, rows: Sequence[Int32], temperature: float) -> list[Float32]:
        return _logprobs(self._scored(rows, temperature, None, None))

    def _scored(self, rows: Sequence[Int32], temperature: float, start: list[int] | None, reuse: list[int] | None) -> dict[str, Any]:
        body: dict[str, Any] = {"rows": [row.tolist() for row in rows], "temperature": temperature, "start": start, "reuse": reuse}
        return self._call("POST", "/rllm/score", body)

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None, timeout: float = _CALL_TIMEOUT) -> dict[str, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=timeout)
        try:
            headers = {"authorization": f"Bearer {self._api_key}", "content-type": "application/json"}
            connection.request(method, path, None if body is None else msgspec.json.encode(body), headers)
            response = connection.getresponse()
            answer = msgspec.json.decode(response.read())
        except (OSError, http.client.HTTPException, msgspec.DecodeError) as error:
            state = "runs but did not answer" if self._child.alive else "has ended"
            raise ServerError(
                f"the local server {state} ({method} {path}: {error!r}); last lines of {self._child.log_path}:\n{self._child.log_tail()}"
            ) from error
        finally:
            connection.close()
        if response.status != 200:
            raise ServerError(f"the local server refused {method} {path} with {response.status}: {answer['error']['message']}")
        return answer


def _ends(values: Float32) -> tuple[int, int]:
    """The first and the last token that has a value; 1 or more."""
    known = np.flatnonzero(np.isfinite(values[1:])) + 1
    return (int(known[0]), int(known[-1])) if len(known) else (1, 1)


def _logprobs(answer: Mapping[str, Any]) -> list[Float32]:
    return [np.array([np.nan if value is None else value for value in row], np.float32) for row in answer["logprobs"]]


def _environment(threads: int) -> dict[str, str | None]:
    changes: dict[str, str | None] = dict.fromkeys(PROXY_NAMES)
    tunables = ":".join(filter(None, [os.environ.get("GLIBC_TUNABLES"), _MALLOC]))
    return {
        **changes,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": str(threads),
        "GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", _SPIN),
        "GLIBC_TUNABLES": tunables,
    }


def _default_kv_bytes() -> int:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(memory // 4, _MOST_KV_BYTES)
