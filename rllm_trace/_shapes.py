"""Wraps whatever can be called so that an activity spans each entry, and keeps it what it was.

A function stays a function, a coroutine function a coroutine function, generators stay generators with the meaning of ``send``,
``throw`` and ``close`` unchanged, methods bind, partials stay partials. Name, docstring, signature and qualified name (and so pickling)
are the function's own. What the code returns, yields or raises is passed on as the same object.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import AsyncGenerator, Callable, Generator
from typing import Any, Final, TypeVar, cast

from rllm_trace._activity import Activity, Kind
from rllm_trace.exceptions import ConfigurationError

__all__ = ["wrap"]

F = TypeVar("F", bound=Callable[..., Any])


def wrap(function: F, kind: Kind) -> F:
    """``function`` with an activity of ``kind`` around each entry. Raises ConfigurationError for a class or what cannot be called."""
    target = cast("Any", function)
    for method in (staticmethod, classmethod):
        if isinstance(target, method):
            return cast("F", method(wrap(cast("Any", target).__func__, kind)))
    if isinstance(target, type):
        raise ConfigurationError(f"got the class {target.__qualname__}; decorate the method that does the work")
    if not callable(target):
        raise ConfigurationError(f"got {target!r} of type {type(target).__qualname__}; expected a function or something else to call")
    if isinstance(target, functools.partial):
        return cast("F", _TracedPartial.of(cast("functools.partial[Any]", target), kind))
    if inspect.ismethod(target):
        return cast("F", types.MethodType(wrap(target.__func__, kind), target.__self__))
    if inspect.isroutine(target):
        return cast("F", _shaped(target, target, kind))
    return cast("F", _TracedCallable(target, kind))


def _shaped(function: Callable[..., Any], like: Callable[..., Any], kind: Kind) -> Callable[..., Any]:
    """The wrapper of the same shape as ``function``; looks like ``like``, and tells what decorated it as ``_rllm_kind``."""
    make = next((make for is_shape, make in _SHAPES if is_shape(function)), _function)
    call: Any = functools.wraps(like)(make(function, kind))
    for name in set(dir(like)).difference(dir(call)):
        if not name.startswith("__"):  # such as ``cache_clear`` of functools.cache
            setattr(call, name, getattr(like, name))
    call._rllm_kind = kind
    return call


def _function(function: Callable[..., Any], kind: Kind) -> Callable[..., Any]:
    begin = kind.begin

    def call(*args: Any, **kwargs: Any) -> Any:
        activity = begin(function, args, kwargs)
        activity.resume()
        try:
            result = function(*args, **kwargs)
        except BaseException as error:
            activity.suspend()
            activity.fail(error)
            raise
        activity.suspend()
        activity.succeed(result)
        return result

    return call


def _coroutine(function: Callable[..., Any], kind: Kind) -> Callable[..., Any]:
    begin = kind.begin

    async def call(*args: Any, **kwargs: Any) -> Any:
        activity = begin(function, args, kwargs)
        activity.resume()
        try:
            result = await function(*args, **kwargs)
        except BaseException as error:
            activity.suspend()
            activity.fail(error)
            raise
        activity.suspend()
        activity.succeed(result)
        return result

    return call


def _generator(function: Callable[..., Any], kind: Kind) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        activity = kind.begin(function, args, kwargs)
        inner: Generator[Any, Any, Any] | None = None
        value: Any = None
        thrown: BaseException | None = None
        while True:
            activity.resume()
            try:
                if inner is None:
                    inner = function(*args, **kwargs)
                assert inner is not None
                item = inner.send(value) if thrown is None else inner.throw(thrown)
            except StopIteration as stop:
                activity.suspend()
                activity.succeed(stop.value)
                return stop.value
            except BaseException as error:
                activity.suspend()
                _broken(activity, error)
                raise
            activity.suspend()
            activity.yielded(item)
            value = thrown = None
            try:
                value = yield item
            except BaseException as error:  # noqa: BLE001 - whatever the consumer throws is the body's
                thrown = error

    return call


def _async_generator(function: Callable[..., Any], kind: Kind) -> Callable[..., Any]:
    async def call(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        activity = kind.begin(function, args, kwargs)
        inner: AsyncGenerator[Any, Any] | None = None
        value: Any = None
        thrown: BaseException | None = None
        while True:
            activity.resume()
            try:
                if inner is None:
                    inner = function(*args, **kwargs)
                assert inner is not None
                item = await (inner.asend(value) if thrown is None else inner.athrow(thrown))
            except StopAsyncIteration:
                activity.suspend()
                activity.succeed(None)
                return
            except BaseException as error:
                activity.suspend()
                _broken(activity, error)
                raise
            activity.suspend()
            activity.yielded(item)
            value = thrown = None
            try:
                value = yield item
            except BaseException as error:  # noqa: BLE001 - whatever the consumer throws is the body's
                thrown = error

    return call


_SHAPES: Final = (
    (inspect.iscoroutinefunction, _coroutine),
    (inspect.isasyncgenfunction, _async_generator),
    (inspect.isgeneratorfunction, _generator),
)


def _broken(activity: Activity, error: BaseException) -> None:
    """A generator that its consumer closed has done its work."""
    if isinstance(error, GeneratorExit):
        activity.succeed(None)
    else:
        activity.fail(error)


class _TracedPartial(functools.partial[Any]):
    """A partial of a wrapped function; pickles as the partial it was made of."""

    _rllm_made_of: tuple[functools.partial[Any], Kind]

    @classmethod
    def of(cls, partial: functools.partial[Any], kind: Kind) -> _TracedPartial:
        self = cls(wrap(partial.func, kind), *partial.args, **partial.keywords)
        self._rllm_made_of = (partial, kind)
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return wrap, self._rllm_made_of


class _TracedCallable:
    """An object with ``__call__``: everything but the call is the object's own, its class included."""

    def __init__(self, target: Callable[..., Any], kind: Kind) -> None:
        own = vars(self)
        own["__wrapped__"] = target
        own["__doc__"] = target.__doc__
        own["_rllm_kind"] = kind
        own["_rllm_call"] = _shaped(cast("Any", target).__call__, target.__call__, kind)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return vars(self)["_rllm_call"](*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["__wrapped__"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["__wrapped__"], name, value)

    @property  # type: ignore[misc]
    def __class__(self) -> type[Any]:  # pyright: ignore[reportIncompatibleMethodOverride, reportIncompatibleVariableOverride]
        return cast("type[Any]", type(vars(self)["__wrapped__"]))

    def __reduce__(self) -> tuple[Any, ...]:
        return wrap, (vars(self)["__wrapped__"], vars(self)["_rllm_kind"])
