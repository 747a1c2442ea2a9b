"""What the tests of the examples share."""

from __future__ import annotations

from types import ModuleType

import pytest

_lasting: list[ModuleType] = []


@pytest.fixture
def lasting() -> list[ModuleType]:
    """Apps that stay as long as the process, as an app does. One that a test imports anew holds a client whose event loop is gone; if it
    were let go, the client's open connections would be left to the collector, in the middle of another test."""
    return _lasting
