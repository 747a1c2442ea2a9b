"""What happens in verl's process in, what the user's process prints out: a small actor between the two, and both its ends.

The head never prints. Its report has the methods of ``Report``; each call is a message, and the user's process plays it back on the
real one. The other way, the mailbox says whether the run is to be stopped, and hands on the rows that the user's process draws.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import msgspec

from rllm_trace.routing import CallSite
from rllm_trainer.evaluation import Evaluation, Evaluator
from rllm_trainer.exceptions import EngineError
from rllm_trainer.measures import evaluation_measures
from rllm_trainer.metrics import Line, MetricsLog
from rllm_trainer.report import Losses, Report
from rllm_trainer.rollout.attempt import Job
from rllm_trainer.types import Rollout

__all__ = ["EventReport", "Mailbox", "play", "watch_stop"]

_MOST = 10_000
_DIED = "died"
_LOOK = 1.0


class Mailbox:
    """An actor: events of the head, in order, until they are taken; rows for it, until it takes them; and the wish to stop."""

    def __init__(self) -> None:
        self._events: list[tuple[str, tuple[Any, ...]]] = []
        self._dropped = 0
        self._stop = False
        self._held: list[Any] = []
        self._rows: list[bytes] = []
        self._over = False
        self._come = asyncio.Event()
        self._wanted = 0
        self._asked = asyncio.Event()

    async def put(self, name: str, arguments: tuple[Any, ...]) -> None:
        """One event; beyond ten thousand that nobody takes, they are counted instead."""
        if len(self._events) >= _MOST:
            self._dropped += 1
            return
        self._events.append((name, arguments))

    async def take(self) -> list[tuple[str, tuple[Any, ...]]]:
        """All events since the last call."""
        events, self._events = self._events, []
        if self._dropped:
            events.append(("warn", (f"{self._dropped} messages of the cluster were not taken in time and are lost",)))
            self._dropped = 0
        return events

    async def hold(self, groups: list[Any]) -> None:
        """Placement groups of the head: Ray keeps them until the user's job ends, even where the head is killed."""
        self._held += groups

    async def held(self) -> list[Any]:
        """Those that the user's process gives back."""
        return self._held

    async def rows(self, wanted: int, within: float) -> tuple[list[bytes], bool]:
        """Packed rows that have come since the last call, and whether there are no others; waits for so many seconds at most.

        ``wanted``: how many in all the head is about to use.
        """
        self._wanted = max(self._wanted, wanted)
        self._asked.set()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._come.wait(), within)
        self._come.clear()
        rows, self._rows = self._rows, []
        return rows, self._over

    async def wanted(self, more_than: int) -> int:
        """How many rows the head wants in all, once that is more than this: a question that the user's process has open."""
        while self._wanted <= more_than:
            self._asked.clear()
            await self._asked.wait()
        return self._wanted

    async def give(self, rows: bytes, over: bool) -> None:
        """Packed rows for the head, and whether they are the last."""
        self._rows.append(rows)
        self._over = over
        self._come.set()

    async def stop(self) -> None:
        """The run is to end at its next step."""
        self._stop = True

    async def stopped(self) -> bool:
        return self._stop


class EventReport:
    """The head's report: ``Report``'s methods, as messages, and the run's metrics on file."""

    def __init__(self, mailbox: Any, metrics: MetricsLog) -> None:
        self._mailbox = mailbox
        self._metrics = metrics

    @property
    def lines(self) -> list[Line]:
        """Every line of metrics."""
        return self._metrics.lines

    def note(self, sentence: str) -> None:
        self._send("note", sentence)

    def warn(self, sentence: str) -> None:
        self._send("warn", sentence)

    def routing(self, sites: Sequence[CallSite]) -> None:
        self._send("routing", list(sites))

    def hung(self, job: Job, reason: str, stack: str) -> None:
        self._send("hung", job, reason, stack)

    def step(self, step: int, line: Mapping[str, float], losses: Losses) -> None:
        """One step: on file, and as a message."""
        self._send("step", self._metrics.write(step, line), losses)

    def started_from(self, found: Evaluation) -> None:
        """The evaluation of the model that the run started from: the line of step 0, and a message."""
        self._metrics.write(0, evaluation_measures(found))
        greedy = found.greedy.interval if found.greedy is not None else None
        self._send("evaluation", "before", found.sampled.interval, greedy, found.sampled.failures)

    def ended_with(self, step: int, found: Evaluation) -> None:
        """The evaluation after the last step, where it was not known to be the last one: a line of its own."""
        self._metrics.write(step, evaluation_measures(found))

    def evaluator(self, session: Any) -> Evaluator | None:
        """Over the run's fixed rows; None where there are none."""
        if not session.eval_tasks:
            return None
        report: Any = self
        return Evaluator(
            session.eval_tasks,
            session.runner,
            msgspec.structs.replace(session.route, sites=None),
            n=session.settings.eval_n,
            seed=session.settings.seed,
            log=session.log,
            report=report,
            stop=session.stop,
        )

    def died(self, error: EngineError) -> None:
        """Something without which the run cannot go on is gone: the head ends with this, unless verl waits for it there without end."""
        self._send(_DIED, error)

    @contextmanager
    def batch(self, what: str, total: int) -> Generator[Callable[[Rollout], None]]:
        """As ``Report.batch``; a bar would be drawn too far from its terminal."""
        yield lambda _: None

    def _send(self, name: str, *arguments: Any) -> None:
        self._mailbox.put.remote(name, arguments)


def play(events: Sequence[tuple[str, tuple[Any, ...]]], report: Report, *, steps: int | None) -> EngineError | None:
    """The head's messages on the user's report. Gives what has died, where one says that something has."""
    died: EngineError | None = None
    for name, arguments in events:
        if name == _DIED:
            died = died or arguments[0]
        elif name == "step":
            line, losses = arguments
            report.step(line, losses, steps=steps)
        else:
            getattr(report, name)(*arguments)
    return died


def watch_stop(mailbox: Any, get: Callable[[Any], Any], stop: threading.Event) -> None:
    """Sets ``stop`` in this process once the mailbox says so; a thread that ends with the process."""

    def look() -> None:
        while not stop.is_set():
            try:
                if get(mailbox.stopped.remote()):
                    stop.set()
            except Exception:  # noqa: BLE001 - the user's process is gone, and the run with it
                stop.set()
            time.sleep(_LOOK)

    threading.Thread(target=look, name="rllm-stop", daemon=True).start()
