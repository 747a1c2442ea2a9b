"""One line a step, in JSONL and in TensorBoard."""

import json
import math

from rllm_trainer.metrics import MetricsLog, read_metrics


def test_a_step_is_one_line(tmp_path):
    """Every step is a flat line that can be read back."""
    log = MetricsLog(tmp_path)
    log.write(1, {"reward/mean": 0.5})
    log.write(2, {"reward/mean": 0.75, "loss": -1})
    log.close()
    assert [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [
        {"step": 1, "reward/mean": 0.5},
        {"step": 2, "reward/mean": 0.75, "loss": -1.0},
    ]
    assert read_metrics(tmp_path / "metrics.jsonl") == log.lines


def test_numbers_that_are_none_are_counted(tmp_path):
    """NaN and infinity are left out of the line, and the line says how many."""
    log = MetricsLog(tmp_path)
    assert log.write(1, {"a": math.nan, "b": math.inf, "c": 1.0}) == {"step": 1, "c": 1.0, "not_finite": 2.0}
    log.close()


def test_a_resumed_log_drops_what_came_after_its_checkpoint(tmp_path):
    """Lines after the resumed step are taken again, not kept twice."""
    log = MetricsLog(tmp_path)
    for step in (1, 2, 3):
        log.write(step, {"x": step})
    log.close()
    resumed = MetricsLog(tmp_path, resume_after=2)
    resumed.write(3, {"x": 30})
    resumed.close()
    assert [(line["step"], line["x"]) for line in read_metrics(tmp_path / "metrics.jsonl")] == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_a_cut_last_line_is_left_out(tmp_path):
    """What a crash left half written is no line."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "x": 1.0}\n{"step": 2, "x"')
    assert read_metrics(path) == [{"step": 1, "x": 1.0}]


def test_tensorboard_reads_the_events(tmp_path):
    """TensorBoard's own reader finds every scalar at its step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = MetricsLog(tmp_path)
    log.write(1, {"reward/mean": 0.25, "loss": 2.0})
    log.write(300, {"reward/mean": 0.5})
    log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == ["loss", "reward/mean"]
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(1, 0.25), (300, 0.5)]
