"""How many rows verl's trainers draw, and when: no more than the run has, each once, and as many ahead as ``staleness`` says.

Step ``n`` has ``n + staleness`` batches drawn, also where an interruption came in between: what was drawn and not trained comes back with
verl's queue. Left to itself, verl draws a batch at every step, so at the end it would begin again at the first row.
"""

from __future__ import annotations

from typing import Any

from rllm_trainer.cluster._session import Session
from rllm_trainer.cluster.rows import RowsRanOut

__all__ = ["Drawing"]


class Drawing:
    """Mixed into verl's trainers, before them."""

    session: Session
    global_steps: int
    _restored_tq_prompt_count: int
    _drawn: int = 0
    """Rows that were drawn, from the first on."""

    def _go_on_drawing(self) -> None:
        """Once, before the first step taken here."""
        self._drawn = (self.global_steps - 1) * self.session.settings.batch_tasks + self._restored_tq_prompt_count
        self.session.rows.let_go(below=self._drawn)  # those that the queue has kept are being rolled out by now

    def _require_rows(self) -> None:
        """Raises ``RowsRanOut`` where there are none for the step that begins."""
        needed = self.global_steps * self.session.settings.batch_tasks
        if self.session.rows.upto(needed) < needed:
            raise RowsRanOut

    def _add_prompts_to_generate(self, num_prompts: int) -> int:
        there = self.session.rows.upto(self._drawn + num_prompts) - self._drawn
        if there <= 0:
            return 0
        self._drawn += there
        verls: Any = super()
        return int(verls._add_prompts_to_generate(there))

    def _add_batch_to_generate(self) -> None:
        settings = self.session.settings
        missing = (self.global_steps + settings.staleness) * settings.batch_tasks - self._drawn
        if missing > 0:
            self._add_prompts_to_generate(missing)
