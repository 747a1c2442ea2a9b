"""Traces that other tools have kept, as Episodes: ``import_episodes("folder")``.

What they kept is text, so the episodes are not exact and are not trained on as they are; they can be read and scored. Spans of ours that
were exported with their tokens are the exception: they come back exact.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, Literal

from rllm_trace import _given as given
from rllm_trace.exceptions import ConfigurationError
from rllm_trace.importers import langfuse, otlp, phoenix
from rllm_trace.importers._files import documents
from rllm_trace.types import Episode

__all__ = ["Source", "import_episodes"]

Source = Literal["auto", "otlp", "langfuse", "phoenix"]

_SOURCES: Final[dict[str, tuple[Callable[[Any], bool], Callable[[Path], Iterator[Episode]]]]] = {
    "otlp": (otlp.is_document, otlp.otlp_episodes),
    "langfuse": (langfuse.is_document, langfuse.langfuse_episodes),
    "phoenix": (phoenix.is_document, phoenix.phoenix_episodes),
}


def import_episodes(path: str | os.PathLike[str], *, source: Source = "auto") -> Iterator[Episode]:
    """One episode for each trace in a file or folder of JSON, oldest first.

    ``"auto"`` goes by the first document. Raises ConfigurationError if there is nothing to import or nothing that is known, ValueError that
    names the file for one that does not fit the others.
    """
    path = given.path(path, "path")
    if source != "auto" and source not in _SOURCES:
        raise ConfigurationError(f"got source={source!r}; expected 'auto' or one of {sorted(_SOURCES)}")
    first, document = next(documents(path), (Path(path), None))
    chosen = source if source != "auto" else next((name for name, (knows, _) in _SOURCES.items() if knows(document)), None)
    if chosen is None:
        raise ConfigurationError(f"{first} is of no known kind; say which with source=, one of {sorted(_SOURCES)}")
    return _SOURCES[chosen][1](Path(path))
