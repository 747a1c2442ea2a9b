"""A batch in, new weights behind the server out: how far trainer and server are apart, the update, the export, and the proven swap."""

from __future__ import annotations

from collections.abc import Sequence

from rllm_trainer.config import Settings
from rllm_trainer.correction import WIDE_GAP
from rllm_trainer.engine.base import Engine
from rllm_trainer.measures import Measures, probe_rows, swap_measures, update_measures
from rllm_trainer.metrics import GAP_MEAN
from rllm_trainer.report import Report
from rllm_trainer.schedule import learning_rate
from rllm_trainer.serving.base import Server
from rllm_trainer.serving.proof import pick_probe
from rllm_trainer.trainability_report import Ratio, logprob_ratio
from rllm_trainer.types import Batch, Float32, Sample

__all__ = ["Probe", "learn"]


class Probe:
    """Some rows of a batch, looked at under the weights that sampled them: before the update, what is to be compared after it.

    Without a server there is nothing to compare, and no row.
    """

    def __init__(self, batch: Batch, *, engine: Engine, server: Server | None, version: int) -> None:
        self.samples = probe_rows([row.sample for row in batch.rows]) if server is not None else []
        self._engine = engine
        self.before = self.at_one()
        current = [i for i, sample in enumerate(self.samples) if bool((sample.versions[sample.trained_mask] == version).all())]
        self.ratio = self._ratio(current)
        """Trainer's over server's probability of the tokens that these weights sampled."""

    def at_one(self) -> list[Float32]:
        """Logprobs at temperature 1, which every server can give of tokens that it is shown."""
        return self._engine.logprobs([s.token_ids for s in self.samples], temperatures=[1.0] * len(self.samples))

    def _ratio(self, which: Sequence[int]) -> Ratio:
        samples: list[Sample] = [self.samples[i] for i in which]
        if all(sample.temperature == 1.0 for sample in samples):
            return logprob_ratio(samples, [self.before[i] for i in which])
        own = self._engine.logprobs([s.token_ids for s in samples], temperatures=[s.temperature for s in samples])
        return logprob_ratio(samples, own)


def learn(
    batch: Batch, *, steps: int | None, settings: Settings, engine: Engine, server: Server | None, probe: Probe, report: Report
) -> Measures:
    """Update the weights, and have the server prove that it serves them, under the version after the batch's.

    Args:
        steps: of the run in all, for the schedule; None: nobody knows.
        probe: of this batch, from before.
    """
    assert settings.lr is not None
    lr = learning_rate(batch.step, peak=settings.lr, schedule=settings.schedule, warmup_steps=settings.warmup_steps, steps=steps)
    line = update_measures(engine.update(batch, lr=lr))
    if line.get(GAP_MEAN, 0.0) > WIDE_GAP and batch.rows[0].is_weights is None:
        report.warn(
            f"step {batch.step}: the server's logprobs differ from the trainer's by {line[GAP_MEAN]:.2g} nats on average; {WIDE_GAP:g} "
            "is much: is the server's precision lower, or does it report logprobs of another temperature?"
        )
    if server is not None:
        picked = pick_probe([sample.token_ids for sample in probe.samples], probe.before, probe.at_one())
        line |= swap_measures(server.swap(engine.export_weights(batch.policy_version + 1), probe=picked))
    return line
