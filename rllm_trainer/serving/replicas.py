"""Several servers of one policy in, one ``Server`` out: an episode stays where it began, a new one goes where the fewest are.

A swap is one of all: each is proven, and where one fails the others are put back, so that the run stops with the old weights served.
A server that dies is started again with the weights of the others while they go on; the calls that it took with it fail as
infrastructure faults do, and their rollouts are tried again. One that cannot be started again, or dies too often, ends the run.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import copy_context
from pathlib import Path
from typing import Any, Protocol

import msgspec

from rllm_trace.routing import Endpoint
from rllm_trainer._digest import file_digest
from rllm_trainer.engine.base import WeightsFile
from rllm_trainer.exceptions import ServerError
from rllm_trainer.serving.base import PROVEN_BY_LOGPROBS, Capabilities, Continues, Probe, Server, SwapReport
from rllm_trainer.types import Float32, Int32

__all__ = ["Replicas"]

_LOOKS_EVERY = 1.0
_MOST_RESTARTS = 3
"""Of one server; one that dies more often has a cause that starting it again does not mend."""
_REVIVAL = 900.0
"""Seconds that a swap waits for a server that is being started again."""


class Checked(Server, Protocol):
    """A server that says whether it is gone."""

    def check(self) -> None:
        """Raises ``ServerError`` if it is."""
        ...


class _Member:
    """One server, or its place while it is started again."""

    def __init__(self, number: int, start: Callable[[], Any], server: Checked) -> None:
        self.number = number
        self.start = start
        self.server = server
        self.up = True
        self.draining = False
        self.restarts = 0
        self.lost: ServerError | None = None
        """Why it will not come back."""


class Replicas:
    """A ``Server``. Made by ``start``."""

    def __init__(self, members: Sequence[_Member], base: Path | None) -> None:
        self._members = list(members)
        each = [msgspec.structs.asdict(member.server.capabilities) for member in members]
        self.capabilities = Capabilities(**{name: all(one[name] for one in each) for name in each[0]})
        """What all of them can do."""
        self._base = base
        self._current: WeightsFile | None = None
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._open: dict[str, tuple[Any, _Member]] = {}
        """Episode id -> (the open episode, where it is served)."""
        self._closed = threading.Event()
        self._swapping = threading.Lock()
        self.restarted = 0
        """Servers that were started again."""
        threading.Thread(target=self._look, name="rllm-replicas", daemon=True).start()

    @classmethod
    def start(cls, starts: Sequence[Callable[[], Any]], *, base: Path | None = None) -> Replicas:
        """Start all at once.

        Args:
            starts: each starts one server and returns it.
            base: folder of the weights that they start with, to go back to.

        Raises:
            ServerError: one did not start; the others are closed.
        """
        with ThreadPoolExecutor(len(starts)) as pool:
            futures = [pool.submit(copy_context().run, start) for start in starts]
        failed = next((error for future in futures if (error := future.exception()) is not None), None)
        if failed is not None:
            for future in futures:
                if future.exception() is None:
                    future.result().close()
            raise failed
        return cls([_Member(i, start, future.result()) for i, (start, future) in enumerate(zip(starts, futures, strict=True))], base)

    @property
    def base_url(self) -> str:
        return self._any().server.base_url

    @property
    def api_key(self) -> str:
        return self._any().server.api_key

    @property
    def model(self) -> str:
        return self._any().server.model

    @property
    def version(self) -> int:
        return min(member.server.version for member in self._members if member.up)

    @property
    def servers(self) -> list[Checked]:
        return [member.server for member in self._members]

    def resolve(self, scope: Any) -> Endpoint:
        """Where the calls of an episode go: where its last one went, while that server is up; else where the fewest open episodes are."""
        with self._lock:
            if scope is None:
                return _endpoint(self._least())
            episode = scope.episode
            _, member = self._open.get(episode.id, (None, None))
            if member is None or not member.up:
                member = self._least()
                self._open[episode.id] = episode, member
            return _endpoint(member)

    def continuations(self) -> Counter[str]:
        """See ``Continues``: of all together; what a server had counted that was started again is lost."""
        servers = [member.server for member in self._members]
        return sum((server.continuations() for server in servers if isinstance(server, Continues)), Counter[str]())

    def swap(self, weights: WeightsFile, *, probe: Probe | None = None) -> SwapReport:
        """All of them, each proven.

        Raises:
            ServerError: one of them did not take the weights or is not proven; what the message says is served by the others.
        """
        with self._swapping:
            self._whole(time.monotonic() + _REVIVAL)
            servers = self.servers
            reports, errors = self._swap_each(self._members, weights, probe)
            died = [self._members[number] for number in errors if self._is_gone(self._members[number], servers[number])]
            if died:
                self._whole(time.monotonic() + _REVIVAL)
                again, errors_again = self._swap_each(died, weights, probe)
                reports |= again
                errors = {n: error for n, error in errors.items() if n not in again} | errors_again
            if errors:
                raise self._put_back(weights, errors)
            self._current = weights
        told = list(reports.values())
        return msgspec.structs.replace(
            max(told, key=lambda report: report.seconds),
            requests_in_flight=sum(report.requests_in_flight for report in told),
            max_difference=max(report.max_difference for report in told),
            proof=PROVEN_BY_LOGPROBS if all(report.proof == PROVEN_BY_LOGPROBS for report in told) else "digest",
        )

    def prompt_logprobs(self, rows: Sequence[Int32], *, temperature: float = 1.0) -> list[Float32]:
        return self._any().server.prompt_logprobs(rows, temperature=temperature)

    @contextmanager
    def without(self, number: int, *, drained_within: float) -> Generator[Checked]:
        """Server ``number`` once no open episode is served by it, and while this is open none is; the others go on.

        Raises:
            TimeoutError: episodes were still open after ``drained_within`` seconds.
        """
        member = self._members[number]
        deadline = time.monotonic() + drained_within
        with self._changed:
            member.draining = True
        try:
            while self._load(member):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{self._load(member)} episodes were still served by server {number} after {drained_within:g} s")
                self._closed.wait(0.02)
            yield member.server
        finally:
            with self._changed:
                member.draining = False

    def wait_restarted(self, count: int, *, timeout: float) -> bool:
        """Wait until so many servers have been started again since the start; False after ``timeout`` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self.restarted >= count, timeout)

    def close(self) -> None:
        self._closed.set()
        with self._changed:
            self._changed.notify_all()
        for member in self._members:
            with suppress(Exception):
                member.server.close()

    def _swap_each(
        self, members: Sequence[_Member], weights: WeightsFile, probe: Probe | None
    ) -> tuple[dict[int, SwapReport], dict[int, BaseException]]:
        """What came of each, by number."""
        with ThreadPoolExecutor(len(members)) as pool:
            futures = {member.number: pool.submit(member.server.swap, weights, probe=probe) for member in members}
        errors = {number: error for number, future in futures.items() if (error := future.exception()) is not None}
        return {number: future.result() for number, future in futures.items() if number not in errors}, errors

    def _is_gone(self, member: _Member, server: Checked) -> bool:
        """Whether ``server`` has died; then its place is being filled, or has been."""
        if member.up and member.server is server:
            self._check(member)
        return not member.up or member.server is not server

    def _any(self) -> _Member:
        with self._lock:
            up = next((member for member in self._members if member.up), None)
        if up is not None:
            return up
        raise next((member.lost for member in self._members if member.lost is not None), None) or ServerError("no server is up")

    def _least(self) -> _Member:
        self._sweep()
        up = [member for member in self._members if member.up]
        free = [member for member in up if not member.draining] or up
        if not free:
            return self._any()
        return min(free, key=self._load)

    def _load(self, member: _Member) -> int:
        with self._lock:
            self._sweep()
            return sum(1 for _, where in self._open.values() if where is member)

    def _sweep(self) -> None:
        with self._lock:
            self._open = {key: (episode, member) for key, (episode, member) in self._open.items() if not episode.closed}

    def _whole(self, deadline: float) -> None:
        """Waits for servers that are being started again. Raises ``ServerError`` where one will not come back."""
        with self._changed:
            while True:
                lost = next((member.lost for member in self._members if member.lost is not None), None)
                if lost is not None:
                    raise lost
                if all(member.up for member in self._members):
                    return
                if not self._changed.wait(max(deadline - time.monotonic(), 0.0)):
                    raise ServerError(f"a server that had died was not up again after {_REVIVAL:g} s")

    def _put_back(self, weights: WeightsFile, errors: dict[int, BaseException]) -> ServerError:
        """Serve the old weights everywhere where the new ones have been taken; gives the error to raise."""
        first = min(errors)
        why = f"server {first} of {len(self._members)} did not take version {weights.version}: {errors[first]}"
        taken = [member for member in self._members if member.number not in errors]
        old = self._current or _weights_of(self._base)
        if not taken:
            return ServerError(why)
        if old is None:
            return ServerError(f"{why}; the others serve version {weights.version}, as there is no file of the old weights to go back to")
        for member in taken:
            try:
                member.server.swap(old)
            except ServerError as error:
                return ServerError(f"{why}; server {member.number} could not be put back to version {old.version}: {error}")
        return ServerError(f"{why}; the others are back at version {old.version}, and the old weights stay served")

    def _look(self) -> None:
        """Finds servers that are gone and starts them again, until closed."""
        while not self._closed.wait(_LOOKS_EVERY):
            for member in self._members:
                if member.up:
                    with suppress(Exception):
                        self._check(member)

    def _check(self, member: _Member) -> None:
        try:
            member.server.check()
        except ServerError as error:
            if self._closed.is_set():
                return
            with self._changed:
                if not member.up:
                    return
                member.up = False
            threading.Thread(target=self._revive, args=(member, error), name=f"rllm-revive-{member.number}", daemon=True).start()

    def _revive(self, member: _Member, died: ServerError) -> None:
        with suppress(Exception):
            member.server.close()
        try:
            if member.restarts >= _MOST_RESTARTS:
                raise ServerError(f"server {member.number} has died {member.restarts + 1} times; the last time: {died}")
            member.restarts += 1
            server = member.start()
        except ServerError as error:
            with self._changed:
                member.lost = error
                self._changed.notify_all()
            return
        with self._changed:
            current = self._current
        try:
            if current is not None:
                server.swap(current)
        except ServerError as error:
            server.close()
            with self._changed:
                member.lost = error
                self._changed.notify_all()
            return
        with self._changed:
            if self._closed.is_set():
                server.close()
                return
            member.server = server
            member.up = True
            self.restarted += 1
            self._changed.notify_all()


def _endpoint(member: _Member) -> Endpoint:
    server = member.server
    return Endpoint(base_url=server.base_url, api_key=server.api_key, model=server.model)


def _weights_of(base: Path | None) -> WeightsFile | None:
    """The weights of a model folder, where they are one file."""
    files = [] if base is None else sorted(base.glob("*.safetensors"))
    if len(files) != 1:
        return None
    return WeightsFile(path=files[0], version=0, digest=file_digest(files[0]), tensors=0, num_bytes=files[0].stat().st_size)
