"""What is printed: every loss with its reason, warnings to stderr in any case."""

from collections import Counter

from rllm_trace.routing import CallSite
from rllm_trainer.config import make_settings, table
from rllm_trainer.intervals import Interval
from rllm_trainer.report import Report, losses_of
from rllm_trainer.samples import Counters
from rllm_trainer.trainability_report import Entry, TrainabilityReport
from rllm_trainer.types import Rollout


def rollout(fault, reason):
    return Rollout(task_id="t", index=0, row={}, episode=None, reward=None, rewards={}, fault=fault, reason=reason)


def test_a_step_says_what_it_lost(capsys):
    """Failed rollouts by fault and reason, tokens and rows by cause, and notes stand under the step."""
    rollouts = [
        rollout(None, None),
        rollout("policy", "it raised [x]"),
        rollout("policy", "it raised [x]"),
        rollout("infrastructure", "boom"),
    ]
    losses = losses_of(rollouts, Counters(lost_tokens={"inexact": 5}, breaks={"whitespace": 2}), ["tried again: 1"])
    Report().step({"step": 3, "reward/mean": 0.5, "loss": 0.25}, losses, steps=8)
    out = capsys.readouterr().out
    assert out.splitlines() == [
        "step 3/8  reward 0.500  loss 0.2500",
        "    failed rollouts by fault: policy 2, infrastructure 1",
        "      2 × it raised [x]",
        "      1 × boom",
        "    sampled tokens not trained: inexact 5",
        "    prompts that started a new row: whitespace 2",
        "    tried again: 1",
    ]


def test_many_reasons_are_cut_and_counted(capsys):
    """More reasons than a person reads are said to be in the file."""
    losses = losses_of([rollout("app", f"reason {i}") for i in range(6)], Counters(), [])
    Report().step({"step": 1}, losses, steps=None)
    assert "and 2 further reasons, in rollouts.jsonl" in capsys.readouterr().out


def test_causes_have_an_example_once_and_a_table_at_the_end(capsys):
    """The first step that has a cause shows a case of it, later ones only count; the run's table has all of them."""
    lost = [Entry(name="inexact", count=2, tokens=5, example="episode e, solver, call a: no [ids]")]
    found = TrainabilityReport(counters=Counters(episodes=1, lost_tokens={"inexact": 5}), lost=lost)
    report = Report()
    for step in (1, 2):
        report.step({"step": step}, losses_of([], found.counters, [], found), steps=2)
    report.trainability(found)
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[:5] == [
        "step 1/2",
        "sampled tokens not trained: inexact 5",
        "inexact, such as episode e, solver, call a: no [ids]",
        "step 2/2",
        "sampled tokens not trained: inexact 5",
    ]
    assert "lost inexact 2 5 episode e, solver, call a: no [ids]" in lines[5:]


def test_without_progress_only_warnings_are_printed(capsys):
    """``progress=False`` keeps stdout empty; warnings go to stderr and are kept."""
    report = Report(progress=False)
    report.settings(table(make_settings({}), ()), {"app": "x"})
    report.note("a note")
    report.routing([CallSite(model="gpt", endpoint="policy", trained=True, calls=1, values={"seed": Counter()})])
    report.step({"step": 1}, losses_of([], Counters(), []), steps=1)
    report.evaluation("before", Interval(mean=0.5, low=0.4, high=0.6), None, {})
    report.trainability(TrainabilityReport(counters=Counters(episodes=1)))
    report.warn("careful [bold]")
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "warning: careful [bold]\n")
    assert report.warnings == ["careful [bold]"]


def test_the_table_marks_what_was_given(capsys):
    """Every setting is a line, and those given are marked."""
    Report().settings(table(make_settings({"lr": 0.5}), ["lr"]), {"app": "answer"})
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "lr 0.5 given" in lines
    assert "app answer" in lines
    assert "group_size 8 default" in lines


def test_the_routing_table(capsys):
    """After the first batch each model name is told with where it goes."""
    sites = [
        CallSite(model="gpt", endpoint="policy", trained=True, calls=8, values={}),
        CallSite(model="judge", endpoint="own", trained=False, calls=4, values={}),
    ]
    Report().routing(sites)
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "gpt policy yes 8" in lines
    assert "judge its own endpoint no 4" in lines
