"""How many rows a run on Ray draws at each step: its own batch and those ahead, none twice, and none that no step would train."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rllm_trainer.cluster._verl_drawing import Drawing
from rllm_trainer.cluster.rows import RowsRanOut


class Verls:
    """What verl's trainer does with the prompts that it is to draw."""

    def __init__(self, there: int, *, batch: int, staleness: int, done: int = 0, restored: int = 0) -> None:
        self.asked: list[int] = []
        self.global_steps = done + 1
        self._restored_tq_prompt_count = restored
        rows = SimpleNamespace(upto=lambda count: min(count, there), let_go=self._let_go)
        self.session: Any = SimpleNamespace(rows=rows, settings=SimpleNamespace(batch_tasks=batch, staleness=staleness))
        self.below = -1

    def _let_go(self, below: int) -> None:
        self.below = below

    def _add_prompts_to_generate(self, num_prompts: int) -> int:
        self.asked.append(num_prompts)
        return num_prompts


class Trainer(Drawing, Verls):
    """As a run has it."""


def draws(trainer: Trainer, warmup: int = 0) -> list[list[int]]:
    """What each step draws, the warm-up with the first, until there are no rows for another."""
    trainer._go_on_drawing()
    if warmup:
        trainer._add_prompts_to_generate(warmup)
    found: list[list[int]] = []
    while True:
        try:
            trainer._require_rows()
        except RowsRanOut:
            return found
        trainer._add_batch_to_generate()
        found.append(list(trainer.asked))
        trainer.asked.clear()
        trainer.global_steps += 1


def test_turn_by_turn_each_step_draws_its_batch() -> None:
    """Three steps of two rows; a seventh row makes no step."""
    assert draws(Trainer(6, batch=2, staleness=0)) == [[2], [2], [2]]


def test_ahead_the_last_steps_draw_nothing() -> None:
    """verl's warm-up is one batch; the third step trains what is there, where verl would begin again at the first row."""
    assert draws(Trainer(6, batch=2, staleness=1), warmup=2) == [[2, 2], [2], []]
    assert draws(Trainer(4, batch=2, staleness=5), warmup=10) == [[4], []]


@pytest.mark.parametrize(
    "restored, first",
    [
        (2, [2]),  # saved at the end of a step: the batch ahead is in the queue
        (4, []),  # stopped in the step after it, which had drawn
        (0, [4]),  # nothing was ahead
    ],
)
def test_a_continued_run_counts_what_the_queue_has_kept(restored: int, first: list[int]) -> None:
    """After two steps of two rows, of ten; rows before those still to be drawn are let go."""
    trainer = Trainer(10, batch=2, staleness=1, done=2, restored=restored)
    assert draws(trainer) == [first, [2], []]
    assert trainer.below == 4 + restored
