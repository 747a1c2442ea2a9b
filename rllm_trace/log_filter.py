"""A log record in, the same record with the ids of the episode that it was written in."""

from __future__ import annotations

import logging
from typing import Final

from rllm_trace._context import current

__all__ = ["LogFilter"]

_NONE: Final = "-"


class LogFilter(logging.Filter):
    """Adds ``episode_id``, ``trace_id``, ``span_id`` and ``agent`` to every record, ``"-"`` outside an episode. Lets every record pass.

    On a handler, so that records of every logger get them: ``handler.addFilter(rllm.LogFilter())``, then
    ``logging.Formatter("%(episode_id)s %(message)s")``. A field that the record has already is left as it is.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Adds the fields."""
        scope = current()
        inside = scope is not None and bool(scope.episode.id)
        found = (scope.episode.id, scope.episode.trace_id, scope.span_id, scope.trajectory_name) if scope is not None and inside else ()
        for name, value in zip(("episode_id", "trace_id", "span_id", "agent"), found or (_NONE,) * 4, strict=True):
            vars(record).setdefault(name, value)
        return True
