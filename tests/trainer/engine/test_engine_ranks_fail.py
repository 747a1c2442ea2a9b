"""Of ranks that fail together, the error names the one that died, and not what its peers say of the connection."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from rllm_trainer._child import ChildDied, ChildError
from rllm_trainer.engine.ranks import cause_of


def ended(error: Exception | None) -> Future[Any]:
    """A call that has ended so."""
    future: Future[Any] = Future()
    if error is None:
        future.set_result({})
    else:
        future.set_exception(error)
    return future


def test_a_death_is_the_cause_of_what_its_peers_say() -> None:
    """Whichever ended first."""
    peer, death = ended(ChildError("connection closed by peer", "RuntimeError")), ended(ChildDied("engine rank 1 has ended"))
    assert cause_of([peer, death]) is death
    assert cause_of([ended(None), peer, death]) is death


def test_without_a_death_the_first_error_is_the_cause() -> None:
    """All have ended, so nothing is waited for."""
    first, second = ended(ChildError("not finite", "EngineError")), ended(ChildError("not finite", "EngineError"))
    assert cause_of([ended(None), first, second]) is first
    assert cause_of([ended(None), ended(None)]) is None
