"""Several servers of one policy: where episodes go, swaps of all or of none, and one that dies."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from rllm_trainer._digest import file_digest
from rllm_trainer.engine.base import WeightsFile
from rllm_trainer.exceptions import ServerError
from rllm_trainer.models import resolve_model
from rllm_trainer.serving.base import Capabilities, Probe, SwapReport
from rllm_trainer.serving.local import LocalServer
from rllm_trainer.serving.proof import SwapNotProven
from rllm_trainer.serving.replicas import Replicas
from rllm_trainer.types import Float32, Int32

ALL = Capabilities(**dict.fromkeys(Capabilities.__struct_fields__, True))


class Place:
    """A server that holds a version and nothing else; it fails where it is told to."""

    def __init__(self, number: int) -> None:
        self.capabilities = ALL
        self.base_url = f"http://{number}/v1"
        self.api_key, self.model = "key", "policy"
        self.version = 0
        self.fails: set[int] = set()
        """Versions that it does not take."""
        self.gone = threading.Event()
        self.closed = threading.Event()

    def check(self) -> None:
        if self.gone.is_set():
            raise ServerError("it has ended")

    def swap(self, weights: WeightsFile, *, probe: Probe | None = None) -> SwapReport:
        if weights.version in self.fails:
            raise SwapNotProven("it still serves the old weights")
        self.version = weights.version
        return SwapReport(version=weights.version, seconds=0.1, requests_in_flight=1, proof="logprobs", max_difference=1e-6)

    def prompt_logprobs(self, rows: Sequence[Int32], *, temperature: float = 1.0) -> list[Float32]:
        self.check()
        return [np.zeros(len(row), np.float32) for row in rows]

    def close(self) -> None:
        self.closed.set()


def weights(version: int) -> WeightsFile:
    return WeightsFile(path=Path(f"/weights-{version}"), version=version, digest="", tensors=0, num_bytes=0)


def episode(name: str) -> Any:
    """A scope in an open episode."""
    return SimpleNamespace(episode=SimpleNamespace(id=name, closed=False))


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rllm_trainer.serving.replicas._LOOKS_EVERY", 0.02)


@pytest.fixture
def three() -> Iterator[tuple[Replicas, list[Place]]]:
    places: list[Place] = []

    def start(number: int) -> Callable[[], Place]:
        def started() -> Place:
            places.append(Place(number))
            return places[-1]

        return started

    replicas = Replicas.start([start(n) for n in range(3)])
    yield replicas, places
    replicas.close()
    assert all(place.closed.is_set() for place in places)


def test_an_episode_stays_and_a_new_one_goes_where_the_fewest_are(three: tuple[Replicas, list[Place]]) -> None:
    """Three episodes on three servers; when one ends, the next one takes its place."""
    replicas, _ = three
    a, b, c, d = (episode(name) for name in "abcd")
    urls = [replicas.resolve(scope).base_url for scope in (a, b, c)]
    assert sorted(urls) == ["http://0/v1", "http://1/v1", "http://2/v1"]
    assert [replicas.resolve(scope).base_url for scope in (a, b, c)] == urls
    b.episode.closed = True
    assert replicas.resolve(d).base_url == urls[1]


def test_a_server_is_drained_for_as_long_as_it_is_held(three: tuple[Replicas, list[Place]]) -> None:
    """Its open episodes end first, new ones go elsewhere, and afterwards it is used again."""
    replicas, _ = three
    first = episode("first")
    number = int(replicas.resolve(first).base_url[7])
    with pytest.raises(TimeoutError, match="1 episodes were still served"), replicas.without(number, drained_within=0.05):
        pass
    first.episode.closed = True
    with replicas.without(number, drained_within=5.0) as server:
        assert server.base_url == f"http://{number}/v1"
        elsewhere = {replicas.resolve(episode(f"{i}")).base_url for i in range(4)}
        assert server.base_url not in elsewhere
    assert replicas.resolve(episode("back")).base_url == f"http://{number}/v1"


def test_a_swap_is_one_of_all(three: tuple[Replicas, list[Place]]) -> None:
    """Requests in flight are summed."""
    replicas, places = three
    report = replicas.swap(weights(1))
    assert (report.version, report.requests_in_flight, report.proof) == (1, 3, "logprobs")
    assert [place.version for place in places] == [1, 1, 1]
    assert replicas.version == 1


def test_a_partial_swap_puts_the_others_back(three: tuple[Replicas, list[Place]]) -> None:
    """One server does not prove the new weights: the run is told, and the old ones are served by the others."""
    replicas, places = three
    replicas.swap(weights(1))
    places[1].fails = {2}
    with pytest.raises(ServerError, match=r"did not take version 2: it still serves the old weights; the others are back at version 1"):
        replicas.swap(weights(2))
    assert [place.version for place in places] == [1, 1, 1]


def test_a_server_that_died_comes_back_with_the_weights_of_the_others(three: tuple[Replicas, list[Place]]) -> None:
    """Its episodes go on elsewhere; the next swap has all three again."""
    replicas, places = three
    replicas.swap(weights(1))
    scope = episode("a")
    number = int(replicas.resolve(scope).base_url[7])
    dead = next(place for place in places if place.base_url == f"http://{number}/v1")
    dead.gone.set()
    assert dead.closed.wait(10)
    report = replicas.swap(weights(2))
    assert report.version == 2
    assert replicas.restarted == 1
    assert len(places) == 4
    assert [server.version for server in replicas.servers] == [2, 2, 2]


def test_one_that_cannot_be_started_again_ends_the_run() -> None:
    """The next swap raises what the start raised."""
    starts = iter([Place(0), None])

    def start() -> Place:
        place = next(starts)
        if place is None:
            raise ServerError("no memory is left")
        return place

    replicas = Replicas.start([start, lambda: Place(1)])
    try:
        replicas.servers[0].gone.set()  # type: ignore[attr-defined]
        with pytest.raises(ServerError, match="no memory is left"):
            _swap_for_ever(replicas)
    finally:
        replicas.close()


def _swap_for_ever(replicas: Replicas) -> None:
    """Until the death has been seen."""
    while True:
        replicas.swap(weights(1))


def test_one_that_dies_in_a_swap_is_swapped_again(three: tuple[Replicas, list[Place]]) -> None:
    """The step is not lost: it comes back with the old weights and takes the new ones."""
    replicas, places = three
    replicas.swap(weights(1))

    def dies(weights: WeightsFile, *, probe: Probe | None = None) -> SwapReport:
        places[2].gone.set()
        raise ServerError("the connection broke")

    places[2].swap = dies  # type: ignore[method-assign]
    assert replicas.swap(weights(2)).version == 2
    assert [server.version for server in replicas.servers] == [2, 2, 2]
    assert replicas.restarted == 1


def test_a_start_that_fails_closes_the_others() -> None:
    """Nothing is left behind."""
    place = Place(0)

    def fail() -> Place:
        raise ServerError("there is no port")

    with pytest.raises(ServerError, match="there is no port"):
        Replicas.start([lambda: place, fail])
    assert place.closed.is_set()


def test_two_real_servers_and_one_is_killed(tmp_path: Path) -> None:
    """Both are swapped and proven by digest; the killed one is started again and has the weights of that swap."""
    folder = resolve_model("tiny-qwen2")
    file = folder / "model.safetensors"
    told = WeightsFile(path=file, version=1, digest=file_digest(file), tensors=0, num_bytes=file.stat().st_size)

    def start(number: int) -> Callable[[], LocalServer]:
        return lambda: LocalServer.start(folder, run_dir=tmp_path / str(number), threads=1, max_model_len=64)

    replicas = Replicas.start([start(0), start(1)], base=folder)
    try:
        assert replicas.swap(told).proof == "digest"
        os.kill(replicas.servers[0].pid, signal.SIGKILL)  # type: ignore[attr-defined]
        assert replicas.wait_restarted(1, timeout=120)
        assert [server.version for server in replicas.servers] == [1, 1]
        assert replicas.swap(msgspec.structs.replace(told, version=2)).version == 2
    finally:
        replicas.close()
