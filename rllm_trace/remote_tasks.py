"""Functions and classes that a cluster runs (Ray tasks and actors): they go on in the workflow that called them.

    @ray.remote
    @carried
    def solve(question): ...

    remote(solve)(question)                       # instead of solve.remote(question)
    remote(actor.method)(question)
    remote(solve.options(num_cpus=2))(question)

What a task records is sent to the process that called it before the result is given. That process listens on loopback, which is enough on
one machine; ``configure(reachable_at=...)`` has it listen where workers on others reach it. What cannot be sent is counted in the
worker. Ray itself is never imported here.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from typing import Any, Final, TypeVar, cast

from rllm_trace import attributes as A
from rllm_trace._handover import attach_env, child_env

__all__ = ["carried", "remote"]

T = TypeVar("T", bound=Callable[..., Any])

_CONTEXT: Final = "rllm_context"
"""The keyword that the context travels under."""


def carried(target: T, /) -> T:
    """A function that goes on in the workflow of its caller, or a class all of whose public methods do. Goes below ``@ray.remote``.

    Without a context, as when it is called with plain ``.remote(...)``, it runs as it would.
    """
    if isinstance(target, type):
        for name, method in list(vars(target).items()):
            if not name.startswith("_") and inspect.isfunction(method):
                setattr(target, name, _carried(method))
        return cast("T", target)
    return cast("T", _carried(target))


def remote(handle: Any) -> Callable[..., Any]:
    """``handle.remote``, which takes the running workflow along. ``handle`` is what Ray has made of something ``carried``."""

    @functools.wraps(handle.remote)
    def call(*args: Any, **kwargs: Any) -> Any:
        context = {key: value for key, value in child_env({}).items() if key == A.ENV_CONTEXT}
        return handle.remote(*args, **kwargs, **({_CONTEXT: context} if context else {}))

    return call


def _carried(function: Callable[..., Any]) -> Callable[..., Any]:
    make = next((make for is_shape, make in _SHAPES if is_shape(function)), _function)
    call: Any = functools.wraps(function)(make(function))
    del call.__wrapped__  # Ray asks what is behind all wrappers for a method's parameters, and would refuse the context
    signature = inspect.signature(function)
    context = inspect.Parameter(_CONTEXT, inspect.Parameter.KEYWORD_ONLY, default=None)
    positions = list(signature.parameters.values())
    rest = [parameter for parameter in positions if parameter.kind is inspect.Parameter.VAR_KEYWORD]
    call.__signature__ = signature.replace(parameters=[*(p for p in positions if p not in rest), context, *rest])
    return call


def _function(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, rllm_context: Mapping[str, str] | None = None, **kwargs: Any) -> Any:
        with attach_env(rllm_context or {}):
            return function(*args, **kwargs)

    return call


def _coroutine(function: Callable[..., Any]) -> Callable[..., Any]:
    async def call(*args: Any, rllm_context: Mapping[str, str] | None = None, **kwargs: Any) -> Any:
        with attach_env(rllm_context or {}):
            return await function(*args, **kwargs)

    return call


def _generator(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, rllm_context: Mapping[str, str] | None = None, **kwargs: Any) -> Generator[Any, Any, Any]:
        with attach_env(rllm_context or {}):
            steps: Generator[Any, Any, Any] = function(*args, **kwargs)
            return (yield from steps)

    return call


def _async_generator(function: Callable[..., Any]) -> Callable[..., Any]:
    async def call(*args: Any, rllm_context: Mapping[str, str] | None = None, **kwargs: Any) -> AsyncGenerator[Any]:
        with attach_env(rllm_context or {}):
            async for item in function(*args, **kwargs):
                yield item

    return call


_SHAPES: Final = (
    (inspect.iscoroutinefunction, _coroutine),
    (inspect.isasyncgenfunction, _async_generator),
    (inspect.isgeneratorfunction, _generator),
)
