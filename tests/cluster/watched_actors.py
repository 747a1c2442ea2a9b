"""Actors on a simulated cluster, one of which is killed while all are watched: prints what was said of it, as JSON."""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading

from simulated import two_nodes

from rllm_trainer.cluster.last_words import last_words
from rllm_trainer.cluster.liveness import Watch
from rllm_trainer.exceptions import EngineError


class Speaker:
    """Says something on its log, and waits."""

    def say(self, words: str) -> int:
        print(words, file=sys.stderr, flush=True)
        return os.getpid()

    def sleep(self, seconds: float) -> None:
        threading.Event().wait(seconds)


def main() -> None:
    with two_nodes(cpus=2) as ray:
        actor = ray.remote(Speaker).options(num_cpus=0)
        calm, busy, killed = actor.remote(), actor.remote(), actor.remote()
        busy.sleep.remote(600)
        pid = ray.get(killed.say.remote("the last that it said"))
        told: queue.Queue[EngineError] = queue.Queue()
        watch = Watch({"the calm one": calm, "the busy one": busy, "the third": killed}, told.put)
        before = told.qsize()
        os.kill(pid, signal.SIGKILL)
        found = str(told.get(timeout=120))
        watch.wait(120)
        print(json.dumps({"before": before, "found": found, "more": told.qsize(), "of_others": last_words(ValueError("no process"))}))


if __name__ == "__main__":
    main()
