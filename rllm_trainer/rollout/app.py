"""The user's app in, what the runner calls out: the same function, with a workflow around it if it has none.

Whether an app is a workflow is read off the function, through whatever else decorates it. One that is not gets the decorator here;
if it is a plain function that returns a coroutine or a generator, the wrapper runs that to its end, so that its calls are inside.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, cast

from rllm_trace._decorators import WorkflowKind, workflow

__all__ = ["as_workflow", "consumed", "drained", "is_async", "is_workflow", "kinds_of"]

_MOST_LAYERS = 100


def is_async(app: Callable[..., Any]) -> bool:
    """Whether calling it gives a coroutine or an async generator, as far as its definition says."""
    return any(inspect.iscoroutinefunction(layer) or inspect.isasyncgenfunction(layer) for layer in _layers(app))


def is_workflow(app: Callable[..., Any]) -> bool:
    """Whether ``@rllm.workflow`` is one of its decorators."""
    return any(isinstance(kind, WorkflowKind) for layer in _layers(app) for kind in kinds_of(layer))


def as_workflow(app: Callable[..., Any]) -> Callable[..., Any]:
    """The app, as a workflow."""
    if is_workflow(app):
        return app
    if is_async(app) or inspect.isgeneratorfunction(inspect.unwrap(app)):
        return workflow(app)
    named = app if hasattr(app, "__name__") else getattr(app, "func", type(app))

    @functools.wraps(named)
    def whole(*args: Any, **kwargs: Any) -> Any:
        return drained(app(*args, **kwargs))

    return workflow(whole)


def drained(produced: Any) -> Any:
    """A generator's items as a list, an awaitable's result; anything else as it is."""
    if isinstance(produced, Iterator):
        return list(cast("Iterator[Any]", produced))
    if isinstance(produced, (Awaitable, AsyncIterator)):
        return asyncio.run(consumed(cast("Awaitable[Any] | AsyncIterator[Any]", produced)))
    return produced


async def consumed(produced: Awaitable[Any] | AsyncIterator[Any]) -> Any:
    """An async generator's items as a list, an awaitable's result."""
    return [item async for item in produced] if isinstance(produced, AsyncIterator) else await produced


def _layers(app: Any) -> Iterator[Any]:
    """The app and everything that it wraps: decorated functions, partials, methods, callable objects."""
    waiting = [app]
    for _ in range(_MOST_LAYERS):
        if not waiting:
            return
        layer = waiting.pop()
        yield layer
        inner = [getattr(layer, name, None) for name in ("__wrapped__", "func", "__func__")]
        if not inspect.isroutine(layer) and not isinstance(layer, functools.partial):
            inner.append(getattr(cast("Any", type(layer)), "__call__", None))  # noqa: B004 - its function is wanted
        waiting += [one for one in inner if callable(one)]


def kinds_of(layer: Any) -> Iterator[Any]:
    """What a wrapper of ``rllm_trace`` holds on to, the settings of its decorator among it; other functions give what they close over."""
    yield getattr(layer, "_rllm_kind", None)
    for cell in getattr(layer, "__closure__", None) or ():
        try:
            held = cell.cell_contents
        except ValueError:
            continue
        yield held
        yield getattr(held, "__self__", None)
