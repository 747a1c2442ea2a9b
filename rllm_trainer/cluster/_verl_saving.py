"""What verl's trainers save besides their own turn: the last whole step, after a stop; and what is said where the disk refuses.

A step is whole once its update is taken and its weights are served. Rows that were drawn for the next one are drawn again, or come back
with verl's queue.
"""

from __future__ import annotations

from typing import Any

from rllm_trainer.cluster._session import Session
from rllm_trainer.cluster._verl_v1_api import torch
from rllm_trainer.cluster.refusals import mode_of
from rllm_trainer.cluster.saved import checkpoints_of, refusal_of, saved_step
from rllm_trainer.exceptions import CheckpointError

__all__ = ["Saving"]


class Saving:
    """Mixed into verl's trainers, before them."""

    session: Session
    global_steps: int
    train_dataloader: Any
    _whole: int = 0
    """The last step that is whole."""
    _place: Any = None
    """verl's place in the rows, after those of that step."""

    def _step_is_whole(self, step: int) -> None:
        self._whole = step
        self._place = self.train_dataloader.state_dict()

    def save_last_step(self) -> None:
        """A checkpoint of the last whole step, where there is none."""
        self.global_steps = self._whole
        if not self._whole or saved_step(self.session.run_dir) == self._whole:
            return
        self._save_checkpoint()
        if mode_of(self.session.settings) == "sync":
            torch.save(self._place, checkpoints_of(self.session.run_dir) / f"global_step_{self._whole}" / "data.pt")

    def _save_checkpoint(self) -> None:
        """Raises ``CheckpointError`` where the disk refuses: torch and Ray do not hand on what it says."""
        verls: Any = super()
        try:
            verls._save_checkpoint()
        except Exception as error:
            refusal = refusal_of(self.session.run_dir)
            if refusal is None:
                raise
            raise CheckpointError(
                f"the checkpoint of step {self.global_steps} could not be written to {self.session.run_dir}: {refusal.strerror}; "
                "free space, then continue with resume=True"
            ) from error
