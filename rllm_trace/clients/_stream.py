"""The byte stream of a response in; a byte stream of the same kind out, which shows every chunk to a reader and says how it ended.

Works on httpx and httpx2, sync and async: ``response.stream`` is a public attribute, so no method of theirs is patched. The end is told
exactly once: when the stream is exhausted, fails, is closed before its end, or is dropped without ever being read.
"""

from __future__ import annotations

import importlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Final, Protocol

from rllm_trace._guard import guard

__all__ = ["Reader", "tee"]

_FLAVOURS: Final = ("httpx", "httpx2")
_classes: dict[tuple[str, bool], type[Any]] = {}


class Reader(Protocol):
    """Who looks on. Its methods are called on the thread that consumes the stream."""

    holds: bool
    """What ``feed`` gave last is to be passed on together with what comes next."""
    quickly: Callable[[bytes], bytes | None] | None
    """``feed`` for a chunk like the one before; gives None, and has taken nothing in, for any other. None: there is no such chunk."""

    def feed(self, chunk: bytes) -> bytes:
        """A chunk has arrived; gives what the app is to see of it."""
        ...

    def flush(self) -> bytes:
        """The stream is exhausted; gives what was held back."""
        ...

    def end(self, error: BaseException | None, exhausted: bool) -> None:
        """The stream is over. Called once."""
        ...


class _Tee:
    """What the sync and the async stream share."""

    _inner: Any
    _reader: Reader | None

    def __init__(self, inner: Any, reader: Reader) -> None:
        self._inner = inner
        self._reader = reader
        self._show: Callable[[bytes], bytes] | None = reader.feed

    def _feed(self, chunk: bytes) -> bytes:
        show, reader = self._show, self._reader
        if show is None:
            return chunk
        try:
            quickly = None if reader is None else reader.quickly
            seen = None if quickly is None else quickly(chunk)
            return show(chunk) if seen is None else seen
        except Exception as error:  # noqa: BLE001 - as in ``guard``
            self._show = None
            guard.count("stream", error)
            return chunk

    def _flush(self) -> bytes:
        rest = b""
        if self._show is not None and self._reader is not None:
            with guard("stream"):
                rest = self._reader.flush()
        return rest

    def _end(self, error: BaseException | None = None, *, exhausted: bool = False) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            with guard("stream"):
                reader.end(error, exhausted)

    def __del__(self) -> None:
        self._end()


def _sync_class(module: Any) -> type[Any]:
    class SyncTee(_Tee, module.SyncByteStream):
        """``SyncByteStream`` that is looked on."""

        def __iter__(self) -> Iterator[bytes]:
            held = b""
            try:
                feed, reader = self._feed, self._reader
                for chunk in self._inner:
                    seen = feed(chunk)
                    if held:
                        seen = held + seen
                    if reader is not None and reader.holds:
                        held = seen
                    elif seen:
                        held = b""
                        yield seen
                rest, held = held + self._flush(), b""
                self._end(exhausted=True)
                if rest:
                    yield rest
            except BaseException as error:
                self._end(error)
                if held and isinstance(error, Exception):
                    yield held
                raise

        def close(self) -> None:
            try:
                self._inner.close()
            finally:
                self._end()

    return SyncTee


def _async_class(module: Any) -> type[Any]:
    class AsyncTee(_Tee, module.AsyncByteStream):
        """``AsyncByteStream`` that is looked on."""

        async def __aiter__(self) -> AsyncIterator[bytes]:
            held = b""
            try:
                feed, reader = self._feed, self._reader
                async for chunk in self._inner:
                    seen = feed(chunk)
                    if held:
                        seen = held + seen
                    if reader is not None and reader.holds:
                        held = seen
                    elif seen:
                        held = b""
                        yield seen
                rest, held = held + self._flush(), b""
                self._end(exhausted=True)
                if rest:
                    yield rest
            except BaseException as error:
                self._end(error)
                if held and isinstance(error, Exception):
                    yield held
                raise

        async def aclose(self) -> None:
            try:
                await self._inner.aclose()
            finally:
                self._end()

    return AsyncTee


def tee(response: Any, reader: Reader, *, is_async: bool) -> None:
    """Puts ``reader`` between an unread response of httpx or httpx2 and whoever reads it."""
    flavour = next(name for kind in type(response).__mro__ if (name := kind.__module__.partition(".")[0]) in _FLAVOURS)
    made = _classes.get((flavour, is_async))
    if made is None:
        module = importlib.import_module(flavour)
        made = _classes[flavour, is_async] = _async_class(module) if is_async else _sync_class(module)
    response.stream = made(response.stream, reader)
