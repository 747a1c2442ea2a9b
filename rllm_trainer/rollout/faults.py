"""How a rollout ended in, whose fault it was out.

Infrastructure faults (our deadline, a 5xx, a broken connection, an answer of the policy's server that is none, a machine out of memory,
files, threads or disk, an interrupt) and the app's own (it failed before its first exact call) leave the gradient, not the denominators.
What the policy caused (the context ran over, a step limit, an action that could not be parsed) is trained, with the reward function's word
or 0. Only infrastructure faults that raised, or left the app without a reply, are worth a new attempt.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping
from typing import Any, cast

import msgspec

from rllm_trace._exact import INCOMPLETE_STREAM, NO_CHOICES, UNREADABLE
from rllm_trace._spans import error_info
from rllm_trace.exceptions import RllmError
from rllm_trace.types import Episode, ErrorInfo, ModelCall
from rllm_trainer.types import Fault

__all__ = ["Verdict", "describe", "judge", "judge_recorded", "leaves_gradient"]

_CONNECTION_TYPES = frozenset(
    {
        "APIConnectionError",
        "APITimeoutError",
        "ConnectError",
        "ConnectTimeout",
        "NetworkError",
        "PoolTimeout",
        "ProtocolError",
        "ReadError",
        "ReadTimeout",
        "RemoteProtocolError",
        "TransportError",
        "WriteError",
        "WriteTimeout",
    }
)
"""Class names of openai's, httpx's and httpcore's connection errors; by name, because no client is imported for it."""
_CLIENT_MODULES = ("openai", "httpx", "httpx2", "httpcore")
_SPENT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EIO})
"""Error numbers of a machine that has run out of something, or whose disk fails."""
_NO_THREAD = "can't start new thread"
"""CPython's words, of a ``RuntimeError``."""
_RETRYABLE_STATUS = frozenset({408, 409, 425, 429})
_APP_STATUS = frozenset({401, 403, 404, 405})
_NO_ANSWER = frozenset({NO_CHOICES, UNREADABLE})
"""Why a call is inexact to which a server that is up answered something else than a reply."""
_LONGEST_MESSAGE = 300


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What one ended rollout comes to."""

    fault: Fault | None = None
    """None: it ended well."""
    reason: str | None = None
    """One sentence for the report."""
    retry: bool = False
    """A new attempt may end well."""


def judge(*, error: BaseException | None, deadline: str | None, episode: Episode | None) -> Verdict:
    """Whose fault it was that a rollout ended as it did.

    Args:
        error: what the app raised, if it did.
        deadline: which deadline of ours ended it, in words, if one did.
        episode: what was recorded of it.
    """
    if deadline is not None:
        return Verdict(fault="infrastructure", reason=deadline)
    if error is not None:
        return _judge_error(error, episode)
    broken = _last_broken_call(episode)
    if broken is not None:
        why = broken.error.message if broken.error is not None else broken.inexact_reason
        return Verdict(fault="infrastructure", reason=f"the app went on without the reply of a call that failed: {why}", retry=True)
    return Verdict()


def judge_recorded(episode: Episode) -> Verdict:
    """The same of a stored episode, whose exception is a record by now: what had caused it is told by the call that failed last."""
    error = episode.error
    if episode.termination in ("timeout", "cancelled"):
        return Verdict(fault="infrastructure", reason=error.message if error is not None else f"it was ended by a {episode.termination}")
    if error is None or episode.termination != "failed":
        return judge(error=None, deadline=None, episode=episode)
    what = f"the app raised {error.type}: {' '.join(error.message.split())[:_LONGEST_MESSAGE]}"
    if _is_below(error) or _was_machine(error) or _last_broken_call(episode) is not None:
        return Verdict(fault="infrastructure", reason=what)
    if error.status_code in _APP_STATUS or error.type.startswith(f"{RllmError.__module__}."):
        return Verdict(fault="app", reason=what)
    if not any(call.exact and call.complete for call in episode.calls):
        return Verdict(fault="app", reason=f"{what} before its first exact call")
    return Verdict(fault="policy", reason=what)


def leaves_gradient(fault: Fault | None, overrides: Mapping[Any, str] | None = None) -> bool:
    """True where a rollout with this fault is not trained; ``overrides``: fault -> ``train`` or ``leave``."""
    asked = (overrides or {}).get(fault or "")
    return asked == "leave" if asked is not None else fault in ("infrastructure", "app", "reward")


def describe(error: BaseException) -> str:
    """``ValueError: text``, cut to a line."""
    text = " ".join(error_info(error).message.split())
    text = text if len(text) <= _LONGEST_MESSAGE else text[: _LONGEST_MESSAGE - 3] + "..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _judge_error(error: BaseException, episode: Episode | None) -> Verdict:
    what = describe(error)
    if _is_interrupt(error):  # an episode that ends so is on record as cancelled
        return Verdict(fault="infrastructure", reason=f"the app was interrupted by {what}")
    if any(_is_connection(e) or _is_machine(e) or _is_server_status(_status(e)) for e in _chain(error)):
        return Verdict(fault="infrastructure", reason=f"the app raised {what}", retry=True)
    if any(_status(e) in _APP_STATUS or isinstance(e, RllmError) for e in _chain(error)):
        return Verdict(fault="app", reason=f"the app raised {what}")
    broken = _last_broken_call(episode)
    if broken is not None and broken.inexact_reason in _NO_ANSWER:
        why = f"the app raised {what}, after an answer of the policy's server that is none: {broken.inexact_reason}"
        return Verdict(fault="infrastructure", reason=why, retry=True)
    if not any(call.exact and call.complete for call in episode.calls) if episode is not None else True:
        return Verdict(fault="app", reason=f"the app raised {what} before its first exact call")
    return Verdict(fault="policy", reason=f"the app raised {what}")


def _is_interrupt(error: BaseException) -> bool:
    return not isinstance(error, (Exception, SystemExit, BaseExceptionGroup))


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        waiting += [e for e in (one.__cause__, None if one.__suppress_context__ else one.__context__) if e is not None]
        if isinstance(one, BaseExceptionGroup):
            waiting += cast("tuple[BaseException, ...]", one.exceptions)


def _is_connection(error: BaseException) -> bool:
    if isinstance(error, ConnectionError):
        return True
    return any(kind.__name__ in _CONNECTION_TYPES and kind.__module__.split(".")[0] in _CLIENT_MODULES for kind in type(error).__mro__)


def _is_machine(error: BaseException) -> bool:
    """Whether the machine that the app ran on had too little of something."""
    if isinstance(error, OSError):
        return error.errno in _SPENT
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and _NO_THREAD in str(error.args))


def _status(error: BaseException) -> int | None:
    status = getattr(error, "status_code", None)
    return status if isinstance(status, int) and not isinstance(status, bool) else None


def _is_server_status(status: int | None) -> bool:
    return status is not None and (status >= 500 or status in _RETRYABLE_STATUS)


def _last_broken_call(episode: Episode | None) -> ModelCall | None:
    """The last call to the policy of a trajectory, if its server or connection failed it: the app went on without a reply."""
    if episode is None:
        return None
    for trajectory in episode.trajectories:
        calls = [call for call in trajectory.calls if call.endpoint == "policy" and not call.late]
        if calls and _is_broken(calls[-1]):
            return calls[-1]
    return None


def _is_broken(call: ModelCall) -> bool:
    return call.inexact_reason in _NO_ANSWER or (call.error is not None and _is_below(call.error))


def _was_machine(error: ErrorInfo) -> bool:
    """``_is_machine`` of what is on record."""
    return (
        error.type == MemoryError.__name__
        or (error.type == RuntimeError.__name__ and _NO_THREAD in error.message)
        or (error.type == OSError.__name__ and any(error.message.startswith(f"[Errno {number}]") for number in _SPENT))
    )


def _is_below(error: ErrorInfo) -> bool:
    """Whether the server or the connection failed, not what was asked of it."""
    if _is_server_status(error.status_code) or error.type == INCOMPLETE_STREAM:
        return True
    module, _, name = error.type.rpartition(".")
    return name in _CONNECTION_TYPES and module.split(".")[0] in _CLIENT_MODULES
