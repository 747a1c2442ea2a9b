"""10,000 episodes open at once in Ray workers on two simulated nodes, their spans home over OTLP with a token: is one lost?

    python benchmarks/many_episodes.py [--episodes 10000] [--workers 4] [--rounds 2] [--json]

Each episode waits for a scripted time (lognormal, median 2 s, p99 20 s, cut at 30 s, seed given) that begins once all of its round are
open, makes one call to a scripted server of its worker, and ends. The home process puts the episodes together from spans alone. Memory is
looked at after each round: in the second one the same work must find room in what the first one left.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import sys
import time
from collections.abc import Sequence
from typing import Any

MEDIAN, P99, LONGEST = 2.0, 20.0, 30.0
SEED = 0
_DEADLINE = 600.0
_CLIENTS = 32
"""Of a worker: the work of one client's connection pool grows with the square of the calls that wait in it."""
_WITHOUT = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
"""Processes of Ray's that are not needed here."""


class Herd:
    """One worker's share, in an actor: episodes as tasks of one event loop, calls to a server of its own."""

    def __init__(self, environ: dict[str, str]) -> None:
        os.environ |= environ
        import openai

        import rllm_trace as rllm
        from rllm_trace.exporters.otlp import OTLPExporter
        from rllm_trace.testing import ScriptedServer

        rllm.configure(exporters=[OTLPExporter(tokens=True)], capture_content=True, tokens=True)
        self._server = ScriptedServer().__enter__()
        key, url = self._server.api_key, self._server.base_url
        self._clients = [openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=300) for _ in range(_CLIENTS)]
        self._open = 0
        self._most = 0
        self._all = asyncio.Event()
        self._opened = asyncio.Event()
        self._share = 0

        @rllm.workflow
        async def episode(number: int, wait: float) -> int:
            self._open += 1
            self._most = max(self._most, self._open)
            if self._open == self._share:
                self._opened.set()
            await self._all.wait()
            await asyncio.sleep(wait)
            client = self._clients[number % _CLIENTS]
            done = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": str(number)}])
            self._open -= 1
            return len(done.choices)

        self._episode = episode

    async def round(self, first: int, waits: Sequence[float]) -> dict[str, Any]:
        """Open them all, let them run, and see that what they recorded has been sent."""
        import rllm_trace as rllm

        self._all.clear()
        self._opened.clear()
        self._most, self._share = 0, len(waits)
        started, cpu = time.monotonic(), time.process_time()
        tasks = [asyncio.create_task(self._episode(first + number, wait)) for number, wait in enumerate(waits)]
        await self._opened.wait()
        self._all.set()
        failed = sum(isinstance(found, BaseException) for found in await asyncio.gather(*tasks, return_exceptions=True))
        sent = await asyncio.to_thread(rllm.flush, _DEADLINE)
        self._server.log.clear()
        return {
            "most_open": self._most,
            "failed": failed,
            "sent": sent,
            "seconds": time.monotonic() - started,
            "cpu_seconds": time.process_time() - cpu,
            "rss": resident(),
            "dropped": rllm.stats()["dropped"],
        }


def resident() -> int:
    """Bytes of memory that this process holds."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def scripted_waits(count: int, seed: int) -> list[float]:
    """Seconds, lognormal with the median and the 99th percentile asked for."""
    sigma = math.log(P99 / MEDIAN) / 2.326
    draw = random.Random(seed)
    return [min(LONGEST, draw.lognormvariate(math.log(MEDIAN), sigma)) for _ in range(count)]


def main() -> int:
    """Run the rounds; 1 where an episode was lost or memory grew."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()

    import ray
    from ray.cluster_utils import Cluster

    from rllm_trace.episode_receiver import EpisodeReceiver

    arrived: dict[str, int] = {}

    def keep(episode: Any) -> None:
        arrived[episode.id] = arrived.get(episode.id, 0) + sum(call.complete for call in episode.calls)

    os.environ |= {"RAY_memory_monitor_refresh_ms": "0", "RAY_prestart_worker_first_driver": "0"}
    cluster = Cluster()
    for _ in range(2):
        cluster.add_node(num_cpus=asked.workers, object_store_memory=100 * 2**20, **_WITHOUT)
    ray.init(address=cluster.address, log_to_driver=False)
    lines: list[dict[str, Any]] = []
    try:
        with EpisodeReceiver(on_episode=keep, settle=1.0, deadline=_DEADLINE) as receiver:
            actor = ray.remote(Herd).options(num_cpus=1, scheduling_strategy="SPREAD")
            environ = {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)} | receiver.environ()
            herds = [actor.remote(environ) for _ in range(asked.workers)]
            share = asked.episodes // asked.workers
            for number in range(asked.rounds):
                arrived.clear()
                cpu = time.process_time()
                waits = [scripted_waits(share, SEED + worker) for worker in range(asked.workers)]
                said = ray.get([herd.round.remote(worker * share, waits[worker]) for worker, herd in enumerate(herds)], timeout=_DEADLINE)
                receiver.wait((number + 1) * share * asked.workers, timeout=_DEADLINE)
                lines.append(
                    {
                        "round": number + 1,
                        "episodes": share * asked.workers,
                        "open_at_once": sum(one["most_open"] for one in said),
                        "arrived": len(arrived),
                        "with_their_call": sum(calls == 1 for calls in arrived.values()),
                        "failed": sum(one["failed"] for one in said),
                        "all_sent": all(one["sent"] for one in said),
                        "home_mb": resident() / 2**20,
                        "workers_mb": [one["rss"] / 2**20 for one in said],
                        "home_cpu_seconds": time.process_time() - cpu,
                        "workers_cpu_seconds": [one["cpu_seconds"] for one in said],
                        "seconds": max(one["seconds"] for one in said),
                    }
                )
                if not asked.json:
                    print(lines[-1])
    finally:
        ray.shutdown()
        cluster.shutdown()
    if asked.json:
        print(json.dumps(lines))
    lost = any(line["with_their_call"] != line["episodes"] for line in lines)
    grown = len(lines) > 1 and max(last / first for first, last in zip(_memory(lines[-2]), _memory(lines[-1]), strict=True)) > 1.15
    return 1 if lost or grown else 0


def _memory(line: dict[str, Any]) -> list[float]:
    return [line["home_mb"], *line["workers_mb"]]


if __name__ == "__main__":
    sys.exit(main())
