"""Options in, a configured process out; and the two ways to see that what was recorded has left: ``flush`` and ``shutdown``.

A call of ``configure`` replaces the last one as a whole. An option that cannot have an effect is refused, never ignored. Every wait has a
deadline; at exit what is still waiting gets a few seconds.
"""

from __future__ import annotations

import atexit
import importlib
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from os import PathLike
from typing import Any, Final, Literal, cast

from rllm_trace._given import flag, path, seconds, text
from rllm_trace._guard import guard
from rllm_trace._instruments import remove_all
from rllm_trace._recorder import EpisodeSink, SpanSink, recorder
from rllm_trace.exceptions import ConfigurationError
from rllm_trace.rollouts import EPISODE_TIMEOUT

__all__ = ["configure", "flush", "shutdown"]

Redact = Callable[[dict[str, Any]], dict[str, Any] | None]

_SETTLE: Final = 5.0
_EXIT_TIMEOUT: Final = 5.0
_EVERYWHERE: Final = frozenset({"0.0.0.0", "::"})
_lock: Final = threading.RLock()


class _AtExit:
    registered = False


def configure(
    *,
    service_name: str | None = None,
    exporters: Iterable[Any] = (),
    store: str | PathLike[str] | None = None,
    capture_content: bool | None = None,
    tokens: bool | Literal["auto"] = "auto",
    sample: float = 1.0,
    redact: Redact | None = None,
    settle: float = _SETTLE,
    processes: bool = False,
    reachable_at: str | None = None,
) -> None:
    """Records every workflow of this process from now on; without ``exporters`` and ``store``, only what ``collect`` and rollouts ask for.

    ``exporters``: ``"otlp"``, exporters of ``rllm_trace.exporters``, any OpenTelemetry SpanExporter. ``store``: a folder for episodes.
    ``capture_content``: whether text and ids may leave for them; None: as each exporter says, for OTLP OpenTelemetry's GenAI variable.
    ``tokens``: whether ids and logprobs are asked for; ``"auto"``: for a store, ``collect`` and rollouts. ``sample``: share of episodes
    that exporters and store get, whole ones. ``redact``: sees a copy of every record that leaves, and returns what may leave of it.
    ``settle``: seconds that calls may still run after their workflow has returned. ``processes``: whether ``multiprocessing`` takes the
    running workflow along: what its processes and pools record inside one comes home to this process.
    ``reachable_at``: ``"host"`` or ``"host:port"``, an address of this machine that processes on others (Ray's workers) send their records
    to, over HTTP with a token; None: loopback, so that only processes of this machine do. Raises ConfigurationError.
    """
    exporters = _as_list(exporters)
    if store is not None:
        path(store, "store")
    has_outlet = bool(exporters) or store is not None
    place = _place(reachable_at)
    _check(
        tokens=tokens,
        sample=sample,
        settle=settle,
        capture_content=capture_content,
        redact=redact,
        service_name=service_name,
        processes=processes,
    )
    if not has_outlet:
        for option, given in (
            ("service_name", service_name is not None),
            ("capture_content", capture_content is not None),
            ("sample", sample != 1.0),
            ("redact", redact is not None),
        ):
            if given:
                raise ConfigurationError(f"{option}= has no effect without exporters= or store=: give one of them, or leave it out")
    spans, episodes = _sinks(exporters, service_name=service_name, capture_content=capture_content, redact=redact)
    stores = [] if store is None else [_store(store, capture_content=capture_content, redact=redact)]
    with _lock:
        _close_sinks(_EXIT_TIMEOUT)
        recorder.span_sinks = tuple(spans)
        recorder.episode_sinks = (*episodes, *stores)
        recorder.store_tokens = bool(stores)
        recorder.content = bool(stores) or any(_shows_content(sink) for sink in (*spans, *episodes))
        recorder.tokens = None if tokens == "auto" else tokens
        recorder.sample = float(sample)
        recorder.settle = float(settle)
        _set_processes(processes, place)
        recorder.check_environment()
        if has_outlet:
            _register_at_exit()


def flush(timeout: float = 5.0) -> bool:
    """Waits until all that has ended is delivered. True only if it was, in time, and nothing was lost since the last flush.

    Raises ConfigurationError unless ``timeout`` is a number of seconds.
    """
    deadline = time.monotonic() + seconds(timeout, "timeout")
    delivered = recorder.writer.wait_idle(timeout)
    home = () if recorder.home is None else (recorder.home,)
    for sink in (*recorder.span_sinks, *recorder.episode_sinks, *home):
        in_time = False
        with guard("flush"):
            in_time = sink.flush(max(0.0, deadline - time.monotonic()))
        delivered = delivered and in_time
    return delivered and recorder.forget_dropped() == 0


