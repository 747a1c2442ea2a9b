"""The model clients that can be patched, by name. A new client is a new file here and a line below.

Nothing is imported or patched before ``instrument``; ``ensure`` is what each start of a workflow calls.
"""

from __future__ import annotations

from typing import Final, Protocol

from rllm_trace.clients import openai
from rllm_trace.exceptions import UnknownInstrumentError

__all__ = ["ensure", "instrument", "uninstrument"]


class _Patch(Protocol):
    def install(self) -> bool: ...

    def ensure(self) -> None: ...

    def uninstall(self) -> None: ...


_PATCHES: Final[dict[str, _Patch]] = {"openai": openai}
_turned_off: Final[set[str]] = set()


def _patch(name: str) -> _Patch:
    try:
        return _PATCHES[name]
    except (KeyError, TypeError):
        raise UnknownInstrumentError(f"got the client {name!r}, expected one of {sorted(_PATCHES)}") from None


def instrument(name: str) -> bool:
    """Patches the client ``name`` for this process; again changes nothing. False: not installed. Raises ``UnknownInstrumentError``."""
    patch = _patch(name)
    _turned_off.discard(name)
    return patch.install()


def uninstrument(name: str) -> None:
    """Makes the patch of ``name`` inert, and starts of workflows leave it so. Raises ``UnknownInstrumentError``."""
    patch = _patch(name)
    _turned_off.add(name)
    patch.uninstall()


def ensure() -> None:
    """Every client that was not turned off is patched, and its patch still reachable."""
    for name, patch in _PATCHES.items():
        if name not in _turned_off:
            patch.ensure()
