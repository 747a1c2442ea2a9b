"""Actors in, word of the first that dies out: a thread that has a question open with each, which Ray answers when the actor is gone.

verl's trainer waits for rows and for weights, not for processes; what ends its wait is left where it looks between two polls. A busy
actor is not asked again before it has answered, and is not dead.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from rllm_trainer.cluster.last_words import last_words, words_of
from rllm_trainer.cluster.loading import ray_api
from rllm_trainer.exceptions import EngineError

__all__ = ["Watch"]

_LOOK = 1.0
_TELL = 60.0
"""Seconds to read a dead process's log."""
_AGAIN = 2.0
"""Seconds between an answer and the next question."""


class Watch:
    """Watches until ``close``."""

    def __init__(self, actors: Mapping[str, Any], died: Callable[[EngineError], None]) -> None:
        """``actors``: what each is called in an error, and its handle; ``died`` is called once, in this object's thread."""
        self._actors = dict(actors)
        self._died = died
        self._over = threading.Event()
        self._seen = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rllm-liveness", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Say nothing more; what ends from now on ends with the run."""
        self._over.set()

    def wait(self, timeout: float) -> None:
        """Until a death has been told, if one is seen within so many seconds: for who has an error that a death may explain."""
        if self._seen.wait(timeout):
            self._thread.join(_TELL)

    def _run(self) -> None:
        ray = ray_api().ray
        asked: dict[Any, str] = {}
        ask_at = dict.fromkeys(self._actors, 0.0)
        while not self._over.is_set():
            now = time.monotonic()
            for name in [name for name, due in ask_at.items() if due <= now]:
                del ask_at[name]
                asked[self._actors[name].__ray_ready__.remote()] = name
            for reference in _answered(ray, list(asked)):
                name = asked.pop(reference)
                death = _death(ray, reference)
                if death is not None and not self._over.is_set():
                    self._seen.set()
                    self._died(EngineError(f"{name} has ended: {words_of(death)}.{last_words(death)}"))
                    return
                ask_at[name] = time.monotonic() + _AGAIN
            if not asked:
                self._over.wait(_LOOK)


def _answered(ray: Any, asked: list[Any]) -> list[Any]:
    return ray.wait(asked, num_returns=1, timeout=_LOOK)[0] if asked else []


def _death(ray: Any, reference: Any) -> Exception | None:
    """What an answer says of a death; a question that failed otherwise is asked again."""
    try:
        ray.get(reference)
    except ray_api().ActorDiedError as error:
        return error
    except Exception:  # noqa: BLE001 - the actor is there, or will be said to be gone
        return None
    return None