def shutdown(timeout: float = 5.0) -> bool:
    """Ends what is open as it is, delivers what there is, closes the exporters, and stops recording until ``configure`` or ``collect``.

    True only if all was delivered in time. Raises ConfigurationError unless ``timeout`` is a number of seconds.
    """
    deadline = time.monotonic() + seconds(timeout, "timeout")
    with _lock:
        for episode in list(recorder.open_episodes.values()):
            with guard("shutdown"):
                episode.expire("rllm_trace was shut down", EPISODE_TIMEOUT)
        delivered = flush(timeout)
        _close_sinks(max(0.0, deadline - time.monotonic()))
        recorder.refresh()
        recorder.writer.stop()
        remove_all()
        _set_processes(False)
    return delivered


def _set_processes(wanted: bool, place: tuple[str, int | None] | None = None) -> None:
    """What is not wanted and was never loaded stays so."""
    home: Any = sys.modules.get("rllm_trace._home")
    if home is not None and (not wanted or home.is_elsewhere()):
        home.close()
    if place is not None:
        from rllm_trace import _home

        _home.open_at(*place)
    if wanted:
        from rllm_trace import _home, _homeward, _spawning

        _home.address()
        _homeward.preload()
        _spawning.install()
        return
    spawning: Any = sys.modules.get("rllm_trace._spawning")
    if spawning is not None:
        spawning.uninstall()


def _place(reachable_at: str | None) -> tuple[str, int | None] | None:
    if reachable_at is None:
        return None
    from rllm_trace.http_hops import host_and_port

    text(reachable_at, "reachable_at")
    host, port = host_and_port(reachable_at)
    if host in _EVERYWHERE:
        raise ConfigurationError(
            f"got reachable_at={reachable_at!r}; expected an address of this machine that processes on others can name"
        )
    return host, port


def _close_sinks(timeout: float) -> None:
    spans, episodes = recorder.span_sinks, recorder.episode_sinks
    recorder.span_sinks, recorder.episode_sinks, recorder.store_tokens = (), (), False
    recorder.refresh()
    if episodes:
        recorder.writer.wait_idle(timeout)
    for sink in spans:
        with guard("exporter"):
            sink.close(timeout)
    for sink in episodes:
        with guard("exporter"):
            sink.close()


def _check(
    *, tokens: object, sample: object, settle: object, capture_content: object, redact: object, service_name: object, processes: object
) -> None:
    if not (tokens is True or tokens is False or tokens == "auto"):
        raise ConfigurationError(f"got tokens={tokens!r}; expected True, False or 'auto'")
    if isinstance(sample, bool) or not isinstance(sample, (int, float)) or not 0.0 <= sample <= 1.0:
        raise ConfigurationError(f"got sample={sample!r}; expected a share from 0.0 to 1.0")
    seconds(settle, "settle")
    flag(capture_content, "capture_content", or_none=True)
    if redact is not None and not callable(redact):
        raise ConfigurationError(f"got redact={redact!r}; expected a function from a record (a dict) to what may leave of it")
    flag(processes, "processes")
    text(service_name, "service_name", or_none=True)


def _as_list(exporters: Any) -> list[Any]:
    if isinstance(exporters, (str, bytes, Mapping)) or not isinstance(exporters, Iterable):
        raise ConfigurationError(f"got exporters={exporters!r}; expected a list, such as exporters=['otlp']")
    return list(cast("Iterable[Any]", exporters))


def _sinks(
    exporters: list[Any], *, service_name: str | None, capture_content: bool | None, redact: Redact | None
) -> tuple[list[SpanSink], list[EpisodeSink]]:
    if not exporters:
        return [], []
    from rllm_trace.exporters import open_sinks

    spans, episodes = open_sinks(exporters, capture_content=capture_content, redact=redact, service_name=service_name)
    return [*spans], [*episodes]


def _store(path: str | PathLike[str], *, capture_content: bool | None, redact: Redact | None) -> EpisodeSink:
    try:
        module = importlib.import_module("rllm_trace.store")
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            "store= is not part of this version; to keep episodes on disk give exporters=[rllm_trace.exporters.JSONLExporter(path)]"
        ) from error
    return module.open_store(path, capture_content=capture_content, redact=redact)


def _shows_content(sink: Any) -> bool:
    """Whether a sink may be given content; one that does not say may."""
    disclosure = getattr(sink, "_disclosure", None)
    return disclosure is None or bool(disclosure.content)


def _register_at_exit() -> None:
    if not _AtExit.registered:
        _AtExit.registered = True
        atexit.register(_at_exit)
        recorder.child_hooks.append(_in_forked_child)
        _finalize_child()


def _finalize_child(_: object = None) -> None:
    """A child of ``multiprocessing`` leaves without running ``atexit``; its own finalizers it does run."""
    if "multiprocessing.util" in sys.modules:
        from multiprocessing import parent_process, util

        if parent_process() is not None:
            util.Finalize(None, _at_exit, exitpriority=10)


def _in_forked_child() -> None:
    """``multiprocessing`` clears finalizers right after the fork, then runs what asked for it."""
    if "multiprocessing.util" in sys.modules:
        from multiprocessing import util

        util.register_after_fork(recorder, _finalize_child)


def _at_exit() -> None:
    with guard("exit"):
        if recorder.span_sinks or recorder.episode_sinks:
            shutdown(_EXIT_TIMEOUT)
